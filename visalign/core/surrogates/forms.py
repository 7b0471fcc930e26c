# SPDX-License-Identifier: Apache-2.0
"""Alternatives to PPO's clip: KL penalty, gradient-keeping clip, soft gate, geometric mean.

`log_ratio` comes from `ratios.log_ratio` and `ratio_level`, which put 0 at absent decisions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_same

from .ppo import LOG_RATIO_LIMIT, bounded, bounded_ratio, ppo_clip, surrogate_inputs
from .ratios import ratio_level


def ppo_kl(log_ratio: Tensor, advantage: Tensor, *, beta: float, kl: Tensor | None = None) -> Tensor:
    """Compute PPO's surrogate with a KL penalty instead of the clip, ℓ = −r A + β KL(π_old ‖ π).

    Without `kl` the divergence is estimated from the old policy's samples by r − 1 − log r ≥ 0: unbiased, and
    so is its gradient r − 1. `kl` is the exact divergence of each decision where it is known, nats,
    differentiable: `gaussian_kl(mean, mean_old, std)` (symmetric at equal std). Adapt β between updates, not here.

    Schulman et al., PPO, arXiv 1707.06347, eq. 8.
    """
    log_r, gain = surrogate_inputs(log_ratio, advantage)
    check_same(kl=kl, log_ratio=log_r)
    kl = torch.expm1(bounded(log_r)) - log_r if kl is None else kl
    return -bounded_ratio(log_r) * gain + beta * kl  # −r A + β KL(π_old ‖ π)


def gradient_keeping_clip(log_ratio: Tensor, advantage: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """Compute PPO's clip whose upper side keeps a bounded gradient.

    The value is that of `ppo_clip`. Where A > 0 and r > 1 + ε_high the clipped term is (1 + ε_high)/sg(r) · r, with
    gradient −(1 + ε_high) A ∇log r instead of 0. For A > 0 it is therefore no trust region: add a KL term or take few
    inner epochs. Dong et al., Agentic Entropy-Balanced Policy Optimization (AEPO), arXiv 2510.14545.
    """
    clipped = ppo_clip(log_ratio, advantage, eps_low=eps_low, eps_high=eps_high)
    log_r, gain = surrogate_inputs(log_ratio, advantage)
    above = (gain > 0) & (torch.expm1(log_r) > eps_high)
    one = torch.exp(torch.where(above, log_r - log_r.detach(), 0.0))  # value 1, gradient ∇log r
    return torch.where(above, clipped.detach() * one, clipped)


def drpo(log_ratio: Tensor, advantage: Tensor, old_log_prob: Tensor | None = None, *, epsilon: float = 12.5) -> Tensor:
    """Compute DRPO: a quadratic pull to the old policy in place of the clip, ℓ = −r A + |A| μ (r − 1)² / (2ε).

    μ is the old policy's probability of the token, so that likely tokens are held and unlikely ones may move. Without
    old_log_prob it is 1, SPO's pull, whose gradient is 0 at r = 1 + ε sign A. DRPO, arXiv 2606.09821; Simple Policy
    Optimization, arXiv 2401.16025.
    """
    log_r, gain = surrogate_inputs(log_ratio, advantage)
    check_same(old_log_prob=old_log_prob, log_ratio=log_r)
    likely = 1.0 if old_log_prob is None else old_log_prob.detach().to(log_r.dtype).clamp(max=0).exp()
    ratio = bounded_ratio(log_r)
    return -ratio * gain + gain.abs() * likely * (ratio - 1).square() / (2 * epsilon)


def sapo(log_ratio: Tensor, advantage: Tensor, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Tensor:
    """Compute the soft adaptive gate of SAPO in place of the clip.

    ℓ = −(4/τ) σ(τ (r − 1)) A, τ = τ_pos where A > 0, else τ_neg; −2 A/τ at r = 1. The gradient's weight 4 σ(1
    − σ) r is 1 at r = 1 and fades on both sides; τ_neg > τ_pos makes it fade sooner for A < 0. Soft Adaptive
    Policy Optimization, arXiv 2511.20347; the definition of its gate f.
    """
    log_r, gain = surrogate_inputs(log_ratio, advantage)
    tau = torch.where(gain > 0, torch.full_like(gain, tau_pos), torch.full_like(gain, tau_neg))
    shift = torch.expm1(log_r.clamp(max=LOG_RATIO_LIMIT))
    return -4 / tau * torch.sigmoid(tau * shift) * gain  # −(4/τ) σ(τ (r − 1)) A


def gmpo(
    log_ratio: Tensor, advantage: Tensor, weight: Tensor, *, eps_low: float = 0.4, eps_high: float = 0.4
) -> Tensor:
    """Compute GMPO: the geometric mean of the clipped ratios of a whole sequence [B, T].

    ℓ_it = −s_i A_it, s_i = exp(Σ_t w c_it / Σ_t w), c = min(log r, ε_high) where A > 0 and max(log r, −ε_low)
    where A < 0: clipped per token in log space, then averaged. With the paper's one advantage per sequence ℓ
    is constant along it, and "seq_mean_token_mean" gives the paper's loss. Zhao et al., Geometric-Mean Policy
    Optimization, arXiv 2507.20673.
    """
    log_r, gain = surrogate_inputs(log_ratio, advantage)
    clipped = torch.where(gain > 0, log_r.clamp(max=eps_high), log_r)
    clipped = torch.where(gain < 0, log_r.clamp(min=-eps_low), clipped)
    ratio = bounded_ratio(ratio_level(clipped, weight, "sequence"))  # s = exp(Σ_t w c_t / Σ_t w)
    return torch.where(weight != 0, -ratio * gain, 0.0)
