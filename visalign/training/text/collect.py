# SPDX-License-Identifier: Apache-2.0
"""One iteration's completions: sample, judge, keep the groups with signal.

Each process makes and judges a stretch of the samples; what is said of them goes to all, which keep the same
groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor

from visalign.core import Objective, Trajectories, relative_uncertainty_weight
from visalign.interfaces import Scores
from visalign.seeds import sample_seed
from visalign.text import TextRollout, ToolTrace, join_rollouts
from visalign.text.tool_calls import without_failed
from visalign.training.loop.algorithm import Collected
from visalign.training.loop.judging import check_failures, concatenate_scores, reward_columns, score_metrics
from visalign.training.loop.processes import Shares
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import PromptSampler
from visalign.training.policy.settings import MATRIX_ADVANTAGES

from .completion_statistics import distinct_pairs, repetition
from .dynamic_groups import DynamicGroups
from .parts import Records, TextParts
from .self_imitation import Replayed
from .settings import TextRolloutSettings
from .trajectories import bundle_index, engine_gap, trajectories_of


@dataclass(kw_only=True)
class TextExperience:
    """What an iteration learns from."""

    rollout: TextRollout
    """Of this process's b samples, T tokens wide."""
    trajectories: Trajectories
    """[B, T] of all processes, in the order of one, on the CPU."""
    shares: Shares
    """Who holds which of the B."""
    features: Tensor | None
    """[b, H] of the prompts, for a log-partition head."""
    signal: dict[str, float] = field(default_factory=dict)
    replayed: Sequence[Replayed | None] | None = None
    """What each update learns from again."""


@dataclass(frozen=True, kw_only=True)
class _Round:
    rollout: TextRollout
    """Of this process's b samples."""
    records: Records
    """Of the same."""
    shares: Shares
    """Who holds which of the round's B."""
    group: list[int]
    """Of all B, as everything below."""
    reward: Tensor
    """[B], or [B, M] where the objective normalises the terms one by one."""
    valid: Tensor
    tokens: Tensor
    """[B, T] int64, −1 where there is none."""
    said: Mapping[str, Tensor]
    """Name -> [B] float64: value, length, truncated, entropy (summed over tokens), and part/NAME."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A round's completions, which are being judged."""

    rollout: TextRollout
    """Of this process's b samples, as everything below."""
    records: Records
    shares: Shares
    group: list[int]
    """Of all B."""
    verdicts: Sequence[Callable[[], Scores]]
    """Of one stretch of samples after the other."""


def collect(
    parts: TextParts,
    write: Callable[[int], Written],
    groups: DynamicGroups | None,
    iteration: int,
    settings: TextRolloutSettings,
    objective: Objective,
    clock: PhaseClock,
) -> Collected:
    """Make, judge and prepare the completions of an iteration; `write` has those of a round by its number.

    Returns:
        The experience, None where dynamic sampling found no group with signal; and counts of all that was
        made, dropped groups included.

    Raises:
        RewardFailure: the reward returned something else than scores, or failed too often.
        UserError: who wrote the completions is too far from the policy.
        BudgetSpent: dynamic sampling with when_spent "stop".
    """
    if groups is None:
        rounds = [_judged(parts, write(iteration), settings, objective, clock)]
        one = rounds[0]
        kept = _Kept(one.rollout, one.shares, one.group, one.reward, one.valid, one.said)
    else:
        rounds = []
        while groups.wants_more:
            made = _judged(parts, write(groups.round), settings, objective, clock)
            payload = dict.fromkeys(made.group, len(rounds))
            groups.feed(made.group, made.said["value"].float(), made.valid, payload=payload)
            rounds.append(made)
        kept = _taken(groups, rounds)
    metrics = _metrics(parts.reward, rounds)
    if groups is not None:
        metrics |= {f"groups/{key}": float(getattr(groups.last, key)) for key in GROUP_COUNTS}
    tokens = int(sum(float(made.said["length"].sum()) for made in rounds))
    samples = sum(len(made.group) for made in rounds)
    if kept is None:
        return Collected(experience=None, samples=samples, tokens=tokens, metrics=metrics)
    rollout, own = kept.rollout, kept.shares.own
    with clock.phase("replay"), torch.no_grad():
        rollout = cast("Any", parts.policy).with_routes(rollout) if settings.routing_replay else rollout
        asked = {g: record for r in rounds for g, record in zip(r.rollout.group, r.records, strict=True)}
        said = trajectories_of(parts, rollout, kept.reward[own], kept.valid[own], settings, objective, asked)
        features = None if parts.log_partition is None else parts.log_partition.features(rollout)
    trajectories = _weighed(replace(_of_all(said, kept), iteration=iteration), kept, parts.reward)
    if objective.selection == "clip_cov":
        generator = torch.Generator().manual_seed(sample_seed(parts.seed, "uniform", iteration))
        uniform = torch.rand(trajectories.weight.shape, generator=generator)
        trajectories = replace(trajectories, uniform=uniform)
    if objective.advantage == "riskpo":
        size = objective.advantage_options.get("bundle", 5)
        trajectories = replace(trajectories, bundle=bundle_index(kept.group, size))
    if trajectories.rollout_log_prob is not None:
        metrics["engine_gap"] = engine_gap(trajectories, settings.allowed_gap)
        metrics["entropy"] = _mean_entropy(trajectories)  # the policy's: another engine may not say
    experience = TextExperience(
        rollout=rollout, trajectories=trajectories, shares=kept.shares, features=features
    )
    return Collected(experience=experience, samples=samples, tokens=tokens, metrics=metrics)


