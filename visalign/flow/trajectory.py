# SPDX-License-Identifier: Apache-2.0
"""What a rollout leaves behind: final latents, and of each stochastic step all that a replay needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .transitions import Kernel


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """N (sample, step) pairs taken out of a trajectory: what `replay` takes and the rollout's record."""

    x: Tensor
    """[N, ...] latents that the model saw, storage dtype."""
    x_next: Tensor
    """[N, ...] latents that were drawn, storage dtype."""
    sigma: Tensor
    """[N] float32."""
    sigma_next: Tensor
    """[N] float32."""
    time: Tensor
    """[N] float32, what the network was given beside x."""
    log_prob: Tensor
    """[N] float32 of the rollout policy."""
    mean: Tensor
    """[N, ...] float32 of the rollout policy."""
    std: Tensor
    """[N] float32 total std."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """B denoised samples and their S stochastic steps. S is 0 for a pure ODE rollout.

    float32 fields are float64 when the policy stores latents in float64.
    """

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
    """[S] float32, what the network was given: `policy.times` of the schedule."""
    sde_steps: tuple[int, ...]
    """The S stochastic steps, as indices into the timestep schedule."""
    kernel: Kernel
    """The kernel of the stochastic steps; `replay` needs the same."""
    node: Tensor
    """[B, S] int64 on the CPU, the first of the samples that have this step in common: one draw of noise, the
    same numbers everywhere. Itself where a sample is alone."""

    def __len__(self) -> int:
        return self.latents.shape[0]

    @property
    def dimensions(self) -> int:
        """Number of dimensions of one latent."""
        return self.latents[0].numel()

    def pairs(self, sample: Tensor, step: Tensor) -> Pairs:
        """The pairs (sample[i], step[i]).

        Args:
            sample: [N] integer, which sample, 0 <= sample < B.
            step: [N] integer, which of the S stochastic steps, 0 <= step < S (not its index in sigmas).

        Raises:
            ValueError: For shapes that differ.
        """
        if sample.ndim != 1 or sample.shape != step.shape:
            raise ValueError(
                f"pairs needs sample [N] and step [N]; got {tuple(sample.shape)} and {tuple(step.shape)}."
            )
        sample, step = sample.to(self.x.device), step.to(self.x.device)
        return Pairs(
            x=self.x[sample, step],
            x_next=self.x_next[sample, step],
            sigma=self.sigma[step],
            sigma_next=self.sigma_next[step],
            time=self.time[step],
            log_prob=self.log_prob[sample, step],
            mean=self.mean[sample, step],
            std=self.std[sample, step],
        )

    def all_pairs(self) -> tuple[Tensor, Tensor]:
        """Every (sample, step): two index tensors [B·S], the steps of a sample side by side."""
        samples, steps = torch.arange(len(self)), torch.arange(len(self.sde_steps))
        return samples.repeat_interleave(len(steps)), steps.repeat(len(samples))


_OF_SAMPLES = ("latents", "x", "x_next", "log_prob", "mean", "std")


def end_points(latents: Tensor) -> Trajectory:
    """Clean latents [B, ...] that no rollout made, as a trajectory without steps."""
    count, *shape = latents.shape
    none, numbers = latents.new_zeros(count, 0, *shape), torch.zeros(0, device=latents.device)
    return Trajectory(
        latents=latents,
        x=none,
        x_next=none,
        log_prob=numbers.expand(count, 0),
        mean=none.to(torch.promote_types(latents.dtype, torch.float32)),
        std=numbers.expand(count, 0),
        sigma=numbers,
        sigma_next=numbers,
        time=numbers,
        sde_steps=(),
        kernel=Kernel(schedule="none", noise_level=0.0),
        node=torch.zeros(count, 0, dtype=torch.int64),
    )


def joined_trajectories(parts: Sequence[Trajectory]) -> Trajectory:
    """Samples of several rollouts over the same steps as those of one."""
    if len(parts) == 1:
        return parts[0]
    begins = [sum(map(len, parts[:number])) for number in range(len(parts))]
    return replace(
        parts[0],
        **{name: torch.cat([getattr(one, name) for one in parts]) for name in _OF_SAMPLES},
        node=torch.cat([one.node + begin for one, begin in zip(parts, begins, strict=True)]),
    )
