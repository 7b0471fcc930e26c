# SPDX-License-Identifier: Apache-2.0
"""Squared-residual objectives: pull log π towards a target made from the reward."""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_same

from . import ratios
from .ppo import bounded_ratio, surrogate_inputs


def flow_balance(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    log_z: Tensor,
    reward: Tensor,
    weight: Tensor,
    *,
    beta: float = 15.0,
    log_ratio: Tensor | None = None,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    length_normalised: bool = True,
) -> Tensor:
    """Compute FlowRL's trajectory balance: match π to π_ref e^{βR}/Z instead of maximizing R.

    ℓ_i = sg[ω_i] δ_i², δ_i = log Z(x_i) + (1/n_i) Σ_t log π − β R_i − (1/n_i) Σ_t log π_ref, ω_i = clip(r_i, 1 −
    ε_low, 1 + ε_high), constant along T. The released code computes the clipped weight and uses the unclipped one
    (here ε_low = 1, ε_high = ∞). Without a ratio and with length_normalised=False it is plain trajectory balance.

    All but `log_z` and `reward`, [B], are [B, T]. `log_z` is differentiable; `reward` is detached, and in the paper
    group-normalized; `beta` is in nats per unit of it. `log_ratio`, in the paper of `ratio_level(…, "sequence_sum")`,
    is detached; None is ω = 1. Without `length_normalised` n is 1, and not Σ_t w.

    Zhu et al., FlowRL, arXiv 2509.15207; Malkin et al., trajectory balance, arXiv 2201.13259.
    """
    difference = ratios.log_ratio(log_prob, ref_log_prob, weight)
    check_axes(log_prob=(log_prob, "B T"), log_z=(log_z, "B"), reward=(reward, "B"))
    check_same(log_ratio=log_ratio, weight=weight)
    total = ratios.ratio_level(difference, weight, "sequence" if length_normalised else "sequence_sum")
    target = beta * reward.detach().to(total.dtype) - log_z.to(total.dtype)
    present = weight != 0
    loss = torch.where(present, total - target[:, None], 0.0).square()  # (log Z + Σ_t log π/π_ref − β R)²
    if log_ratio is None:
        return loss
    log_r = torch.where(present, log_ratio.detach().to(loss.dtype), 0.0)
    return bounded_ratio(log_r).clamp(1 - eps_low, 1 + eps_high) * loss


def dro(
    log_prob: Tensor, log_ratio: Tensor, advantage: Tensor, *, beta: float, weight: Tensor | None = None
) -> Tensor:
    """Compute direct reward optimization: policy gradient with a quadratic pull to the rollout policy.

    ℓ = −(A log π − (β/2)(log r)²). Up to a constant and the factor β this is the squared residual ½ (A − β log r)²,
    smallest at log r = A/β. The paper uses whole sequences and A = R − V: pass sums over the sequence as [B]. Public
    trainers apply it per token. Richemond et al., DRO, arXiv 2405.19107, eq. 4; Kimi k1.5, arXiv 2501.12599.
    """
    score, gain = surrogate_inputs(log_prob, advantage)
    shift, _ = surrogate_inputs(log_ratio, advantage)
    check_same(log_prob=score, log_ratio=shift, weight=weight)
    if weight is not None:
        score, gain, shift = (torch.where(weight != 0, part, 0.0) for part in (score, gain, shift))
    return beta / 2 * shift.square() - gain * score
