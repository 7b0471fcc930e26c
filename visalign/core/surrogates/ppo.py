# SPDX-License-Identifier: Apache-2.0
"""PPO's clipped surrogate: log-ratio and advantage in, one loss per decision out.

T counts tokens or denoising steps; the formula is the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visalign.core.precision import float32

LOG_RATIO_LIMIT = 20.0
"""Ratios are e^min(log r, 20): e^20 = 4.9e8 replaces larger ones, and nothing overflows."""


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
    gradient. With `dual_clip` c: ℓ = −max(min(r A, clip(r) A), c A) where A < 0. With `delta` δ:
    ℓ = −min(min(r, δ) A, clip(r) A). Both cap r where A < 0, and agree for c = δ ≥ 1 + ε_high.
    Deviation: above log r = 20 the value stays at e^20 and ∂ℓ/∂log r at −e^20 A.

    GSPO and LUSPO are this surrogate on the sequence ratio (`ratio_level`), aggregated by
    "seq_mean_token_mean" (GSPO, ε = 3e-4, 4e-4) or "seq_mean_token_sum" (LUSPO, ε = 2e-3, 2.5e-3).

    Args:
        log_ratio: [B] or [B, T], differentiable.
        advantage: [B], or the shape of log_ratio.
        eps_low: Distance of the lower bound from 1, in [0, 1].
        eps_high: Distance of the upper bound from 1, ≥ 0; infinity for none. DAPO's clip-higher is 0.28 with
            eps_low 0.2.
        dual_clip: c > 1, 3 in the paper; None for none.
        delta: δ > 1, 4 in INTELLECT-2; None for none. Excludes dual_clip.

    Returns:
        Loss per decision, the shape of log_ratio, unweighted and unmasked.

    Schulman et al., PPO, arXiv 1707.06347, eq. 7; Yu et al., DAPO, arXiv 2503.14476, eq. 10 (two bounds);
    Ye et al., arXiv 1912.09729 (dual clip); INTELLECT-2, arXiv 2505.07291, section 4.1 (δ); LUSPO, arXiv
    2602.05261.
    """
    if not 0 <= eps_low <= 1 or not eps_high >= 0:
        raise ValueError(
            "the ratio is clipped to [1 − eps_low, 1 + eps_high], eps_low in [0, 1] and eps_high ≥ 0; got "
            f"eps_low={eps_low}, eps_high={eps_high}."
        )
    if dual_clip is not None and delta is not None:
        raise ValueError(
            f"dual_clip and delta both set the ceiling for A < 0; give one, got {dual_clip} and {delta}."
        )
    for name, bound in (("dual_clip", dual_clip), ("delta", delta)):
        if bound is not None and not bound > 1:
            raise ValueError(f"{name} is a ratio above 1, or None for no ceiling; got {bound}.")
    ceiling = math.inf if dual_clip is None else dual_clip - 1
    if delta is not None:
        eps_high, ceiling = min(eps_high, delta - 1), max(eps_high, delta - 1)

    value, gain = surrogate_inputs(log_ratio, advantage)
    shift = torch.expm1(value)  # r − 1, exact for clip ranges of 1e-5, which 1 + ε would round away
    above = (gain > 0) & (shift > eps_high)
    below = (gain < 0) & (shift < -eps_low)
    capped = (gain < 0) & (shift > ceiling)
    # −min(r A, clip(r, 1 − ε_low, 1 + ε_high) A): where a bound is the minimum, the loss is constant
    ratio = bounded_ratio(torch.where(above | below | capped, 0.0, value))
    ratio = torch.where(above, 1 + eps_high, torch.where(below, 1 - eps_low, ratio))
    return -torch.where(capped, 1 + ceiling, ratio) * gain


def surrogate_inputs(log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Check and align the inputs of a surrogate.

    Returns:
        log_ratio in float32 or better, and the detached advantage in the same shape and dtype.
    """
    if log_ratio.ndim not in (1, 2) or advantage.shape not in (log_ratio.shape, log_ratio.shape[:1]):
        raise ValueError(
            "log_ratio must be [B] or [B, T] and advantage [B] or the same shape; got log_ratio "
            f"{tuple(log_ratio.shape)} and advantage {tuple(advantage.shape)}."
        )
    value = float32(log_ratio)
    gain = advantage.detach().to(value.dtype)
    if gain.ndim < value.ndim:
        gain = gain[:, None]
    return value, gain.expand_as(value)


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """Compute r = e^min(log r, 20), keeping the gradient r ∇log r above the limit."""
    excess = (log_ratio - LOG_RATIO_LIMIT).clamp(min=0).detach()
    return torch.exp(log_ratio - excess)
