# SPDX-License-Identifier: Apache-2.0
"""Score samples with a reward, now or in a thread while others are sampled; compute the scores' metrics."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visalign.core.groups.labels import group_index, group_sum
from visalign.errors import UserError
from visalign.interfaces import Scores, score_named, with_capabilities

from .algorithm import Context

Records = Sequence[Mapping[str, Any]]


class RewardFailure(UserError):
    """The reward could not score too many samples."""


def score_samples(reward: Any, samples: Any, records: Records) -> Scores:
    """Score images [b, 3, H, W] or b completions against their prompt records."""
    return score_named(reward, samples, [record["prompt"] for record in records], records, name=reward.name)


class RewardScorer:
    """Scores chunks of an iteration in the order in which they are submitted, at once or `in_thread`."""

    def __init__(self, reward: Any, *, in_thread: bool) -> None:
        self._reward, self.iteration = with_capabilities(reward), 0
        self._thread = None
        if in_thread:
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            # a new thread starts on the first GPU, whichever this process works on
            initializer = None if device is None else partial(torch.cuda.set_device, device)
            self._thread = ThreadPoolExecutor(1, "reward", initializer)

    @property
    def reward(self) -> Any:
        """The reward with its weights in the present `iteration`."""
        return reward_at(self._reward, self.iteration)

    @contextmanager
    def at(self, iteration: int) -> Iterator[None]:
        """Score with the weights of an iteration that is sampled ahead."""
        present, self.iteration = self.iteration, iteration
        try:
            yield
        finally:
            self.iteration = present

    def submit(self, samples: Any, records: Records) -> Callable[[], Scores]:
        """Submit a chunk; the returned function waits for its scores, and raises what the reward raised."""
        if self._thread is not None:
            return self._thread.submit(score_samples, self.reward, samples, records).result
        scores = score_samples(self.reward, samples, records)
        return lambda: scores

    def wait(self) -> None:
        """Wait until nothing is being scored, so that an evaluation may use the reward."""
        if self._thread is not None:
            self._thread.submit(int).result()

    def chunks(self, group: Sequence[Any], count: int, *, whole_groups: bool = False) -> list[Tensor]:
        """Cut row indices [b] of groups (equal neighbouring labels) into at most `count` chunks.

        Rewards that compare within a group get whole groups, as with `whole_groups`; rewards that compare the
        batch get one chunk.
        """
        capabilities = self.reward.capabilities
        anywhere = not (whole_groups or capabilities.needs_group)
        starts = [i for i in range(len(group)) if anywhere or i == 0 or group[i] != group[i - 1]]
        parts = torch.tensor(starts).tensor_split(1 if capabilities.needs_batch else min(count, len(starts)))
        return list(torch.arange(len(group)).tensor_split([int(part[0]) for part in parts[1:]]))


def concatenate_scores(chunks: Sequence[Scores]) -> Scores:
    """Concatenate the scores of consecutive chunks; a part or std missing from a chunk becomes NaN."""
    if len(chunks) == 1:
        return chunks[0]

    def concatenate(columns: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(columns, chunks, strict=True)
        return torch.cat([torch.full_like(c.value, torch.nan) if x is None else x for x, c in pairs])

    def concatenate_text(columns: Sequence[Sequence[Any] | None], missing: Any) -> list[Any] | None:
        if not any(columns):
            return None
        pairs = zip(columns, chunks, strict=True)
        return [text for texts, chunk in pairs for text in (texts or [missing] * len(chunk))]

    part_names = dict.fromkeys(name for chunk in chunks for name in chunk.parts)
    stds = [chunk.std for chunk in chunks]
    return Scores(
        value=torch.cat([chunk.value for chunk in chunks]),
        valid=torch.cat([chunk.valid for chunk in chunks]),
        unit=chunks[0].unit,
        std=None if all(std is None for std in stds) else concatenate(stds),
        parts={name: concatenate([chunk.parts.get(name) for chunk in chunks]) for name in part_names},
        text=concatenate_text([chunk.text for chunk in chunks], ""),
        reason=concatenate_text([chunk.reason for chunk in chunks], None),
    )


Rollout = TypeVar("Rollout")


class RolloutPrefetcher(Generic[Rollout]):
    """Sample the next iteration's rollout before the weights move, so that it is scored during the update.

    With staleness 1 a rollout is one iteration old at most; with 0 nothing is prefetched, nor before a scheduled
    checkpoint, so that a resumed run begins as an uninterrupted one continues. `sample` takes (iterations finished,
    run), and submits to the reward.
    """

    def __init__(self, sample: Callable[[int, Context], Rollout], staleness: int) -> None:
        self._sample, self._staleness = sample, staleness
        self._prefetched: tuple[int, Rollout] | None = None

    def next(self, run: Context) -> Rollout:
        """Return this iteration's rollout, and start sampling the next one if no checkpoint is between."""
        iteration, (number, rollout) = run.counters.iteration, self._prefetched or (None, None)
        if number != iteration:  # none yet, or a checkpoint of another iteration was loaded
            rollout = self._sample(iteration, run)
        self._prefetched = None
        if self._staleness and run.prefetch_next:
            self._prefetched = iteration + 1, self._sample(iteration + 1, run)
        return rollout  # type: ignore[return-value]  # it is of this iteration


