# SPDX-License-Identifier: Apache-2.0
"""The cautious value of several critics."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visalign.core.checks import check_positive
from visalign.core.precision import float32


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

    SAFE (two critics, a = 0.3).
    """
    check_positive(temperature=temperature)
    if not values.ndim or not values.shape[-1]:
        raise ValueError(f"values must be [..., n] with at least one critic; got {tuple(values.shape)}.")
    total = torch.logsumexp(-float32(values) / temperature, -1) - math.log(values.shape[-1])
    return -temperature * total
