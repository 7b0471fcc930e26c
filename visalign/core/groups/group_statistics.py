# SPDX-License-Identifier: Apache-2.0
"""Mean, count and extremes of each group, for values [B] and an index [B] in 0 … K − 1 (see `group_index`).

Computed in float64 over the present members alone; absent ones may hold anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .labels import group_min, group_sum


def group_extremes(values: Tensor, present: Tensor, index: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """(smallest, largest) present value of each group, [K] float64; +inf and −inf for an empty group."""
    value = values.detach().double()
    low = group_min(torch.where(present, value, float("inf"))[:, None], index, groups)
    high = group_min(torch.where(present, -value, float("inf"))[:, None], index, groups)
    return low[:, 0], -high[:, 0]


def group_mean(values: Tensor, present: Tensor, index: Tensor, groups: int) -> Tensor:
    """Mean of the present values of each group, [K] float64; 0 for an empty group."""
    value = torch.where(present, values.detach().double(), 0.0)
    total = group_sum(torch.stack([value, present.double()], 1), index, groups)
    return total[:, 0] / total[:, 1].clamp(min=1)


def group_centre(values: Tensor, present: Tensor, index: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(smallest value, mean above it, number of present members) of each group, [K] float64.

    The mean is smallest + second. Kept apart, equal values are exact zeros above the smallest, and a large
    common offset costs no digits. The smallest of an empty group is +inf.
    """
    lowest, _ = group_extremes(values, present, index, groups)
    above = torch.where(present, values.detach().double() - lowest[index], 0.0)
    count = group_sum(present.double()[:, None], index, groups)[:, 0]
    return lowest, group_mean(above, present, index, groups), count
