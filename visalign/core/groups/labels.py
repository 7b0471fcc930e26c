# SPDX-License-Identifier: Apache-2.0
"""Group labels as indices, and sums over groups."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

Labels = Tensor | Sequence[Hashable]
"""One label per sample: an integer tensor [B], or a sequence of anything hashable."""


def group_index(group: Labels, size: int, device: torch.device | None = None) -> tuple[Tensor, int]:
    """Number the groups of `size` labels: (index [B] int64 on the device, number of groups K)."""
    shape = tuple(group.shape) if isinstance(group, Tensor) else (len(group),)
    if isinstance(group, str) or shape != (size,):
        kind = type(group).__name__
        raise ValueError(f"group needs one label per sample, {size} in all; got a {kind} of {list(shape)}.")
    if isinstance(group, Tensor):
        if group.is_floating_point() or group.is_complex():
            raise ValueError(f"group labels must be integers, or a list of anything hashable; got {group.dtype}.")
        labels, index = torch.unique(group, return_inverse=True)
        return index.to(device), labels.shape[0]
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(label, len(numbers)) for label in group]
    return torch.tensor(index, dtype=torch.int64, device=device), len(numbers)


def group_sum(values: Tensor, index: Tensor, groups: int) -> Tensor:
    """Sum rows of one group: values [B, T] and index [B] in 0 … K-1 give [K, T]."""
    return values.new_zeros(groups, values.shape[1]).index_add(0, index, values)


def group_min(values: Tensor, index: Tensor, groups: int) -> Tensor:
    """Smallest entry of each group: values [B, T] and index [B] give [K, T]; +inf for an empty group."""
    start = values.new_full((groups, values.shape[1]), float("inf"))
    return start.scatter_reduce(0, index[:, None].expand_as(values), values, "amin")
