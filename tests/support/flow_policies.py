# SPDX-License-Identifier: Apache-2.0
"""Two tiny policies for the flow tests: Gaussian data with exact velocity, and one linear network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.flow import timestep_sigmas
from visalign.interfaces import ForwardCount, Prediction


@dataclass(frozen=True)
class Shift:
    """A condition that is one number per sample."""

    value: Tensor

    def __len__(self) -> int:
        return len(self.value)

    def select(self, index: Tensor) -> Shift:
        return Shift(self.value[index])


@dataclass
class GaussianPolicy:
    """Data N(mean + condition, scale²): v(x, σ) = E[noise − x0 | x_σ = x], exact."""

    mean: float = 0.5
    scale: float = 0.3
    latent_shape: tuple[int, ...] = (1, 1, 1)
    storage_dtype: torch.dtype = torch.float64
    prediction: Prediction = "velocity"
    count: ForwardCount = field(default_factory=ForwardCount)

    device = torch.device("cpu")
    module = torch.nn.Identity()

    def encode(self, prompts: Sequence[str]) -> Shift:
        return Shift(torch.zeros(len(prompts)))

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.storage_dtype == torch.float64 else torch.float32

    def times(self, sigmas: Tensor) -> Tensor:
        return 1000 * sigmas

    def velocity(self, x: Tensor, sigma: Tensor, condition: Any, time: Tensor | None = None) -> Tensor:
        self.count.forward += len(x)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        sigma, shift = (t.to(dtype).view(-1, *[1] * (x.ndim - 1)) for t in (sigma, condition.value))
        mean = self.mean + shift
        variance = (1 - sigma) ** 2 * self.scale**2 + sigma**2
        centred = x.to(dtype) - (1 - sigma) * mean
        return sigma / variance * centred - mean - (1 - sigma) * self.scale**2 / variance * centred

    def decode(self, latents: Tensor) -> Tensor:
        return latents.float().clamp(0, 1).expand(-1, 3, -1, -1)

    def sigmas(self, steps: int, *, timestep_schedule: str = "plain") -> Tensor:
        return timestep_sigmas(steps)

    @contextmanager
    def reference(self) -> Iterator[None]:
        yield

    def trainable_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return []

    def save(self, folder: Path) -> None:
        raise OSError("a test policy has nothing to save")

    @property
    def forward_count(self) -> ForwardCount:
        return self.count


class LinearPolicy(GaussianPolicy):
    """v = W [x, σ, condition] + b, per latent, in one nn.Linear."""

    def __init__(self, *, storage_dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (2, 3, 3)) -> None:
        super().__init__(latent_shape=shape, storage_dtype=storage_dtype)
        size = math.prod(shape)
        working = torch.float64 if storage_dtype == torch.float64 else torch.float32
        self.network = torch.nn.Linear(size + 2, size, dtype=working)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.network.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=working)

    def velocity(self, x: Tensor, sigma: Tensor, condition: Any, time: Tensor | None = None) -> Tensor:
        dtype = self.network.weight.dtype
        columns = [x.flatten(1).to(dtype), sigma[:, None].to(dtype), condition.value[:, None].to(dtype)]
        return self.network(torch.cat(columns, 1)).view(x.shape)
