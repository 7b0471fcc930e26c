# SPDX-License-Identifier: Apache-2.0
"""Means and deviations over groups of rows: missing entries are left out, equal ones give exact zeros.

Everything here is float64 and two-pass; `values` are [B, T] columns that hold 0 where `mask` is False.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .labels import group_min, group_sum


def present_entries(values: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return a bool tensor of the shape of values: finite and valid."""
    present = torch.isfinite(values)
    if valid is None:
        return present
    if valid.dtype != torch.bool or valid.shape != values.shape[: valid.ndim]:
        raise ValueError(
            f"valid must be a bool tensor shaped like the values, {tuple(values.shape)}, or their first dimensions; "
            f"got {valid.dtype} {tuple(valid.shape)}."
        )
    return present & valid.reshape(valid.shape + (1,) * (values.ndim - valid.ndim))


def centre(values: Tensor, mask: Tensor, index: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Return (present members of each entry's group, values − group mean), both [B, T]."""
    count = group_sum(mask.to(values.dtype), index, groups)
    # less the smallest: equal values are exact zeros, a large common offset costs no digits
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
    """Divide; 0/0, equal rewards without eps, is 0."""
    return centred / divisor.clamp(min=torch.finfo(divisor.dtype).tiny)
