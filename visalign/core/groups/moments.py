# SPDX-License-Identifier: Apache-2.0
"""Means and deviations over groups of rows: what is missing is left out, equal entries give exact zeros.

Everything here is float64 and two-pass; `values` are [B, T] columns that hold 0 where `mask` is False.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .labels import group_min, group_sum


def present_entries(values: Tensor, valid: Tensor | None = None) -> Tensor:
    """Bool of the shape of values: finite and not marked as missing.

    Raises:
        ValueError: valid is not bool, or not shaped like the first dimensions of values.
    """
    present = torch.isfinite(values)
    if valid is None:
        return present
    if valid.dtype != torch.bool or valid.shape != values.shape[: valid.ndim]:
        raise ValueError(
            f"valid must be a bool tensor shaped like the values, {tuple(values.shape)}, or like their first "
            f"dimensions; got {valid.dtype} {tuple(valid.shape)}."
        )
    return present & valid.reshape(valid.shape + (1,) * (values.ndim - valid.ndim))


def centre(values: Tensor, mask: Tensor, index: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(present members of each entry's group, values − group mean), both [B, T].

    The group's smallest value is taken off first: equal values become exact zeros before anything is summed,
    and a large common offset cannot cost digits.
    """
    count = group_sum(mask.to(values.dtype), index, groups)
    lowest = group_min(torch.where(mask, values, float("inf")), index, groups)
    shifted = torch.where(mask, values - lowest[index], 0.0)
    mean = group_sum(shifted, index, groups) / count.clamp(min=1)
    return count[index], torch.where(mask, shifted - mean[index], 0.0)


def spread(centred: Tensor, mask: Tensor, index: Tensor, groups: int, ddof: int) -> Tensor:
    """Standard deviation of each entry's group, sqrt(Σ (x − mean)²/(n − ddof)), [B, T]; 0 for one member."""
    count = group_sum(mask.to(centred.dtype), index, groups)
    total = group_sum(centred.square(), index, groups)
    return (total / (count - ddof).clamp(min=1)).sqrt()[index]


def divide(centred: Tensor, divisor: Tensor) -> Tensor:
    """Quotient in which 0/0, equal rewards without eps, is 0."""
    return centred / divisor.clamp(min=torch.finfo(divisor.dtype).tiny)


def check_spread(ddof: int, eps: float) -> None:
    """Refuse a divisor or an eps that no estimator uses."""
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 (biased) or 1 (unbiased); got {ddof!r}.")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"eps must be a finite number ≥ 0; got {eps}.")
