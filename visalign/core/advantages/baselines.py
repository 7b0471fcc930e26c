# SPDX-License-Identifier: Apache-2.0
"""Advantages with other baselines than the group mean: OPO, GPG, pass@k, best and worst of a group, DA-PG."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_same
from visalign.core.groups.labels import Labels, group_index, group_min, group_sum
from visalign.core.groups.moments import centre, divide, present_entries, spread
from visalign.core.precision import float32_dtype

from .group import group_advantages


def opo_advantages(reward: Tensor, length: Tensor, group: Labels, *, valid: Tensor | None = None) -> Tensor:
    """Subtract the baseline of least variance: A_i = R_i − Σ_{j∈g} n_j R_j / Σ_{j∈g} n_j.

    The exact optimum weighs by ‖∇ log π(y_j)‖², which OPO takes to be proportional to the `length` [B] n_j ≥
    0. Only ratios of lengths matter; where all of a group are 0 the plain mean is taken. Hao et al., OPO,
    arXiv 2505.23585, section 3.
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
    counted: Literal["signal", "nonzero_reward"] = "signal",
    ddof: int = 1,
    eps: float = 1e-4,
    valid: Tensor | None = None,
) -> Tensor:
    """Scale centred rewards up for groups without signal: A_i = α (R_i − mean_g)/F_norm.

    α = B/(B − M), with M samples in groups of equal rewards: their gradient is zero, and averaging over them
    would shrink the step. verl has α = B/#{R ≠ 0} (`counted="nonzero_reward"`), which depends on the zero of
    the reward. Missing rewards are not in B.

    `f_norm` is F_norm > 0: 1 as published, a number in units of the reward, or "std" for std_g + eps. Chu et
    al., GPG, arXiv 2504.02546, the corrected gradient estimate.
    """
    values, mask, index, groups = _rows(reward, group, valid)
    scale: Literal["group", "none"] = "group" if f_norm == "std" else "none"
    # A_i = α (R_i − mean_g)/F_norm
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

    J runs over the sets of k − 1 other members of the group; k is at least 2, None for the whole group. With the
    rewards of a group sorted upwards: A_i = Σ_{m<rank i} C(m−1, k−2)/C(n−1, k−1) (R_i − R_(m)). With k = n only the
    best has an advantage, R_best − R_second. For rewards 0 and 1 it is C(n−c, k−1)/C(n−1, k−1) for each of the c
    successes. The leave-one-out baseline max_J makes k·mean_i(A_i ∇ log π_i) an unbiased gradient of the expected best
    of k. Groups with fewer than k present members get 0. `scale="group"` divides by std_g + eps. Tang et al., arXiv
    2503.19595 (k = n, leave-one-out); Walder and Karkhanis, PKPO, arXiv 2505.15201 (k < n).
    """
    values, mask, index, groups = _rows(reward, group, valid)
    count, centred = centre(values, mask, index, groups)
    n = count[:, 0]
    size = n if k is None else torch.full_like(n, k)
    lowest = group_min(torch.where(mask, values, float("inf")), index, groups)[index]
    height = torch.where(mask, values - lowest, 0.0)[:, 0]
    order, rank = group_ranks(torch.where(mask[:, 0], height, float("inf")), index, groups)
    # Σ_{m<rank} C(m−1, k−2)/C(n−1, k−1) (R_i − R_(m)), split into chance · R_i and a running sum
    total = _log_choose(n - 1, size - 1)
    usable = mask[:, 0] & (size <= n) & (n > 1)
    share = torch.where(usable, (_log_choose(rank - 1, size - 2) - total).exp(), 0.0)
    weighted = (share * height)[order]
    below = torch.zeros_like(height).scatter(0, order, weighted.cumsum(0) - weighted)
    start = group_min(below[:, None], index, groups)[index, 0]
    chance = (_log_choose(rank - 1, size - 1) - total).exp()
    result = torch.where(usable, chance * height - (below - start), 0.0).clamp(min=0)
    std = spread(centred, mask, index, groups, ddof)[:, 0]
    result = divide(result, std + eps) if scale == "group" else result
    return _finish(torch.where(std > 0, result, 0.0), reward)


def best_of_group_advantages(
    reward: Tensor, group: Labels, *, worst: float = 0.0, valid: Tensor | None = None
) -> Tensor:
    """Mark the extremes of each group: A_i = 1 for the best, `worst` ≤ 0 for the worst, else 0.

    With `worst=0` a policy gradient is fine-tuning on the best of n; with −1 the best is set against the worst. Ties
    share the mark. Liu et al., Flow-GRPO, arXiv 2505.05470, online SFT and online DPO as compared there.
    """
    values, mask, index, groups = _rows(reward, group, valid)
    low = group_min(torch.where(mask, values, float("inf")), index, groups)[index]
    high = -group_min(torch.where(mask, -values, float("inf")), index, groups)[index]
    mark = (values == high).double() + worst * (values == low).double()
    return _finish(torch.where(mask & (high > low), mark, 0.0), reward)


def decoupled_advantages(
    reward: Tensor, group: Labels, *, baseline: Literal["taken", "none"] = "taken", valid: Tensor | None = None
) -> Tensor:
    """Learn from queries that are drawn apart from the actions taken (decoupled approval): A_q = R_q − b.

    Of the samples of a group the first, third, ... are the actions taken and the others the queries. Only the queries
    are learnt from, an action taken has NaN. What the actions taken do to the approval of their prompt is then
    independent of what is learnt: E[Σ_q A_q ∇ log π(q)] is the gradient of the approval alone. DA-PG, Uesato et al.,
    Avoiding tampering incentives in deep RL via decoupled approval, arXiv 2011.08827. Deviation: b is the mean
    approval of the actions taken, which leaves that gradient as it is; "none" is b = 0, as published.
    """
    values, mask, index, groups = _rows(reward, group, valid)
    same = index[:, None] == index
    is_query = (same.tril(-1).sum(1) % 2 == 1)[:, None]
    taken = mask & ~is_query
    number = group_sum(taken.double(), index, groups)
    mean = divide(group_sum(torch.where(taken, values, 0.0), index, groups), number)[index]
    has_baseline = number[index] > 0 if baseline == "taken" else torch.ones_like(mask)
    gain = torch.where(mask & has_baseline, values - (mean if baseline == "taken" else 0.0), 0.0)
    return _finish(torch.where(is_query, gain, torch.nan), reward)


def _rows(reward: Tensor, group: Labels, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return rewards [B, 1] float64 (0 where missing), mask [B, 1], index [B] and the number of groups."""
    check_axes(reward=(reward, "B"))
    index, groups = group_index(group, reward.shape[0], reward.device)
    mask = present_entries(reward, valid)
    return torch.where(mask, reward.detach().double(), 0.0)[:, None], mask[:, None], index, groups


def _finish(result: Tensor, reward: Tensor) -> Tensor:
    return result.reshape(reward.shape).to(float32_dtype(reward))


def group_ranks(values: Tensor, index: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return the order [B] by group and value, and the rank 1, 2, … [B] of each entry in its group."""
    order = torch.argsort(values, stable=True)
    order = order[torch.argsort(index[order], stable=True)]
    position = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=order.device))
    first = group_min(position.double()[:, None], index, groups)[index, 0]
    return order, position - first + 1


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """Compute log C(n, k); −inf outside 0 ≤ k ≤ n."""
    inside = (k >= 0) & (k <= n)
    n, k = torch.where(inside, n, 0.0), torch.where(inside, k, 0.0)
    value = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return torch.where(inside, value, -float("inf"))
