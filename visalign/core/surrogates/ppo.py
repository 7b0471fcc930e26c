# SPDX-License-Identifier: Apache-2.0
"""PPO's clipped surrogate: log-ratio and advantage in, one loss per decision out.

T counts tokens or denoising steps; the formula is the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_advantage
from visalign.core.precision import float32

LOG_RATIO_LIMIT = 20.0  # Ratios are e^min(log r, 20): e^20 = 4.9e8 replaces larger ones, and nothing overflows


def ppo_clip(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> Tensor:
    """Compute PPO's clipped surrogate with separate bounds and an optional ceiling for A < 0.

    ℓ = −min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), r = exp(log r). Clipped decisions have exactly zero
    gradient. With `dual_clip` c (3 in its paper): ℓ = −max(min(r A, clip(r) A), c A) where A < 0. With
    `delta` δ (4 in INTELLECT-2): ℓ = −min(min(r, δ) A, clip(r) A). Both cap r where A < 0, and agree for c =
    δ ≥ 1 + ε_high.
    Deviation: above log r = 20 the value stays at e^20 and ∂ℓ/∂log r at −e^20 A.

    GSPO and LUSPO are this surrogate on the sequence ratio (`ratio_level`), aggregated by "seq_mean_token_mean" (GSPO,
    ε = 3e-4, 4e-4) or "seq_mean_token_sum" (LUSPO, ε = 2e-3, 2.5e-3); DAPO's clip-higher is 0.2, 0.28. Schulman et
    al., PPO, arXiv 1707.06347, eq. 7; Yu et al., DAPO, arXiv 2503.14476, eq. 10 (two bounds); Ye et al., arXiv
    1912.09729 (dual clip); INTELLECT-2, arXiv 2505.07291, section 4.1 (δ); LUSPO, arXiv 2602.05261.
    """
    log_r, gain = surrogate_inputs(log_ratio, advantage)
    log_r = bounded(log_r)
    ratio = torch.exp(log_r)
    clipped = 1 + torch.expm1(log_r).clamp(-eps_low, eps_high)  # expm1: ranges of 2e-6 must survive float32
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    loss = torch.maximum(-ratio * gain, -clipped * gain)  # −min(r A, clip(r) A)
    if dual_clip is not None:
        loss = torch.where(gain < 0, torch.minimum(loss, -dual_clip * gain), loss)  # −max(min(…), c A)
    return loss


def surrogate_inputs(log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-ratio in float32 or better, and the detached advantage in its shape and dtype."""
    if log_ratio.ndim > 2:
        raise ValueError(f"log_ratio must be [B] or [B, T]; got shape {tuple(log_ratio.shape)}.")
    check_advantage(advantage, log_ratio)
    value = float32(log_ratio)
    gain = advantage.detach().to(value.dtype)
    return value, (gain[:, None] if gain.ndim < value.ndim else gain).expand_as(value)


def bounded(log_ratio: Tensor) -> Tensor:
    """Compute min(log r, 20), keeping the gradient above the limit."""
    return log_ratio - (log_ratio - LOG_RATIO_LIMIT).clamp(min=0).detach()


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Compute r = e^min(log r, 20), keeping the gradient r ∇log r above the limit."""
    return torch.exp(bounded(log_ratio))
