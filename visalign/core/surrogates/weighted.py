# SPDX-License-Identifier: Apache-2.0
"""Surrogates of the form ℓ = −sg[ω] A log π: the gradient flows through log π alone, ω only scales it.

What differs is the weight ω: none (REINFORCE, GPG), the ratio, the clipped ratio (CISPO), a smooth function
of the sequence's ratio (VESPO), or the ratio inside a trust region of the divergence (DPPO).
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
    """REINFORCE, with the importance ratio as a constant weight if it is given.

    ℓ = −sg[r] A log π, r = 1 without log_ratio. GPG is this without a ratio (its factor α belongs to the
    advantage).

    Args:
        log_prob: [B] or [B, T] log π, differentiable.
        advantage: [B], or the shape of log_prob; detached here.
        log_ratio: the shape of log_prob, any level; detached here, r limited to e^20.
        weight: the shape of log_prob; where it is 0 the loss is 0 and log_prob gets exactly zero gradient,
            even if it is NaN.

    Returns:
        The shape of log_prob, float32 or better.

    Williams, Machine Learning 8, 1992; Chu et al., GPG, arXiv 2504.02546.
    """
    # −sg[r] A log π
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
    """Clipped importance weights: no decision loses its gradient.

    ℓ = −sg[clip(r, b_low, b_high)] A log π. The bounds are ratios, not distances from 1, as three conventions
    share the name: 0 and 1 + ε_high (the paper; 0 and 5 in ScaleRL), 1 − ε_low and 1 + ε_high (0.8 and 1.2 by
    default in verl), 0 and ε_high (TRL, whose default of 0.2 caps every weight at 0.2).

    Args:
        log_prob: [B] or [B, T] log π, differentiable.
        log_ratio: the shape of log_prob, any level; detached here.
        advantage: [B], or the shape of log_prob; detached here.
        bound_low: smallest weight, ≥ 0.
        bound_high: largest weight, ≥ bound_low; infinity: e^20.
        weight: the shape of log_prob; where it is 0, loss and gradient are exactly 0.

    Returns:
        The shape of log_prob, float32 or better. "token_mean" is the paper's aggregation.

    MiniMax-M1, arXiv 2506.13585, eq. 4 and 5; ScaleRL, arXiv 2510.13786 (0 and 5).
    """
    if not 0 <= bound_low <= bound_high:
        raise ValueError(
            "the bounds are ratios with 0 ≤ bound_low ≤ bound_high (1 ± ε, not ε); got "
            f"bound_low={bound_low}, bound_high={bound_high}."
        )
    # −sg[clip(r, b_low, b_high)] A log π
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
    """Weigh a sequence by VESPO's gamma kernel: φ(W) = W^k e^{λ(1 − W)}.

    φ(1) = 1, its peak is at W = k/λ, and it vanishes for W → 0 and W → ∞. (k, λ) depend on the sign of A.

    Args:
        log_ratio: [B] or [B, T] log W, of whole sequences.
        advantage: [B], or the shape of log_ratio.
        k_pos: exponent for A ≥ 0, ≥ 0.
        lambda_pos: rate for A ≥ 0, ≥ 0.
        k_neg: exponent for A < 0, ≥ 0.
        lambda_neg: rate for A < 0, ≥ 0.

    Returns:
        The shape of log_ratio, ≥ 0, without gradient.

    Shen et al., VESPO, arXiv 2602.10693; the kernel φ.
    """
    parameters = {"k_pos": k_pos, "lambda_pos": lambda_pos, "k_neg": k_neg, "lambda_neg": lambda_neg}
    if not all(value >= 0 for value in parameters.values()):
        raise ValueError(f"k and λ must be ≥ 0; got {parameters}.")
    value, gain = surrogate_inputs(log_ratio.detach(), advantage)
    worse = gain < 0
    # log φ(W) = k log W − λ (W − 1)
    log_pos = k_pos * value - lambda_pos * (bounded_ratio(value) - 1)
    log_neg = k_neg * value - lambda_neg * (bounded_ratio(value) - 1)
    return bounded_ratio(torch.where(worse, log_neg, log_pos))


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
    """Policy gradient weighted by a smooth kernel of the whole sequence's ratio.

    ℓ = −sg[φ(W)] A log π, W = exp(Σ_t log r), φ from `gamma_weight`.

    Args:
        log_prob: [B, T] log π per decision (or [B] per sequence), differentiable.
        log_ratio: the shape of log_prob: `ratio_level(…, "sequence_sum")`, not length-normalised; detached.
        advantage: [B], or the shape of log_prob; detached here.
        k_pos: exponent of W where A ≥ 0.
        lambda_pos: rate of its decay there.
        k_neg: exponent of W where A < 0.
        lambda_neg: rate of its decay there.
        weight: the shape of log_prob; where it is 0, loss and gradient are exactly 0.

    Returns:
        The shape of log_prob, float32 or better.

    Shen et al., VESPO, arXiv 2602.10693.
    """
    kernel = gamma_weight(
        log_ratio, advantage, k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg
    )
    # −sg[φ(W)] A log π
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
    """Policy gradient with a trust region in the divergence instead of the ratio.

    ℓ = −M min(r, cap) A, with the gradient −M min(r, cap) A ∇log π. M = 0 where the policy has already moved
    the way A pushes (r > 1 for A > 0, r < 1 for A < 0) and D exceeds the limit, else 1. With log_prob the
    value is that of the released code, −M sg[min(r, cap)] A log π; the gradient is the same.

    Args:
        log_ratio: [B] or [B, T] per decision, differentiable unless log_prob is given.
        advantage: [B], or the shape of log_ratio; detached here.
        divergence: the shape of log_ratio, D(π_old, π) of each decision; detached here. Tokens: `binary_tv`
            or `binary_kl`. Denoising steps: `gaussian_kl`, which makes this Flow-DPPO.
        limit_low: largest D for A < 0, ≥ 0.
        limit_high: largest D for A > 0, ≥ 0.
        cap: largest ratio, > 0.
        log_prob: the shape of log_ratio, log π, differentiable.
        weight: the shape of log_prob; where it is 0, loss and gradient are exactly 0.

    Returns:
        The shape of log_ratio, float32 or better.

    Qi et al., DPPO, arXiv 2602.04879; Flow-DPPO, arXiv 2606.11025 (one limit, no cap).
    """
    if not (limit_low >= 0 and limit_high >= 0 and cap > 0):
        raise ValueError(
            f"limit_low and limit_high must be ≥ 0 and cap > 0; got {limit_low}, {limit_high} and {cap}."
        )
    check_same(divergence=divergence, log_ratio=log_ratio)
    value, gain = surrogate_inputs(log_ratio.detach(), advantage)
    distance = divergence.detach()
    left = (gain > 0) & (value > 0) & (distance > limit_high)
    left = left | ((gain < 0) & (value < 0) & (distance > limit_low))
    # −sg[1[the divergence is within its limit, or falls] min(r, cap)] A log π
    factor = torch.where(left, 0.0, bounded_ratio(value).clamp(max=cap))
    if log_prob is None:
        moved, _ = surrogate_inputs(log_ratio, advantage)
        log_prob = 1 + (moved - moved.detach())
    return _weighted(log_prob, advantage, factor, weight)


def binary_tv(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Total variation between "this token" and "any other" under both policies: D = |π_old − π|.

    A lower bound of the total variation over the vocabulary. For probabilities only: densities of denoising
    steps have the exact `gaussian_kl`.

    Args:
        log_prob: any shape, log π ≤ 0; above 0 by rounding counts as 0.
        old_log_prob: the same shape, log π_old.

    Returns:
        The same shape, in [0, 1], without gradient.

    Qi et al., DPPO, arXiv 2602.04879.
    """
    new, old = _probabilities(log_prob, old_log_prob)
    return (new.exp() - old.exp()).abs()


