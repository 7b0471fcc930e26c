# SPDX-License-Identifier: Apache-2.0
"""Surrogates ℓ = −sg[ω] A log π: the gradient flows through log π only.

The weight ω is 1 (REINFORCE, GPG), the ratio, the clipped ratio (CISPO), a smooth function of the sequence's
ratio (VESPO), or the ratio inside a trust region of the divergence (DPPO). `log_ratio` is detached here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visalign.core.checks import check_same
from visalign.core.precision import float32

from .ppo import bounded_ratio, surrogate_inputs


def reinforce(
    log_prob: Tensor, advantage: Tensor, log_ratio: Tensor | None = None, *, weight: Tensor | None = None
) -> Tensor:
    """Compute REINFORCE, ℓ = −sg[r] A log π, r = 1 without log_ratio.

    GPG has no ratio (its factor α belongs to the advantage). Williams, Machine Learning 8, 1992; Chu et al.,
    GPG, arXiv 2504.02546.
    """
    return _weighted(log_prob, advantage, None if log_ratio is None else _ratio(log_ratio), weight)


def cispo(
    log_prob: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    bound_low: float,
    bound_high: float,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute CISPO, ℓ = −sg[clip(r, b_low, b_high)] A log π, in which no decision loses its gradient.

    The bounds are ratios, since three conventions exist: 0 and 1 + ε_high (the paper; 0 and 5 in ScaleRL), 1
    − ε_low and 1 + ε_high (0.8 and 1.2 by default in verl), 0 and ε_high (TRL, whose default of 0.2 caps
    every weight at 0.2). Infinity allows e^20. "token_mean" is the paper's aggregation. MiniMax-M1, arXiv
    2506.13585, eq. 4 and 5; ScaleRL, arXiv 2510.13786.
    """
    return _weighted(log_prob, advantage, _ratio(log_ratio).clamp(bound_low, bound_high), weight)


def gamma_weight(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
) -> Tensor:
    """Compute VESPO's gamma kernel of a sequence ratio, φ(W) = W^k e^{λ(1 − W)}, (k, λ) by the sign of A.

    φ(1) = 1, the peak is at W = k/λ, and φ vanishes for W → 0 and W → ∞. No gradient. Shen et al., VESPO,
    arXiv 2602.10693.
    """
    log_w, gain = surrogate_inputs(log_ratio.detach(), advantage)
    # log φ(W) = k log W − λ (W − 1)
    log_pos = k_pos * log_w - lambda_pos * (bounded_ratio(log_w) - 1)
    log_neg = k_neg * log_w - lambda_neg * (bounded_ratio(log_w) - 1)
    return bounded_ratio(torch.where(gain < 0, log_neg, log_pos))


def vespo(
    log_prob: Tensor,
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    k_pos: float = 2.0,
    lambda_pos: float = 3.0,
    k_neg: float = 3.0,
    lambda_neg: float = 2.0,
    weight: Tensor | None = None,
) -> Tensor:
    """VESPO, ℓ = −sg[φ(W)] A log π, W = exp(Σ_t log r), φ of `gamma_weight` (Shen et al., arXiv 2602.10693)."""
    kernel = gamma_weight(log_ratio, advantage, k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg)
    return _weighted(log_prob, advantage, kernel, weight)


