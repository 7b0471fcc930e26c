# SPDX-License-Identifier: Apache-2.0
"""Search for noise of a higher reward: around the start noise (zero order), and along the paths.

A reward takes images [M, 3, H, W] and gives [M], higher is better; NaN, unknown, is chosen only where too few
are known. It is called with one candidate of every sample at a time.

Ma et al., Inference-time scaling beyond denoising steps, arXiv 2501.09732, section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.core.checks import check_rules
from visalign.core.objective.options import check_row
from visalign.interfaces import Condition, DiffusionPolicy
from visalign.seeds import sample_seed

from .noise import initial_noise
from .rollout import check_finite, complete, first_latents
from .transitions import velocity_between

Reward = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class ZeroOrderSearch:
    """Climb from a start noise to neighbours whose images have a higher reward.

    The pivot n has N neighbours n' = √(1 − ρ²)·n + ρ·ε, ε ~ N(0, I), which are start noise like any other.
    Each is denoised along the ODE, decoded and scored; the best of them and n is the next pivot, K times. A
    sample costs T (1 + K N) velocities and 1 + K N scored images.

    Deviations from the paper: its neighbours only lie at a distance, ours keep the variance; the pivot stays
    if no neighbour is better, so that more rounds are never worse; all candidates take the same steps.
    """

    rounds: int = 3
    """K, moves of the pivot."""
    candidates: int = 1
    """N, the neighbours of a round (the paper: 2 or 4)."""
    radius: float = 0.5
    """ρ in (0, 1]: the share of a neighbour's deviation that is new; 1 is best of 1 + K N."""

    def __post_init__(self) -> None:
        check_row("search", self)

    def velocities(self, steps: int) -> int:
        """Number of velocities per sample on a schedule of T steps: T (1 + K N)."""
        return steps * (1 + self.rounds * self.candidates)

    @torch.no_grad()
    def __call__(
        self,
        policy: DiffusionPolicy,
        condition: Condition,
        reward: Reward,
        *,
        sigmas: Tensor,
        seeds: Sequence[int],
        batch_size: int | None = None,
    ) -> Tensor:
        """Search for each of B samples apart from the start noise of `rollout`; final latents [B, ...]."""
        sigmas = _sigmas_of(sigmas, condition, seeds)
        count, rows = len(condition), torch.arange(len(condition))
        pivot = initial_noise(seeds, policy.latent_shape)

        def denoise(noise: Tensor) -> tuple[Tensor, Tensor]:
            """Return ([n·B, ...] latents, [n, B] values) of n noises for every sample."""
            repeated = condition.select(rows.repeat(len(noise) // count))
            x = first_latents(policy, noise, sigmas)
            x = complete(policy, repeated, x, sigmas=sigmas, step=0, batch_size=batch_size)
            return x, _score(policy, x, reward, count, batch_size)

        latents, (value,) = denoise(pivot)
        for k in range(self.rounds):
            fresh = _fresh_noise(seeds, policy.latent_shape, k, self.candidates)
            repeated = pivot.repeat(self.candidates, *[1] * (pivot.ndim - 1))
            near = (1 - self.radius**2) ** 0.5 * repeated + self.radius * fresh
            candidates, values = denoise(near)
            best, number = values.max(0)
            better, index = best > value, number * count + rows
            value = torch.maximum(value, best)
            pivot = torch.where(_rows(better, pivot), near[index], pivot)
            latents = torch.where(_rows(better, latents), candidates[index.to(candidates.device)], latents)
        check_finite(latents)
        return latents


@dataclass(frozen=True, kw_only=True)
class PathSearch:
    """Add noise to partly denoised paths, denoise them further, and keep those of the highest reward.

    N paths of each prompt are denoised along the ODE to step `start`. Then, in rounds, each gets M branches:
    noised from σ to the level σ' of `back` steps earlier, which keeps the flow's marginal (`renoise`), and
    denoised by `forward` steps; the N best of the N M by the reward of their predicted images x̂0 = x − σ v
    continue, until the schedule ends. v is that of the last step, so x̂0 costs no forward. A path costs
    start + Σ M·(steps of the round)  velocities.

    Deviations from the paper: Δf and Δb are counted in steps; x̂0 comes from the last step, not from one
    more; the N survivors are returned, the best first (the paper ends with random search).
    """

    branches: int = 4
    """M, branches of each path; at least 2 if a group has one path."""
    start: int = 4
    """Steps before the first round, from 1."""
    back: int = 1
    """Δf in steps, at most `start`."""
    forward: int = 3
    """Δb in steps, above `back`; the last round takes the rest."""

    def __post_init__(self) -> None:
        check_row("search", self)
        check_rules(self, PATH_RULES)

    def rounds(self, steps: int) -> list[tuple[int, int, int]]:
        """List (first step of a round, the step it is noised back to, its last step), until T."""
        if self.start >= steps:
            raise ValueError(f"start is {self.start}; with {steps} steps it must be from 1 to {steps - 1}.")
        rounds, begin = [], self.start
        while begin < steps:
            end = min(begin - self.back + self.forward, steps)
            rounds.append((begin, begin - self.back, end))
            begin = end
        return rounds

    def velocities(self, steps: int) -> int:
        """Number of velocities per path on a schedule of T steps: start + Σ M·(steps of the round)."""
        return self.start + self.branches * sum(end - up for _, up, end in self.rounds(steps))

    @torch.no_grad()
    def __call__(
        self,
        policy: DiffusionPolicy,
        condition: Condition,
        reward: Reward,
        *,
        sigmas: Tensor,
        seeds: Sequence[int],
        paths: int = 1,
        batch_size: int | None = None,
    ) -> Tensor:
        """Search in groups of N = `paths` consecutive samples; final latents, each group's best first."""
        sigmas = _sigmas_of(sigmas, condition, seeds)
        count, rounds = len(condition), self.rounds(len(sigmas) - 1)
        if paths < 1 or count % paths or paths * self.branches == self.branches == 1:
            raise ValueError(
                f"{count} samples, groups of {paths} paths, {self.branches} branches of each: give whole "
                "groups, and at least 2 branches to choose from."
            )
        x = first_latents(policy, initial_noise(seeds, policy.latent_shape), sigmas)
        x = complete(policy, condition, x, sigmas=sigmas, step=0, until=self.start, batch_size=batch_size)
        repeated = condition.select(torch.arange(count).repeat(self.branches))
        options: dict[str, Any] = {"sigmas": sigmas, "batch_size": batch_size}
        for number, (begin, up, end) in enumerate(rounds):
            fresh = _fresh_noise(seeds, policy.latent_shape, number, self.branches)
            branches = renoise(x.repeat(self.branches, *[1] * (x.ndim - 1)), fresh, sigmas[begin], sigmas[up])
            before = complete(policy, repeated, branches, step=up, until=end - 1, **options)
            branches = complete(policy, repeated, before, step=end - 1, until=end, **options)
            v = velocity_between(before, branches, sigmas[end - 1], sigmas[end])
            clean = (branches - sigmas[end].to(v) * v).to(x.dtype)
            value = _score(policy, clean, reward, count, batch_size)
            x = branches[_best(value, paths).to(branches.device)]
        check_finite(x)
        return x


PATH_RULES = (
    (lambda s: s.back > s.start, "back is {back}; it must be at most start, {start} steps."),
    (lambda s: s.forward <= s.back, "forward is {forward}, back {back}: no round would get any further."),
)


def renoise(x: Tensor, noise: Tensor, sigma: Tensor, sigma_up: Tensor) -> Tensor:
    """Noise latents at σ < 1 up to σ' > σ: x' = a·x + √(σ'² − (a σ)²)·ε with a = (1 − σ') / (1 − σ)."""
    scale = (1 - sigma_up.double()) / (1 - sigma.double())
    std = (sigma_up.double().square() - (scale * sigma.double()).square()).sqrt()
    working = torch.promote_types(x.dtype, torch.float32)
    return (float(scale) * x.to(working) + float(std) * noise.to(x.device, working)).to(x.dtype)


def _score(policy: DiffusionPolicy, latents: Tensor, reward: Reward, count: int, batch_size: int | None) -> Tensor:
    """Score [n·B, ...] clean latents: [n, B] float64, −∞ where unknown."""
    chunks = latents.split(min(batch_size or len(latents), len(latents)))
    images = torch.cat([policy.decode(chunk).float().cpu() for chunk in chunks])
    value = torch.stack([reward(part).double().cpu() for part in images.split(count)])
    return torch.where(value.isfinite(), value, -torch.inf)


def _best(value: Tensor, paths: int) -> Tensor:
    """Indices [B · paths] of each group's best branches by values [M, B · paths]; ties take the first branch."""
    branches, count = value.shape
    groups = value.view(branches, -1, paths).transpose(0, 1).flatten(1)  # [B, M · paths]
    order = groups.argsort(dim=1, descending=True, stable=True)[:, :paths]
    branch, path = order // paths, order % paths
    return (branch * count + torch.arange(0, count, paths)[:, None] + path).flatten()


def _fresh_noise(seeds: Sequence[int], shape: Sequence[int], number: int, copies: int) -> Tensor:
    """Draw noise [copies · B, *shape] of a round, the same for a sample whatever its batch."""
    round_seeds = [sample_seed("search", seed, number, i) for i in range(copies) for seed in seeds]
    return initial_noise(round_seeds, shape)


def _sigmas_of(sigmas: Tensor, condition: Condition, seeds: Sequence[int]) -> Tensor:
    if not len(condition) or len(seeds) != len(condition):
        raise ValueError(f"{len(condition)} samples and {len(seeds)} seeds: give one seed for each sample.")
    return torch.as_tensor(sigmas).cpu().float()


def _rows(mask: Tensor, x: Tensor) -> Tensor:
    return mask.to(x.device).reshape(-1, *[1] * (x.ndim - 1))
