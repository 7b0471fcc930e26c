# SPDX-License-Identifier: Apache-2.0
"""What the selection rules share: who is present, means, quantiles and order statistics over a whole step.

Everything is computed in float64, without gradient, without reading a value back, and on any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_same, check_share


def token_terms(log_prob: Tensor, advantage: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(values, advantages, present) of one shape: float64, float64, bool; no gradient, 0 where absent.

    An entry is present when its weight is not 0 and both numbers are finite.
    """
    shape = log_prob.shape
    if weight.shape != shape or advantage.shape not in (shape, shape[:1]):
        raise ValueError(
            "values and weight must have one shape, [B, T], and advantage that shape or [B]; got "
            f"values {tuple(shape)}, weight {tuple(weight.shape)}, advantage {tuple(advantage.shape)}."
        )
    value, gain = log_prob.detach().double(), advantage.detach().double()
    gain = gain.reshape(gain.shape + (1,) * (value.ndim - gain.ndim)).expand_as(value)
    inside = (weight != 0) & torch.isfinite(value) & torch.isfinite(gain)
    return torch.where(inside, value, 0.0), torch.where(inside, gain, 0.0), inside


def present_decisions(values: Tensor, weight: Tensor) -> Tensor:
    """Bool of the shape of values: weight not 0 and value finite."""
    check_same(values=values, weight=weight)
    return (weight != 0) & torch.isfinite(values)


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Mean Σ w x / Σ w of float64 values; entries of weight 0 may hold anything.

    The smallest value is taken off first: equal values give exactly that value, and offsets cost no digits.

    Returns:
        0-dim, NaN when all weights are 0.
    """
    inside = weight != 0
    held = torch.where(inside, values, float("inf")).flatten()
    lowest = torch.cat([held, held.new_full((1,), float("inf"))]).min()
    return lowest + (torch.where(inside, values - lowest, 0.0) * weight).sum() / weight.sum()


def masked_quantile(values: Tensor, weight: Tensor, q: float, *, per_row: bool = False) -> Tensor:
    """Quantile of the present values, interpolated linearly between order statistics.

    The rank is q (n − 1). Ranks that rounding moves off a whole number are put back, so that a threshold
    that should be a value is that value. Unlike `torch.quantile` it leaves absent values out and has no size
    limit.

    Args:
        values: any shape; [..., T] with per_row.
        weight: the same shape; values of weight 0 are left out, the others count once.
        q: in [0, 1].
        per_row: one quantile per row instead of one for all.

    Returns:
        0-dim float64, or [..., 1] with per_row; NaN where nothing is present.

    Hyndman and Fan, Sample Quantiles in Statistical Packages, 1996, definition 7.
    """
    check_share(q=q)
    inside = present_decisions(values, weight)
    held = torch.where(inside, values.detach().double(), float("inf"))
    if not per_row:
        held, inside = held.flatten(), inside.flatten()
    ordered = torch.nn.functional.pad(held, (0, 1), value=float("inf")).sort(-1).values
    count = inside.sum(-1, keepdim=True)
    rank = q * (count - 1).clamp(min=0).double()
    rank = torch.where((rank - rank.round()).abs() <= 1e-12 * count, rank.round(), rank)
    below, above = ordered.gather(-1, rank.floor().long()), ordered.gather(-1, rank.ceil().long())
    result = torch.where(count == 0, float("nan"), torch.lerp(below, above, rank - rank.floor()))
    return result if per_row else result.squeeze(-1)


def kth_smallest(values: Tensor, inside: Tensor, k: Tensor) -> Tensor:
    """The k-th smallest of the values where inside is True.

    Args:
        values: any shape.
        inside: bool, the same shape.
        k: 0-dim int64 in [0, number of values + 1].

    Returns:
        0-dim float64; −inf for k = 0, +inf when fewer than k are inside.
    """
    held = torch.where(inside, values.detach().double(), float("inf")).flatten()
    low, high = held.new_full((1,), float("-inf")), held.new_full((1,), float("inf"))
    ordered = torch.cat([low, held.sort().values, high])
    return ordered.gather(0, k.reshape(1)).squeeze(0)


def share_count(inside: Tensor, ratio: float) -> Tensor:
    """How many decisions a share stands for: max(⌊ratio N⌋, 1), and 0 for a ratio of 0; 0-dim int64 ≤ N."""
    count = inside.sum()
    number = (ratio * count.double()).floor().long()
    return torch.minimum(number.clamp(min=1 if ratio > 0 else 0), count)


def ppo_clipped(log_ratio: Tensor, advantage: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """Where PPO's clip already takes the gradient: (A > 0, r > 1 + ε_high) or (A < 0, r < 1 − ε_low).

    Args:
        log_ratio: [B, T].
        advantage: [B], or the shape of log_ratio.
        eps_low: the clip's lower bound is 1 − eps_low.
        eps_high: its upper one 1 + eps_high.

    Returns:
        bool, the shape of log_ratio; False where a number is missing.

    Schulman et al., PPO, arXiv 1707.06347, eq. 7.
    """
    value, gain, _ = token_terms(log_ratio, advantage, torch.ones_like(log_ratio))
    shift = torch.expm1(value)
    return (gain > 0) & (shift > eps_high) | (gain < 0) & (shift < -eps_low)
