# SPDX-License-Identifier: Apache-2.0
"""Scores of an evaluation from a reward that is asked now, logged so that a stopped run can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

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
from visalign.rewards.base.contract import RewardError, check_answer
from visalign.rewards.base.failure import FailureAlarm, Naming, failure_reasons
from visalign.rewards.pairs.asking import check_preferences

OnBatch = Callable[[int, int], object]
"""Called with the number of finished scores and of all."""


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """Options of asking a reward."""

    log: Path | None = None
    """File to which scores are written batch by batch, and from which earlier ones are read."""
    batch_size: int = 32
    max_failure_rate: float = 0.5
    """Share of failures among the last 200 answers above which the run stops."""
    on_batch: OnBatch | None = None


class _Request(NamedTuple):
    """A request to a reward: one or two images, a prompt and its record."""

    images: tuple[str, ...]
    prompt: str
    metadata: Mapping[str, Any] | None


def score_pairs(
    pairs: PreferenceSet, reward: PointwiseReward | PairwiseReward, options: ScoringOptions | None = None
) -> PairScores:
    """Score a preference set: each distinct image and prompt once, or each pair in both orders.

    A failed score is NaN with the reward's reason.
    """
    rows = [(pair, (pair.image_left, pair.image_right), _metadata(pair)) for pair in pairs.pairs]
    if not isinstance(reward, PointwiseReward):
        requests = [
            tuple(_Request(order, pair.prompt, record) for order in (images, images[::-1]))
            for pair, images, record in rows
        ]
        answers = _ask(reward, requests, options, _compare_batch)
        prob, swapped = (special.expit(_column(answers, order, "value")) for order in (0, 1))
        reasons = [first.reason or second.reason for first, second in answers]
        return from_probabilities(reward.name, prob, swapped=swapped, reasons=reasons)
    requests = [tuple(_Request((image,), pair.prompt, record) for image in images) for pair, images, record in rows]
    answers = _ask(reward, requests, options, _score_batch)
    has_std = any(answer.std is not None for row in answers for answer in row)
    return from_scores(
        reward.name,
        reward.unit,
        _column(answers, 0, "value"),
        _column(answers, 1, "value"),
        std_left=_column(answers, 0, "std") if has_std else None,
        std_right=_column(answers, 1, "std") if has_std else None,
        reasons=[left.reason or right.reason for left, right in answers],
        higher_is_better=reward.higher_is_better,
    )


def score_quality(
    records: QualitySet, reward: PointwiseReward, options: ScoringOptions | None = None
) -> QualityScores:
    """Score the images of a quality set; a failed score is NaN with the reward's reason."""
    if not isinstance(reward, PointwiseReward):
        raise RewardError(
            f"{getattr(reward, 'name', reward)!r} compares two images and gives no score of one, which a "
            "quality set needs. Evaluate it on a preference set."
        )
    requests = [(_Request((record.image,), record.prompt, _metadata(record)),) for record in records.records]
    answers = _ask(reward, requests, options, _score_batch)
    return from_values(
        reward.name,
        reward.unit,
        _column(answers, 0, "value"),
        std=_column(answers, 0, "std") if any(answer.std is not None for (answer,) in answers) else None,
        reasons=[answer.reason for (answer,) in answers],
        higher_is_better=reward.higher_is_better,
    )


AskBatch = Callable[[Any, Sequence[_Request], Sequence[tuple[Any, ...]]], list[Logged]]
"""(reward, requests, their images) -> answers."""


def _ask(
    reward: Any, rows: Sequence[tuple[_Request, ...]], options: ScoringOptions | None, ask: AskBatch
) -> list[tuple[Logged, ...]]:
    """Answer every request; equal ones are asked once, and those in the log are not asked again."""
    options = options or ScoringOptions()
    log = ScoreLog(options.log, {reward.name: reward_identity(reward)}, Logged)
    alarm = FailureAlarm(reward.name, options.max_failure_rate, min_samples=50)
    keys = [tuple(score_key(*request) for request in row) for row in rows]
    distinct = dict(zip(chain(*keys), chain(*rows), strict=True))
    answers = {key: entry for key in distinct if (entry := log.get(key)) is not None}
    remaining = [(key, request) for key, request in distinct.items() if key not in answers]
    try:
        for start in range(0, len(remaining), options.batch_size):
            new = _answer_batch(reward, remaining[start : start + options.batch_size], ask)
            log.add(new)
            answers |= new
            if options.on_batch is not None:
                options.on_batch(len(answers), len(distinct))
            for answer in new.values():
                alarm.note(answer.reason)
    finally:
        log.close()
    return [tuple(answers[key] for key in row) for row in keys]


def _answer_batch(reward: Any, batch: Sequence[tuple[str, _Request]], ask: AskBatch) -> dict[str, Logged]:
    answers: dict[str, Logged] = {}
    readable: list[tuple[str, _Request, tuple[Any, ...]]] = []
    for key, request in batch:
        try:
            readable.append((key, request, tuple(map(resolve_image, request.images))))
        except UserError as error:
            answers[key] = Logged(value=None, reason=str(error))
    if readable:
        keys, requests, images = zip(*readable, strict=True)
        with Naming(reward.name):
            answers |= dict(zip(keys, ask(reward, requests, images), strict=True))
    return answers


def _score_batch(
    reward: PointwiseReward, requests: Sequence[_Request], images: Sequence[tuple[Any, ...]]
) -> list[Logged]:
    prompts, records = [r.prompt for r in requests], [r.metadata for r in requests]
    scores = reward.score([image for (image,) in images], prompts, records)
    check_answer(reward.name, scores, len(requests), "image")
    stds = [None] * len(requests) if scores.std is None else scores.std
    return list(map(_logged, scores.value, failure_reasons(scores), stds))


def _compare_batch(
    judge: PairwiseReward, requests: Sequence[_Request], images: Sequence[tuple[Any, ...]]
) -> list[Logged]:
    left, right = map(list, zip(*images, strict=True))
    answer = judge.compare(left, right, [r.prompt for r in requests], [r.metadata for r in requests])
    check_preferences(judge.name, answer, len(requests))
    odds = answer.prob.double().logit() if answer.log_odds is None else answer.log_odds
    return list(map(_logged, odds.clamp(-30.0, 30.0), failure_reasons(answer), [None] * len(requests)))


def _logged(value: Any, reason: str | None, std: Any) -> Logged:
    number = finite_or_none(value)
    if reason is not None or number is None:
        return Logged(value=None, reason=reason or f"the judge returned {float(value):g}, which is no score")
    return Logged(value=number, std=None if std is None else finite_or_none(std))


def _column(rows: Sequence[tuple[Logged, ...]], index: int, name: str) -> NDArray[np.float64]:
    """[N] values or deviations, NaN where there is none."""
    return np.array([getattr(row[index], name) for row in rows], dtype=np.float64)


def _metadata(record: PreferencePair | QualityRecord) -> Mapping[str, Any] | None:
    """Collect the prompt's record for verifiers, and the source of edits, from the extra columns."""
    verifier_record, source = record.extra.get("record"), source_of(record.extra)
    metadata = {**verifier_record} if isinstance(verifier_record, Mapping) else {}
    return (metadata if source is None else {**metadata, "source": source}) or None
