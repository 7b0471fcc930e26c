# SPDX-License-Identifier: Apache-2.0
"""Surrogates ℓ = −sg[ω] A log π: the gradient flows through log π only.

The weight ω is 1 (REINFORCE, GPG), the ratio, the clipped ratio (CISPO), a smooth function of the sequence's
ratio (VESPO), or the ratio inside a trust region of the divergence (DPPO).
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
    """Compute REINFORCE, optionally weighted by the importance ratio.

    ℓ = −sg[r] A log π, r = 1 without log_ratio. GPG has no ratio (its factor α belongs to the advantage).

    Args:
        log_prob: [B] or [B, T] log π, differentiable.
        advantage: [B], or the shape of log_prob.
        log_ratio: The shape of log_prob, any level; detached.
        weight: The shape of log_prob, 0 for absent decisions.

    Returns:
        Loss per decision, the shape of log_prob.

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
    """Compute CISPO: clipped importance weights, so that no decision loses its gradient.

    ℓ = −sg[clip(r, b_low, b_high)] A log π. The bounds are ratios, since three conventions exist: 0 and 1 +
    ε_high (the paper; 0 and 5 in ScaleRL), 1 − ε_low and 1 + ε_high (0.8 and 1.2 by default in verl), 0 and
    ε_high (TRL, whose default of 0.2 caps every weight at 0.2).

    Args:
        log_prob: [B] or [B, T] log π, differentiable.
        log_ratio: The shape of log_prob, any level; detached.
        advantage: [B], or the shape of log_prob.
        bound_low: Smallest weight, ≥ 0.
        bound_high: Largest weight, ≥ bound_low; infinity allows e^20.
        weight: The shape of log_prob, 0 for absent decisions.

    Returns:
        Loss per decision, the shape of log_prob; "token_mean" is the paper's aggregation.

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
    """Compute VESPO's gamma kernel of a sequence ratio, φ(W) = W^k e^{λ(1 − W)}.

    φ(1) = 1, the peak is at W = k/λ, and φ vanishes for W → 0 and W → ∞. (k, λ) depend on the sign of A.

    Args:
        log_ratio: [B] or [B, T] log W, of whole sequences.
        advantage: [B], or the shape of log_ratio.
        k_pos: Exponent for A ≥ 0, ≥ 0.
        lambda_pos: Rate for A ≥ 0, ≥ 0.
        k_neg: Exponent for A < 0, ≥ 0.
        lambda_neg: Rate for A < 0, ≥ 0.

    Returns:
        φ ≥ 0 without gradient, the shape of log_ratio.

    Shen et al., VESPO, arXiv 2602.10693.
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
    """Compute VESPO: a policy gradient weighted by a smooth kernel of the sequence's ratio.

    ℓ = −sg[φ(W)] A log π, W = exp(Σ_t log r), φ from `gamma_weight`.

    Args:
        log_prob: [B, T] log π per decision (or [B] per sequence), differentiable.
        log_ratio: The shape of log_prob, from `ratio_level(…, "sequence_sum")`; detached.
        advantage: [B], or the shape of log_prob.
        k_pos: Exponent of W for A ≥ 0.
        lambda_pos: Rate of decay for A ≥ 0.
        k_neg: Exponent of W for A < 0.
        lambda_neg: Rate of decay for A < 0.
        weight: The shape of log_prob, 0 for absent decisions.

    Returns:
        Loss per decision, the shape of log_prob.

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
    """Compute DPPO: a policy gradient with a trust region in the divergence instead of the ratio.

    ℓ = −M min(r, cap) A, with gradient −M min(r, cap) A ∇log π. M = 0 where the policy has already moved in
    the direction of A (r > 1 for A > 0, r < 1 for A < 0) and D exceeds the limit, else 1. With log_prob the
    value is that of the released code, −M sg[min(r, cap)] A log π; the gradient is the same.

    Args:
        log_ratio: [B] or [B, T] per decision, differentiable unless log_prob is given.
        advantage: [B], or the shape of log_ratio.
        divergence: The shape of log_ratio, D(π_old, π); detached. Tokens: `binary_tv` or `binary_kl`.
            Denoising steps: `gaussian_kl`, which gives Flow-DPPO.
        limit_low: Largest D for A < 0, ≥ 0.
        limit_high: Largest D for A > 0, ≥ 0.
        cap: Largest ratio, > 0.
        log_prob: The shape of log_ratio, log π, differentiable.
        weight: The shape of log_prob, 0 for absent decisions.

    Returns:
        Loss per decision, the shape of log_ratio.

    Qi et al., DPPO, arXiv 2602.04879; Flow-DPPO, arXiv 2606.11025 (one limit, no cap).
    """
    if not (limit_low >= 0 and limit_high >= 0 and cap > 0):
        raise ValueError(
            f"limit_low and limit_high must be ≥ 0 and cap > 0; got {limit_low}, {limit_high} and {cap}."
        )
    check_same(divergence=divergence, log_ratio=log_ratio)
    value, gain = surrogate_inputs(log_ratio.detach(), advantage)
    distance = divergence.detach()
    outside = (gain > 0) & (value > 0) & (distance > limit_high)
    outside = outside | ((gain < 0) & (value < 0) & (distance > limit_low))
    # −sg[M min(r, cap)] A log π
    factor = torch.where(outside, 0.0, bounded_ratio(value).clamp(max=cap))
    if log_prob is None:
        live, _ = surrogate_inputs(log_ratio, advantage)
        log_prob = 1 + (live - live.detach())  # value 1, gradient ∇log r
    return _weighted(log_prob, advantage, factor, weight)


def binary_tv(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Compute the total variation of "this token" against "any other", D = |π_old − π|.

    It is a lower bound of the total variation over the vocabulary. Denoising steps have the exact
    `gaussian_kl`.

    Args:
        log_prob: Any shape, log π ≤ 0 (clamped).
        old_log_prob: The same shape, log π_old.

    Returns:
        D in [0, 1] without gradient, the shape of log_prob.

    Qi et al., DPPO, arXiv 2602.04879.
    """
    new, old = _probabilities(log_prob, old_log_prob)
    return (new.exp() - old.exp()).abs()


def binary_kl(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """Compute the KL divergence of "this token" against "any other".

    D = π_old log(π_old/π) + (1 − π_old) log((1 − π_old)/(1 − π)), a lower bound of KL(π_old ‖ π) over the
    vocabulary; exact also near probability 1.

    Args:
        log_prob: Any shape, log π ≤ 0 (clamped).
        old_log_prob: The same shape, log π_old.

    Returns:
        Nats ≥ 0 without gradient, the shape of log_prob; infinite where π is 1 and π_old is not.

    Qi et al., DPPO, arXiv 2602.04879.
    """
    new, old = _probabilities(log_prob, old_log_prob)
    this, other = old.exp(), -torch.expm1(old)
    # π_old log(π_old/π) + (1 − π_old) log((1 − π_old)/(1 − π)), with 0 log 0 = 0
    this_term = torch.where(this == 0, 0.0, this * (old - new))
    other_term = torch.where(other == 0, 0.0, other * (_log_complement(old) - _log_complement(new)))
    return (this_term + other_term).clamp(min=0)


def _probabilities(log_prob: Tensor, old_log_prob: Tensor) -> tuple[Tensor, Tensor]:
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
