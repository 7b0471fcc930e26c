# SPDX-License-Identifier: Apache-2.0
"""Feynman-Kac steering: resample the samples of a prompt between steps by the reward of their predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from visalign.interfaces import Condition, DiffusionPolicy
from visalign.seeds import sample_seed

from .noise import initial_noise, step_noise
from .rollout import check_finite, first_latents, velocity_of
from .transitions import Kernel, sde_step


@torch.no_grad()
def steered_rollout(
    policy: DiffusionPolicy,
    condition: Condition,
    reward: Callable[[Tensor], Tensor],
    *,
    sigmas: Tensor,
    seeds: Sequence[int],
    particles: int,
    resample_after: Sequence[int],
    strength: float = 10.0,
    schedule: str = "flow",
    noise_level: float = 0.7,
    batch_size: int | None = None,
) -> Tensor:
    """Denoise groups of `particles` samples by the SDE and resample each group after some steps.

    After such a step k the image x̂0 = x_k − σ_k v is predicted from that forward, decoded and scored: r_k. Particles
    are drawn again in proportion to exp(λ (r_k − r_prev)); the product along a path is exp(λ r), so the group
    approaches p(x0) exp(λ r(x0)). Draws are systematic: a particle of weight w among n has ⌊n w⌋ or ⌈n w⌉ children.
    Without a reward it has none, unless nothing in its group has one.

    `condition` and `seeds` have the samples of a group consecutively; `reward` maps their images [M, 3, H, W] to
    [M], higher is better, NaN is unknown. `resample_after` are rising steps in 0 to T − 3: the noise of the next
    step separates the children, and the last step is the ODE's. λ is `strength`, per unit of the reward;
    `schedule` and `noise_level` are those of `Kernel`. Singhal et al., Feynman-Kac steering, arXiv 2501.06848.
    """
    sigmas = torch.as_tensor(sigmas).cpu().float()
    count, steps, after = len(condition), len(sigmas) - 1, list(resample_after)
    if count % max(1, particles) or len(seeds) != count:
        raise ValueError(
            f"{count} samples, {len(seeds)} seeds, groups of {particles}: give whole groups of at least 2, "
            "and a seed for each sample."
        )
    check_steering(particles, after, 0, steps - 3, strength)
    kernel = Kernel(schedule=schedule, noise_level=noise_level, sigma_max=sigmas[1].item())
    x = first_latents(policy, initial_noise(seeds, policy.latent_shape), sigmas)
    levels, times = sigmas.to(x.device), policy.times(sigmas).to(x.device)
    chunks = torch.arange(count).split(min(batch_size or count, count))
    previous = torch.zeros(count, dtype=torch.float64)
    for k in range(steps):
        images = []
        for rows in chunks:
            chunk, shape = x[rows], (len(rows),)
            sigma, sigma_next = levels[k].expand(shape), levels[k + 1].expand(shape)
            v = velocity_of(policy, chunk, sigma, condition.select(rows), times[k].expand(shape))
            if k in after:
                images.append(policy.decode((chunk - levels[k] * v).to(x.dtype)).float().cpu())
            if k == steps - 1:  # the final latent keeps no noise
                x_next = sde_step(chunk, v, sigma, sigma_next, schedule="none").mean
            else:
                noise = step_noise([seeds[i] for i in rows.tolist()], k, policy.latent_shape)
                x_next = kernel.step(chunk, v, sigma, sigma_next).sample(noise)
            x[rows] = x_next.to(x.dtype)
        if k in after:
            value = reward(torch.cat(images))
            parents, previous = resample_particles(value, previous, strength, particles, seeds, k)
            x = x[parents.to(x.device)]
    check_finite(x)
    return x


def resample_particles(
    value: Tensor, previous: Tensor, strength: float, particles: int, seeds: Sequence[int], step: int
) -> tuple[Tensor, Tensor]:
    """Draw the particles of each group again in proportion to exp(λ (r − r_prev)).

    `value` [M] are the rewards r of the predicted images, not finite where unknown; `previous` [M] the last known
    ones, 0 before the first resampling. The first seed of each group decides its draws, with `step`, so that no two
    steps draw the same. Returns the index of each particle's parent, and the parent's last known reward.
    """
    value = value.double().cpu()
    if value.shape != previous.shape:
        raise ValueError(f"The reward gave {list(value.shape)} values for {len(previous)} images; give [B].")
    draws = [sample_seed("steer", seed, step) for seed in seeds]
    parents = _draw_parents(strength * (value - previous), particles, draws)
    return parents, torch.where(value.isfinite(), value, previous)[parents]


def check_steering(particles: int, after: Sequence[int], first: int, last: int, strength: float) -> None:
    """Refuse groups of one, a strength that is not positive, and steps outside `first` to `last`."""
    if particles < 2:
        raise ValueError(f"particles is {particles}; groups of at least 2 can be resampled.")
    steps = list(after)
    if not steps or steps != sorted(set(steps)) or not first <= steps[0] <= steps[-1] <= last:
        raise ValueError(f"resample_after is {steps}; give rising steps among {first} to {last}.")
    if not 0 < strength < float("inf"):
        raise ValueError(f"strength is {strength}; it must be above 0 and finite.")


def _draw_parents(log_weight: Tensor, particles: int, seeds: Sequence[int]) -> Tensor:
    """Index [M] of each particle's parent in its group, by systematic resampling."""
    groups = log_weight.view(-1, particles)
    finite = groups.isfinite()
    groups = torch.where(finite, groups, -torch.inf)
    groups = torch.where(finite.any(1, keepdim=True), groups, 0.0)  # nothing known: all equal
    edges = groups.softmax(1).cumsum(1)
    offset = torch.tensor(seeds[::particles], dtype=torch.float64) / 2**63
    points = (torch.arange(particles, dtype=torch.float64) + offset[:, None]) / particles
    chosen = torch.searchsorted(edges, points, right=True).clamp(max=particles - 1)
    return (chosen + particles * torch.arange(len(groups))[:, None]).flatten()
