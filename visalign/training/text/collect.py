# SPDX-License-Identifier: Apache-2.0
"""One iteration's completions: sample, judge, keep the groups with signal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from visalign.core import Objective, Trajectories
from visalign.interfaces import Scores
from visalign.seeds import sample_seed
from visalign.text import TextRollout, join_rollouts
from visalign.training.loop.judging import check_failures, judge, reward_columns
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import PromptSampler
from visalign.training.loop.trainer import Collected
from visalign.training.policy.settings import MATRIX_ADVANTAGES

from .dynamic_groups import DynamicGroups
from .parts import Records, TextParts
from .settings import TextRolloutSettings
from .trajectories import engine_gap, trajectories_of


@dataclass(kw_only=True)
class TextExperience:
    """What an iteration learns from."""

    rollout: TextRollout
    trajectories: Trajectories
    features: Tensor | None
    """[B, H] of the prompts, for a log-partition head."""
    signal: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Round:
    rollout: TextRollout
    scores: Scores
    records: Records


def collect(
    parts: TextParts,
    sampler: PromptSampler,
    groups: DynamicGroups | None,
    iteration: int,
    settings: TextRolloutSettings,
    objective: Objective,
    clock: PhaseClock,
) -> Collected:
    """Make, judge and prepare the completions of an iteration.

    Returns:
        The experience, None where dynamic sampling found no group with signal; and counts of all that was
        made, dropped groups included.

    Raises:
        RewardFailure: the reward returned something else than scores, or failed too often.
        UserError: who wrote the completions is too far from the policy.
        BudgetSpent: dynamic sampling with when_spent "stop".
    """
    if groups is None:
        rounds = [_round(parts, sampler, iteration, settings, clock)]
        kept = rounds[0].rollout, _reward(parts, rounds[0], objective), _valid(rounds[0])
    else:
        rounds = []
        while groups.wants_more:
            rounds.append(_round(parts, sampler, groups.round, settings, clock))
            _feed(groups, rounds[-1], len(rounds) - 1)
        kept = _taken(groups, [_reward(parts, made, objective) for made in rounds], rounds)
    metrics = _metrics(rounds)
    if groups is not None:
        metrics |= {f"groups/{key}": float(getattr(groups.last, key)) for key in GROUP_COUNTS}
    tokens = int(sum(float(r.rollout.loss_mask.sum()) for r in rounds))
    samples = sum(len(r.rollout) for r in rounds)
    if kept is None:
        return Collected(experience=None, samples=samples, tokens=tokens, metrics=metrics)
    rollout, reward, valid = kept
    with clock.phase("replay"), torch.no_grad():
        asked = {g: record for r in rounds for g, record in zip(r.rollout.group, r.records, strict=True)}
        trajectories = trajectories_of(parts, rollout, reward, valid, iteration, settings, objective, asked)
        features = None if parts.log_partition is None else parts.log_partition.features(rollout)
    if trajectories.rollout_log_prob is not None:
        metrics["engine_gap"] = engine_gap(trajectories, settings.allowed_gap)
        metrics["entropy"] = _mean_entropy(trajectories)  # the policy's: another engine may not say
    experience = TextExperience(rollout=rollout, trajectories=trajectories, features=features)
    return Collected(experience=experience, samples=samples, tokens=tokens, metrics=metrics)


GROUP_COUNTS = ("rounds", "generated", "kept", "dropped_right", "dropped_wrong", "dropped_flat", "surplus")
"""Counts of `DynamicGroups` that are logged."""


def _round(
    parts: TextParts,
    sampler: PromptSampler,
    number: int,
    settings: TextRolloutSettings,
    clock: PhaseClock,
) -> _Round:
    """P prompts, G completions each, judged."""
    batch, size = sampler.batch(number), settings.group_size
    chosen = [parts.records[i] for i in batch.prompt_index[::size].tolist()]
    with clock.phase("rollout"), torch.no_grad():
        rollout = parts.generator.generate(
            [record["prompt"] for record in chosen],
            seeds=[sample_seed(parts.seed, "sample", i) for i in batch.sample_id.tolist()],
            num_generations=size,
            sampling=settings.sampling,
            stopping=settings.stopping(),
            group=batch.group_id[::size].tolist(),
        )
    records = [record for record in chosen for _ in range(size)]
    with clock.phase("reward"):
        scores = judge(parts.reward, list(rollout.text), records, what="completions")
    made = _Round(rollout=rollout, scores=scores, records=records)
    skipped = ~rollout.generated  # a prompt that was too long is no failure of the reward
    check_failures(scores, _valid(made) | skipped, settings.max_failure_rate, parts.reward.name)
    return made


def _valid(made: _Round) -> Tensor:
    return made.scores.valid.cpu() & made.scores.value.isfinite().cpu() & made.rollout.generated


def _feed(groups: DynamicGroups, made: _Round, place: int) -> None:
    labels = list(made.rollout.group)
    payload = dict.fromkeys(labels, place)
    groups.feed(labels, made.scores.value.float().cpu(), _valid(made), payload=payload)


def _reward(parts: TextParts, made: _Round, objective: Objective) -> Tensor:
    """[B], or [B, M] where the objective normalises the terms one by one."""
    if objective.advantage in MATRIX_ADVANTAGES:
        return reward_columns(parts.reward, made.scores).float()
    return made.scores.value.float()


def _taken(
    groups: DynamicGroups, rewards: Sequence[Tensor], rounds: Sequence[_Round]
) -> tuple[TextRollout, Tensor, Tensor] | None:
    """The samples of the groups that the step trains on, in the order of the groups."""
    taken = groups.take()
    if not taken:
        return None
    parts = [rounds[group.payload].rollout.rows(group.index) for group in taken]
    return (
        join_rollouts(parts),
        torch.cat([rewards[group.payload][group.index] for group in taken]),
        torch.cat([group.valid for group in taken]),
    )


def _mean_entropy(trajectories: Trajectories) -> float:
    entropy, weight = trajectories.entropy, trajectories.weight
    return math.nan if entropy is None else float((entropy * weight).sum() / weight.sum().clamp(min=1))


def _metrics(rounds: Sequence[_Round]) -> dict[str, float]:
    """Statistics of all completions that were made, those of dropped groups included."""
    value = torch.cat([r.scores.value.double().cpu() for r in rounds])
    valid = torch.cat([_valid(r) for r in rounds])
    length = torch.cat([r.rollout.loss_mask.sum(1) for r in rounds])
    entropy = sum(float((r.rollout.entropy * r.rollout.loss_mask).sum()) for r in rounds)
    parts = {
        f"reward_part/{name}": float(torch.cat([r.scores.parts[name].double() for r in rounds]).nanmean())
        for name in rounds[0].scores.parts
    }
    return {
        "reward_mean": float(value[valid].mean()),
        "reward_std": float(value[valid].std(correction=0)),
        "valid_share": float(valid.double().mean()),
        "length_mean": float(length.mean()),
        "truncated_share": float(torch.cat([r.rollout.truncated for r in rounds]).double().mean()),
        "entropy": entropy / max(float(length.sum()), 1.0),
        **parts,
    }
