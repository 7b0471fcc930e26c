# SPDX-License-Identifier: Apache-2.0
"""Collect an iteration's completions: sample, score, and select the groups with signal.

Each process samples and scores a part of the completions; all get the scores, and select the same groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from visalign.core import Trajectories, relative_uncertainty_weight
from visalign.interfaces import Scores
from visalign.seeds import sample_seed
from visalign.text import TextRollout, ToolTrace, join_rollouts
from visalign.text.tool_calls import spread_scores, without_failed
from visalign.training.loop.algorithm import Collected
from visalign.training.loop.dynamic_groups import DynamicGroups
from visalign.training.loop.judging import (
    RewardScorer,
    check_failures,
    concatenate_scores,
    reward_columns,
    score_metrics,
)
from visalign.training.loop.processes import Shares
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.sampler import PromptSampler
from visalign.training.policy.settings import MATRIX_ADVANTAGES

from .entropy_metrics import answer_entropy, policy_entropy
from .parts import Records, TextParts
from .self_imitation import Replay
from .trajectories import answer_labels, build_trajectories, engine_gap

TOOLS = "tools/"  # Prefix of the columns of `ToolTrace` counts, whose means are logged
TOO_LONG = "prompt too long"  # Stop reason of samples that are neither scored nor counted as failures


@dataclass(kw_only=True)
class TextExperience:
    """Scored completions of an iteration, for its updates."""

    rollout: TextRollout  # This process's b samples, T tokens wide
    trajectories: Trajectories  # [B, T] of all processes, in the order of one, on the CPU
    shares: Shares  # Owner of each of the B samples
    features: Tensor | None  # [b, H] of the prompts, for a log-partition head
    signal: dict[str, float] = field(default_factory=dict)  # Metrics of the advantages
    replays: Sequence[Replay | None] | None = None  # Self-imitation's replay of each update


@dataclass(frozen=True, kw_only=True)
class PendingRound:
    """Completions of a round that are being scored."""

    rollout: TextRollout  # This process's b samples
    records: Records  # [b] prompt records
    shares: Shares  # Owner of each of the round's B samples
    group: list[int]  # [B] labels
    scores: Sequence[Callable[[], Scores]]  # Functions that wait for the scores of consecutive chunks of the b samples


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """Scored samples of a round, or those that are trained on."""

    rollout: TextRollout  # This process's b samples
    shares: Shares  # Owner of each of the B samples
    group: list[int]  # [B] labels
    reward: Tensor  # [B], or [B, M] where the objective normalises the terms one by one
    valid: Tensor  # bool [B]
    columns: Mapping[str, Tensor]
    """name -> [B] float64: value, length, truncated, entropy (summed over tokens), and part/NAME; NaN where the prompt
    was too long."""


@dataclass(frozen=True, kw_only=True)
class _Round(_Scored):
    records: Records  # [b] prompt records
    tokens: Tensor  # [B, T] int64, −1 for none
    answer: Tensor | None  # [B] int64, labels of the answers; None where the reward names none


def sample_completions(parts: TextParts, sampler: PromptSampler, number: int, clock: PhaseClock) -> PendingRound:
    """Sample this process's share of P prompts with G completions each, and send each chunk to the reward."""
    batch, settings = sampler.batch(number), parts.rollout
    shares = Shares.of_groups(len(batch), settings.group_size, parts.accelerator)
    group = batch.group_id[shares.own].tolist()
    rollouts, all_records, scores = [], [], []
    for chunk in parts.scorer.chunks(group, settings.overlap):
        index = shares.own[chunk]
        # A prompt is named once for all its samples if every group has as many; else once for each sample.
        counts = batch.group_id[index].unique_consecutive(return_counts=True)[1]
        repeats = int(counts[0]) if bool((counts == counts[0]).all()) else 1
        records = [parts.records[i] for i in batch.prompt_index[index].tolist()]
        with clock.phase("rollout"), torch.no_grad():
            rollout = parts.generator.generate(
                [record["prompt"] for record in records[::repeats]],
                seeds=[sample_seed(parts.seed, "sample", i) for i in batch.sample_id[index].tolist()],
                num_generations=repeats,
                sampling=settings.sampling,
                stopping=settings.stopping(),
                group=batch.group_id[index][::repeats].tolist(),
            )
        with clock.phase("reward"):
            scores.append(_submit(parts.scorer, rollout, records))
        rollouts.append(rollout)
        all_records += records
    return PendingRound(
        rollout=rollouts[0] if len(rollouts) == 1 else join_rollouts(rollouts),
        records=all_records,
        shares=shares,
        group=batch.group_id.tolist(),
        scores=scores,
    )