@dataclass(frozen=True)
class _Kept:
    """The B samples that are trained on; reward, valid and said as in `_Round`."""

    rollout: TextRollout
    shares: Shares
    group: list[int]
    reward: Tensor
    valid: Tensor
    said: Mapping[str, Tensor]


def certainty(said: Mapping[str, Tensor], valid: Tensor, strengths: Mapping[str, float]) -> Tensor:
    """[B] factors of the advantages, the product over rewards of `relative_uncertainty_weight`.

    Args:
        said: with "part/LABEL.std", [B].
        valid: bool [B]; of the others the factor is 0.
        strengths: label -> λ.
    """
    found = valid.double()
    for label, strength in strengths.items():
        std = torch.where(valid, said[f"part/{label}.std"].double(), torch.nan)
        found = torch.where(valid, found * relative_uncertainty_weight(std, strength=strength), 0.0)
    return found


def _weighed(trajectories: Trajectories, kept: _Kept, reward: Any) -> Trajectories:
    """With the loss of each sample weighed by what its reward is sure of, where the reward asks for that."""
    strengths = reward.capabilities.advantage_weights
    if not strengths:
        return trajectories
    certain = certainty(kept.said, kept.valid, strengths).to(trajectories.weight)
    return replace(trajectories, loss_weight=certain[:, None].expand_as(trajectories.weight).contiguous())


def _of_all(own: Trajectories, kept: _Kept) -> Trajectories:
    """[b, T] of this process -> [B, T] of all."""
    if len(kept.shares.places) == 1:
        return own
    held = {f.name: getattr(own, f.name) for f in fields(own) if f.name != "group"}
    tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
    found: dict[str, Any] = {name: kept.shares.gather_all(value) for name, value in tensors.items()}
    return replace(own, group=kept.group, **found)


TOOL_METRICS = {
    "tool_calls": "tools/calls",
    "tool_cut": "tools/cut",
    "tool_failed": "tools/failed",
    "branched": "tools/branched",
}
"""Of a sample -> the mean that is logged."""
GROUP_COUNTS = ("rounds", "generated", "kept", "dropped_right", "dropped_wrong", "dropped_flat", "surplus")
"""Counts of `DynamicGroups` that are logged."""


def write(
    parts: TextParts, sampler: PromptSampler, number: int, settings: TextRolloutSettings, clock: PhaseClock
) -> Written:
    """P prompts, G completions each, written and handed to the judge, a stretch after the other; some of them
    by this process."""
    process, size = parts.accelerator, settings.group_size
    batch = sampler.batch(number)
    shares = Shares.of_groups(len(batch), size, process, whole_groups=parts.branches)
    group = batch.group_id[shares.own].tolist()
    made, kept, verdicts = [], [], []
    for places in parts.judging.chunks(group, settings.overlap, whole_groups=parts.branches):
        at = shares.own[places]
        # where it has as many of each group, it names a prompt once; else once for each sample
        counts = batch.group_id[at].unique_consecutive(return_counts=True)[1]
        times = int(counts[0]) if bool((counts == counts[0]).all()) else 1
        records = [parts.records[i] for i in batch.prompt_index[at].tolist()]
        with clock.phase("rollout"), torch.no_grad():
            rollout = parts.generator.generate(
                [record["prompt"] for record in records[::times]],
                seeds=[sample_seed(parts.seed, "sample", i) for i in batch.sample_id[at].tolist()],
                num_generations=times,
                sampling=settings.sampling,
                stopping=settings.stopping(),
                group=batch.group_id[at][::times].tolist(),
            )
        with clock.phase("reward"):
            verdicts.append(parts.judging.ask(list(rollout.text), records))
        made.append(rollout)
        kept += records
    return Written(
        rollout=made[0] if len(made) == 1 else join_rollouts(made),
        records=kept,
        shares=shares,
        group=batch.group_id.tolist(),
        verdicts=verdicts,
    )


