# SPDX-License-Identifier: Apache-2.0
"""Ranking of the images of one prompt, with intervals; a pairwise judge is asked on a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from visalign.core.preference.pairing import Method, next_pairs
from visalign.core.preference.ranking import Model, RankingFit, fit_ranking
from visalign.interfaces import PairwiseReward, PointwiseReward, copy_records, score_named, with_capabilities
from visalign.rewards.base.contract import Request, check_rules, read_request
from visalign.rewards.base.failure import failure_reasons

from .asking import PairAnswers, PairAsker, distinct_images

BUDGET = 0.3
"""Share of the n(n − 1)/2 pairs that `rank` asks a pairwise judge about, as single calls."""
UNITS = {"bradley_terry": "Bradley-Terry logits", "thurstone": "standard normal units", "log_odds": "log-odds"}
GRADED = 1e-3
"""A judge with a probability farther than this from 0, 1/2 and 1 grades its answers."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    order: list[int]
    """Image numbers, best first; images that could not be judged are left out."""
    score: Tensor
    """[n] float32; NaN where not judged."""
    low: Tensor
    """[n] float32, lower end of the score's interval; NaN where the judge gives no uncertainty."""
    high: Tensor
    """[n] float32, its upper end."""
    level: float
    """Probability that the interval is meant to hold the score with."""
    unit: str
    """Unit of score, low and high."""
    valid: Tensor
    """[n] bool."""
    reason: list[str | None]
    """[n] reason why an image is not judged, or None."""
    calls: int
    """Number of comparisons, or of images scored."""
    bias: float | None = None
    """Advantage of the left position, in `unit`; None for a pointwise judge."""
    bias_std: float | None = None
    """Its standard deviation."""
    pairs: Tensor | None = None
    """[N, 2] image numbers (left, right) of every call, in order; None for a pointwise judge."""
    answers: PairAnswers | None = None
    """Answers to these calls; the first of equal images represents all."""


def rank(
    images: Any,
    prompt: str,
    judge: PointwiseReward | PairwiseReward,
    *,
    metadata: Mapping[str, Any] | None = None,
    budget: float = BUDGET,
    level: float = 0.9,
    method: Method = "active",
    model: Model | None = None,
) -> Ranking:
    """Order the images of one prompt; equal images are one item of the fit and keep their order.

    A pointwise judge (one with `score`) orders by its mean, with mean ± z std as interval. A pairwise judge (`compare`
    alone) is asked in rounds of at most n/2 calls (`visalign.core.preference.pairing`), and the scores, the position
    bias and the intervals come from one fit (`visalign.core.preference.ranking`); a failed call counts as a call and
    is left out of the fit. A judge that offers both is asked for scores; wrap it to have it compare.

    `budget` is the largest number of calls as a share of n(n − 1)/2, in (0, 2]; n − 1 are allowed always, since fewer
    give no order. Above 1 close pairs alone are asked again, in the other order. `level` is the probability of the
    intervals. A `model` of None is "log_odds" for a judge of probabilities, "bradley_terry" for one that only decides.
    """
    rules = {
        f"budget is {budget}; allowed are shares of n(n − 1)/2 in (0, 2]": 0 < budget <= 2,
        f"level is {level}; allowed are probabilities between 0 and 1, e.g. 0.9": 0 < level < 1,
    }
    check_rules(judge.name, rules)
    request = read_request(
        judge.name, images, [prompt] * len(images), copy_records([metadata] * len(images)), texts=True
    )
    if isinstance(judge, PointwiseReward):
        return _rank_scores(judge, request, level)
    return _rank_pairs(judge, request, budget=budget, level=level, method=method, model=model)


def _rank_scores(judge: PointwiseReward, request: Request, level: float) -> Ranking:
    score = torch.full((len(request),), torch.nan)
    low, high, reasons = score.clone(), score.clone(), list(request.images.reasons)
    if rows := request.rows:
        scores = score_named(judge, *request.select(rows), name=judge.name)
        score[rows] = scores.value.detach().cpu().float()
        if scores.std is not None:
            z = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
            low[rows], high[rows] = (score[rows] + sign * z * scores.std.detach().cpu().float() for sign in (-1, 1))
        for row, reason in zip(rows, failure_reasons(scores), strict=True):
            reasons[row] = reason
    return Ranking(
        order=_order(score if judge.higher_is_better else -score),
        score=score,
        low=low,
        high=high,
        level=level,
        unit=judge.unit,
        valid=~torch.isnan(score),
        reason=reasons,
        calls=len(rows),
    )