def _submit(scorer: RewardScorer, rollout: TextRollout, records: Records) -> Callable[[], Scores]:
    """Submit a chunk without the samples whose prompts were too long, if it has others."""
    rows = _fits(rollout).nonzero()[:, 0].tolist()
    # an environment may have written into the prompts
    records = [{**record, "prompt": prompt} for record, prompt in zip(records, rollout.prompt, strict=True)]
    if len(rows) in (0, len(rollout)):
        return scorer.submit(list(rollout.text), records)
    wait = scorer.submit([rollout.text[i] for i in rows], [records[i] for i in rows])
    return lambda: spread_scores(wait(), rows, len(rollout), TOO_LONG)


def _fits(rollout: TextRollout) -> Tensor:
    """bool [b], False where the prompt was too long to be completed."""
    return torch.tensor([reason != TOO_LONG for reason in rollout.stop_reason], dtype=torch.bool)


def collect(
    parts: TextParts,
    sample_round: Callable[[int], PendingRound],
    groups: DynamicGroups | None,
    iteration: int,
    clock: PhaseClock,
) -> Collected:
    """Collect the completions of an iteration; `sample_round` samples a round by its number.

    The experience is None where dynamic sampling found no group with signal; counts include dropped groups.
    """
    rounds: list[_Round] = []
    if groups is None:
        rounds.append(_score(parts, sample_round(iteration), clock))
        selected: _Scored | None = rounds[0]
    else:
        while groups.wants_more:
            scored = _score(parts, sample_round(groups.round), clock)
            groups.feed(scored.group, scored.columns["value"].float(), scored.valid, payload=scored)
            rounds.append(scored)
        selected = _select(groups)
    metrics = _metrics(parts.reward, rounds)
    if groups is not None:
        metrics |= groups.metrics()
    tokens = int(sum(float(scored.columns["length"].nansum()) for scored in rounds))
    samples = sum(len(scored.group) for scored in rounds)
    experience = None
    if selected is not None:
        records = {g: record for r in rounds for g, record in zip(r.rollout.group, r.records, strict=True)}
        experience = _experience(parts, selected, records, iteration, clock)
        if experience.trajectories.rollout_log_prob is not None:
            metrics["engine_gap"] = engine_gap(experience.trajectories, parts.rollout.allowed_gap)
            if (entropy := experience.trajectories.entropy) is not None:  # another engine may report none
                weight = experience.trajectories.weight
                metrics |= policy_entropy((entropy * weight).sum(1), weight.sum(1))
    return Collected(experience=experience, samples=samples, tokens=tokens, metrics=metrics)


