# SPDX-License-Identifier: Apache-2.0
"""Group-relative, batch-scaled, centred and leave-one-out advantages; whitening; the clamp.

Deliberate deviations from the published code:
* a group of equal rewards gives exactly 0 in every setting (float32 means give rounding noise divided by
  eps);
* a missing reward leaves the statistics of its group and gets 0; it is never counted as a reward of 0;
* a group with one valid member gives 0 (verl keeps the raw reward).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_choice
from visalign.core.groups.labels import Labels, group_index
from visalign.core.groups.moments import centre, divide, present_entries, spread
from visalign.core.precision import float32_dtype

Scale = Literal["group", "batch", "none"]
Baseline = Literal["mean", "leave_one_out"]


def group_advantages(
    reward: Tensor,
    group: Labels,
    *,
    scale: Scale = "group",
    baseline: Baseline = "mean",
    ddof: int = 1,
    eps: float = 1e-4,
    valid: Tensor | None = None,
) -> Tensor:
    """Compare each reward with the others of its group: A_i = (R_i − mean_g)/(std + eps); 0 where missing.

    The mean is over the valid members of i's group g. With baseline "leave_one_out" (RLOO) it is over the
    other members: R_i − mean_{j≠i} R_j = (R_i − mean_g)·n/(n−1). The std is that of the "group" (GRPO), one
    for the "batch" of rewards centred per group, or "none" (Dr.GRPO, RLOO). Rewards [B, T] are treated column
    by column. Statistics are centred before they are squared. Shao et al., DeepSeekMath, arXiv 2402.03300,
    section 4.1.2; Liu et al., Dr.GRPO, arXiv 2503.20783, section 3.2; Ahmadian et al., RLOO, arXiv
    2402.14740; Liu et al., Flow-GRPO, arXiv 2505.05470.
    """
    check_choice("scale", scale, get_args(Scale))
    check_choice("baseline", baseline, get_args(Baseline))
    if reward.ndim not in (1, 2):
        raise ValueError(f"reward must be [B] or [B, T]; got shape {tuple(reward.shape)}.")
    index, groups = group_index(group, reward.shape[0], reward.device)
    present = present_entries(reward, valid)
    mask = present[:, None] if present.ndim == 1 else present
    values = torch.where(mask, reward.detach().double().reshape(mask.shape), 0.0)
    # A_i = (R_i − mean_g)/(std + eps), or (R_i − mean_g) n/(n − 1) over it
    count, centred = centre(values, mask, index, groups)
    result = centred * count / (count - 1).clamp(min=1) if baseline == "leave_one_out" else centred
    if scale == "group":
        result = divide(result, spread(centred, mask, index, groups, ddof) + eps)
    elif scale == "batch":
        all_rows = torch.zeros_like(index)
        deviation = centre(values, mask, all_rows, 1)[1]
        result = divide(result, spread(deviation, mask, all_rows, 1, ddof) + eps)
    result = torch.where(mask & (count > 1), result, 0.0)  # one member has nothing to be compared with
    return result.reshape(reward.shape).to(float32_dtype(reward))


def whiten(
    values: Tensor,
    valid: Tensor | None = None,
    *,
    group: Labels | None = None,
    ddof: int = 1,
    eps: float = 1e-8,
    eps_inside: bool = True,
    keep_mean: bool = False,
) -> Tensor:
    """Bring the valid entries to mean 0 and standard deviation 1, all together or group by group.

    y = (x − mean)/sqrt(var + eps), or (x − mean)/(std + eps) with `eps_inside=False`. The scope is what is passed in:
    per sample on [B], per token on [B, T], where long sequences weigh more (the two published forms of GDPO differ in
    just this); with `group`, one label per row, it is all entries of the rows of a group. `keep_mean` adds the mean
    back. Entries that are not finite, or not `valid` (the shape of values or its first dimensions), get 0.
    """
    present = present_entries(values, valid)
    flat = torch.where(present, values.detach().double(), 0.0).reshape(-1, 1)
    mask = present.reshape(-1, 1)
    index, groups = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device), 1
    if group is not None:
        row, groups = group_index(group, values.shape[0], values.device)
        index = row.repeat_interleave(values[:1].numel())
    _, centred = centre(flat, mask, index, groups)
    std = spread(centred, mask, index, groups, ddof)
    divisor = (std.square() + eps).sqrt() if eps_inside else std + eps
    result = divide(centred, divisor)
    if keep_mean:
        result = result + flat - centred
    return result.reshape(values.shape).to(float32_dtype(values))


def clamp_advantages(advantage: Tensor, bound: float) -> Tensor:
    """Limit advantages to [−bound, bound]; published Flow-GRPO uses 5."""
    return advantage.clamp(-bound, bound)
