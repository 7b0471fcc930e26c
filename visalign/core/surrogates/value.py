# SPDX-License-Identifier: Apache-2.0
"""The value function's side of actor-critic methods: its clipped loss, and how good it is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visalign.core.checks import check_positive, check_same
from visalign.core.precision import float32, float32_dtype


def value_loss(
    values: Tensor,
    returns: Tensor,
    *,
    old_values: Tensor | None = None,
    clip: float | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Squared error of the value function per decision, pessimistically clipped around the rollout's values.

    ℓ = ½ (V − R)², or with `clip` = ε: ½ max((V − R)², (clip(V, V_old − ε, V_old + ε) − R)²), whose gradient
    is exactly zero where the clipped error is the larger one.

    Nothing is summed: hand ℓ to `aggregate` with the counts of the whole optimizer step, so that
    micro-batches add up to the full batch here as they do for the policy.

    Args:
        values: [B, T] or any shape, V of the current value function, differentiable; float16 and bfloat16 are
            computed in float32.
        returns: the same shape, R in the unit of the reward; detached here.
        old_values: the same shape, V of the rollout; detached here.
        clip: ε > 0, in the unit of the reward: scale it with the rewards.
        weight: the same shape; where it is 0 the loss is 0 with exactly zero gradient, even from NaN.

    Returns:
        Loss per decision, the shape of values, float32 or better.

    Raises:
        ValueError: shapes that differ, clip that is not positive, or only one of old_values and clip.

    Schulman et al., PPO, arXiv 1707.06347, eq. 9, has the squared error without the ½; the clip is not in
    that paper but in its released code, written down by Engstrom et al., arXiv 2005.12729, section 3.
    """
    value, target, old = _prepare(values, returns, old_values, clip, weight)
    error = (value - target).square() / 2
    if old is None or clip is None:
        return error
    # ½ max((V − R)², (clip(V, V_old ± ε) − R)²)
    held = _held(value, old, clip, target)
    bound = (value.detach().clamp(old - clip, old + clip) - target).square() / 2
    return torch.where(held, bound, error)


def value_clip_fraction(
    values: Tensor, returns: Tensor, *, old_values: Tensor, clip: float, weight: Tensor | None = None
) -> Tensor:
    """Share of the present decisions whose gradient the clip of `value_loss` removed.

    Args:
        values: V of the model as it is.
        returns: the targets, of the shape of values.
        old_values: V of the rollout.
        clip: c of `value_loss`: V may move by c before its gradient goes.
        weight: the shape of values; decisions of weight 0 are not counted, the others count once.

    Returns:
        0-dim, in [0, 1], without gradient; 0 when no decision is present.
    """
    value, target, old = _prepare(values.detach(), returns, old_values, clip, weight)
    assert old is not None
    inside = torch.ones_like(value, dtype=torch.bool) if weight is None else weight != 0
    held = _held(value, old, clip, target) & inside
    return held.sum().to(value.dtype) / inside.sum().clamp(min=1)


def soft_minimum(values: Tensor, *, temperature: float = 0.3) -> Tensor:
    """Cautious value of several critics, V = −a [ln Σ_h exp(−v_h/a) − ln n].

    Between the minimum (a → 0) and the mean (a → ∞) of the n critics; equal critics give their value.

    Args:
        values: [..., n], differentiable.
        temperature: a > 0, in the unit of the values.

    Returns:
        [...], float32 or better.

    Raises:
        ValueError: no critics, or a temperature that is not positive and finite.

    SAFE, arXiv 2602.04651 (two critics, a = 0.3).
    """
    check_positive(temperature=temperature)
    if not values.ndim or not values.shape[-1]:
        raise ValueError(f"values must be [..., n] with at least one critic; got {tuple(values.shape)}.")
    total = torch.logsumexp(-float32(values) / temperature, -1) - math.log(values.shape[-1])
    return -temperature * total


def explained_variance(values: Tensor, returns: Tensor, weight: Tensor | None = None) -> Tensor:
    """Fraction of the returns' variance that the value function predicts: 1 − Var(R − V)/Var(R).

    1 is perfect, 0 is no better than a constant, negative is worse than that. Variances are two-pass, in
    float64, over everything that is passed in.

    Args:
        values: any shape.
        returns: the same shape.
        weight: the same shape; decisions of weight 0 are not counted, the others count once.

    Returns:
        0-dim float64 without gradient; NaN, no value, when the returns do not vary or none is present.
    """
    inside = torch.ones_like(values, dtype=torch.bool) if weight is None else weight != 0
    value, target, _ = _prepare(values.detach().double(), returns.double(), None, None, weight)
    spread = _sum_of_squares(target, inside)
    share = 1 - _sum_of_squares(target - value, inside) / spread
    return torch.where(spread > 0, share, float("nan"))


def _sum_of_squares(value: Tensor, inside: Tensor) -> Tensor:
    """Σ (x − mean)² over the present entries; exactly 0 when they are equal."""
    lowest = torch.where(inside, value, float("inf")).amin() if value.numel() else value.new_zeros(())
    shifted = torch.where(inside, value - lowest, 0.0)
    mean = shifted.sum() / inside.sum().clamp(min=1)
    return torch.where(inside, shifted - mean, 0.0).square().sum()


def _held(value: Tensor, old: Tensor, clip: float, target: Tensor) -> Tensor:
    """Where the clipped error is the larger one."""
    value = value.detach()
    return (value.clamp(old - clip, old + clip) - target).abs() > (value - target).abs()


def _prepare(
    values: Tensor, returns: Tensor, old_values: Tensor | None, clip: float | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(V, R, V_old) in float32 or better, 0 where weight is 0."""
    if (old_values is None) != (clip is None):
        given = "clip without old_values" if old_values is None else "old_values without clip"
        raise ValueError(f"clipping needs old_values and clip, plain squared error neither; got {given}.")
    if clip is not None and not clip > 0:
        raise ValueError(
            f"clip must be positive, in the unit of the reward; got {clip}. None switches it off."
        )
    check_same(values=values, returns=returns, old_values=old_values, weight=weight)
    dtype = float32_dtype(values)
    tensors = [values.to(dtype), returns.detach().to(dtype)]
    if old_values is not None:
        tensors.append(old_values.detach().to(dtype))
    if weight is not None:
        tensors = [torch.where(weight != 0, tensor, 0.0) for tensor in tensors]
    return tensors[0], tensors[1], tensors[2] if old_values is not None else None
