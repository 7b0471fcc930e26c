# SPDX-License-Identifier: Apache-2.0
"""Scores for an evaluation from a judge that is asked now, logged so that a stopped run goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.records import PreferencePair, PreferenceSet, QualityRecord, QualitySet
from visalign.errors import UserError
from visalign.evaluation.rewards.pair_scores import PairScores, from_probabilities, from_scores
from visalign.evaluation.rewards.quality import QualityScores, from_values
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.pipelines.score.log import Logged, ScoreLog, judge_identity, number, score_key
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import FailureAlarm, Naming, failure_reasons

OnBatch = Callable[[int, int], object]
"""Called with the scores that are done and all that are needed."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How a judge is asked."""

    log: Path | None = None
    """Where scores are written as they come, and read from."""
    batch_size: int = 32
    max_failure_rate: float = 0.5
    """Above this share of failures among the last 200 answers the run stops."""
    on_batch: OnBatch | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch_size is {self.batch_size}; it must be at least 1.")


@dataclass(frozen=True)
class _Unit:
    """One thing to ask: one or two images, a prompt, its record."""

    images: tuple[str, ...]
    prompt: str
    metadata: Mapping[str, Any] | None

    @property
    def key(self) -> str:
        return score_key(self.images, self.prompt, self.metadata)


def judge_pairs(
    pairs: PreferenceSet, judge: PointwiseReward | PairwiseReward, asking: Asking | None = None
) -> PairScores:
    """Ask a judge about a preference set: each distinct image and prompt once, or each pair in both orders.

    Args:
        pairs: The set.
        judge: Scores images, or compares two.
        asking: How.

    Returns:
        Scores; what failed is NaN with the judge's reason.

    Raises:
        RewardError: The judge raised, or failed too often.
        UserError: The log holds scores of another judge.
    """
    asking = asking or Asking()
    if not isinstance(judge, PointwiseReward):
        return _compared_pairs(pairs, judge, asking)
    units = [
        tuple(_Unit((image,), pair.prompt, _metadata(pair)) for image in (pair.image_left, pair.image_right))
        for pair in pairs.pairs
    ]
    said = _ask(judge, [unit for both in units for unit in both], asking, _scored)
    rows = [tuple(said[unit.key] for unit in both) for both in units]
    stds = [[math.nan if row[k].std is None else row[k].std for row in rows] for k in (0, 1)]
    has_std = any(entry.std is not None for entry in said.values())
    return from_scores(
        judge.name,
        judge.unit,
        [_value(left) for left, _ in rows],
        [_value(right) for _, right in rows],
        std_left=np.array(stds[0], dtype=float) if has_std else None,
        std_right=np.array(stds[1], dtype=float) if has_std else None,
        reasons=[left.reason or right.reason for left, right in rows],
        higher_is_better=judge.higher_is_better,
    )


def judge_quality(records: QualitySet, judge: PointwiseReward, asking: Asking | None = None) -> QualityScores:
    """Ask a judge about the images of a quality set.

    Args:
        records: The set.
        judge: Scores images.
        asking: How.

    Returns:
        Scores; what failed is NaN with the judge's reason.

    Raises:
        RewardError: The judge only compares, raised, or failed too often.
        UserError: The log holds scores of another judge.
    """
    if not isinstance(judge, PointwiseReward):
        raise RewardError(
            f"{getattr(judge, 'name', judge)!r} compares two images and gives no score of one, which a "
            "quality set needs. Evaluate it on a preference set."
        )
    asking = asking or Asking()
    units = [_Unit((record.image,), record.prompt, _metadata(record)) for record in records.records]
    said = _ask(judge, units, asking, _scored)
    rows = [said[unit.key] for unit in units]
    has_std = any(row.std is not None for row in rows)
    return from_values(
        judge.name,
        judge.unit,
        [_value(row) for row in rows],
        std=[math.nan if row.std is None else row.std for row in rows] if has_std else None,
        reasons=[row.reason for row in rows],
        higher_is_better=judge.higher_is_better,
    )