def _judged(
    parts: TextParts,
    written: Written,
    settings: TextRolloutSettings,
    objective: Objective,
    clock: PhaseClock,
) -> _Round:
    """A round's completions with what the judge says of all processes' samples."""
    rollout, shares = written.rollout, written.shares
    with clock.phase("reward"):
        scores = without_failed(concatenate_scores([verdict() for verdict in written.verdicts]), rollout)
    length = rollout.loss_mask.sum(1)
    own = {
        "value": scores.value,
        "valid": scores.valid.cpu() & scores.value.isfinite().cpu() & rollout.generated,
        # a prompt that was too long is no failure of the reward
        "skipped": torch.tensor([reason == "prompt too long" for reason in rollout.stop_reason]),
        "length": length,
        "width": torch.full_like(length, rollout.loss_mask.shape[1]),  # a tool's answers count in no length
        "truncated": rollout.truncated,
        "entropy": (rollout.entropy * rollout.loss_mask).sum(1),
        **({} if rollout.tools is None else tool_counts(rollout.tools)),
        **({} if scores.std is None else {"part/std": scores.std}),
        **{f"part/{name}": part for name, part in scores.parts.items()},
    }
    said = shares.table(own)
    valid, skipped = said.pop("valid") != 0, said.pop("skipped") != 0
    check_failures(scores, valid | skipped, settings.max_failure_rate, parts.reward.name)
    width = int(said.pop("width").max())
    reward = said["value"].float()
    if objective.advantage in MATRIX_ADVANTAGES:
        reward = shares.gather_all(reward_columns(parts.reward, scores).float())
    if parts.accelerator.num_processes > 1:
        rollout = join_rollouts([rollout], length=width)
    return _Round(
        rollout=rollout,
        records=written.records,
        shares=shares,
        group=written.group,
        reward=reward,
        valid=valid,
        tokens=shares.gather_all(torch.where(rollout.loss_mask != 0, rollout.completion_ids, -1)),
        said=said,
    )


def tool_counts(traces: Sequence[ToolTrace]) -> dict[str, Tensor]:
    """[B] each, of what is logged of a tool."""
    return {
        "tool_calls": torch.tensor([float(trace.calls) for trace in traces]),
        "tool_cut": torch.tensor([float(trace.cut) for trace in traces]),
        "tool_failed": torch.tensor([float(trace.failed is not None) for trace in traces]),
        "branched": torch.tensor([float(trace.shared > 0) for trace in traces]),
    }


def _taken(groups: DynamicGroups, rounds: Sequence[_Round]) -> _Kept | None:
    """The samples of the groups that the step trains on, in the order of the groups."""
    taken = groups.take()
    if not taken:
        return None
    made = [rounds[group.payload] for group in taken]
    chosen = list(zip(made, [group.index for group in taken], strict=True))
    own = [each.rollout.rows(place[place >= 0]) for each, i in chosen for place in [each.shares.local[i]]]
    return _Kept(
        join_rollouts(own),
        Shares.of_owners(torch.cat([r.shares.owner[i] for r, i in chosen]), made[0].shares.accelerator),
        [r.group[i] for r, index in chosen for i in index.tolist()],
        torch.cat([r.reward[i] for r, i in chosen]),
        torch.cat([group.valid for group in taken]),
        {n: torch.cat([r.said[n][i] for r, i in chosen]) for n in made[0].said if n.endswith(".std")},
    )


def _mean_entropy(trajectories: Trajectories) -> float:
    entropy, weight = trajectories.entropy, trajectories.weight
    return math.nan if entropy is None else float((entropy * weight).sum() / weight.sum().clamp(min=1))


def _metrics(reward: Any, rounds: Sequence[_Round]) -> dict[str, float]:
    """Statistics of all completions that were made, those of dropped groups included."""
    names = dict.fromkeys(name for made in rounds for name in made.said)
    absent = [torch.full_like(made.said["value"], math.nan) for made in rounds]
    said = {
        n: torch.cat([m.said.get(n, none) for m, none in zip(rounds, absent, strict=True)]) for n in names
    }
    valid = torch.cat([made.valid for made in rounds])
    value, length = said["value"], said["length"]
    group = torch.tensor([label for made in rounds for label in made.group])
    parts = {name.removeprefix("part/"): part for name, part in said.items() if name.startswith("part/")}
    tools = [name for name in said if name in TOOL_METRICS]
    return {
        **{TOOL_METRICS[name]: float(said[name].mean()) for name in tools},
        **score_metrics(reward, value, valid, group, parts),
        "diversity": fmean(distinct_pairs(made.tokens, torch.tensor(made.group)) for made in rounds),
        "repetition": float(torch.cat([repetition(made.tokens) for made in rounds]).nanmean()),
        "length_mean": float(length.mean()),
        "truncated_share": float(said["truncated"].mean()),
        "entropy": float(said["entropy"].sum()) / max(float(length.sum()), 1.0),
    }
