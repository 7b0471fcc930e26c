# SPDX-License-Identifier: Apache-2.0
"""PPO's clipped surrogate: log-ratio and advantage in, one loss per decision out.

The objectives never learn whether T counts tokens or denoising steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.core.precision import float32

LOG_RATIO_LIMIT = 20.0
"""Ratios are e^min(log r, 20): e^20 = 4.9e8 stands for all that is larger, and nothing overflows."""


def ppo_clip(
    log_ratio: Tensor,
    advantage: Tensor,
    *,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate with separate bounds, and with a ceiling for A < 0 if one is given.

    ℓ = −min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), r = exp(log r). Clipped decisions have exactly zero
    gradient. With `dual_clip` c: ℓ = −max(min(r A, clip(r) A), c A) where A < 0. With `delta` δ:
    ℓ = −min(min(r, δ) A, clip(r) A). Both hold r at the ceiling where A < 0; they are one and the same for
    c = δ ≥ 1 + ε_high. Deviation: above log r = 20 the value stays at e^20 and ∂ℓ/∂log r at −e^20 A.

    GSPO and LUSPO are this surrogate on the sequence ratio (`ratio_level`), averaged over sequences with
    "seq_mean_token_mean" (GSPO, ε = 3e-4, 4e-4) or "seq_mean_token_sum" (LUSPO, ε = 2e-3, 2.5e-3).

    Args:
        log_ratio: [B] or [B, T], differentiable; float16 and bfloat16 are computed in float32.
        advantage: [B], or the shape of log_ratio; detached here.
        eps_low: distance of the lower bound from 1, in [0, 1].
        eps_high: distance of the upper bound from 1, ≥ 0; infinity switches it off. DAPO's clip-higher: above
            eps_low (0.2 and 0.28).
        dual_clip: c > 1, 3 in the paper; None switches it off.
        delta: δ > 1, 4 in INTELLECT-2; None switches it off. Not together with dual_clip.

    Returns:
        Loss per decision, the shape of log_ratio, to be minimised; not weighted, not masked.

    Schulman et al., PPO, arXiv 1707.06347, eq. 7; Yu et al., DAPO, arXiv 2503.14476, eq. 10 (two bounds);
    Ye et al., arXiv 1912.09729 (dual clip); INTELLECT-2, arXiv 2505.07291, section 4.1 (δ); LUSPO, arXiv
    2602.05261.
    """
    bounds = _bounds(eps_low, eps_high, dual_clip, delta)
    value, gain = surrogate_inputs(log_ratio, advantage)
    above, below, beyond = _clipped(value, gain, bounds)
    # −min(r A, clip(r, 1 − ε_low, 1 + ε_high) A): where the min takes a bound, the loss is a constant
    ratio = bounded_ratio(torch.where(above | below | beyond, 0.0, value))
    ratio = torch.where(above, 1 + bounds.high, torch.where(below, 1 - bounds.low, ratio))
    return -torch.where(beyond, 1 + bounds.ceiling, ratio) * gain


def surrogate_inputs(log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """Check and align what every surrogate gets.

    Args:
        log_ratio: [B] or [B, T].
        advantage: [B], or the shape of log_ratio.

    Returns:
        (log_ratio in float32 or better, advantage without gradient, of the same shape and dtype).
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
    """r = e^min(log r, 20), with the gradient r ∇log r kept alive above the limit.

    Args:
        log_ratio: any shape, differentiable.

    Returns:
        The shape and dtype of log_ratio.
    """
    excess = (log_ratio - LOG_RATIO_LIMIT).clamp(min=0).detach()
    return torch.exp(log_ratio - excess)


@dataclass(frozen=True)
class _Bounds:
    """Distances from 1, so that 1e-5 is not rounded away before it is compared."""

    low: float
    """Below, for A < 0."""
    high: float
    """Above, for A > 0."""
    ceiling: float
    """Above, for A < 0."""


def _bounds(eps_low: float, eps_high: float, dual_clip: float | None, delta: float | None) -> _Bounds:
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
    if delta is not None:
        return _Bounds(eps_low, min(eps_high, delta - 1), max(eps_high, delta - 1))
    return _Bounds(eps_low, eps_high, math.inf if dual_clip is None else dual_clip - 1)


def _clipped(log_ratio: Tensor, advantage: Tensor, bounds: _Bounds) -> tuple[Tensor, Tensor, Tensor]:
    """Where the clip is active: (above with A > 0, below with A < 0, above the ceiling with A < 0)."""
    shift = torch.expm1(log_ratio)
    worse = advantage < 0
    return (
        (advantage > 0) & (shift > bounds.high),
        worse & (shift < -bounds.low),
        worse & (shift > bounds.ceiling),
    )
