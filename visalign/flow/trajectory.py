# SPDX-License-Identifier: Apache-2.0
"""Trajectories: final latents, and everything that a replay needs of each stochastic step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visalign.core.checks import check_axes

from .transitions import Kernel


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """N (sample, step) pairs of a trajectory: inputs of `replay`, and the rollout's statistics."""

    x: Tensor
    """[N, ...] latents that the model saw, storage dtype."""
    x_next: Tensor
    """[N, ...] latents that were drawn, storage dtype."""
    sigma: Tensor
    """[N] float32."""
    sigma_next: Tensor
    """[N] float32."""
    time: Tensor
    """[N] float32, time input of the network."""
    log_prob: Tensor
    """[N] float32 of the rollout policy."""
    mean: Tensor
    """[N, ...] float32 of the rollout policy."""
    std: Tensor
    """[N] float32 total std."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """B denoised samples and their S stochastic steps (S = 0: pure ODE); float64 where latents are stored so."""

    latents: Tensor
    """[B, ...] final latents x0, storage dtype."""
    x: Tensor
    """[B, S, ...] latents before each stochastic step, as the model saw them, storage dtype."""
    x_next: Tensor
    """[B, S, ...] latents after it, rounded to the storage dtype before `log_prob` was taken."""
    log_prob: Tensor
    """[B, S] float32."""
    mean: Tensor
    """[B, S, ...] float32."""
    std: Tensor
    """[B, S] float32, total std of x_next."""
    sigma: Tensor
    """[S] float32."""
    sigma_next: Tensor
    """[S] float32."""
    time: Tensor
    """[S] float32, time input of the network: `policy.times` of the schedule."""
    sde_steps: tuple[int, ...]
    """The S stochastic steps, as indices into the timestep schedule."""
    kernel: Kernel
    """The kernel of the stochastic steps; `replay` needs the same."""
    node: Tensor
    """[B, S] int64 on the CPU, the first of the samples that share this step and its noise, or itself."""

    def __len__(self) -> int:
        return self.latents.shape[0]

    def rows(self, index: Tensor) -> Trajectory:
        """Select the samples `index` [n] int64, ascending; samples that share steps come together."""
        position = torch.full((len(self),), -1).index_put((index,), torch.arange(len(index)))
        tensors = {name: value[index.to(value.device)] for name in _PER_SAMPLE for value in (getattr(self, name),)}
        return replace(self, **tensors, node=position[self.node[index]])

    def pairs(self, sample: Tensor, step: Tensor) -> Pairs:
        """Select the pairs (sample[i], step[i]), [N] each; steps are counted among the S, not in sigmas."""
        check_axes(sample=(sample, "N"), step=(step, "N"))
        sample, step = sample.to(self.x.device), step.to(self.x.device)
        return Pairs(
            **{name: getattr(self, name)[step] for name in ("sigma", "sigma_next", "time")},
            **{name: getattr(self, name)[sample, step] for name in _PER_SAMPLE[1:]},
        )


_PER_SAMPLE = ("latents", "x", "x_next", "log_prob", "mean", "std")


def trajectory_of_latents(latents: Tensor) -> Trajectory:
    """Wrap clean latents [B, ...] in a trajectory without steps."""
    count, *shape = latents.shape
    empty, numbers = latents.new_zeros(count, 0, *shape), torch.zeros(0, device=latents.device)
    return Trajectory(
        latents=latents,
        x=empty,
        x_next=empty,
        log_prob=numbers.expand(count, 0),
        mean=empty.to(torch.promote_types(latents.dtype, torch.float32)),
        std=numbers.expand(count, 0),
        sigma=numbers,
        sigma_next=numbers,
        time=numbers,
        sde_steps=(),
        kernel=Kernel(schedule="none", noise_level=0.0),
        node=torch.zeros(count, 0, dtype=torch.int64),
    )


def concatenate_trajectories(parts: Sequence[Trajectory]) -> Trajectory:
    """Concatenate the samples of several rollouts over the same steps."""
    if len(parts) == 1:
        return parts[0]
    offsets = [sum(map(len, parts[:number])) for number in range(len(parts))]
    return replace(
        parts[0],
        **{name: torch.cat([getattr(part, name) for part in parts]) for name in _PER_SAMPLE},
        node=torch.cat([part.node + offset for part, offset in zip(parts, offsets, strict=True)]),
    )