def check_failures(scores: Scores, valid: Tensor, limit: float, name: str) -> None:
    """Stop a run whose reward fails on more than `limit` of all processes' samples, or on all of them."""
    failed = int((~valid).sum())
    pairs = zip(scores.reason or [], scores.valid.tolist(), strict=False)
    counts = Counter(reason or "no reason given" for reason, is_valid in pairs if not is_valid)
    if failed <= limit * len(valid) and failed < len(valid):
        for reason, _ in counts.most_common(3):
            warnings.warn(f"Reward {name!r} could not score samples, which are left out: {reason}", stacklevel=2)
        return
    reasons = "; ".join(f"{reason} ({count}×)" for reason, count in counts.most_common(3))
    allowed = "not all" if limit == 1 else f"at most {limit:.0%}"
    raise RewardFailure(
        f"reward {name!r} could not score {failed} of {len(valid)} samples; {allowed} may fail "
        f"(rollout.max_failure_rate). Reasons: {reasons or 'value not finite'}. Fix the reward, or set "
        "rewards.allow_missing=true to do without those that fail; then continue with --resume."
    )


def reward_at(reward: Any, iteration: int) -> Any:
    """Return a reward with the weights of its terms after `iteration` iterations."""
    at = reward.capabilities.at_iteration
    return reward if at is None else at(iteration)


def reward_weights(reward: Any) -> dict[str, float]:
    """Return label -> weight of the terms of a sum; a single reward has weight 1."""
    return dict(reward.capabilities.term_weights or {reward.name: 1.0})


def reward_columns(reward: Any, scores: Scores) -> Tensor:
    """Return [B, M] float64 scores of the terms of a sum on the CPU, higher is better in each."""
    weights = reward_weights(reward)
    if f"{next(iter(weights))}.weighted" not in scores.parts:
        return scores.value.double().cpu()[:, None]
    columns = []
    for label, weight in weights.items():
        then = scores.parts.get(f"{label}.weight", torch.tensor(weight)).double().cpu()  # when they were scored
        columns.append(scores.parts[f"{label}.weighted"].double().cpu() / torch.where(then == 0, 1.0, then))
    return torch.stack(columns, 1)


def score_metrics(
    reward: Any, value: Tensor, valid: Tensor, group: Tensor, parts: Mapping[str, Tensor]
) -> dict[str, float]:
    """Compute metrics of the optimized reward `value` [B], its parts, and the rewards that are only recorded."""
    metrics = reward_metrics(value, valid, group)
    metrics |= {f"reward_part/{name}": float(part.nanmean()) for name, part in parts.items()}
    for label, sign in reward.capabilities.recorded_terms.items():
        term = sign * parts[label]
        term_metrics = reward_metrics(term, term.isfinite(), group)
        metrics[f"recorded/{label}"] = term_metrics["reward_mean"]
        metrics[f"recorded_std/{label}"] = term_metrics["reward_group_std"]
        metrics[f"agreement/{label}"] = rank_agreement(torch.where(valid, value, torch.nan), term, group)
    return metrics


def reward_metrics(value: Tensor, valid: Tensor, group: Tensor) -> dict[str, float]:
    """Compute mean and spreads of the reward [B] over the valid samples of the groups."""
    scored = value[valid]
    index, groups = group_index(group[valid], len(scored))
    count = group_sum(torch.ones(len(scored), 1, dtype=torch.float64), index, groups)[:, 0]
    mean = group_sum(scored[:, None], index, groups)[:, 0] / count
    variance = group_sum((scored - mean[index]).square()[:, None], index, groups)[:, 0] / count
    return {
        "reward_mean": float(scored.mean()),
        "reward_std": float(scored.std(correction=0)),
        "reward_group_std": float(variance.sqrt().mean()),
        "valid_share": float(valid.double().mean()),
    }


def rank_agreement(first: Tensor, second: Tensor, group: Tensor) -> float:
    """Average Kendall's τ-b within groups over the groups in which both rewards vary; NaN without one.

    τ_b = Σ_{i<j} s_ij t_ij / √(Σ s_ij² Σ t_ij²), s and t the signs of a pair's differences (Kendall 1945). A
    tie counts for neither side, so that a reward of 0 and 1 reaches 1 only against another of its kind. A
    sample with a NaN is left out.
    """
    agreements = []
    for label in group.unique():
        rows = (group == label) & first.isfinite() & second.isfinite()
        s, t = (torch.sign(values[rows, None] - values[rows]) for values in (first, second))
        scale = float((s.square().sum() * t.square().sum()).sqrt())
        if scale:
            agreements.append(float((s * t).sum()) / scale)
    return sum(agreements) / len(agreements) if agreements else math.nan


class NegatedReward:
    """A reward with the sign of its values changed, so that higher is better."""

    higher_is_better = True

    def __init__(self, reward: Any) -> None:
        self.name, self.unit = reward.name, reward.unit
        self.range = (-reward.range[1], -reward.range[0])
        self.capabilities, self.identity = reward.capabilities, None
        self._reward = reward

    def score(self, samples: Any, prompts: Sequence[Any], metadata: Any = None) -> Any:
        """Score with the sign of `value` changed; `std` stays."""
        scores = self._reward.score(samples, prompts, metadata)
        return replace(scores, value=-scores.value)


def as_higher_is_better(reward: Any) -> Any:
    """Return the reward, negated where lower is better."""
    reward = with_capabilities(reward)
    return reward if reward.higher_is_better else NegatedReward(reward)
