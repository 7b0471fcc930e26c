# SPDX-License-Identifier: Apache-2.0
"""A random stream per sample, so that neither its batch nor its neighbours change what it draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def draw_seeds(seed: int, count: int) -> list[int]:
    """Seeds in [0, 2⁶²) of `count` samples from the seed of the run; the first n do not depend on `count`."""
    generator = torch.Generator().manual_seed(check_seeds([seed])[0])
    return torch.randint(2**62, (count,), generator=generator).tolist()


def sample_uniforms(seeds: Sequence[int], length: int) -> Tensor:
    """Numbers that decide the tokens of B samples, row b drawn from a generator seeded with seeds[b].

    Args:
        seeds: B integers in [0, 2⁶³); equal seeds on one prompt give equal samples.
        length: T, tokens per sample at most; the first n numbers do not depend on it.

    Returns:
        [B, T] float64 in [0, 1), on the CPU whatever the device of the model.

    Raises:
        ValueError: for a seed that is negative, too large or not an integer.
    """
    uniform = torch.empty(len(seeds), length, dtype=torch.float64)
    for row, seed in zip(uniform, check_seeds(seeds), strict=True):
        row.uniform_(generator=torch.Generator().manual_seed(seed))
    return uniform


def check_seeds(seeds: Sequence[int]) -> list[int]:
    """The seeds as a list; refused are negative ones, from 2⁶³ on, and what is no integer."""
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(
                f"Seeds are one integer in [0, 2⁶³) per sample; got {seed!r}. draw_seeds(run_seed, B) makes "
                "B of them."
            )
    return list(seeds)
