# SPDX-License-Identifier: Apache-2.0
"""Stored steps under the current weights, and the check that under unchanged weights the ratio is 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.core.surrogates.ratio_check import RatioCheck, check_log_ratio
from visalign.interfaces import Condition, DiffusionPolicy

from .rollout import checked_batch_size, velocity_of
from .trajectory import Pairs, Trajectory
from .transitions import Kernel

RATIO_BOUND = 1e-5
"""Default bound of |log ratio| per latent dimension: a tenth of the published clip range 1e-4, far above
float32 rounding (1e-7 to 1e-6). Models that compute in bfloat16 exceed it: 2e-5 to 5e-4 are reported."""


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """N stored steps under the current weights; everything carries gradient but `std`."""

    log_prob: Tensor
    """[N] of the stored x_next, reduced as the kernel says."""
    mean: Tensor
    """[N, ...] float32."""
    std: Tensor
    """[N] total std, float32."""
    v: Tensor
    """[N, ...] velocity, float32."""


def replay(
    policy: DiffusionPolicy,
    condition: Condition,
    x: Tensor,
    x_next: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    kernel: Kernel,
    time: Tensor | None = None,
) -> StepStats:
    """Statistics of N stored steps x -> x_next under the policy's current weights, differentiable.

    Args:
        policy: The policy; its velocity is called once, with gradient if enabled.
        condition: Conditions of the N pairs (`condition.select(sample_index)`).
        x: [N, ...] stored latents (`Trajectory.pairs`).
        x_next: [N, ...] stored next latents.
        sigma: [N] noise levels; rows may differ.
        sigma_next: [N] next noise levels.
        kernel: The rollout's kernel, `trajectory.kernel`.
        time: [N] what the network was given (`Pairs.time`); None is `policy.times(sigma)`.

    Raises:
        ValueError: When the lengths differ, or a step has no noise.
    """
    lengths = {"condition": len(condition), "x": len(x), "x_next": len(x_next)}
    lengths |= {"sigma": len(sigma), "sigma_next": len(sigma_next)}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            f"replay takes N flat (sample, step) pairs; the lengths differ: {lengths}. "
            "Select the condition with the sample index of each pair: condition.select(sample)."
        )
    v = velocity_of(policy, x, sigma, condition, time)
    transition = kernel.step(x, v, sigma, sigma_next)
    return StepStats(
        log_prob=kernel.log_prob_of(transition, x_next), mean=transition.mean, std=transition.std, v=v
    )


def replay_pairs(policy: DiffusionPolicy, condition: Condition, pairs: Pairs, kernel: Kernel) -> StepStats:
    """`replay` of pairs as a trajectory gives them."""
    steps = pairs.x, pairs.x_next, pairs.sigma, pairs.sigma_next
    return replay(policy, condition, *steps, kernel=kernel, time=pairs.time)


def ratio_check(
    policy: DiffusionPolicy,
    condition: Condition,
    trajectory: Trajectory,
    *,
    bound: float | None = None,
    batch_size: int | None = None,
    max_samples: int | None = None,
    strict: bool = True,
) -> RatioCheck:
    """Replay a trajectory under the weights that made it and measure how far the ratio is from 1.

    Call it before the first update. Give the training micro-batch as `batch_size`: pairs of several steps
    stand side by side as in training, and the passes carry gradient as there, so what is measured is what the
    trainer will see. No backward follows, and they are counted so.

    Args:
        policy: The policy of the rollout, unchanged.
        condition: The rollout's condition, B samples.
        trajectory: The rollout.
        bound: Largest |log ratio| allowed, of the kernel's reduction; default 1e-5 per latent dimension.
        batch_size: Pairs per forward; by default B.
        max_samples: Check the first so many samples only; by default all.
        strict: Raise when the bound is exceeded; otherwise return a check with ok False.

    Raises:
        ValueError: When the trajectory has no stochastic step, or the condition is not that of the rollout.
        RatioError: When the ratio is not 1 within the bound (strict).
    """
    if len(condition) != len(trajectory):
        raise ValueError(
            f"ratio_check needs the rollout's condition, {len(trajectory)} samples; got {len(condition)}."
        )
    sample, step = trajectory.all_pairs()
    if max_samples is not None:
        sample, step = (index[: max_samples * len(trajectory.sde_steps)] for index in (sample, step))
    if len(sample) == 0:
        raise ValueError(
            "ratio_check needs at least one stochastic step and sample; the trajectory has none."
        )
    differences, count = [], policy.forward_count
    with_backward = count.forward_backward
    size = checked_batch_size(len(trajectory) if batch_size is None else batch_size, len(sample))
    for rows in torch.arange(len(sample)).split(size):
        pairs = trajectory.pairs(sample[rows], step[rows])
        with torch.enable_grad():
            stats = replay_pairs(policy, condition.select(sample[rows]), pairs, trajectory.kernel)
        differences.append(stats.log_prob.detach() - pairs.log_prob)
    count.forward += count.forward_backward - with_backward
    count.forward_backward = with_backward
    dimensions = trajectory.dimensions if trajectory.kernel.log_prob_reduction == "sum" else 1
    return check_log_ratio(
        torch.cat(differences), bound=RATIO_BOUND * dimensions if bound is None else bound, strict=strict
    )
