# SPDX-License-Identifier: Apache-2.0
"""Alternatives to PPO's clip: KL penalty, gradient-keeping clip, soft gate, geometric mean.

`log_ratio` comes from `ratios.log_ratio` and `ratio_level`, which put 0 at absent decisions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_same

from .ppo import LOG_RATIO_LIMIT, bounded_ratio, ppo_clip, surrogate_inputs
from .ratios import ratio_level


def ppo_kl(log_ratio: Tensor, advantage: Tensor, *, beta: float, kl: Tensor | None = None) -> Tensor:
    """Compute PPO's surrogate with a KL penalty instead of the clip.

    ℓ = −r A + β KL(π_old ‖ π). Without `kl` the divergence is estimated from the old policy's samples by
    r − 1 − log r ≥ 0: unbiased, and so is its gradient r − 1. Adapt β between updates, not here.

    Args:
        log_ratio: [B] or [B, T], differentiable.
        advantage: [B], or the shape of log_ratio.
        beta: β ≥ 0, in units of the advantage per nat.
        kl: The shape of log_ratio, nats, differentiable: exact divergence of each decision where it is known,
            e.g. `gaussian_kl(mean, mean_old, std)` (symmetric at equal std).

    Returns:
        Loss per decision, the shape of log_ratio.

    Schulman et al., PPO, arXiv 1707.06347, eq. 8.
    """
    value, gain = surrogate_inputs(log_ratio, advantage)
    if not beta >= 0:
        raise ValueError(f"beta must be ≥ 0; got {beta}.")
    if kl is None:
        excess = (value - LOG_RATIO_LIMIT).clamp(min=0).detach()
        kl = torch.expm1(value - excess) - value
    check_same(kl=kl, log_ratio=value)
    # −r A + β KL(π_old ‖ π)
    return -bounded_ratio(value) * gain + beta * kl


def gradient_keeping_clip(log_ratio: Tensor, advantage: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """Compute PPO's clip whose upper side keeps a bounded gradient.

    The value is that of `ppo_clip`. Where A > 0 and r > 1 + ε_high the clipped term is (1 + ε_high)/sg(r) ·
    r, with gradient −(1 + ε_high) A ∇log r instead of 0. For A > 0 it is therefore no trust region: add a KL
    term or take few inner epochs.

    Args:
        log_ratio: [B] or [B, T], differentiable.
        advantage: [B], or the shape of log_ratio.
        eps_low: Distance of the lower bound from 1.
        eps_high: Distance of the upper bound from 1.

    Returns:
        Loss per decision, the shape of log_ratio.

    Dong et al., Agentic Entropy-Balanced Policy Optimization (AEPO), arXiv 2510.14545.
    """
    clipped = ppo_clip(log_ratio, advantage, eps_low=eps_low, eps_high=eps_high)
    value, gain = surrogate_inputs(log_ratio, advantage)
    above = (gain > 0) & (torch.expm1(value) > eps_high)
    one = torch.exp(torch.where(above, value - value.detach(), 0.0))  # value 1, gradient ∇log r
    return torch.where(above, clipped.detach() * one, clipped)


def sapo(log_ratio: Tensor, advantage: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """Compute the soft adaptive gate of SAPO in place of the clip.

    ℓ = −(4/τ) σ(τ (r − 1)) A, τ = τ_pos where A > 0, else τ_neg. The gradient's weight 4 σ(1 − σ) r is 1 at
    r = 1 and fades on both sides; τ_neg > τ_pos makes it fade sooner for A < 0.

    Args:
        log_ratio: [B] or [B, T], differentiable.
        advantage: [B], or the shape of log_ratio.
        tau_pos: Temperature for A > 0, > 0.
        tau_neg: Temperature for A ≤ 0, > 0.

    Returns:
        Loss per decision, the shape of log_ratio; −2 A/τ at r = 1.

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
    """Compute GMPO: the geometric mean of the clipped ratios of a sequence.

    ℓ_it = −s_i A_it, s_i = exp(Σ_t w c_it / Σ_t w), c = min(log r, ε_high) where A > 0 and
    max(log r, −ε_low) where A < 0: clipped per token in log space, then averaged. With the paper's one
    advantage per sequence ℓ is constant along it, and "seq_mean_token_mean" gives the paper's loss.

    Args:
        log_ratio: [B, T] of whole sequences, per token, differentiable.
        advantage: [B] or [B, T].
        weight: [B, T], 0 for absent decisions.
        eps_low: Lower bound in log space, ≥ 0.
        eps_high: Upper bound in log space, ≥ 0.

    Returns:
        Loss per decision, [B, T].

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
