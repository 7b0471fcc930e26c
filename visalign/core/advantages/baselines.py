# SPDX-License-Identifier: Apache-2.0
"""Advantages with other baselines than the group mean: OPO, GPG, pass@k, best and worst of a group.

All take rewards [B] and labels [B]; the statistics run over everything that is passed in. As everywhere, a
missing reward leaves its group and gets 0, and a group of one or of equal rewards gives exactly 0.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_choice, check_same
from visalign.core.groups.labels import Labels, group_index, group_min, group_sum
from visalign.core.groups.moments import centre, check_spread, divide, present_entries, spread
from visalign.core.precision import float32_dtype

from .group import group_advantages

Counted = Literal["signal", "nonzero_reward"]


def opo_advantages(reward: Tensor, length: Tensor, group: Labels, *, valid: Tensor | None = None) -> Tensor:
    """Subtract the baseline of least variance: A_i = R_i − Σ_{j∈g} n_j R_j / Σ_{j∈g} n_j.

    The exact optimum weighs by ‖∇ log π(y_j)‖²; OPO takes it to be proportional to the length n_j.

    Args:
        reward: [B], any unit; entries that are not finite count as missing.
        length: [B] n_j ≥ 0 in tokens, or any estimate of the squared gradient norm; only its ratios matter.
        group: [B] labels.
        valid: bool [B]; False means missing.

    Returns:
        [B], float64 for float64 rewards, else float32; no gradient. Where all lengths of a group are 0 the
        plain mean is taken.

    Hao et al., OPO, arXiv 2505.23585, section 3.
    """
    values, mask, index, groups = _rows(reward, group, valid)
    check_same(length=length, reward=reward)
    weight = torch.where(mask, length.detach().double()[:, None], 0.0)
    _, centred = centre(values, mask, index, groups)
    shift = divide(group_sum(weight * centred, index, groups), group_sum(weight, index, groups))
    return _finish(torch.where(mask, centred - shift[index], 0.0), reward)


def gpg_advantages(
    reward: Tensor,
    group: Labels,
    *,
    f_norm: float | Literal["std"] = 1.0,
    counted: Counted = "signal",
    ddof: int = 1,
    eps: float = 1e-4,
    valid: Tensor | None = None,
) -> Tensor:
    """Rescale centred rewards for the samples that carry none: A_i = α (R_i − mean_g)/F_norm.

    α = B/(B − M), M samples in groups whose rewards are all equal: their gradient is zero, and averaging
    over them would shrink the step. That is the paper's form. verl has α = B/#{R ≠ 0} instead
    (`counted="nonzero_reward"`), which depends on where the reward has its zero.

    Args:
        reward: [B], any unit; entries that are not finite count as missing and are not in B.
        group: [B] labels.
        f_norm: F_norm > 0: 1 as published, or another number in units of the reward, or "std", std_g + eps.
        counted: "signal" (the paper) or "nonzero_reward" (verl).
        ddof: of the std.
        eps: added to the std.
        valid: bool [B]; False means missing.

    Returns:
        [B], float64 for float64 rewards, else float32; no gradient.

    Chu et al., GPG, arXiv 2504.02546, the corrected gradient estimate.
    """
    check_choice("counted", counted, get_args(Counted))
    if f_norm != "std" and (isinstance(f_norm, str) or not 0 < f_norm < float("inf")):
        raise ValueError(f"f_norm must be a positive number or 'std'; got {f_norm!r}.")
    values, mask, index, groups = _rows(reward, group, valid)
    scale: Literal["group", "none"] = "group" if f_norm == "std" else "none"
    relative = group_advantages(values, group, scale=scale, ddof=ddof, eps=eps, valid=mask)
    if counted == "signal":
        number = (mask & (group_sum(relative.abs(), index, groups)[index] > 0)).double().sum()
    else:
        number = (values != 0).double().sum()
    alpha = mask.double().sum() / number.clamp(min=1)
    return _finish(alpha * relative / (1.0 if f_norm == "std" else f_norm), reward)


def pass_at_k_advantages(
    reward: Tensor,
    group: Labels,
    *,
    k: int | None = None,
    scale: Literal["none", "group"] = "none",
    ddof: int = 1,
    eps: float = 1e-6,
    valid: Tensor | None = None,
) -> Tensor:
    """Credit a sample with what it adds to the best of k: A_i = E_J[max(R_i, max_J R) − max_J R].

    J runs over the sets of k − 1 other members of the group. With k = n, the whole group, only the best has
    an advantage: R_best − R_second. For rewards 0 and 1 it is C(n−c, k−1)/C(n−1, k−1) for each of the c
    successes. The leave-one-out baseline max_J makes k·mean_i(A_i ∇ log π_i) an unbiased gradient of the
    expected best of k.

    With the rewards of a group sorted upwards: A_i = Σ_{m<rank i} C(m−1, k−2)/C(n−1, k−1) (R_i − R_(m)).

    Args:
        reward: [B], any unit; entries that are not finite count as missing.
        group: [B] labels.
        k: 2 … ; None for k = n of each group. Groups with fewer than k present members get 0.
        scale: "none", or "group" to divide by std_g + eps.
        ddof: of the std.
        eps: added to the std, in units of the reward.
        valid: bool [B]; False means missing.

    Returns:
        [B] ≥ 0, float64 for float64 rewards, else float32; no gradient.

    Tang et al., arXiv 2503.19595 (k = n, leave-one-out); Walder and Karkhanis, PKPO, arXiv 2505.15201
    (k < n).
    """
    check_spread(ddof, eps)
    check_choice("scale", scale, ("none", "group"))
    if k is not None and k < 2:
        raise ValueError(f"k must be at least 2, or None for the whole group; got {k}.")
    values, mask, index, groups = _rows(reward, group, valid)
    count, centred = centre(values, mask, index, groups)
    n = count[:, 0]
    size = n if k is None else torch.full_like(n, k)
    lowest = group_min(torch.where(mask, values, float("inf")), index, groups)[index]
    height = torch.where(mask, values - lowest, 0.0)[:, 0]

    order, rank = _ranks(torch.where(mask[:, 0], height, float("inf")), index, groups)
    total = _log_choose(n - 1, size - 1)
    usable = mask[:, 0] & (size <= n) & (n > 1)
    share = torch.where(usable, (_log_choose(rank - 1, size - 2) - total).exp(), 0.0)
    below = torch.zeros_like(height).scatter(0, order, _exclusive_sum((share * height)[order]))
    start = group_min(below[:, None], index, groups)[index, 0]
    chance = (_log_choose(rank - 1, size - 1) - total).exp()
    result = torch.where(usable, chance * height - (below - start), 0.0).clamp(min=0)
    std = spread(centred, mask, index, groups, ddof)[:, 0]
    result = divide(result, std + eps) if scale == "group" else result
    return _finish(torch.where(std > 0, result, 0.0), reward)


def best_of_group_advantages(
    reward: Tensor, group: Labels, *, worst: float = 0.0, valid: Tensor | None = None
) -> Tensor:
    """Mark the extremes of each group: A_i = 1 for the best, `worst` for the worst, else 0.

    With `worst=0` a policy gradient with it is fine-tuning on the best of n; with −1 the best is set against
    the worst. Ties share the mark: each of several best gets 1.

    Args:
        reward: [B], any unit; entries that are not finite count as missing.
        group: [B] labels.
        worst: advantage of the worst, ≤ 0.
        valid: bool [B]; False means missing.

    Returns:
        [B], float64 for float64 rewards, else float32; 0 in a group whose rewards are all equal.

    Liu et al., Flow-GRPO, arXiv 2505.05470, online SFT and online DPO as compared there.
    """
    if not worst <= 0:
        raise ValueError(f"worst must be ≤ 0, the best has 1; got {worst}.")
    values, mask, index, groups = _rows(reward, group, valid)
    low = group_min(torch.where(mask, values, float("inf")), index, groups)[index]
    high = -group_min(torch.where(mask, -values, float("inf")), index, groups)[index]
    mark = (values == high).double() + worst * (values == low).double()
    return _finish(torch.where(mask & (high > low), mark, 0.0), reward)


def _rows(reward: Tensor, group: Labels, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """(rewards [B, 1] float64 with 0 where missing, mask [B, 1], index [B], number of groups)."""
    check_axes(reward=(reward, "B"))
    index, groups = group_index(group, reward.shape[0], reward.device)
    mask = present_entries(reward, valid)
    return torch.where(mask, reward.detach().double(), 0.0)[:, None], mask[:, None], index, groups


def _finish(result: Tensor, reward: Tensor) -> Tensor:
    return result.reshape(reward.shape).to(float32_dtype(reward))


def _ranks(values: Tensor, index: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(order [B] that sorts by group and value, rank 1, 2, … of each entry in its group [B] float64)."""
    order = torch.argsort(values, stable=True)
    order = order[torch.argsort(index[order], stable=True)]
    place = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    first = group_min(place.double()[:, None], index, groups)[index, 0]
    return order, place - first + 1


def _exclusive_sum(values: Tensor) -> Tensor:
    """Sum of what stands before each entry."""
    return values.cumsum(0) - values


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """log C(n, k), float64; −inf outside 0 ≤ k ≤ n."""
    inside = (k >= 0) & (k <= n)
    n, k = torch.where(inside, n, 0.0), torch.where(inside, k, 0.0)
    value = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return torch.where(inside, value, -float("inf"))
