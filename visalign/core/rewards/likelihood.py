# SPDX-License-Identifier: Apache-2.0
"""Rewards from likelihoods: of the reference answer, JEPO's credit."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from visalign.core.checks import check_axes
from visalign.core.groups.labels import Labels, group_index, group_min, group_sum
from visalign.core.precision import float32, float32_dtype

Likelihood = Literal["log_prob", "mean_log_prob", "prob", "mean_prob"]


def likelihood_reward(log_prob: Tensor, weight: Tensor, *, kind: Likelihood = "log_prob") -> Tensor:
    """Reward a sample by the likelihood of the reference answer after it; no verifier is needed.

    R_i = Σ_t w log π(a*_t | prompt, z_i, a*_<t) ("log_prob", which works with long and short answers alike),
    that over Σ_t w ("mean_log_prob"), its exponential ("prob", which underflows for long answers), or Σ_t w
    π/Σ_t w ("mean_prob"). All samples of a group share the answer, so sums are comparable. R depends on θ
    itself: the exact gradient of E[R] is the policy gradient with R plus the gradient of this value.
    `log_prob` [B, T] is that of the answer's tokens, teacher forced, differentiable; NaN for a row without a
    token. Likelihood-based reward designs, arXiv 2602.03979.
    """
    check_axes(log_prob=(log_prob, "B T"), weight=(weight, "B T"))
    inside = weight != 0
    value = torch.where(inside, float32(log_prob), 0.0)
    total = weight.sum(1).to(value.dtype)
    summed = ((value.exp() if kind == "mean_prob" else value) * weight).sum(1)
    if kind in ("mean_log_prob", "mean_prob"):
        summed = summed / torch.where(total == 0, 1.0, total)
    reward = summed.exp() if kind == "prob" else summed
    return torch.where(inside.any(1), reward, float("nan"))


def jepo_credit(log_likelihood: Tensor, group: Labels) -> tuple[Tensor, Tensor]:
    """Compute the group's log mean likelihood, and what each sample adds to it (JEPO).

    bound = log mean_j exp ℓ_j over the group; credit_i = bound − log mean_{j≠i} exp ℓ_j, the advantage, for
    `log_likelihood` [B] ℓ_i = log π(a* | prompt, z_i) in nats. One sample that explains the answer earns nearly all of
    it. Returns (bound [B], NaN for a group without members; credit [B], 0 where missing, alone in the group, or all
    are equal). Likelihood-based reward designs, arXiv 2602.03979 (JEPO with leave-one-out).
    """
    check_axes(log_likelihood=(log_likelihood, "B"))
    size = log_likelihood.shape[0]
    index, groups = group_index(group, size, log_likelihood.device)
    present = torch.isfinite(log_likelihood)
    value = log_likelihood.detach().double()[:, None]
    member = present[:, None]
    position = torch.arange(size, device=value.device, dtype=value.dtype)[:, None]

    def log_sum(among: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (max ℓ, Σ exp(ℓ − max), exp(ℓ − max)) per sample, over the marked of its group."""
        low = group_min(torch.where(among, -value, float("inf")), index, groups)
        top = -torch.where(torch.isfinite(low), low, 0.0)[index]
        terms = torch.where(among, (torch.where(among, value, top) - top).exp(), 0.0)
        return top, group_sum(terms, index, groups)[index], terms

    count = group_sum(member.to(value.dtype), index, groups)[index]
    top, total, terms = log_sum(member)
    # the largest term is left out by summing the others again: subtracting it would leave nothing
    at_top = torch.where(member & (value == top), position, float("inf"))
    leader = position == group_min(at_top, index, groups)[index]
    second, rest, _ = log_sum(member & ~leader)
    others = top + _log_mean(total - terms, count - 1)
    without = torch.where(leader, second + _log_mean(rest, count - 1), others)
    bound = torch.where(count > 0, top + _log_mean(total, count), float("nan"))
    credit = torch.where(member & (count > 1), bound - without, 0.0)
    dtype = float32_dtype(log_likelihood)
    return bound[:, 0].to(dtype), credit[:, 0].to(dtype)


def _log_mean(total: Tensor, count: Tensor) -> Tensor:
    """Compute log(total/count), exactly 0 where they are equal; finite where there is nothing."""
    return torch.where(total > 0, total, 1.0).log() - count.clamp(min=1).log()