def _score(parts: TextParts, pending: PendingRound, clock: PhaseClock) -> _Round:
    rollout, shares = pending.rollout, pending.shares
    with clock.phase("reward"):
        scores = without_failed(concatenate_scores([wait() for wait in pending.scores]), rollout)
    length, fits = rollout.loss_mask.sum(1), _fits(rollout)
    of_completions = {
        "value": scores.value,
        "length": length,
        "truncated": rollout.truncated,
        "entropy": (rollout.entropy * rollout.loss_mask).sum(1),
        **({} if rollout.tools is None else tool_columns(rollout.tools)),
        **({} if scores.std is None else {"part/std": scores.std}),
        **{f"part/{name}": part for name, part in scores.parts.items()},
    }
    columns = shares.table(
        {
            "valid": scores.valid.cpu() & scores.value.isfinite().cpu() & rollout.generated,
            "skipped": ~fits,
            # tool answers count in the width and not in the length
            "width": torch.full_like(length, rollout.loss_mask.shape[1]),
            **{name: torch.where(fits, column.cpu(), torch.nan) for name, column in of_completions.items()},
        }
    )
    valid, skipped = columns.pop("valid") != 0, columns.pop("skipped") != 0
    # a prompt that was too long is no failure of the reward
    counted = replace(scores, valid=scores.valid.cpu() | ~fits)
    check_failures(counted, valid | skipped, parts.rollout.max_failure_rate, parts.reward.name)
    width = int(columns.pop("width").max())
    reward = columns["value"].float()
    if parts.objective.advantage in MATRIX_ADVANTAGES:
        reward = shares.gather_all(reward_columns(parts.reward, scores).float())
    answer = answer_labels(parts.reward, rollout, pending.records)
    if parts.accelerator.num_processes > 1:  # rows of one width can be gathered
        rollout = join_rollouts([rollout], length=width)
    return _Round(
        rollout=rollout,
        records=pending.records,
        shares=shares,
        group=pending.group,
        reward=reward,
        valid=valid,
        answer=None if answer is None else shares.gather_all(answer),
        tokens=shares.gather_all(torch.where(rollout.loss_mask != 0, rollout.completion_ids, -1)),
        columns=columns,
    )


def tool_columns(traces: Sequence[ToolTrace]) -> dict[str, Tensor]:
    """Tabulate tool calls, name -> [B]."""
    counts = [(trace.calls, trace.cut, trace.failed is not None) for trace in traces]
    columns = torch.tensor(counts, dtype=torch.float64).T
    return dict(zip((f"{TOOLS}calls", f"{TOOLS}cut", f"{TOOLS}failed"), columns, strict=True))


def _select(groups: DynamicGroups) -> _Scored | None:
    """Select the samples of the groups that the updates train on, in the order of the groups."""
    taken = groups.take()
    if not taken:
        return None
    pairs: list[tuple[_Round, Tensor]] = [(group.payload, group.index) for group in taken]
    rollouts = []
    for scored, index in pairs:
        local = scored.shares.local[index]
        rollouts.append(scored.rollout.rows(local[local >= 0]))
    stds = [name for name in pairs[0][0].columns if name.endswith(".std")]
    owner = torch.cat([scored.shares.owner[index] for scored, index in pairs])
    return _Scored(
        rollout=join_rollouts(rollouts),
        shares=Shares.of_owners(owner, pairs[0][0].shares.accelerator),
        group=[scored.group[i] for scored, index in pairs for i in index.tolist()],
        reward=torch.cat([scored.reward[index] for scored, index in pairs]),
        valid=torch.cat([group.valid for group in taken]),
        columns={name: torch.cat([scored.columns[name][index] for scored, index in pairs]) for name in stds},
    )


def _experience(
    parts: TextParts, selected: _Scored, records: Mapping[Any, Mapping[str, Any]], iteration: int, clock: PhaseClock
) -> TextExperience:
    shares, rollout, objective = selected.shares, selected.rollout, parts.objective
    reward, valid = selected.reward[shares.own], selected.valid[shares.own]
    with clock.phase("replay"), torch.no_grad():
        if parts.rollout.routing_replay:
            rollout = cast("Any", parts.policy).with_routes(rollout)
        local = build_trajectories(parts, rollout, reward, valid, records)
        features = None if parts.log_partition is None else parts.log_partition.features(rollout)
    t = replace(_gather(local, selected), iteration=iteration)
    if strengths := parts.reward.capabilities.advantage_weights:
        weights = uncertainty_weights(selected.columns, selected.valid, strengths).to(t.weight)
        t = replace(t, loss_weight=weights[:, None].expand_as(t.weight).contiguous())
    if objective.selection == "clip_cov":
        generator = torch.Generator().manual_seed(sample_seed(parts.seed, "uniform", iteration))
        t = replace(t, uniform=torch.rand(t.weight.shape, generator=generator))
    return TextExperience(rollout=rollout, trajectories=t, shares=shares, features=features)


