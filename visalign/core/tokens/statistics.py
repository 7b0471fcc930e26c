# SPDX-License-Identifier: Apache-2.0
"""Statistics that selection shares: presence, means, quantiles and order statistics over a whole step.

Computed without reading a value back, on any shape.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_advantage, check_same


def token_terms(log_prob: Tensor, advantage: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return values, advantages (0 where absent) and presence (weight ≠ 0, both finite), in one shape."""
    check_same(values=log_prob, weight=weight)
    check_advantage(advantage, log_prob)
    value, gain = log_prob.detach().double(), advantage.detach().double()
    gain = gain.reshape(gain.shape + (1,) * (value.ndim - gain.ndim)).expand_as(value)
    inside = (weight != 0) & torch.isfinite(value) & torch.isfinite(gain)
    return torch.where(inside, value, 0.0), torch.where(inside, gain, 0.0), inside


def present_decisions(values: Tensor, weight: Tensor) -> Tensor:
    """Mark the decisions whose weight is not 0 and whose value is finite."""
    check_same(values=values, weight=weight)
    return (weight != 0) & torch.isfinite(values)


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """Compute Σ w x / Σ w of float64 values, 0-dim, less the smallest first, so that offsets cost no digits."""
    inside = weight != 0
    present = torch.where(inside, values, float("inf")).flatten()
    lowest = torch.cat([present, present.new_full((1,), float("inf"))]).min()
    return lowest + (torch.where(inside, values - lowest, 0.0) * weight).sum() / weight.sum()


def masked_quantile(values: Tensor, weight: Tensor, q: float, *, per_row: bool = False) -> Tensor:
    """Compute the quantile of the present values, interpolated linearly between order statistics.

    The rank is q (n − 1). Ranks that rounding moves off a whole number are put back, so that a threshold that
    should be a value is that value. Unlike `torch.quantile` it leaves absent values out and has no size
    limit. 0-dim; with `per_row` [..., 1], one per row of [..., T]. NaN where nothing is present. Hyndman and
    Fan, Sample Quantiles in Statistical Packages, 1996, definition 7.
    """
    inside = present_decisions(values, weight)
    present = torch.where(inside, values.detach().double(), float("inf"))
    if not per_row:
        present, inside = present.flatten(), inside.flatten()
    ordered = torch.nn.functional.pad(present, (0, 1), value=float("inf")).sort(-1).values
    count = inside.sum(-1, keepdim=True)
    rank = q * (count - 1).clamp(min=0).double()
    rank = torch.where((rank - rank.round()).abs() <= 1e-12 * count, rank.round(), rank)
    below, above = ordered.gather(-1, rank.floor().long()), ordered.gather(-1, rank.ceil().long())
    result = torch.where(count == 0, float("nan"), torch.lerp(below, above, rank - rank.floor()))
    return result if per_row else result.squeeze(-1)


def kth_smallest(values: Tensor, inside: Tensor, k: Tensor) -> Tensor:
    """Find the k-th smallest value where inside is True; −inf for k = 0, +inf if fewer than k are inside."""
    present = torch.where(inside, values.detach().double(), float("inf")).flatten()
    low, high = present.new_full((1,), float("-inf")), present.new_full((1,), float("inf"))
    ordered = torch.cat([low, present.sort().values, high])
    return ordered.gather(0, k.reshape(1)).squeeze(0)


def share_count(inside: Tensor, ratio: float) -> Tensor:
    """Count the decisions in a share: max(⌊ratio N⌋, 1), and 0 for a ratio of 0; 0-dim int64 ≤ N."""
    count = inside.sum()
    number = (ratio * count.double()).floor().long()
    return torch.minimum(number.clamp(min=1 if ratio > 0 else 0), count)


def ppo_clipped(log_ratio: Tensor, advantage: Tensor, *, eps_low: float, eps_high: float) -> Tensor:
    """Mark where PPO's clip has no gradient: (A > 0, r > 1 + ε_high) or (A < 0, r < 1 − ε_low); 1707.06347, eq. 7."""
    value, gain, _ = token_terms(log_ratio, advantage, torch.ones_like(log_ratio))
    shift = torch.expm1(value)
    return (gain > 0) & (shift > eps_high) | (gain < 0) & (shift < -eps_low)