def _compared_pairs(pairs: PreferenceSet, judge: PairwiseReward, asking: Asking) -> PairScores:
    orders = [
        (
            _Unit((pair.image_left, pair.image_right), pair.prompt, _metadata(pair)),
            _Unit((pair.image_right, pair.image_left), pair.prompt, _metadata(pair)),
        )
        for pair in pairs.pairs
    ]
    said = _ask(judge, [unit for both in orders for unit in both], asking, _compared)
    rows = [tuple(said[unit.key] for unit in both) for both in orders]
    straight, turned = ([_probability(row[k]) for row in rows] for k in (0, 1))
    return from_probabilities(
        judge.name, straight, swapped=turned, reasons=[a.reason or b.reason for a, b in rows]
    )


def _ask(
    judge: Any,
    units: Sequence[_Unit],
    asking: Asking,
    one_batch: Callable[[Any, Sequence[_Unit], Sequence[tuple[Any, ...]]], list[Logged]],
) -> dict[str, Logged]:
    """key -> answer of every distinct unit; those in the log are not asked again."""
    log = ScoreLog(asking.log, {judge.name: judge_identity(judge)}, Logged)
    alarm = FailureAlarm(judge.name, asking.max_failure_rate, least=50)
    distinct = {unit.key: unit for unit in units}
    answers = {key: entry for key in distinct if (entry := log.get(key)) is not None}
    open_units = [(key, unit) for key, unit in distinct.items() if key not in answers]
    try:
        for batch in _batches(open_units, asking.batch_size):
            found = _answer_batch(judge, batch, one_batch)
            log.add(found)
            answers |= found
            if asking.on_batch is not None:
                asking.on_batch(len(answers), len(distinct))
            for entry in found.values():
                alarm.note(entry.reason)
    finally:
        log.close()
    return answers


def _answer_batch(
    judge: Any,
    batch: Sequence[tuple[str, _Unit]],
    one_batch: Callable[[Any, Sequence[_Unit], Sequence[tuple[Any, ...]]], list[Logged]],
) -> dict[str, Logged]:
    found: dict[str, Logged] = {}
    ready: list[tuple[str, _Unit, tuple[Any, ...]]] = []
    for key, unit in batch:
        try:
            ready.append((key, unit, tuple(resolve_image(image) for image in unit.images)))
        except UserError as error:
            found[key] = Logged(value=None, reason=str(error))
    if ready:
        with Naming(judge.name):
            answers = one_batch(judge, [unit for _, unit, _ in ready], [images for _, _, images in ready])
        found |= {key: answer for (key, _, _), answer in zip(ready, answers, strict=True)}
    return found


def _scored(
    judge: PointwiseReward, units: Sequence[_Unit], images: Sequence[tuple[Any, ...]]
) -> list[Logged]:
    scores = judge.score(
        [image for (image,) in images], [u.prompt for u in units], [u.metadata for u in units]
    )
    reasons = failure_reasons(scores)
    return [
        _logged(scores.value[k], reasons[k], None if scores.std is None else scores.std[k])
        for k in range(len(units))
    ]


def _compared(
    judge: PairwiseReward, units: Sequence[_Unit], images: Sequence[tuple[Any, ...]]
) -> list[Logged]:
    said = judge.compare(
        [left for left, _ in images],
        [right for _, right in images],
        [unit.prompt for unit in units],
        [unit.metadata for unit in units],
    )
    odds = said.prob.double().logit() if said.log_odds is None else said.log_odds
    odds = odds.clamp(-30.0, 30.0)
    reasons = said.reason or [None] * len(units)
    return [
        _logged(odds[k], None if bool(said.valid[k]) else reasons[k] or "no reason given", None)
        for k in range(len(units))
    ]


def _logged(value: Any, reason: str | None, std: Any) -> Logged:
    found = number(value)
    if reason is not None or found is None:
        return Logged(value=None, reason=reason or f"the judge returned {float(value):g}, which is no score")
    return Logged(value=found, std=None if std is None else number(std))


def _value(entry: Logged) -> float:
    return math.nan if entry.value is None else entry.value


def _probability(entry: Logged) -> float:
    return math.nan if entry.value is None else 1 / (1 + math.exp(-entry.value))


def _metadata(record: PreferencePair | QualityRecord) -> Mapping[str, Any] | None:
    """The prompt's record for verifiers, where the set carries one."""
    found = record.extra.get("record")
    return found if isinstance(found, Mapping) else None


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
