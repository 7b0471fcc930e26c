# SPDX-License-Identifier: Apache-2.0
"""Replays of whole trajectories, to test that the ratio is 1 under unchanged weights."""

from __future__ import annotations

import torch

from visalign.core.surrogates.ratio_check import RatioCheck, check_log_ratio
from visalign.flow.rollout import RATIO_BOUND, replay
from visalign.flow.trajectory import Trajectory
from visalign.interfaces import Condition, DiffusionPolicy


def all_pairs(trajectory: Trajectory) -> torch.Tensor:
    """Every (sample, step), [2, B S], the steps of a sample consecutive."""
    return torch.cartesian_prod(torch.arange(len(trajectory)), torch.arange(len(trajectory.sde_steps))).T


def ratio_check(
    policy: DiffusionPolicy,
    condition: Condition,
    trajectory: Trajectory,
    *,
    bound: float | None = None,
    batch_size: int | None = None,
    strict: bool = True,
) -> RatioCheck:
    """Replay a trajectory with gradient, in batches of mixed steps as in training, and compare log-probs."""
    sample, step = all_pairs(trajectory)
    differences = []
    for rows in torch.arange(len(sample)).split(min(batch_size or len(trajectory), len(sample))):
        pairs = trajectory.pairs(sample[rows], step[rows])
        with torch.enable_grad():
            stats = replay(policy, condition.select(sample[rows]), pairs, trajectory.kernel)
        differences.append(stats.log_prob.detach() - pairs.log_prob)
    dimensions = trajectory.latents[0].numel() if trajectory.kernel.log_prob_reduction == "sum" else 1
    bound = RATIO_BOUND * dimensions if bound is None else bound
    return check_log_ratio(torch.cat(differences), bound=bound, strict=strict)
