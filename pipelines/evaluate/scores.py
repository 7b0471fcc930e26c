# SPDX-License-Identifier: Apache-2.0
"""Scores of an evaluation: of a reward that is asked now, logged for a resumed run, or from the set's columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.sets.tables import listed, nearest_first
from visalign.errors import Naming, UserError
from visalign.evaluation.rewards.pair_scores import PairScores, from_probabilities, from_scores
from visalign.evaluation.rewards.quality import QualityScores, from_values
from visalign.interfaces import PairwiseReward, PointwiseReward, score_named, with_capabilities
from visalign.pipelines.score.image_rows import record_metadata
from visalign.pipelines.score.log import Logged, ScoreLog, score_key
from visalign.pipelines.score.score import MISSING, check_batch_size, finite_or_none, read_number
from visalign.rewards.base.ahead import decode_ahead
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import FailureAlarm, failure_reasons
from visalign.rewards.pairs.asking import check_preferences


class _Request(NamedTuple):
    images: tuple[str, ...]
    prompt: str
    metadata: Mapping[str, Any] | None


def score_pairs(pairs: PreferenceSet, reward: PointwiseReward | PairwiseReward, **asking: Any) -> PairScores:
    """Score each distinct image and prompt once, or each pair in both orders; a failure is NaN with its reason."""
    requests = []
    for pair in pairs.pairs:
        left, right, metadata = pair.image_left, pair.image_right, record_metadata(pair.image_left, pair.extra) or None
        inputs = ((left,), (right,)) if isinstance(reward, PointwiseReward) else ((left, right), (right, left))
        requests.append(tuple(_Request(images, pair.prompt, metadata) for images in inputs))
    answers = _ask(reward, requests, **asking)
    first, second = (_column(answers, index, "value") for index in (0, 1))
    reasons = [former.reason or latter.reason for former, latter in answers]
    if not isinstance(reward, PointwiseReward):
        prob, swapped = special.expit(first), special.expit(second)
        return from_probabilities(reward.name, prob, swapped=swapped, reasons=reasons)
    return from_scores(
        reward.name,
        reward.unit,
        first,
        second,
        std_left=_column(answers, 0, "std"),
        std_right=_column(answers, 1, "std"),
        reasons=reasons,
        higher_is_better=reward.higher_is_better,
    )


def score_quality(records: QualitySet, reward: PointwiseReward, **asking: Any) -> QualityScores:
    """Score the images of a quality set, as `score_pairs` scores pairs."""
    if not isinstance(reward, PointwiseReward):
        name = getattr(reward, "name", reward)
        raise RewardError(f"{name!r} compares two images and gives no score of one. Evaluate it on a preference set.")
    requests = [
        (_Request((record.image,), record.prompt, record_metadata(record.image, record.extra) or None),)
        for record in records.records
    ]
    answers = _ask(reward, requests, **asking)
    std = _column(answers, 0, "std")
    return from_values(
        reward.name,
        reward.unit,
        _column(answers, 0, "value"),
        std=None if np.isnan(std).all() else std,
        reasons=[answer.reason for (answer,) in answers],
        higher_is_better=reward.higher_is_better,
    )


def _ask(
    reward: Any,
    rows: Sequence[tuple[_Request, ...]],
    *,
    log: Path | None = None,
    batch_size: int = 32,
    max_failure_rate: float = 0.5,
    on_batch: Callable[[int, int], object] | None = None,
) -> list[tuple[Logged, ...]]:
    """Answer every request, `rows` of those whose answers belong together; equal ones are asked once.

    Answers go into the file `log` batch by batch, and those in it are not asked again.
    """
    alarm = FailureAlarm(reward.name, max_failure_rate, min_samples=50)
    keys = [tuple(score_key(*request) for request in row) for row in rows]
    distinct = dict(zip(chain(*keys), chain(*rows), strict=True))
    check_batch_size(reward.name, reward, len(distinct), batch_size)
    with ExitStack() as stack:
        scores = stack.enter_context(closing(ScoreLog(log, {reward.name: reward}, Logged)))
        answers = {key: entry for key in distinct if (entry := scores.get(key)) is not None}
        if len(answers) < len(distinct) and with_capabilities(reward).capabilities.compares_samples:
            answers = {}
        remaining = [(key, request) for key, request in distinct.items() if key not in answers]
        images = [image for _, request in remaining for image in request.images]
        ahead = stack.enter_context(closing(decode_ahead(images, resolve_image, [reward])))
        for start in range(0, len(remaining), batch_size):
            new = _answer_batch(reward, remaining[start : start + batch_size], ahead)
            scores.add(new)  # before the alarm: a run that it stops keeps its answers
            answers |= new
            if on_batch is not None:
                on_batch(len(answers), len(distinct))
            for answer in new.values():
                alarm.note(answer.reason)
    return [tuple(answers[key] for key in row) for row in keys]


def _answer_batch(reward: Any, batch: Sequence[tuple[str, _Request]], ahead: Iterator[Any]) -> dict[str, Logged]:
    ask = _score_batch if isinstance(reward, PointwiseReward) else _compare_batch
    answers, readable = dict[str, Logged](), list[Any]()
    for key, request in batch:
        decoded = [next(ahead) for _ in request.images]
        try:
            opened = zip(map(resolve_image, request.images), decoded, strict=True)
            images = tuple(image if pixels is None else pixels for image, pixels in opened)
            readable.append((key, images, request.prompt, request.metadata))
        except UserError as error:
            answers[key] = Logged(value=None, reason=str(error))
    if readable:
        keys, *inputs = map(list, zip(*readable, strict=True))
        with Naming(reward.name):
            answers |= dict(zip(keys, ask(reward, *inputs), strict=True))
    return answers


def _score_batch(reward: Any, images: list[Any], prompts: list[str], records: list[Any]) -> list[Logged]:
    scores = score_named(reward, [image for (image,) in images], prompts, records, name=reward.name)
    stds = [None] * len(prompts) if scores.std is None else scores.std
    return list(map(_logged, scores.value, failure_reasons(scores), stds))


def _compare_batch(judge: Any, images: list[Any], prompts: list[str], records: list[Any]) -> list[Logged]:
    left, right = map(list, zip(*images, strict=True))
    answer = judge.compare(left, right, prompts, records)
    check_preferences(judge.name, answer, len(prompts))
    odds = answer.prob.double().logit() if answer.log_odds is None else answer.log_odds
    odds = odds.clamp(-30.0, 30.0)  # a probability of exactly 0 or 1 has infinite log-odds, which JSON cannot hold
    return list(map(_logged, odds, failure_reasons(answer), [None] * len(prompts)))


def _logged(value: Any, reason: str | None, std: Any) -> Logged:
    number = finite_or_none(value)
    if reason is not None or number is None:
        return Logged(value=None, reason=reason or f"the judge returned {float(value):g}, which is no score")
    return Logged(value=number, std=None if std is None else finite_or_none(std))


def _column(rows: Sequence[tuple[Logged, ...]], index: int, name: str) -> NDArray[np.float64]:
    """[N] values or deviations, NaN where there is none."""
    return np.array([getattr(row[index], name) for row in rows], dtype=np.float64)


def column_scores(
    pairs: PreferenceSet, name: str, *, higher_is_better: bool = True, names: Mapping[str, str] | None = None
) -> PairScores:
    """Read precomputed scores of a preference set; a row without a number counts as failed.

    Columns are NAME_left and NAME_right (NAME_std_left, NAME_std_right too), or NAME_prob of the left image (with
    NAME_prob_swapped, the same after an exchange). `names` are those of the file where it has others.
    """
    rows, reasons = [pair.extra for pair in pairs.pairs], [MISSING] * len(pairs)
    columns, prob = {column for row in rows for column in row}, f"{name}_prob"
    left, right = sides = f"{name}_left", f"{name}_right"
    if {*sides} <= columns:
        return from_scores(
            name,
            f"column {name}",
            _numbers(rows, left),
            _numbers(rows, right),
            std_left=_numbers(rows, f"{name}_std_left"),  # NaN without the column, which counts as none
            std_right=_numbers(rows, f"{name}_std_right"),
            reasons=reasons,
            higher_is_better=higher_is_better,
        )
    if prob not in columns:
        needed = " and ".join((names or {}).get(side, side) for side in sides)
        raise UserError(
            f"'{pairs.name}' has no scores {name!r}: needed are the columns {needed}, or {prob}. "
            f"{_found(name, columns)}In the file, --scores {name}=COLUMN or {name}=LEFT,RIGHT names others."
        )
    if not higher_is_better:
        raise UserError(f"--lower-is-better names {name!r}; {prob} is the probability that the left image is better.")
    swapped = _numbers(rows, f"{prob}_swapped") if f"{prob}_swapped" in columns else None
    return from_probabilities(name, _numbers(rows, prob), swapped=swapped, reasons=reasons)


def quality_column_scores(
    records: QualitySet, name: str, *, higher_is_better: bool = True, names: Mapping[str, str] | None = None
) -> QualityScores:
    """Read precomputed scores of a quality set: the column NAME, and NAME_std where it exists."""
    rows = [record.extra for record in records.records]
    columns = {column for row in rows for column in row}
    if name not in columns:
        column = (names or {}).get(name, name)
        raise UserError(
            f"'{records.name}' has no column {column!r}. {_found(name, columns)}--scores {name}=COLUMN names another."
        )
    return from_values(
        name,
        f"column {name}",
        _numbers(rows, name),
        std=_numbers(rows, f"{name}_std") if f"{name}_std" in columns else None,
        reasons=[MISSING] * len(records),
        higher_is_better=higher_is_better,
    )


def _found(name: str, columns: set[str]) -> str:
    return f"Found besides the set's own: {listed(nearest_first(name, sorted(columns)), limit=20) or 'none'}. "


def _numbers(rows: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    return [read_number(row.get(column)) for row in rows]