def uncertainty_weights(columns: Mapping[str, Tensor], valid: Tensor, strengths: Mapping[str, float]) -> Tensor:
    """Compute factors [B] of the advantages, Π `relative_uncertainty_weight` of "part/LABEL.std"; 0 if not valid."""
    weights = valid.double()
    for label, strength in strengths.items():
        std = torch.where(valid, columns[f"part/{label}.std"].double(), torch.nan)
        weights = torch.where(valid, weights * relative_uncertainty_weight(std, strength=strength), 0.0)
    return weights


def _gather(local: Trajectories, selected: _Scored) -> Trajectories:
    """Gather [b, T] of this process into [B, T] of all."""
    if selected.shares.accelerator.num_processes == 1:
        return local
    tensors = {name: value for name, value in vars(local).items() if isinstance(value, Tensor)}
    tensors.pop("group", None)
    gathered: dict[str, Any] = {n: selected.shares.gather_all(value) for n, value in tensors.items()}
    return replace(local, group=selected.group, **gathered)


def _metrics(reward: Any, rounds: Sequence[_Round]) -> dict[str, float]:
    """Compute statistics of all samples, those of dropped groups included."""
    names = dict.fromkeys(name for scored in rounds for name in scored.columns)
    missing = [torch.full_like(scored.columns["value"], math.nan) for scored in rounds]
    columns = {
        name: torch.cat([r.columns.get(name, nan) for r, nan in zip(rounds, missing, strict=True)]) for name in names
    }
    valid = torch.cat([scored.valid for scored in rounds])
    length = columns["length"]
    fits = length.isfinite()
    group = torch.tensor([label for scored in rounds for label in scored.group])
    parts = {name.removeprefix("part/"): part for name, part in columns.items() if name.startswith("part/")}
    answers = [scored.answer for scored in rounds if scored.answer is not None]
    return {
        **{name: float(column.nanmean()) for name, column in columns.items() if name.startswith(TOOLS)},
        **score_metrics(reward, columns["value"], valid, group, parts),
        "diversity": fmean(distinct_pairs(scored.tokens, torch.tensor(scored.group)) for scored in rounds),
        "repetition": float(torch.cat([repetition(scored.tokens) for scored in rounds]).nanmean()),
        "length_mean": float(length.nanmean()),
        "truncated_share": float(columns["truncated"].nanmean()),
        **policy_entropy(columns["entropy"], length),
        **(answer_entropy(torch.cat(answers)[fits], group[fits].tolist()) if answers and fits.any() else {}),
    }


def repetition(tokens: Tensor) -> Tensor:
    """Compute the share [B] of a completion's 4-grams (tokens [B, T], −1 for none) that occurred before; NaN
    below four tokens.

    seq-rep-4 of Welleck et al., arXiv 1908.04319, section 6.
    """
    return 1 - _distinct(_pair_ids(_pair_ids(tokens, 1), 2))


def distinct_pairs(tokens: Tensor, group: Tensor) -> float:
    """Compute distinct bigrams over all bigrams of a group's completions, mean over groups; NaN without any.

    distinct-2 of Li et al., arXiv 1510.03055, section 5. It falls with length, too.
    """
    pairs = _pair_ids(tokens, 1)
    return float(torch.cat([_distinct(pairs[group == label].reshape(1, -1)) for label in group.unique()]).nanmean())


def _pair_ids(ids: Tensor, apart: int) -> Tensor:
    """Number pairs of ids `apart` positions apart, [B, T − apart]; −1 where one is missing."""
    first, second = ids[:, :-apart], ids[:, apart:]
    radix = int(ids.max()) + 1 if ids.numel() else 1
    return torch.where((first < 0) | (second < 0), -1, torch.unique(first * radix + second, return_inverse=True)[1])


def _distinct(ids: Tensor) -> Tensor:
    """Distinct ids over all ids of each row [B, M] except −1; NaN for none."""
    ordered = ids.sort(1).values
    is_new = pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)[:, : ids.shape[1]]
    present = ordered >= 0
    return (is_new & present).sum(1) / present.sum(1)
