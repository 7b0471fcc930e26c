# SPDX-License-Identifier: Apache-2.0
"""Denoise B samples under a policy, with noise at chosen steps, and replay stored steps under its weights."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.core.surrogates.ratios import LogProbReduction
from visalign.interfaces import Condition, DiffusionPolicy

from .noise import check_seeds, initial_noise, queue_copy, step_noise
from .parametrization import preserving_scale
from .trajectory import Pairs, Trajectory
from .transitions import Kernel, LogProbForm, ODESolver
from .tree import check_nodes


@torch.no_grad()
def rollout(
    policy: DiffusionPolicy,
    condition: Condition,
    *,
    sigmas: Tensor,
    sde_steps: Sequence[int] = (),
    schedule: str = "flow",
    noise_level: float = 0.7,
    seeds: Sequence[int] | Tensor | None = None,
    noise: Tensor | None = None,
    log_prob_reduction: LogProbReduction = "mean",
    log_prob: LogProbForm = "gaussian",
    sigma_max: float | None = None,
    batch_size: int | None = None,
    nodes: Tensor | None = None,
    solver: str = "euler",
    compression: float | None = None,
) -> Trajectory:
    """Denoise B samples; steps in `sde_steps` are stochastic, the others steps of the ODE.

    After every step the latent is rounded to the policy's storage dtype, which is what the next forward sees. The
    log-probability is that of the rounded latent: a replay under unchanged weights reproduces it.

    `sigmas` are [T + 1]. `sde_steps` are rising indices in [0, T), none for evaluation; with bfloat16 storage leave
    out steps of tiny std (0.006 in diffusers' last one), the size of rounding. `seeds` [B] are not needed with `noise`
    [B, ...] (in place of `initial_noise(seeds)`, e.g. shared in a group) and no stochastic step. `schedule`,
    `noise_level`, `log_prob` are those of `Kernel`, `log_prob_reduction` of `Transition.log_prob`; `sigma_max` is
    Flow-SDE's stand-in for σ = 1, by default sigmas[1], as in the published code. `nodes` [T + 1, B] of `tree_nodes`
    are samples of one condition that share first steps, which are computed once, with the noise of the first of them.
    `solver` is an `ODESolver`, whose history has stochastic steps too, and starts again where paths part;
    `compression` is as in `visited_steps`.
    """
    sigmas = _check_sigmas(sigmas)
    total, steps = len(sigmas) - 1, tuple(operator.index(step) for step in sde_steps)
    if list(steps) != sorted({step for step in steps if 0 <= step < total}):
        raise ValueError(f"sde_steps must be rising indices in 0 to {total - 1}; got {list(steps)}.")
    kernel = Kernel(
        schedule=schedule if steps else "none",
        noise_level=noise_level,
        sigma_max=sigmas[1].item() if sigma_max is None else sigma_max,
        log_prob_reduction=log_prob_reduction,
        log_prob=log_prob if steps else "gaussian",
    )
    tree = check_nodes(nodes, len(condition), total, steps)
    noise = _start_noise(policy, tree[0], seeds, noise, bool(steps))
    _check_stochastic(kernel, sigmas, steps)
    levels, times = (level.to(policy.device) for level in (sigmas, policy.times(sigmas)))
    trajectory = _allocate(policy, first_latents(policy, noise, sigmas), levels, times, steps, kernel, tree)
    seed_list = check_seeds(seeds) if seeds is not None else []
    size = min(batch_size or len(condition), len(condition))
    chunks: dict[int, tuple[Condition, ODESolver]] = {}  # they stay the same until paths part
    for k, k_next in itertools.pairwise(visited_steps(total, steps, compression)):
        for number, rows in enumerate(tree[k].unique().split(size)):
            if number not in chunks:
                chunks[number] = condition.select(rows), ODESolver(solver)
            _advance(policy, levels, times, seed_list, trajectory, tree, rows, (k, k_next), *chunks[number])
        if not torch.equal(tree[k], tree[k_next]):
            chunks.clear()
    check_finite(trajectory.latents)
    return trajectory


def visited_steps(steps: int, sde_steps: Sequence[int], compression: float | None = None) -> list[int]:
    """List the indices of a schedule of T steps that a rollout visits, from 0 to T.

    All of them, or with a compression c those up to the end of the last stochastic step, and of the n ODE
    steps after it max(1, round(c·n)), spaced evenly. Deviation: MixGRPO-Flash, arXiv 2507.21802, takes new
    noise levels for them, of which the last is not 0 if one step is left.

    >>> visited_steps(10, [1, 2], 0.4)
    [0, 1, 2, 3, 5, 8, 10]
    """
    if compression is None or not sde_steps or sde_steps[-1] + 1 >= steps:
        return list(range(steps + 1))
    begin = sde_steps[-1] + 1
    count = max(1, round(compression * (steps - begin)))
    return [*range(begin), *(begin + round(i * (steps - begin) / count) for i in range(count + 1))]


RATIO_BOUND = 1e-5
"""Default bound of |log ratio| per latent dimension: a tenth of the published clip range 1e-4, far above
float32 rounding (1e-7 to 1e-6). Models that compute in bfloat16 exceed it: 2e-5 to 5e-4 are reported."""


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Statistics of N stored steps under the current weights; all but `std` carry gradient."""

    log_prob: Tensor
    """[N] of the stored x_next, reduced as the kernel says."""
    mean: Tensor
    """[N, ...] float32."""
    std: Tensor
    """[N] total std, float32."""
    v: Tensor
    """[N, ...] velocity, float32."""


def replay(policy: DiffusionPolicy, condition: Condition, pairs: Pairs, kernel: Kernel) -> StepStats:
    """Compute statistics of N stored steps x -> x_next under the policy's current weights, differentiable.

    `pairs` are flat (sample, step) pairs, `Trajectory.pairs`, with the condition of each
    (`condition.select(sample)`) and the kernel of the rollout.
    """
    if len(condition) != len(pairs.x):  # a condition of one would broadcast
        raise ValueError(
            f"replay takes N flat (sample, step) pairs; got {len(pairs.x)}, and a condition of {len(condition)}. "
            "Select the condition with the sample index of each pair."
        )
    v = velocity_of(policy, pairs.x, pairs.sigma, condition, pairs.time)
    transition = kernel.step(pairs.x, v, pairs.sigma, pairs.sigma_next)
    log_prob = kernel.log_prob_of(transition, pairs.x_next)
    return StepStats(log_prob=log_prob, mean=transition.mean, std=transition.std, v=v)


@torch.no_grad()
def complete(
    policy: DiffusionPolicy,
    condition: Condition,
    x: Tensor,
    *,
    sigmas: Tensor,
    step: int,
    until: int | None = None,
    batch_size: int | None = None,
    solver: str = "euler",
) -> Tensor:
    """Denoise x [B, ...] before step `step` along the ODE, as `rollout` does, to the end or to step `until`."""
    sigmas = _check_sigmas(sigmas)
    levels, times, chunks = sigmas.to(x.device), policy.times(sigmas).to(x.device), []
    for rows in torch.arange(len(x)).split(min(batch_size or len(x), len(x))):
        chunk, chunk_condition, ode = x[rows.to(x.device)], condition.select(rows), ODESolver(solver)
        for k in range(step, len(sigmas) - 1 if until is None else until):
            sigma, sigma_next = levels[k].expand(len(chunk)), levels[k + 1].expand(len(chunk))
            v = velocity_of(policy, chunk, sigma, chunk_condition, times[k].expand(len(chunk)))
            chunk = ode.step(chunk, v, sigma, sigma_next).to(chunk.dtype)
        chunks.append(chunk)
    return torch.cat(chunks)


def predict_clean(trajectory: Trajectory, step: int) -> Tensor:
    """Compute x̂0 = x − σ v before a stochastic step, counted among the S, without a forward."""
    x = trajectory.x[:, step].to(trajectory.mean.dtype)
    sigma, sigma_next = (s[step].expand(len(x)) for s in (trajectory.sigma, trajectory.sigma_next))
    offset = trajectory.kernel.step(x, torch.zeros_like(x), sigma, sigma_next).mean
    shape, slope = (-1, *[1] * (x.ndim - 1)), trajectory.kernel.slope(sigma, sigma_next)
    v = (trajectory.mean[:, step] - offset) / slope.to(offset).reshape(shape)
    return (x - sigma.reshape(shape) * v).to(trajectory.latents.dtype)


def first_latents(policy: DiffusionPolicy, noise: Tensor, sigmas: Tensor) -> Tensor:
    """Turn standard normal noise into the latents [B, ...] before the first step; storage dtype."""
    if policy.prediction != "velocity":  # starts at σ < 1, from noise of variance 1 on the model's scale
        noise = noise * preserving_scale(sigmas[0]).to(noise)
    return noise.to(device=policy.device, dtype=policy.storage_dtype, copy=True)


def check_finite(latents: Tensor) -> None:
    """Raise FloatingPointError unless all latents are finite."""
    if not bool(torch.isfinite(latents).all()):
        raise FloatingPointError(
            f"The rollout ended in latents that are not finite (stored in {latents.dtype}): diverged "
            "weights, or an overflow. Lower the learning rate, or store in bfloat16 or float32."
        )


def encoder_inputs(policy: DiffusionPolicy, records: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
    """Return what `policy.encode` takes: prompts, or of an editing policy (`takes_source`) the records."""
    if getattr(policy, "takes_source", False):
        return records
    return [str(record["prompt"]) for record in records]


def decode_images(policy: DiffusionPolicy, latents: Tensor, *, clips: bool) -> Tensor:
    """Decode latents to images [B, 3, H, W], or with `clips` to all frames [B, F, 3, H, W] of a video."""
    decode_frames = getattr(policy, "decode_frames", None)
    return decode_frames(latents) if clips and decode_frames is not None else policy.decode(latents)


def middle_frames(images: Tensor) -> Tensor:
    """Return images [B, 3, H, W] as they are, and frame ⌊F / 2⌋ of videos [B, F, 3, H, W]."""
    return images if images.ndim == 4 else images[:, images.shape[1] // 2].contiguous()


def velocity_of(
    policy: DiffusionPolicy, x: Tensor, sigma: Tensor, condition: Condition, time: Tensor | None = None
) -> Tensor:
    """Call the policy's velocity; another shape than that of x, or a dtype below float32, is a ValueError."""
    v = policy.velocity(x, sigma, condition, time)
    if v.shape != x.shape or v.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"policy.velocity must return float32 {list(x.shape)}, the shape of its latents; got {v.dtype} "
            f"{list(v.shape)}. Cast the model's output to float32 at the end of velocity."
        )
    return v


def _advance(
    policy: DiffusionPolicy,
    levels: Tensor,
    times: Tensor,
    seeds: list[int],
    trajectory: Trajectory,
    tree: Tensor,
    rows: Tensor,
    steps: tuple[int, int],
    condition: Condition,
    ode: ODESolver,
) -> None:
    """Compute one step of the nodes `rows`, whose condition it is, and write it to all samples that share them.

    tree [T + 1, B] has the first sample of each sample's node. Nothing here waits for the device: what a GPU computes
    is queued while the CPU prepares the next step.
    """
    (k, k_next), kernel, device = steps, trajectory.kernel, trajectory.latents.device
    nodes = tree[k], tree[k_next]
    samples = torch.isin(nodes[0], rows).nonzero()[:, 0]
    ends, end = nodes[1][samples].unique(return_inverse=True)  # nodes after the step, and each sample's
    parent, end = queue_copy(torch.searchsorted(rows, nodes[0][ends]), device), queue_copy(end, device)
    x, samples = trajectory.latents[queue_copy(rows, device)], queue_copy(samples, device)
    sigma, sigma_next = levels[k].expand(len(x)), levels[k_next].expand(len(x))
    v = velocity_of(policy, x, sigma, condition, times[k].expand(len(x)))
    if k not in trajectory.sde_steps:
        trajectory.latents[samples] = ode.step(x, v, sigma, sigma_next).to(x.dtype)[end]
        return
    ode.observe(x, v, sigma, sigma_next)
    transition = kernel.step(x[parent], v[parent], sigma[parent], sigma_next[parent])
    noise = step_noise([seeds[i] for i in ends.tolist()], k, x.shape[1:])
    x_next = transition.sample(queue_copy(noise, device)).to(x.dtype)
    s = trajectory.sde_steps.index(k)
    trajectory.x[samples, s] = x[parent][end]
    trajectory.x_next[samples, s] = x_next[end]
    trajectory.mean[samples, s] = transition.mean[end]
    trajectory.std[samples, s] = transition.std[end]
    trajectory.log_prob[samples, s] = kernel.log_prob_of(transition, x_next)[end]
    trajectory.latents[samples] = x_next[end]


def _allocate(
    policy: DiffusionPolicy,
    latents: Tensor,
    sigmas: Tensor,
    times: Tensor,
    steps: tuple[int, ...],
    kernel: Kernel,
    nodes: Tensor,
) -> Trajectory:
    # allocated once: joining chunks would hold everything twice
    count, shape = (len(latents), len(steps)), latents.shape[1:]
    dtype, device = policy.storage_dtype, policy.device
    working = torch.float64 if dtype == torch.float64 else torch.float32
    index = torch.tensor(steps, dtype=torch.long)
    return Trajectory(
        latents=latents,
        x=torch.empty(*count, *shape, dtype=dtype, device=device),
        x_next=torch.empty(*count, *shape, dtype=dtype, device=device),
        log_prob=torch.empty(count, dtype=working, device=device),
        mean=torch.empty(*count, *shape, dtype=working, device=device),
        std=torch.empty(count, dtype=working, device=device),
        sigma=sigmas[:-1][index.to(device)],
        sigma_next=sigmas[1:][index.to(device)],
        time=times[index.to(device)],
        sde_steps=steps,
        kernel=kernel,
        node=nodes[1:][index].T.contiguous(),
    )


def _start_noise(
    policy: DiffusionPolicy,
    start: Tensor,
    seeds: Sequence[int] | Tensor | None,
    noise: Tensor | None,
    stochastic: bool,
) -> Tensor:
    """Return the start noise [B, ...]: `noise`, or drawn from the seeds of the first samples `start` [B]."""
    shape = (len(start), *policy.latent_shape)
    if len(start) == 0:
        raise ValueError("A rollout needs at least one sample; the condition is empty.")
    if (seeds is None and (noise is None or stochastic)) or (seeds is not None and len(seeds) != len(start)):
        given = "None" if seeds is None else len(seeds)
        raise ValueError(
            f"A rollout of {len(start)} samples needs one seed for each, sample_seed(run_seed, iteration, "
            f"sample_id); got {given}."
        )
    if noise is None:
        return initial_noise([] if seeds is None else seeds, policy.latent_shape)[start]
    if noise.shape != shape:
        raise ValueError(f"noise must be {list(shape)} (samples, *latent_shape); got {list(noise.shape)}.")
    if not torch.equal(noise[start.to(noise.device)], noise):
        raise ValueError("nodes join samples that start from different noise; give them one in `noise`.")
    return noise


def _check_stochastic(kernel: Kernel, sigmas: Tensor, steps: tuple[int, ...]) -> None:
    """Refuse steps without a log-probability, here on the CPU: on a GPU the check would wait for each step."""
    if steps:
        zeros, index = torch.zeros(len(steps), 1), list(steps)
        kernel.log_prob_of(kernel.step(zeros, zeros, sigmas[:-1][index], sigmas[1:][index]), zeros)


def _check_sigmas(sigmas: Tensor) -> Tensor:
    sigmas = torch.as_tensor(sigmas).detach().cpu().float()
    falling = sigmas.ndim == 1 and len(sigmas) >= 2 and bool((sigmas[1:] < sigmas[:-1]).all())
    if not falling or sigmas[-1] != 0 or sigmas[0] > 1:
        raise ValueError(
            "sigmas must be at least two noise levels that fall strictly from at most 1 down to 0; got "
            f"{[round(value, 4) for value in sigmas.flatten().tolist()[:12]]}. Use timestep_sigmas(steps)."
        )
    return sigmas
