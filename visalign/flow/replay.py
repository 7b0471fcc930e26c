# SPDX-License-Identifier: Apache-2.0
"""Replay of stored steps under the current weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from visalign.interfaces import Condition, DiffusionPolicy

from .rollout import velocity_of
from .trajectory import Pairs
from .transitions import Kernel

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
    """Compute statistics of N stored steps x -> x_next under the policy's current weights, differentiable.

    Inputs are flat (sample, step) pairs, `Trajectory.pairs`, with the condition of each pair
    (`condition.select(sample)`) and the kernel of the rollout. `time` [N] is the time input of the network;
    None is `policy.times(sigma)`.
    """
    lengths = [len(part) for part in (condition, x, x_next, sigma, sigma_next)]
    if len(set(lengths)) > 1:
        raise ValueError(
            "replay takes N flat (sample, step) pairs; the lengths of condition, x, x_next, sigma and "
            f"sigma_next are {lengths}. Select the condition with the sample index of each pair."
        )
    v = velocity_of(policy, x, sigma, condition, time)
    transition = kernel.step(x, v, sigma, sigma_next)
    return StepStats(log_prob=kernel.log_prob_of(transition, x_next), mean=transition.mean, std=transition.std, v=v)


def replay_pairs(policy: DiffusionPolicy, condition: Condition, pairs: Pairs, kernel: Kernel) -> StepStats:
    """Replay pairs of a trajectory; see `replay`."""
    steps = pairs.x, pairs.x_next, pairs.sigma, pairs.sigma_next
    return replay(policy, condition, *steps, kernel=kernel, time=pairs.time)
