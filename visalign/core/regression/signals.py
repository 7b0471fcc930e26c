# SPDX-License-Identifier: Apache-2.0
"""Turn rewards into the signals of a regression: pull strengths, or pairs of samples."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visalign.core.advantages.baselines import best_of_group_advantages
from visalign.core.advantages.group import group_advantages
from visalign.core.checks import check_choice
from visalign.core.groups.group_statistics import group_extremes
from visalign.core.groups.labels import Labels, group_index, group_sum
from visalign.core.groups.moments import present_entries


def soft_clip(advantage: Tensor, bound: float) -> Tensor:
    """η tanh(A/η): V-GRPO's limit of advantages, η = 3 there (arXiv 2604.23380, eq. 17)."""
    return bound * torch.tanh(advantage / bound)


def tilted_weights(reward: Tensor, group: Labels, *, temperature: float = 1.0, valid: Tensor | None = None) -> Tensor:
    """Reward-weighted regression, w_i = n softmax_group(z_i/τ), z the group's z-score.

    [B] of mean 1 over a group's n samples; 0 where missing and in groups of equal rewards, which say nothing. τ is in
    standard deviations of the group. Lee et al., arXiv 2302.12192; exponential weights: Fan et al., arXiv 2502.06061.
    """
    z = group_advantages(reward.double(), group, ddof=0, valid=valid)
    index, groups = group_index(group, len(reward), reward.device)
    present = present_entries(reward, valid)
    low, high = (limit[index] for limit in group_extremes(z, present, index, groups))
    weight = torch.where(present & (low < high), ((z - high) / temperature).exp(), 0.0)[:, None]
    count = group_sum(present.double()[:, None], index, groups)[index]
    total = group_sum(weight, index, groups)[index]
    return (weight * count / torch.where(total > 0, total, 1.0))[:, 0].to(z.dtype)


def best_share(reward: Tensor, group: Labels, *, share: float = 0.25, valid: Tensor | None = None) -> Tensor:
    """Rejection fine-tuning: 1 for a group's best samples, 0 for the others and in groups of equal rewards.

    The best are those no worse than the ⌈share · n⌉-th of n; of ties all, but never what is no better than
    the group's worst. RAFT, arXiv 2304.06767.
    """
    index, groups = group_index(group, len(reward), reward.device)
    present = present_entries(reward, valid)
    value = torch.where(present, reward.double(), float("-inf"))
    low = group_extremes(reward, present, index, groups)[0][index]
    bar = torch.full((groups,), float("inf"), dtype=torch.float64)
    for number in range(groups):
        sorted_rewards = value[present & (index == number)].sort(descending=True).values
        if len(sorted_rewards):
            bar[number] = sorted_rewards[max(1, math.ceil(share * len(sorted_rewards) - 1e-9)) - 1]
    return (present & (value >= bar[index]) & (value > low)).double()


def best_worst_pairs(reward: Tensor, group: Labels, *, valid: Tensor | None = None) -> Tensor:
    """The best and the worst sample of each group, [P, 2] rows of the B, the better first, in the order of
    `group_index`; of ties the first; groups of equal rewards give no pair.

    Online Diffusion-DPO as compared in Flow-GRPO, arXiv 2505.05470.
    """
    mark = best_of_group_advantages(reward, group, worst=-1.0, valid=valid)
    index, groups = group_index(group, len(reward), reward.device)
    pairs = []
    for number in range(groups):
        best, worst = (((index == number) & (mark == sign)).nonzero()[:, 0] for sign in (1, -1))
        if len(best):
            pairs.append(torch.stack([best[0], worst[0]]))
    return torch.stack(pairs) if pairs else torch.zeros(0, 2, dtype=torch.int64)


def best_and_worst(reward: Tensor, group: Labels, *, best: int, worst: int, valid: Tensor | None = None) -> Tensor:
    """List the rows of each group's `best` highest rewards, then the `worst` lowest of the rest, best and worst first.

    Of ties the first comes first. Rewards that are not `valid` are between the two, and listed only where a group has
    too few others; without `valid` they are refused. Sol-RL, arXiv 2604.06916.
    """
    if valid is None and not bool(torch.isfinite(reward).all()):
        raise ValueError("Some rewards are not finite. Say by `valid` which of them count.")
    index, groups = group_index(group, len(reward), reward.device)
    present, chosen = present_entries(reward, valid), []
    for number in range(groups):
        rows = (index == number).nonzero()[:, 0]
        if len(rows) < best + worst:
            raise ValueError(f"A group has {len(rows)} samples, fewer than best + worst = {best} + {worst}.")
        value = torch.where(present[rows], reward[rows].double(), torch.nan)
        order = value.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
        rest = order[best:].sort().values
        chosen += [rows[order[:best]], rows[rest[value[rest].nan_to_num(nan=torch.inf).argsort(stable=True)[:worst]]]]
    return torch.cat(chosen)


def level_position(share: Tensor, density: str, *, mean: float = 0.0, std: float = 1.0, scale: float = 1.29) -> Tensor:
    """Map shares w in (0, 1), uniform, to positions u on the training levels, 0 being pure noise.

    uniform: u = w; logit_normal: u = sigmoid(mean + std Φ⁻¹(w)); mode: u = 1 − w − scale (cos²(πw/2) − 1 + w). As in
    diffusers' training scripts u counts from the noise, so that a high mean trains low noise. Esser et al., SD3, arXiv
    2403.03206, section 3.1.
    """
    check_choice("density", density, ("uniform", "logit_normal", "mode"))
    if density == "logit_normal":
        return torch.sigmoid(mean + std * torch.special.ndtri(share))
    if density == "mode":
        return 1 - share - scale * (torch.cos(torch.pi / 2 * share).square() - 1 + share)
    return share


def old_policy_decay(step: int, *, start: int, slope: float, end: float) -> float:
    """Compute the decay of the old policy after iteration 0, 1, ...: 0 before `start`, then min(slope (step −
    start), end).

    Published for DiffusionNFT (arXiv 2509.16117): (0, 0, 0), (0, 0.001, 0.5) and (75, 0.0075, 0.999).
    """
    return 0.0 if step < start else min(slope * (step - start), end)
