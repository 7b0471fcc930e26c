# SPDX-License-Identifier: Apache-2.0
"""Scores for an evaluation from a judge that is asked now, logged so that a stopped run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.prompt_files import source_of
from visalign.data.sets.records import PreferencePair, PreferenceSet, QualityRecord, QualitySet
from visalign.errors import UserError
from visalign.evaluation.rewards.pair_scores import PairScores, from_probabilities, from_scores
from visalign.evaluation.rewards.quality import QualityScores, from_values
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.pipelines.score.log import Logged, ScoreLog, score_key
from visalign.pipelines.score.provenance import reward_identity
from visalign.pipelines.score.score import finite_or_none
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

    Returns:
        Scores; what failed is NaN with the judge's reason.
    """
    sides = [(pair.image_left, pair.image_right) for pair in pairs.pairs]
    if not isinstance(judge, PointwiseReward):
        orders = [
            tuple(_Unit(order, pair.prompt, _metadata(pair)) for order in (both, both[::-1]))
            for both, pair in zip(sides, pairs.pairs, strict=True)
        ]
        rows = _ask(judge, orders, asking or Asking(), _compared)
        straight, turned = (special.expit(_column(rows, order, "value")) for order in (0, 1))
        reasons = [a.reason or b.reason for a, b in rows]
        return from_probabilities(judge.name, straight, swapped=turned, reasons=reasons)
    units = [
        tuple(_Unit((image,), pair.prompt, _metadata(pair)) for image in both)
        for both, pair in zip(sides, pairs.pairs, strict=True)
    ]
    rows = _ask(judge, units, asking or Asking(), _scored)
    has_std = any(entry.std is not None for row in rows for entry in row)
    return from_scores(
        judge.name,
        judge.unit,
        _column(rows, 0, "value"),
        _column(rows, 1, "value"),
        std_left=_column(rows, 0, "std") if has_std else None,
        std_right=_column(rows, 1, "std") if has_std else None,
        reasons=[left.reason or right.reason for left, right in rows],
        higher_is_better=judge.higher_is_better,
    )


def judge_quality(records: QualitySet, judge: PointwiseReward, asking: Asking | None = None) -> QualityScores:
    """Ask a judge about the images of a quality set.

    Returns:
        Scores; what failed is NaN with the judge's reason.
    """
    if not isinstance(judge, PointwiseReward):
        raise RewardError(
            f"{getattr(judge, 'name', judge)!r} compares two images and gives no score of one, which a "
            "quality set needs. Evaluate it on a preference set."
        )
    units = [(_Unit((record.image,), record.prompt, _metadata(record)),) for record in records.records]
    rows = _ask(judge, units, asking or Asking(), _scored)
    return from_values(
        judge.name,
        judge.unit,
        _column(rows, 0, "value"),
        std=_column(rows, 0, "std") if any(row.std is not None for (row,) in rows) else None,
        reasons=[row.reason for (row,) in rows],
        higher_is_better=judge.higher_is_better,
    )


Batch = Callable[[Any, Sequence[_Unit], Sequence[tuple[Any, ...]]], list[Logged]]
"""(judge, what to ask, its images) -> answers."""


def _ask(
    judge: Any, wanted: Sequence[tuple[_Unit, ...]], asking: Asking, one_batch: Batch
) -> list[tuple[Logged, ...]]:
    """The answer of every unit; each distinct one is asked once, and those in the log are not asked again."""
    log = ScoreLog(asking.log, {judge.name: reward_identity(judge)}, Logged)
    alarm = FailureAlarm(judge.name, asking.max_failure_rate, least=50)
    keys = [tuple(unit.key for unit in units) for units in wanted]
    distinct = dict(zip((k for own in keys for k in own), (u for own in wanted for u in own), strict=True))
    answers = {key: entry for key in distinct if (entry := log.get(key)) is not None}
    open_units = [(key, unit) for key, unit in distinct.items() if key not in answers]
    try:
        for start in range(0, len(open_units), asking.batch_size):
            found = _answer_batch(judge, open_units[start : start + asking.batch_size], one_batch)
            log.add(found)
            answers |= found
            if asking.on_batch is not None:
                asking.on_batch(len(answers), len(distinct))
            for entry in found.values():
                alarm.note(entry.reason)
    finally:
        log.close()
    return [tuple(answers[key] for key in own) for own in keys]


def _answer_batch(judge: Any, batch: Sequence[tuple[str, _Unit]], one_batch: Batch) -> dict[str, Logged]:
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
    found = finite_or_none(value)
    if reason is not None or found is None:
        return Logged(value=None, reason=reason or f"the judge returned {float(value):g}, which is no score")
    return Logged(value=found, std=None if std is None else finite_or_none(std))


def _column(rows: Sequence[tuple[Logged, ...]], place: int, name: str) -> NDArray[np.float64]:
    """[N] values or deviations, NaN where there is none."""
    return np.array([getattr(row[place], name) for row in rows], dtype=np.float64)


def _metadata(record: PreferencePair | QualityRecord) -> Mapping[str, Any] | None:
    """The prompt's record for verifiers, and the source of edits, where the set carries them."""
    found, source = record.extra.get("record"), source_of(record.extra)
    known = {**found} if isinstance(found, Mapping) else {}
    return (known if source is None else {**known, "source": source}) or None
