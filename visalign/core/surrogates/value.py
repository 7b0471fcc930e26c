# SPDX-License-Identifier: Apache-2.0
"""Value function of actor-critic methods: clipped loss and explained variance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visalign.core.checks import check_same
from visalign.core.precision import float32, float32_dtype


def value_loss(
    values: Tensor,
    returns: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Compute the squared error of the value function per decision, clipped around the rollout's values.

    ℓ = ½ (V − R)², or with `clip` = ε, in the unit of the reward: ½ max((V − R)², (clip(V, V_old ± ε) − R)²), whose
    gradient is exactly zero where the clipped error is the larger one. Schulman et al., PPO, arXiv 1707.06347, eq. 9,
    (without the ½); the clip is in its released code only, described by Engstrom et al., arXiv 2005.12729, section 3.
    """
    value, target, old = _prepare(values, returns, old_values, clip, weight)
    error = (value - target).square() / 2
    if old is None or clip is None:
        return error
    clipped = _is_clipped(value, old, clip, target)
    bound = (value.detach().clamp(old - clip, old + clip) - target).square() / 2
    return torch.where(clipped, bound, error)


def value_clip_fraction(
    values: Tensor, returns: Tensor, *, old_values: Tensor, clip: float, weight: Tensor | None = None
) -> Tensor:
    """Compute the share of present decisions whose gradient the clip of `value_loss` removed, a number."""
    value, target, old = _prepare(values.detach(), returns, old_values, clip, weight)
    assert old is not None
    present = torch.ones_like(value, dtype=torch.bool) if weight is None else weight != 0
    clipped = _is_clipped(value, old, clip, target) & present
    return clipped.sum().to(value.dtype) / present.sum().clamp(min=1)


def soft_minimum(values: Tensor, *, temperature: float = 0.3) -> Tensor:
    """Soft minimum −a [ln Σ_h exp(−v_h/a) − ln n] of n critics [..., n]; a = 0.3 in SAFE, arXiv 2602.04651."""
    total = torch.logsumexp(-float32(values) / temperature, -1) - math.log(values.shape[-1])
    return -temperature * total


def explained_variance(values: Tensor, returns: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute the explained variance of the returns, 1 − Var(R − V)/Var(R), in float64; a number without gradient.

    1 is perfect, 0 no better than a constant, below 0 worse; NaN if the returns do not vary or none is
    present. Decisions count once, whatever their weight.
    """
    present = torch.ones_like(values, dtype=torch.bool) if weight is None else weight != 0
    value, target, _ = _prepare(values.detach().double(), returns.double(), None, None, weight)
    spread = _sum_of_squares(target, present)
    share = 1 - _sum_of_squares(target - value, present) / spread
    return torch.where(spread > 0, share, float("nan"))


def _sum_of_squares(value: Tensor, present: Tensor) -> Tensor:
    """Compute Σ (x − mean)² over the present entries; exactly 0 if they are equal."""
    lowest = torch.where(present, value, float("inf")).amin() if value.numel() else value.new_zeros(())
    shifted = torch.where(present, value - lowest, 0.0)
    mean = shifted.sum() / present.sum().clamp(min=1)
    return torch.where(present, shifted - mean, 0.0).square().sum()


def _is_clipped(value: Tensor, old: Tensor, clip: float, target: Tensor) -> Tensor:
    value = value.detach()
    return (value.clamp(old - clip, old + clip) - target).abs() > (value - target).abs()


def _prepare(
    values: Tensor, returns: Tensor, old_values: Tensor | None, clip: float | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if (old_values is None) != (clip is None):
        raise ValueError(f"give old_values and clip, or neither; got clip={clip} and one of the two is None.")
    check_same(values=values, returns=returns, old_values=old_values, weight=weight)
    dtype = float32_dtype(values)
    tensors = [values.to(dtype), returns.detach().to(dtype)]
    if old_values is not None:
        tensors.append(old_values.detach().to(dtype))
    if weight is not None:
        tensors = [torch.where(weight != 0, tensor, 0.0) for tensor in tensors]
    return tensors[0], tensors[1], tensors[2] if old_values is not None else None
