# SPDX-License-Identifier: Apache-2.0
"""Policy surrogates: log-ratio and advantage in, one loss per decision out; and what was clipped.

The objectives never learn whether T counts tokens or denoising steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Ratios are e^min(log r, 20): e^20 = 4.9e8 stands for all that is larger, and nothing overflows."""


def ppo_clip(log_ratio: Tensor, advantage: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """PPO's clipped surrogate with separate bounds.

    ℓ = −min(r A, clip(r, 1 − ε_low, 1 + ε_high) A), r = exp(log r). Clipped decisions have exactly zero
    gradient. Deviation: above log r = 20 the value stays at e^20 and ∂ℓ/∂log r at −e^20 A.

    Args:
        log_ratio: [B] or [B, T], differentiable; float16 and bfloat16 are computed in float32.
        advantage: [B], or the shape of log_ratio; detached here.
        eps_low: distance of the lower bound from 1, in [0, 1].
        eps_high: distance of the upper bound from 1, ≥ 0; infinity switches it off. DAPO's clip-higher: above
            eps_low.

    Returns:
        Loss per decision, the shape of log_ratio, to be minimised; not weighted, not masked.

    Raises:
        ValueError: shapes that do not fit or bounds outside their range.

    Schulman et al., PPO, arXiv 1707.06347, eq. 7; Yu et al., DAPO, arXiv 2503.14476, eq. 10 (two bounds).
    """
    value, gain = _prepare(log_ratio, advantage, eps_low, eps_high)
    above, below = _clipped(value, gain, eps_low, eps_high)
    ratio = _ratio(torch.where(above | below, 0.0, value))
    ratio = torch.where(above, 1 + eps_high, torch.where(below, 1 - eps_low, ratio))
    return -ratio * gain


@dataclass(frozen=True)
class ClipFractions:
    """Share of the present decisions whose gradient the clip removed; 0-dim tensors in [0, 1]."""

    total: Tensor
    """low + high."""
    low: Tensor
    """A < 0 and r < 1 − ε_low."""
    high: Tensor
    """A > 0 and r > 1 + ε_high."""


def clip_fractions(
    log_ratio: Tensor, advantage: Tensor, weight: Tensor | None = None, *, eps_low: float, eps_high: float
) -> ClipFractions:
    """Count what `ppo_clip` cuts off with the same arguments.

    Args:
        log_ratio: [B] or [B, T].
        advantage: [B], or the shape of log_ratio.
        weight: the shape of log_ratio; decisions of weight 0 are not counted, the others count once.
        eps_low: as in `ppo_clip`.
        eps_high: as in `ppo_clip`.

    Returns:
        Fractions without gradient; 0 when no decision is present.

    Raises:
        ValueError: as in `ppo_clip`.
    """
    value, gain = _prepare(log_ratio, advantage, eps_low, eps_high)
    above, below = _clipped(value, gain, eps_low, eps_high)
    inside = _inside(value, weight)
    count = inside.sum().clamp(min=1)
    low, high = (below & inside).sum() / count, (above & inside).sum() / count
    return ClipFractions(total=low + high, low=low, high=high)


@dataclass(frozen=True)
class RatioStatistics:
    """How far the policy has moved from the rollout policy; 0-dim tensors without gradient."""

    mean: Tensor
    """Mean of r; 1 in expectation."""
    std: Tensor
    """Standard deviation of r (ddof 0)."""
    low: Tensor
    """Smallest r."""
    high: Tensor
    """Largest r."""
    kl: Tensor
    """Mean of r − 1 − log r ≥ 0, an estimate of KL(π_old ‖ π) in the unit of the log-ratio."""
    largest: Tensor
    """Largest |log r|: at the first update the floor that rounding sets, to hold against the clip range."""


def ratio_statistics(log_ratio: Tensor, weight: Tensor | None = None) -> RatioStatistics:
    """Describe the ratios of the present decisions.

    Args:
        log_ratio: any shape.
        weight: the same shape; decisions of weight 0 are not counted, the others count once.

    Returns:
        Statistics in float32 or better; those of a single ratio of 1 when no decision is present.

    Raises:
        ValueError: shapes differ.
    """
    value = log_ratio.detach().to(torch.promote_types(log_ratio.dtype, torch.float32))
    inside = _inside(value, weight)
    value = torch.where(inside, value, 0.0)
    shift = torch.expm1(value.clamp(max=LOG_RATIO_LIMIT))
    count = inside.sum().clamp(min=1)
    mean = shift.sum() / count
    spread = torch.where(inside, shift - mean, 0.0).square().sum() / count
    empty = ~inside.any()
    return RatioStatistics(
        mean=1 + mean,
        std=spread.sqrt(),
        low=1 + torch.where(empty, 0.0, torch.where(inside, shift, float("inf")).min()),
        high=1 + torch.where(empty, 0.0, torch.where(inside, shift, float("-inf")).max()),
        kl=(shift - value).sum() / count,
        largest=value.abs().max(),
    )


def _prepare(log_ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    if not 0 <= eps_low <= 1 or not eps_high >= 0:
        raise ValueError(
            "the ratio is clipped to [1 − eps_low, 1 + eps_high], eps_low in [0, 1] and eps_high ≥ 0; got "
            f"eps_low={eps_low}, eps_high={eps_high}."
        )
    if log_ratio.ndim not in (1, 2) or advantage.shape not in (log_ratio.shape, log_ratio.shape[:1]):
        raise ValueError(
            "log_ratio must be [B] or [B, T] and advantage [B] or the same shape; got log_ratio "
            f"{tuple(log_ratio.shape)} and advantage {tuple(advantage.shape)}."
        )
    value = log_ratio.to(torch.promote_types(log_ratio.dtype, torch.float32))
    gain = advantage.detach().to(value.dtype)
    if gain.ndim < value.ndim:
        gain = gain[:, None]
    return value, gain.expand_as(value)


def _clipped(log_ratio: Tensor, advantage: Tensor, eps_low: float, eps_high: float) -> tuple[Tensor, Tensor]:
    """Where the clip is active: (above the upper bound with A > 0, below the lower bound with A < 0)."""
    shift = torch.expm1(log_ratio)
    return (advantage > 0) & (shift > eps_high), (advantage < 0) & (shift < -eps_low)


def _ratio(log_ratio: Tensor) -> Tensor:
    """e^log r, its value limited to e^20 and its gradient kept alive there."""
    excess = (log_ratio - LOG_RATIO_LIMIT).clamp(min=0).detach()
    return torch.exp(log_ratio - excess)


def _inside(log_ratio: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return torch.ones_like(log_ratio, dtype=torch.bool)
    if weight.shape != log_ratio.shape:
        raise ValueError(
            f"log_ratio {tuple(log_ratio.shape)} and weight {tuple(weight.shape)} must have one shape."
        )
    return weight != 0