def binary_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """KL between "this token" and "any other" under both policies.

    D = π_old log(π_old/π) + (1 − π_old) log((1 − π_old)/(1 − π)), a lower bound of KL(π_old ‖ π) over the
    vocabulary; exact also next to probability 1, without a constant added inside the logarithms.

    Args:
        log_prob: any shape, log π ≤ 0; above 0 by rounding counts as 0.
        old_log_prob: the same shape, log π_old.

    Returns:
        The same shape, nats, ≥ 0, infinite where π is 1 and π_old is not; without gradient.

    Qi et al., DPPO, arXiv 2602.04879.
    """
    new, old = _probabilities(log_prob, old_log_prob)
    here, other = old.exp(), -torch.expm1(old)
    kept = torch.where(here == 0, 0.0, here * (old - new))
    left = torch.where(other == 0, 0.0, other * (_log_complement(old) - _log_complement(new)))
    return (kept + left).clamp(min=0)


def _probabilities(log_prob: Tensor, old_log_prob: Tensor) -> tuple[Tensor, Tensor]:
    check_same(log_prob=log_prob, old_log_prob=old_log_prob)
    dtype = torch.promote_types(torch.promote_types(log_prob.dtype, old_log_prob.dtype), torch.float32)
    return log_prob.detach().to(dtype).clamp(max=0), old_log_prob.detach().to(dtype).clamp(max=0)


def _log_complement(log_prob: Tensor) -> Tensor:
    """log(1 − e^x) for x ≤ 0, by the form that is exact on either side of e^x = ½."""
    large = log_prob > -math.log(2)
    return torch.where(large, torch.log(-torch.expm1(log_prob)), torch.log1p(-torch.exp(log_prob)))


def _ratio(log_ratio: Tensor) -> Tensor:
    value = log_ratio.detach()
    return bounded_ratio(float32(value))


def _weighted(log_prob: Tensor, advantage: Tensor, factor: Tensor | None, weight: Tensor | None) -> Tensor:
    """−sg[ω] A log π, with both sides of the mask kept from NaN."""
    score, gain = surrogate_inputs(log_prob, advantage)
    check_same(log_prob=score, log_ratio=factor, weight=weight)
    coefficient = gain if factor is None else factor.detach() * gain
    if weight is None:
        return -coefficient * score
    inside = weight != 0
    return -torch.where(inside, coefficient, 0.0) * torch.where(inside, score, 0.0)
