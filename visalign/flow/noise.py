# SPDX-License-Identifier: Apache-2.0
"""Noise per sample: each has a seed of its own, so neither its batch nor its device changes its image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visalign.seeds import sample_seed


def initial_noise(seeds: Sequence[int] | Tensor, shape: Sequence[int]) -> Tensor:
    """Standard normal noise x_1, row b drawn from a generator seeded with seeds[b].

    Equal to what diffusers draws in float32 from `[torch.Generator().manual_seed(s) for s in seeds]`.

    Args:
        seeds: [B] integers in [0, 2⁶³).
        shape: Shape of one latent, e.g. (C, H, W).

    Returns:
        [B, *shape] float32 on the CPU, whatever the device of the model: the same image everywhere.

    Raises:
        ValueError: For a seed that is negative or not an integer.
    """
    return _normal(checked_seeds(seeds), shape)


def step_noise(seeds: Sequence[int] | Tensor, step: int, shape: Sequence[int]) -> Tensor:
    """Standard normal noise ε of denoising step `step`, independent of `initial_noise` and of other steps.

    It depends on the seed and the step alone, so choosing other stochastic steps leaves it as it is.

    Args:
        seeds: [B] integers in [0, 2⁶³).
        step: Index of the denoising step in its timestep schedule.
        shape: Shape of one latent.

    Returns:
        [B, *shape] float32 on the CPU.
    """
    return _normal([sample_seed("step", seed, step) for seed in checked_seeds(seeds)], shape)


def checked_seeds(seeds: Sequence[int] | Tensor) -> list[int]:
    """The seeds as a list of Python integers.

    Raises:
        ValueError: For a seed that is negative, too large or not an integer.
    """
    values = seeds.tolist() if isinstance(seeds, Tensor) else list(seeds)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise ValueError(
                f"Seeds are one integer in [0, 2⁶³) per sample; got {value!r}. sample_seed(...) makes them."
            )
    return values


def _normal(seeds: list[int], shape: Sequence[int]) -> Tensor:
    noise = torch.empty(len(seeds), *shape, dtype=torch.float32)
    for row, seed in zip(noise, seeds, strict=True):
        row.copy_(torch.randn(row.shape, generator=torch.Generator().manual_seed(seed)))
    return noise
