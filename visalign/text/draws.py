# SPDX-License-Identifier: Apache-2.0
"""Random streams, one per sample, so that neither its batch nor its neighbours change what it draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def draw_seeds(seeds: int | Sequence[int], count: int) -> list[int]:
    """Draw `count` sample seeds in [0, 2⁶²) from the seed of a call, the first n the same whatever the count; seeds
    of the samples themselves stay.
    """
    if not isinstance(seeds, int):
        return list(seeds)
    return torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(seeds)).tolist()


def sample_uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """Draw the numbers [B, T] in [0, 1) that decide the tokens of B samples, row b by seeds[b].

    Equal seeds on one prompt give equal samples. The first n numbers do not depend on the length T, and none
    on the device of the model: they are float64 on the CPU.
    """
    uniform = torch.empty(len(seeds), length, dtype=torch.float64)
    for row, seed in zip(uniform, seeds, strict=True):
        row.uniform_(generator=torch.Generator().manual_seed(seed))
    return uniform
