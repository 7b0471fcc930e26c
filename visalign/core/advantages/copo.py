# SPDX-License-Identifier: Apache-2.0
"""COPO, arXiv 2508.04138: compare prompts with each other where the samples of a group agree."""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.advantages.group import group_advantages, whiten
from visalign.core.checks import check_axes
from visalign.core.groups.group_statistics import group_centre
from visalign.core.groups.labels import Labels, group_index, group_sum
from visalign.core.precision import float32, float32_dtype


def between_group_advantages(reward: Tensor, group: Labels, *, eps: float = 1e-6, ddof: int = 0) -> Tensor:
    """Compute COPO's global advantage: compare a prompt's mean reward with that of the other prompts.

    A_q = (R̄_q − mean_q R̄)/(std_q R̄ + eps), given to every sample of q, with R̄_q the mean of the group's rewards. A
    group of equal rewards, without signal in GRPO, gets one. 0 for a single group and for equal means.
    """
    check_axes(reward=(reward, "B"))
    index, groups = group_index(group, reward.shape[0], reward.device)
    present = torch.isfinite(reward)
    lowest, mean, count = group_centre(reward, present, index, groups)
    level = torch.where(count > 0, lowest + mean, float("nan"))
    result = torch.where(present, whiten(level, ddof=ddof, eps=eps, eps_inside=False)[index], 0.0)
    return result.to(float32_dtype(reward))


def consistency_entropy(cluster: Labels, group: Labels, weight: Tensor | None = None) -> Tensor:
    """Compute the entropy of the answers within each group, H_q = −Σ_c p_c ln p_c, in nats.

    `cluster` [B] holds labels of answers, compared within a group only; `weight` [B] ≥ 0 is the mass of each
    sample. Returns [B], H of the sample's group, NaN without mass.
    """
    size = len(group)
    device = group.device if isinstance(group, Tensor) else None
    mass = torch.ones(size, device=device) if weight is None else weight.detach()
    index, groups = group_index(group, size, mass.device)
    answers, _ = group_index(cluster, size, mass.device)
    pairs, pair = torch.stack([index, answers]).unique(dim=1, return_inverse=True)
    total = group_sum(mass.double()[:, None], index, groups)
    share = group_sum(mass.double()[:, None], pair, pairs.shape[1]) / total[pairs[0]]
    entropy = group_sum(torch.special.entr(share), pairs[0], groups)[index, 0]
    return entropy.to(float32_dtype(mass))


def copo_weight(entropy: Tensor, *, gamma: float = 20.0, rho: float = 1.5) -> Tensor:
    """Compute COPO's weight of the local advantage, w = σ(γ (H − ρ)): near 0 where all answers agree.

    `entropy` H has any shape, in nats, e.g. from `consistency_entropy`; for images any spread of the group.
    ρ = 1.5 nats needs five different answers; with G ≤ 4 (ln 4 = 1.39) w stays below 0.1. Scale ρ with ln G.
    """
    value = float32(entropy.detach())
    return torch.sigmoid(gamma * (value - rho))


def copo_advantages(
    reward: Tensor, group: Labels, weight: Tensor, *, eps: float = 1e-6, ddof: int = 1, between_ddof: int = 0
) -> Tensor:
    """Blend local and global advantages: A_i = w_q A_i^local + (1 − w_q) A_q^global, both standardised.

    `weight` [B] is w of the sample's group, from `copo_weight`. Deviation: the paper blends the two losses.
    Blending the advantages gives the same gradient while no ratio is clipped, at half the cost; for the
    losses, use `between_group_advantages` and two surrogates.
    """
    check_axes(reward=(reward, "B"), weight=(weight, "B"))
    local = group_advantages(reward, group, eps=eps, ddof=ddof)
    w = weight.detach().to(local.dtype)
    return w * local + (1 - w) * between_group_advantages(reward, group, eps=eps, ddof=between_ddof)
