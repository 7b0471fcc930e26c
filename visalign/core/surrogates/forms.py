# SPDX-License-Identifier: Apache-2.0
"""Surrogates of the ratio beside the clip: KL penalty, gradient-keeping clip, soft gate, geometric mean.

Like `ppo_clip`: log-ratio and advantage in, one loss per decision out, to be minimised. The log-ratio comes
from `log_ratio` and `ratio_level`, which put 0 where nothing is; `aggregate` leaves those places out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_same

from .ppo import LOG_RATIO_LIMIT, bounded_ratio, ppo_clip, surrogate_inputs
from .ratios import ratio_level


def ppo_kl(log_ratio: Tensor, advantage: Tensor, *, beta: float, kl: Tensor | None = None) -> Tensor:
    """PPO's surrogate with a KL penalty instead of the clip.

    ℓ = −r A + β KL(π_old ‖ π). Without an exact divergence it is estimated from the old policy's own samples
    by r − 1 − log r ≥ 0: unbiased, and so is its gradient r − 1. Adapt β between updates, not here.

    Args:
        log_ratio: [B] or [B, T], differentiable.
        advantage: [B], or the shape of log_ratio; detached here.
        beta: β ≥ 0, in units of the advantage per nat.
        kl: the shape of log_ratio, nats, differentiable: the exact divergence of each decision's distribution
            where it is known, e.g. `gaussian_kl(mean, mean_old, std)` (symmetric at equal std).

    Returns:
        The shape of log_ratio, float32 or better.

    Schulman et al., PPO, arXiv 1707.06347, eq. 8.
    """
    value, gain = surrogate_inputs(log_ratio, advantage)
    if not beta >= 0:
        raise ValueError(f"beta must be ≥ 0; got {beta}.")
    ratio = bounded_ratio(value)
    if kl is None:
        excess = (value - LOG_RATIO_LIMIT).clamp(min=0).detach()
        kl = torch.expm1(value - excess) - value
    check_same(kl=kl, log_ratio=value)
    # −r A + β KL(π_old ‖ π)
    return -ratio * gain + beta * kl


def gradient_keeping_clip(log_ratio: Tensor, advantage: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """PPO's clip whose upper side keeps a bounded gradient.

    The value of `ppo_clip`; where A > 0 and r > 1 + ε_high the clipped term is (1 + ε_high)/sg(r) · r, whose
    gradient is −(1 + ε_high) A ∇log r instead of 0. For A > 0 it is therefore no trust region: add a KL term
    or take few inner epochs.

    Args:
        log_ratio: [B] or [B, T], differentiable.
        advantage: [B], or the shape of log_ratio; detached here.
        eps_low: the clip's lower bound is 1 − eps_low.
        eps_high: its upper one 1 + eps_high.

    Returns:
        The shape of log_ratio, float32 or better.

    Dong et al., Agentic Entropy-Balanced Policy Optimization (AEPO), arXiv 2510.14545.
    """
    clipped = ppo_clip(log_ratio, advantage, eps_low=eps_low, eps_high=eps_high)
    value, gain = surrogate_inputs(log_ratio, advantage)
    above = (gain > 0) & (torch.expm1(value) > eps_high)
    one = torch.exp(torch.where(above, value - value.detach(), 0.0))
    return torch.where(above, clipped.detach() * one, clipped)


def sapo(log_ratio: Tensor, advantage: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """Soft adaptive gate in the place of the clip.

    ℓ = −(4/τ) σ(τ (r − 1)) A, τ = τ_pos where A > 0, else τ_neg. The gradient's weight 4 σ(1 − σ) r is 1 at
    r = 1 and fades on both sides; τ_neg > τ_pos makes it fade sooner for A < 0.

    Args:
        log_ratio: [B] or [B, T], differentiable.
        advantage: [B], or the shape of log_ratio; detached here.
        tau_pos: temperature for A > 0, > 0.
        tau_neg: temperature for A ≤ 0, > 0.

    Returns:
        The shape of log_ratio, float32 or better; at r = 1 the value is −2 A/τ.

    Soft Adaptive Policy Optimization, arXiv 2511.20347; the definition of its gate f.
    """
    value, gain = surrogate_inputs(log_ratio, advantage)
    if not (tau_pos > 0 and tau_neg > 0):
        raise ValueError(f"tau_pos and tau_neg must be > 0; got {tau_pos} and {tau_neg}.")
    tau = torch.where(gain > 0, torch.full_like(gain, tau_pos), torch.full_like(gain, tau_neg))
    shift = torch.expm1(value.clamp(max=LOG_RATIO_LIMIT))
    # −(4/τ) σ(τ (r − 1)) A
    return -4 / tau * torch.sigmoid(tau * shift) * gain


def gmpo(
    log_ratio: Tensor, advantage: Tensor, weight: Tensor, *, eps_low: float = 0.4, eps_high: float = 0.4
) -> Tensor:
    """Geometric mean of the clipped ratios of a sequence.

    ℓ_it = −s_i A_it, s_i = exp(Σ_t w c_it / Σ_t w), c = min(log r, ε_high) where A > 0 and
    max(log r, −ε_low) where A < 0: clipped per token, in log space, and only then averaged. The paper's
    advantage is one per sequence; then ℓ is constant along it, and "seq_mean_token_mean" is the paper's loss.

    Args:
        log_ratio: [B, T], differentiable; per token, whole sequences.
        advantage: [B] or [B, T]; detached here.
        weight: [B, T], 0 for absent decisions.
        eps_low: lower bound in log space, ≥ 0.
        eps_high: upper bound in log space, ≥ 0.

    Returns:
        [B, T] float32 or better; 0 with exactly zero gradient where weight is 0.

    Zhao et al., Geometric-Mean Policy Optimization, arXiv 2507.20673.
    """
    value, gain = surrogate_inputs(log_ratio, advantage)
    if not (eps_low >= 0 and eps_high >= 0):
        raise ValueError(
            f"the log-ratio is clipped to [−eps_low, eps_high], both ≥ 0; got {eps_low} and {eps_high}."
        )
    clipped = torch.where(gain > 0, value.clamp(max=eps_high), value)
    clipped = torch.where(gain < 0, value.clamp(min=-eps_low), clipped)
    # s = exp(Σ_t w c_t / Σ_t w), ℓ = −s A
    ratio = bounded_ratio(ratio_level(clipped, weight, "sequence"))
    return torch.where(weight != 0, -ratio * gain, 0.0)
