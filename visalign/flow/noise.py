# SPDX-License-Identifier: Apache-2.0
"""Noise of single samples: each has its own seed, so neither batch nor device changes its image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visalign.seeds import sample_seed


def initial_noise(seeds: Sequence[int] | Tensor, shape: Sequence[int]) -> Tensor:
    """Draw standard normal noise x_1 [B, *shape], row b from a generator seeded with seeds[b].

    Float32 on the CPU whatever the device of the model: the same image everywhere. Equal to what diffusers
    draws in float32 from `[torch.Generator().manual_seed(s) for s in seeds]`.
    """
    return _normal(check_seeds(seeds), shape)


def step_noise(seeds: Sequence[int] | Tensor, step: int, shape: Sequence[int]) -> Tensor:
    """Draw standard normal noise ε [B, *shape] of step `step`, independent of `initial_noise` and of other steps."""
    return _normal([sample_seed("step", seed, step) for seed in check_seeds(seeds)], shape)


def check_seeds(seeds: Sequence[int] | Tensor) -> list[int]:
    """Return seeds as Python integers; a negative, too large or fractional one is a ValueError."""
    values = seeds.tolist() if isinstance(seeds, Tensor) else list(seeds)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise ValueError(f"Seeds are one integer in [0, 2⁶³) per sample; got {value!r}. Use sample_seed(...).")
    return values


def _normal(seeds: list[int], shape: Sequence[int]) -> Tensor:
    noise = torch.empty(len(seeds), *shape, dtype=torch.float32)
    for row, seed in zip(noise, seeds, strict=True):
        row.copy_(torch.randn(row.shape, generator=torch.Generator().manual_seed(seed)))
    return noise


def queue_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device; from the CPU to a GPU it does not wait for the work that is queued there."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