def _rank_pairs(
    judge: PairwiseReward, request: Request, *, budget: float, level: float, method: Method, model: Model | None
) -> Ranking:
    readable = request.rows
    score, low, high = (torch.full((len(request),), torch.nan) for _ in range(3))
    reasons = list(request.images.reasons)
    ranking = partial(Ranking, score=score, low=low, high=high, level=level, reason=reasons)
    if not readable:
        no_pairs = torch.zeros(0, 2, dtype=torch.long)
        unit = UNITS[model or "bradley_terry"]
        return ranking(order=[], unit=unit, valid=~torch.isnan(score), calls=0, pairs=no_pairs)
    first, index = distinct_images(request.select(readable, stack=False)[0], [0] * len(readable))
    rows = [readable[i] for i in first]
    asker = PairAsker(judge, *request.select(rows, stack=False))
    calls = max(count_calls(len(first), budget), len(first) - 1)
    (comparisons,) = ask_in_rounds(asker, [torch.arange(len(first))], [calls], method=method, model=model)
    pairs, answers, fit = comparisons.pairs, comparisons.answers, comparisons.fit
    is_compared = torch.zeros(len(first), dtype=torch.bool)
    is_compared[pairs[torch.isfinite(answers.log_odds)].flatten()] = True
    fitted = (fit.score, *fit.interval(level))
    for row, number in zip(readable, index, strict=True):
        if is_compared[number]:
            score[row], low[row], high[row] = (column[number] for column in fitted)
        else:
            image_calls = (pairs == number).any(1).nonzero().flatten().tolist()
            failures = filter(None, (answers.reasons[call] for call in image_calls))
            reasons[row] = next(failures, "there is no image with other pixels to compare it with")
    return ranking(
        order=_order(score),
        unit=UNITS[fit.model],
        valid=~torch.isnan(score),
        calls=asker.calls,
        bias=fit.bias,
        bias_std=fit.bias_std,
        pairs=torch.tensor(rows)[pairs],
        answers=answers,
    )


def count_calls(size: int, budget: float) -> int:
    """Calls that a budget allows for a group of `size`: ⌊budget · n(n − 1)/2⌋, at least 1 for a pair."""
    pairs = size * (size - 1) // 2
    return min(max(math.floor(budget * pairs + 1e-9), min(1, pairs)), 2 * pairs)


@dataclass(frozen=True)
class Comparisons:
    """Comparisons inside one group and their fit."""

    pairs: Tensor  # [N, 2] (left, right) within the group: numbers 0 … G − 1
    answers: PairAnswers
    fit: RankingFit


def ask_in_rounds(
    asker: PairAsker,
    sets: Sequence[Tensor],
    calls: Sequence[int],
    *,
    method: Method = "active",
    model: Model | None = None,
) -> list[Comparisons]:
    """Ask about several groups of image numbers at once, in rounds of at most ⌊G/2⌋ calls each, for large batches."""
    pairs = [torch.zeros(0, 2, dtype=torch.int64) for _ in sets]
    log_odds = [torch.zeros(0, dtype=torch.float64) for _ in sets]
    reasons: list[list[str | None]] = [[] for _ in sets]
    is_done = [False] * len(sets)
    both_orders = not with_capabilities(asker.judge).capabilities.both_orders
    while True:
        round_pairs = []
        for group, members in enumerate(sets):
            left = min(calls[group] - len(pairs[group]), max(len(members) // 2, 1))
            chosen = pairs[group][:0]
            if left > 0 and not is_done[group]:
                fit = _fit(pairs[group], log_odds[group], len(members), model)
                chosen = next_pairs(fit, pairs[group], left, method=method, both_orders=both_orders)
            is_done[group] = not len(chosen)
            round_pairs.append(chosen)
        if all(is_done):
            break
        answers = asker.ask(torch.cat([members[chosen] for members, chosen in zip(sets, round_pairs, strict=True)]))
        start = 0
        for group, chosen in enumerate(round_pairs):
            end = start + len(chosen)
            pairs[group] = torch.cat([pairs[group], chosen])
            log_odds[group] = torch.cat([log_odds[group], answers.log_odds[start:end]])
            reasons[group] += answers.reasons[start:end]
            start = end
    fits = [_fit(pairs[group], log_odds[group], len(members), model) for group, members in enumerate(sets)]
    return [Comparisons(pairs[g], PairAnswers(log_odds[g], reasons[g]), fit) for g, fit in enumerate(fits)]


def _fit(pairs: Tensor, log_odds: Tensor, size: int, model: Model | None) -> RankingFit:
    prob = PairAnswers(log_odds, []).prob
    if model is None:
        valid = prob[torch.isfinite(prob)]
        is_graded = bool((torch.minimum((valid - 0.5).abs(), valid.minimum(1 - valid)) > GRADED).any())
        model = "log_odds" if is_graded else "bradley_terry"
    return fit_ranking(pairs, prob, size, model=model)


def _order(score: Tensor) -> list[int]:
    """Return the numbers of the judged images, best first; equal scores keep their order."""
    best = torch.where(score.isnan(), -torch.inf, score).argsort(descending=True, stable=True).tolist()
    return [row for row in best if not math.isnan(float(score[row]))]
