# SPDX-License-Identifier: Apache-2.0
"""One iteration's experience: sample, decode, judge, compare within groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from visalign.core.advantages.group import clamp_advantages, group_advantages
from visalign.core.groups.labels import group_index, group_sum
from visalign.flow.rollout import rollout
from visalign.flow.trajectory import Trajectory
from visalign.interfaces import Condition, DiffusionPolicy, PointwiseReward, Scores
from visalign.seeds import sample_seed
from visalign.training.loop.judging import check_failures, judge
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import Batch

from .settings import ObjectiveSettings, RolloutSettings


@dataclass(frozen=True, kw_only=True)
class Team:
    """What all phases of a run work with."""

    policy: DiffusionPolicy
    reward: PointwiseReward
    records: Sequence[Mapping[str, Any]]
    """Prompt records; each has "prompt", and is handed to the reward as metadata."""
    accelerator: Accelerator
    clock: PhaseClock
    seed: int


@dataclass(frozen=True, kw_only=True)
class Experience:
    """What an iteration learns from: b samples of this process, and what is known of all B."""

    condition: Condition
    trajectory: Trajectory
    advantage: Tensor
    """[b] float32 on the policy's device, clamped; 0 where the reward is missing."""
    trained_steps: tuple[int, ...]
    """The steps of `trajectory` to train on: positions among its stochastic steps."""
    valid_total: int
    """Samples of all processes that could be judged."""
    live: Tensor
    """[B] bool on CPU, all processes in rank order: which samples are back-propagated."""
    first: int
    """Position of this process's first sample in `live`."""
    metrics: dict[str, float]


def choose_steps(settings: RolloutSettings, seed: int, iteration: int) -> tuple[list[int], tuple[int, ...]]:
    """The stochastic steps of an iteration, and which of them (by position) are trained on."""
    sde_steps = settings.stochastic
    if settings.sde_window is None:
        return sde_steps, tuple(sde_steps.index(step) for step in settings.trained)
    draw = np.random.default_rng(sample_seed(seed, "noise steps", iteration))
    chosen = sorted(int(step) for step in draw.choice(sde_steps, settings.sde_window, replace=False))
    return chosen, tuple(range(len(chosen)))


def collect(
    team: Team, batch: Batch, iteration: int, rollout_settings: RolloutSettings, objective: ObjectiveSettings
) -> Experience:
    """Make and judge the samples of an iteration.

    Raises:
        RewardFailure: see `judge`.
        FloatingPointError: the rollout ended in latents that are not finite.
    """
    sde_steps, trained = choose_steps(rollout_settings, team.seed, iteration)
    records = [team.records[i] for i in batch.prompt_index.tolist()]
    condition, trajectory = _sample(team, batch, records, sde_steps, rollout_settings)
    with team.clock.phase("decode"), torch.no_grad(), team.accelerator.autocast():
        chunks = trajectory.latents.split(rollout_settings.batch_size)
        images = torch.cat([team.policy.decode(chunk).float().cpu() for chunk in chunks])
    with team.clock.phase("reward"):
        scores = judge(team.reward, images, records)
    value, valid, group, parts = _gather(team, scores, batch)
    check_failures(scores, valid, rollout_settings.max_failure_rate, team.reward.name)
    advantage = group_advantages(
        value,
        group,
        scale=objective.advantage_scale,  # type: ignore[arg-type]  # checked by ObjectiveSettings
        baseline=objective.baseline,  # type: ignore[arg-type]
        ddof=0,
        valid=valid,
    )
    advantage = clamp_advantages(advantage, objective.advantage_clip).float()
    live = valid if objective.beta > 0 else valid & (advantage != 0)
    first = team.accelerator.process_index * len(batch)
    return Experience(
        condition=condition,
        trajectory=trajectory,
        advantage=advantage[first : first + len(batch)].to(trajectory.x.device),
        trained_steps=trained,
        valid_total=int(valid.sum()),
        live=live,
        first=first,
        metrics=_metrics(value, valid, group, advantage, live) | parts,
    )


def _sample(
    team: Team,
    batch: Batch,
    records: Sequence[Mapping[str, Any]],
    sde_steps: Sequence[int],
    settings: RolloutSettings,
) -> tuple[Condition, Trajectory]:
    with team.clock.phase("rollout"), torch.no_grad(), team.accelerator.autocast():
        condition = team.policy.encode([record["prompt"] for record in records])
        trajectory = rollout(
            team.policy,
            condition,
            sigmas=team.policy.sigmas(settings.steps, timestep_schedule=settings.timestep_schedule),
            sde_steps=sde_steps,
            schedule=settings.schedule,
            noise_level=settings.noise_level,
            seeds=[sample_seed(team.seed, "sample", i) for i in batch.sample_id.tolist()],
            log_prob_reduction=settings.log_prob_reduction,  # type: ignore[arg-type]  # checked by RolloutSettings
            batch_size=settings.batch_size,
        )
    return condition, trajectory


def _gather(team: Team, scores: Scores, batch: Batch) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
    """(value [B] float64, valid [B], group [B]) of all processes on CPU, and the means of the parts."""
    gather, device = team.accelerator.gather, team.accelerator.device
    own = scores.value.float()
    columns = [own, *(part.float() for part in scores.parts.values())]
    table = gather(torch.stack([column.cpu() for column in columns], 1).to(device)).cpu().double()  # type: ignore[union-attr]
    valid = gather((scores.valid.cpu() & torch.isfinite(own.cpu())).to(device)).cpu()  # type: ignore[union-attr]
    group = gather(batch.group_id.to(device)).cpu()  # type: ignore[union-attr]
    parts = {
        f"reward_part/{name}": float(table[:, i].nanmean()) for i, name in enumerate(scores.parts, start=1)
    }
    return table[:, 0], valid, group, parts


def _metrics(
    value: Tensor, valid: Tensor, group: Tensor, advantage: Tensor, live: Tensor
) -> dict[str, float]:
    known = value[valid]
    index, groups = group_index(group[valid], len(known))
    count = group_sum(torch.ones(len(known), 1, dtype=torch.float64), index, groups)[:, 0]
    mean = group_sum(known[:, None], index, groups)[:, 0] / count
    spread = group_sum((known - mean[index]).square()[:, None], index, groups)[:, 0] / count
    return {
        "reward_mean": float(known.mean()),
        "reward_std": float(known.std(correction=0)),
        "reward_group_std": float(spread.sqrt().mean()),
        "valid_share": float(valid.double().mean()),
        "signal_share": float((advantage != 0).double().mean()),
        "trained_share": float(live.double().mean()),
        "advantage_abs": float(advantage[valid].abs().mean()),
    }
