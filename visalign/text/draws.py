# SPDX-License-Identifier: Apache-2.0
"""Random streams, one per sample, so that neither its batch nor its neighbours change what it draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def draw_seeds(seed: int, count: int) -> list[int]:
    """Draw `count` sample seeds in [0, 2⁶²) from the run's seed; the first n do not depend on `count`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2**62, (count,), generator=generator).tolist()


def sample_uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """Draw the numbers [B, T] in [0, 1) that decide the tokens of B samples, row b by seeds[b].

    Equal seeds on one prompt give equal samples. The first n numbers do not depend on the length T, and none
    on the device of the model: they are float64 on the CPU.
    """
    uniform = torch.empty(len(seeds), length, dtype=torch.float64)
    for row, seed in zip(uniform, seeds, strict=True):
        row.uniform_(generator=torch.Generator().manual_seed(seed))
    return uniform


def check_seeds(seeds: Sequence[int]) -> list[int]:
    """Return the seeds as a list; refuse any that is not an integer in [0, 2⁶³)."""
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"Seeds are one integer in [0, 2⁶³) per sample; got {seed!r}.")
    return list(seeds)