def dppo(
    log_ratio: Tensor,
    advantage: Tensor,
    divergence: Tensor,
    *,
    limit_low: float,
    limit_high: float,
    cap: float = 20.0,
    log_prob: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute DPPO: a policy gradient with a trust region in the divergence instead of the ratio.

    ℓ = −M min(r, cap) A, with gradient −M min(r, cap) A ∇log π. M = 0 where the policy has already moved in the
    direction of A (r > 1 for A > 0, r < 1 for A < 0) and D exceeds `limit_high` or `limit_low`, else 1. With log_prob
    the value is that of the released code, −M sg[min(r, cap)] A log π; the gradient is the same.

    `divergence` is D(π_old, π), detached: of tokens `binary_tv` or `binary_kl`, of denoising steps `gaussian_kl`,
    which gives Flow-DPPO. Qi et al., DPPO, arXiv 2602.04879; Flow-DPPO, arXiv 2606.11025 (one limit, no cap).
    """
    check_same(divergence=divergence, log_ratio=log_ratio)
    log_r, gain = surrogate_inputs(log_ratio, advantage)
    moved, distance = log_r.detach(), divergence.detach()
    outside = (gain > 0) & (moved > 0) & (distance > limit_high)
    outside = outside | ((gain < 0) & (moved < 0) & (distance > limit_low))
    factor = torch.where(outside, 0.0, bounded_ratio(moved).clamp(max=cap))  # M min(r, cap)
    if log_prob is None:
        log_prob = 1 + (log_r - moved)  # value 1, gradient ∇log r
    return _weighted(log_prob, advantage, factor, weight)


def prefix_excess(
    divergence: Tensor, weight: Tensor, *, limit: float, smallest: float = 0.8, budget: float = 0.02
) -> Tensor:
    """Compute by how much each token exceeds CPPO's trust region over its prefix, [B, T], for `dppo` with limits 0.

    With w_t falling evenly from 1 to w_min = `smallest` along the row's tokens and Z = w D, a token exceeds where
    Z_t > min(δ, δ + b Σ_{j<t} w_j − Σ_{j<t} Z_j): what the tokens before it have moved is taken from its share. b is
    the 0.9 quantile of the row's D, at least `budget` and at most twice that. CPPO, arXiv 2606.10968.
    """
    present = (weight != 0).to(divergence.dtype)
    count = present.sum(1, keepdim=True)
    share = present * (1 - (1 - smallest) * (present.cumsum(1) - 1) / (count - 1).clamp(min=1))
    distance = present * divergence.detach().nan_to_num()
    known = torch.where((weight != 0) | (count == 0), distance, torch.nan)
    level = torch.nanquantile(known, 0.9, dim=1, keepdim=True).clamp(budget, 2 * budget)
    moved = share * distance
    left = level * (share.cumsum(1) - share) - (moved.cumsum(1) - moved)
    return moved - (limit + left).clamp(max=limit)


def binary_tv(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Compute the total variation of "this token" against "any other", D = |π_old − π|, without gradient.

    It is a lower bound of the total variation over the vocabulary. Denoising steps have the exact
    `gaussian_kl`. Qi et al., DPPO, arXiv 2602.04879.
    """
    new, old = _log_probs(log_prob, old_log_prob)
    return (new.exp() - old.exp()).abs()


def binary_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Compute the KL divergence of "this token" against "any other", nats, without gradient.

    D = π_old log(π_old/π) + (1 − π_old) log((1 − π_old)/(1 − π)), a lower bound of KL(π_old ‖ π) over the vocabulary;
    exact also near probability 1, infinite where π is 1 and π_old is not. Qi et al., DPPO, arXiv 2602.04879.
    """
    new, old = _log_probs(log_prob, old_log_prob)
    this, other = old.exp(), -torch.expm1(old)
    # with 0 log 0 = 0
    this_term = torch.where(this == 0, 0.0, this * (old - new))
    other_term = torch.where(other == 0, 0.0, other * (_log_complement(old) - _log_complement(new)))
    return (this_term + other_term).clamp(min=0)


def _log_probs(log_prob: Tensor, old_log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of one dtype, at most 0."""
    check_same(log_prob=log_prob, old_log_prob=old_log_prob)
    dtype = torch.promote_types(torch.promote_types(log_prob.dtype, old_log_prob.dtype), torch.float32)
    return log_prob.detach().to(dtype).clamp(max=0), old_log_prob.detach().to(dtype).clamp(max=0)


def _log_complement(log_prob: Tensor) -> Tensor:
    """Compute log(1 − e^x) for x ≤ 0, by the form that is accurate on each side of e^x = ½."""
    large = log_prob > -math.log(2)
    return torch.where(large, torch.log(-torch.expm1(log_prob)), torch.log1p(-torch.exp(log_prob)))


def _ratio(log_ratio: Tensor) -> Tensor:
    return bounded_ratio(float32(log_ratio.detach()))


def _weighted(log_prob: Tensor, advantage: Tensor, factor: Tensor | None, weight: Tensor | None) -> Tensor:
    """Compute −sg[ω] A log π; NaN at absent decisions affects neither value nor gradient."""
    score, gain = surrogate_inputs(log_prob, advantage)
    check_same(log_prob=score, log_ratio=factor, weight=weight)
    coefficient = gain if factor is None else factor.detach() * gain
    if weight is None:
        return -coefficient * score
    present = weight != 0
    return -torch.where(present, coefficient, 0.0) * torch.where(present, score, 0.0)
