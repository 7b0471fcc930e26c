# SPDX-License-Identifier: Apache-2.0
"""Search for noise that the reward likes: around the start noise (zero order), and along the paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.interfaces import Condition, DiffusionPolicy
from visalign.seeds import sample_seed

from .noise import initial_noise
from .rollout import check_finite, checked_batch_size, complete, first_latents
from .transitions import velocity_between


@dataclass(frozen=True, kw_only=True)
class ZeroOrderSearch:
    """Climb from a start noise to neighbours whose images the reward likes better.

    Around the pivot n stand N neighbours  n' = √(1 − ρ²)·n + ρ·ε,  ε ~ N(0, I), start noise like any other.
    Each is denoised along the ODE, decoded and judged; the best of them and n is the next pivot, K times. A
    sample costs T (1 + K N) velocities, T steps each, and 1 + K N judged images.

    Differs from the paper, which says of neighbours only that they lie at a distance: ours keep the variance;
    the pivot stays where no neighbour is better, so that more rounds are never worse (the paper may move on);
    candidates take as many steps as the image that is kept, which is one of them.

    Ma et al., Inference-time scaling beyond denoising steps, arXiv 2501.09732, section 3.2.
    """

    rounds: int = 3
    """K, how often the pivot moves."""
    candidates: int = 1
    """N, the neighbours of a round (the paper: 2 or 4)."""
    radius: float = 0.5
    """ρ in (0, 1]: the share of a neighbour's deviation that is new; 1 is best of 1 + K N."""

    def __post_init__(self) -> None:
        _at_least(self, rounds=1, candidates=1)
        if isinstance(self.radius, bool) or not isinstance(self.radius, int | float):
            raise ValueError(f"radius is {self.radius!r}; give a number above 0, at most 1.")
        if not 0 < self.radius <= 1:
            raise ValueError(f"radius is {self.radius}; it must be above 0 and at most 1.")

    def velocities(self, steps: int) -> int:
        """What a sample costs on a schedule of T steps: T (1 + K N)."""
        return steps * (1 + self.rounds * self.candidates)

    @torch.no_grad()
    def __call__(
        self,
        policy: DiffusionPolicy,
        condition: Condition,
        reward: Callable[[Tensor], Tensor],
        *,
        sigmas: Tensor,
        seeds: Sequence[int],
        batch_size: int | None = None,
    ) -> Tensor:
        """Search for each sample by itself.

        Args:
            policy: as for `rollout`.
            condition: B samples.
            reward: images [B, 3, H, W] -> [B], higher is better, NaN where not known, which is never chosen;
                asked of one candidate of every sample at a time.
            sigmas: [T + 1], see `rollout`.
            seeds: one per sample; the first pivot is the start noise of `rollout`.
            batch_size: samples per forward and per decoding; all at once by default.

        Returns:
            [B, ...] final latents.

        Raises:
            ValueError: the seeds are not one per sample.
            FloatingPointError: a final latent is not finite.
        """
        sigmas = _sigmas_of(sigmas, condition, seeds)
        count, rows = len(condition), torch.arange(len(condition))
        pivot = initial_noise(seeds, policy.latent_shape)

        def tried(noise: Tensor) -> tuple[Tensor, Tensor]:
            """([n·B, ...] latents, [n, B] values) of n noises for every sample."""
            each = condition.select(rows.repeat(len(noise) // count))
            x = first_latents(policy, noise, sigmas)
            x = complete(policy, each, x, sigmas=sigmas, step=0, batch_size=batch_size)
            return x, _judged(policy, x, reward, count, batch_size)

        latents, (value,) = tried(pivot)
        for k in range(self.rounds):
            fresh = _fresh(seeds, policy.latent_shape, k, self.candidates)
            around = pivot.repeat(self.candidates, *_ones(pivot))
            near = (1 - self.radius**2) ** 0.5 * around + self.radius * fresh
            found, values = tried(near)
            best, place = values.max(0)
            better, at = best > value, place * count + rows
            value = torch.maximum(value, best)
            pivot = torch.where(_rows(better, pivot), near[at], pivot)
            latents = torch.where(_rows(better, latents), found[at.to(found.device)], latents)
        check_finite(latents)
        return latents


@dataclass(frozen=True, kw_only=True)
class PathSearch:
    """Noise paths that are under way again, denoise them further, and go on with those the reward likes.

    Of each prompt N paths are denoised along the ODE to step `start`. Then, in rounds, each gets M branches:
    noised from σ to the level σ' of `back` steps earlier,

        x' = a·x + √(σ'² − (a σ)²)·ε,  a = (1 − σ') / (1 − σ),

    which leaves the flow's marginal as it is, and denoised by `forward` steps; the N best of the N M by the
    reward of their predicted images x̂0 = x − σ v go on, until the schedule ends. v is that of the last
    step, so x̂0 costs no pass of the network. A path costs  start + Σ M·(steps of the round)  velocities.

    Differs from the paper: Δf and Δb are counted in steps; x̂0 comes from the last step in place
    of one more; the N survivors are handed back, the best first (the paper ends with random search).

    Ma et al., Inference-time scaling beyond denoising steps, arXiv 2501.09732, section 3.2.
    """

    branches: int = 4
    """M, what each path is continued by; with one path of a group, at least 2."""
    start: int = 4
    """Steps before the first round, from 1."""
    back: int = 1
    """Δf in steps, at most `start`."""
    forward: int = 3
    """Δb in steps, above `back`; the last round takes what is left."""

    def __post_init__(self) -> None:
        _at_least(self, branches=1, start=1, back=1, forward=2)
        if self.back > self.start:
            raise ValueError(
                f"back is {self.back}, and the paths have {self.start} steps (start) behind them."
            )
        if self.forward <= self.back:
            raise ValueError(f"forward is {self.forward}, back {self.back}: no round would get any further.")

    def rounds(self, steps: int) -> list[tuple[int, int, int]]:
        """(step that a round begins at, the one it is noised back to, the one it ends at), until T.

        Raises:
            ValueError: the timestep schedule ends before the first round.
        """
        if self.start >= steps:
            raise ValueError(f"start is {self.start}; with {steps} steps it must be from 1 to {steps - 1}.")
        found, at = [], self.start
        while at < steps:
            end = min(at - self.back + self.forward, steps)
            found.append((at, at - self.back, end))
            at = end
        return found

    def velocities(self, steps: int) -> int:
        """What a path costs on a schedule of T steps: start + Σ M·(steps of the round)."""
        return self.start + self.branches * sum(end - up for _, up, end in self.rounds(steps))

    @torch.no_grad()
    def __call__(
        self,
        policy: DiffusionPolicy,
        condition: Condition,
        reward: Callable[[Tensor], Tensor],
        *,
        sigmas: Tensor,
        seeds: Sequence[int],
        paths: int = 1,
        batch_size: int | None = None,
    ) -> Tensor:
        """Search in groups of `paths` samples.

        Args:
            policy: as for `rollout`.
            condition: B · paths samples, those of a group side by side.
            reward: images [B · paths, 3, H, W] -> [B · paths], higher is better, NaN where not known, which
                goes on only where too few could be judged; asked of one branch of every path at a time.
            sigmas: [T + 1], see `rollout`.
            seeds: one per sample.
            paths: N, samples of a group.
            batch_size: samples per forward and per decoding; all at once by default.

        Returns:
            [B · paths, ...] final latents, of a group the best first.

        Raises:
            ValueError: seeds or groups that do not fit, or nothing to choose from; see `rounds`.
            FloatingPointError: a final latent is not finite.
        """
        sigmas = _sigmas_of(sigmas, condition, seeds)
        count, rounds = len(condition), self.rounds(len(sigmas) - 1)
        if paths < 1 or count % paths or paths * self.branches == self.branches == 1:
            raise ValueError(
                f"{count} samples, groups of {paths} paths, {self.branches} branches of each: give whole "
                "groups, and at least 2 branches to choose from."
            )
        x = first_latents(policy, initial_noise(seeds, policy.latent_shape), sigmas)
        x = complete(policy, condition, x, sigmas=sigmas, step=0, until=self.start, batch_size=batch_size)
        each = condition.select(torch.arange(count).repeat(self.branches))
        for number, (at, up, end) in enumerate(rounds):
            fresh = _fresh(seeds, policy.latent_shape, number, self.branches)
            many = noised_again(x.repeat(self.branches, *_ones(x)), fresh, sigmas[at], sigmas[up])
            before = complete(
                policy, each, many, sigmas=sigmas, step=up, until=end - 1, batch_size=batch_size
            )
            many = complete(
                policy, each, before, sigmas=sigmas, step=end - 1, until=end, batch_size=batch_size
            )
            v = velocity_between(before, many, sigmas[end - 1], sigmas[end])
            clean = (many - sigmas[end].to(v) * v).to(x.dtype)
            value = _judged(policy, clean, reward, count, batch_size)
            x = many[_best(value, paths).to(many.device)]
        check_finite(x)
        return x


def noised_again(x: Tensor, noise: Tensor, sigma: Tensor, sigma_up: Tensor) -> Tensor:
    """Latents of the flow at σ, noised to σ' > σ: x' = a·x + √(σ'² − (a σ)²)·ε with a = (1 − σ') / (1 − σ).

    Args:
        x: [B, ...] at σ, below 1.
        noise: [B, ...] standard normal.
        sigma: Scalar.
        sigma_up: Scalar in (σ, 1].

    Returns:
        [B, ...] in the dtype of x.
    """
    kept = (1 - sigma_up.double()) / (1 - sigma.double())
    std = (sigma_up.double().square() - (kept * sigma.double()).square()).sqrt()
    working = torch.promote_types(x.dtype, torch.float32)
    return (float(kept) * x.to(working) + float(std) * noise.to(x.device, working)).to(x.dtype)


def _judged(
    policy: DiffusionPolicy,
    latents: Tensor,
    reward: Callable[[Tensor], Tensor],
    count: int,
    batch_size: int | None,
) -> Tensor:
    """[n, B] float64 values of [n·B, ...] clean latents, −∞ where not known."""
    chunks = latents.split(checked_batch_size(batch_size, len(latents)))
    images = torch.cat([policy.decode(chunk).float().cpu() for chunk in chunks])
    value = torch.stack([reward(part).double().cpu() for part in images.split(count)])
    return torch.where(value.isfinite(), value, -torch.inf)


def _best(value: Tensor, paths: int) -> Tensor:
    """[B · paths] places of each group's best among its branches, from values [M, B · paths].

    Of equal ones the first branch of each path: where nothing is known, each path goes on.
    """
    branches, count = value.shape
    groups = value.view(branches, -1, paths).transpose(0, 1).flatten(1)  # [B, M · paths]
    order = groups.argsort(dim=1, descending=True, stable=True)[:, :paths]
    branch, path = order // paths, order % paths
    return (branch * count + torch.arange(0, count, paths)[:, None] + path).flatten()


def _fresh(seeds: Sequence[int], shape: Sequence[int], number: int, times: int) -> Tensor:
    """[times · B, *shape] noise of a round, the same for a sample whatever its batch."""
    drawn = [sample_seed("search", seed, number, i) for i in range(times) for seed in seeds]
    return initial_noise(drawn, shape)


def _sigmas_of(sigmas: Tensor, condition: Condition, seeds: Sequence[int]) -> Tensor:
    if not len(condition) or len(seeds) != len(condition):
        raise ValueError(f"{len(condition)} samples and {len(seeds)} seeds: give one seed for each sample.")
    return torch.as_tensor(sigmas).cpu().float()


def _at_least(search: ZeroOrderSearch | PathSearch, **least: int) -> None:
    for name, low in least.items():
        value = getattr(search, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(f"{name} is {value!r}; give a whole number of at least {low}.")


def _ones(x: Tensor) -> tuple[int, ...]:
    return (1,) * (x.ndim - 1)


def _rows(mask: Tensor, x: Tensor) -> Tensor:
    return mask.to(x.device).reshape(-1, *_ones(x))
