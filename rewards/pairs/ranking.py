# SPDX-License-Identifier: Apache-2.0
"""`rank`: the images of one prompt in order, with intervals; a pairwise judge is asked on a budget."""

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
from visalign.interfaces import PairwiseReward, PointwiseReward, Scores, with_capabilities
from visalign.rewards.base.contract import Request, RewardError, read_request
from visalign.rewards.base.failure import Naming, failure_reasons
from visalign.rewards.base.images import as_contract

from .asking import PairAnswers, PairAsker, distinct_images

BUDGET = 0.3
"""Share of the n(n − 1)/2 pairs that `rank` asks a pairwise judge about, as single calls."""
UNITS = {
    "bradley_terry": "Bradley-Terry logits",
    "thurstone": "standard normal units",
    "log_odds": "log-odds",
}
GRADED = 1e-3
"""A probability farther than this from 0, 1/2 and 1 shows that a judge grades its answers."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """n images of one prompt in order."""

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
    """Of score, low and high."""
    valid: Tensor
    """[n] bool."""
    reason: list[str | None]
    """Why an image is not judged."""
    calls: int
    """Comparisons, or images scored."""
    bias: float | None = None
    """What standing on the left is worth, in `unit`; None for a pointwise judge."""
    bias_std: float | None = None
    """Its standard deviation."""
    pairs: Tensor | None = None
    """[N, 2] image numbers (left, right) of every call as it was made; None for a pointwise judge."""
    answers: PairAnswers | None = None
    """What the judge said of them; of equal images the first stands for all."""


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
    """Order the images of one prompt.

    A pointwise judge (one with `score`) orders by its mean, with mean ± z std as interval. A pairwise judge
    (`compare` alone) is asked in rounds of at most n/2 calls (`visalign.core.preference.pairing`), and the
    scores, the position bias and the intervals come from one fit (`visalign.core.preference.ranking`); a
    failed call counts as a call and says nothing. A judge that offers both is asked for scores; wrap it to
    have it compare.

    Args:
        images: n images in any accepted form.
        prompt: the prompt of all of them.
        judge: the judge.
        metadata: the prompt's record.
        budget: calls as a share of n(n − 1)/2, in (0, 2]: 2 is every pair in both orders. At least n − 1
            calls are made, without which there is no order.
        level: of the intervals, in (0, 1).
        method: "active" or "swiss".
        model: of the fit; None takes "log_odds" for a judge that answers in probabilities, and
            "bradley_terry" for one that says only which.

    Returns:
        The ranking; equal images share one place in the fit and keep their order.

    Raises:
        ValueError: budget or level out of range.
        TypeError: `judge` has neither `score` nor `compare`.
        RewardError: the judge raised, or returned the wrong number of answers.
    """
    if not 0 < budget <= 2:
        raise ValueError(f"budget is {budget}; allowed are shares of n(n − 1)/2 in (0, 2].")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; allowed are probabilities between 0 and 1, e.g. 0.9.")
    if not isinstance(judge, PointwiseReward | PairwiseReward):
        raise TypeError(
            f"{type(judge).__name__} has neither score nor compare, so it is no judge; see "
            "visalign.interfaces.PointwiseReward and PairwiseReward."
        )
    request = read_request(judge.name, images, [prompt] * len(images), [metadata] * len(images))
    if isinstance(judge, PointwiseReward):
        return _rank_scores(judge, request, level)
    return _rank_pairs(judge, request, budget=budget, level=level, method=method, model=model)


def _rank_scores(judge: PointwiseReward, request: Request, level: float) -> Ranking:
    found = request.images.readable()
    score = torch.full((len(request),), torch.nan)
    low, high, reasons = score.clone(), score.clone(), list(request.images.reasons)
    if found:
        rows = torch.tensor([row for row, _ in found])
        texts = [request.prompts[row] for row, _ in found]
        records = [request.metadata[row] for row, _ in found]
        with Naming(judge.name):
            scores = judge.score(as_contract([image for _, image in found]), texts, records)
        if not isinstance(scores, Scores) or len(scores) != len(found):
            raise RewardError(f"Reward {judge.name!r} did not return one score for each image.")
        score[rows] = torch.where(scores.valid, scores.value, torch.nan).detach().cpu()
        if scores.std is not None:
            z = float(torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=torch.float64)))
            low[rows], high[rows] = (score[rows] + sign * z * scores.std.detach().cpu() for sign in (-1, 1))
        for (row, _), reason in zip(found, failure_reasons(scores), strict=True):
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
        calls=len(found),
    )


def _rank_pairs(
    judge: PairwiseReward,
    request: Request,
    *,
    budget: float,
    level: float,
    method: Method,
    model: Model | None,
) -> Ranking:
    found = request.images.readable()
    score, low, high = (torch.full((len(request),), torch.nan) for _ in range(3))
    reasons = list(request.images.reasons)
    ranking = partial(Ranking, score=score, low=low, high=high, level=level, reason=reasons)
    if not found:
        no_pairs = torch.zeros(0, 2, dtype=torch.long)
        unit = UNITS[model or "bradley_terry"]
        return ranking(order=[], unit=unit, valid=~torch.isnan(score), calls=0, pairs=no_pairs)
    first, index = distinct_images([image for _, image in found], [0] * len(found))
    chosen = [found[i] for i in first]
    asker = PairAsker(
        judge,
        [image for _, image in chosen],
        [request.prompts[row] for row, _ in chosen],
        [request.metadata[row] for row, _ in chosen],
    )
    count = max(calls_of(len(first), budget), len(first) - 1)
    (asked,) = ask_in_rounds(asker, [torch.arange(len(first))], [count], method=method, model=model)
    known = torch.zeros(len(first), dtype=torch.bool)
    known[asked.pairs[torch.isfinite(asked.answers.log_odds)].flatten()] = True
    ends = (asked.fit.score, *asked.fit.interval(level))
    for (row, _), number in zip(found, index, strict=True):
        if not known[number]:
            reasons[row] = _why_missing(asked, number)
            continue
        for target, source in zip((score, low, high), ends, strict=True):
            target[row] = source[number]
    return ranking(
        order=_order(score),
        unit=UNITS[asked.fit.model],
        valid=~torch.isnan(score),
        calls=asker.calls,
        bias=asked.fit.bias,
        bias_std=asked.fit.bias_std,
        pairs=torch.tensor([found[i][0] for i in first])[asked.pairs],
        answers=asked.answers,
    )


def _why_missing(asked: Comparisons, number: int) -> str:
    """The first reason that a call about this image gave."""
    own = (asked.pairs == number).any(1).nonzero().flatten().tolist()
    said = [asked.answers.reasons[call] for call in own]
    return next(filter(None, said), "there is no other image to compare it with")


def calls_of(size: int, budget: float) -> int:
    """Calls that a budget allows for a group of `size`: ⌊budget · n(n − 1)/2⌋, at least 1 for a pair."""
    pairs = size * (size - 1) // 2
    return min(max(math.floor(budget * pairs + 1e-9), min(1, pairs)), 2 * pairs)


@dataclass(frozen=True)
class Comparisons:
    """One group's comparisons and what they say."""

    pairs: Tensor
    """[N, 2] (left, right) within the group: numbers 0 … G − 1."""
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
    """Ask about several groups at once, in rounds of at most ⌊G/2⌋ calls each, so that a judge sees large
    batches. `sets` are the image numbers of each group, `calls` the most calls for each; one entry per
    group comes back.
    """
    pairs = [torch.zeros(0, 2, dtype=torch.int64) for _ in sets]
    odds = [torch.zeros(0, dtype=torch.float64) for _ in sets]
    reasons: list[list[str | None]] = [[] for _ in sets]
    is_done = [False] * len(sets)
    both = not with_capabilities(asker.judge).capabilities.both_orders
    while True:
        new = []
        for at, members in enumerate(sets):
            left = min(calls[at] - len(pairs[at]), max(len(members) // 2, 1))
            chosen = pairs[at][:0]
            if left > 0 and not is_done[at]:
                fit = _fit(pairs[at], odds[at], len(members), model)
                chosen = next_pairs(fit, pairs[at], left, method=method, both_orders=both)
            is_done[at] = not len(chosen)
            new.append(chosen)
        if all(is_done):
            break
        answers = asker.ask(torch.cat([members[pick] for members, pick in zip(sets, new, strict=True)]))
        start = 0
        for at, chosen in enumerate(new):
            end = start + len(chosen)
            pairs[at] = torch.cat([pairs[at], chosen])
            odds[at] = torch.cat([odds[at], answers.log_odds[start:end]])
            reasons[at] += answers.reasons[start:end]
            start = end
    return [
        Comparisons(
            pairs[at], PairAnswers(odds[at], reasons[at]), _fit(pairs[at], odds[at], len(members), model)
        )
        for at, members in enumerate(sets)
    ]


def _fit(pairs: Tensor, odds: Tensor, size: int, model: Model | None) -> RankingFit:
    """The fit of the answers so far."""
    prob = PairAnswers(odds, []).prob
    if model is None:
        known = prob[torch.isfinite(prob)]
        is_graded = bool((torch.minimum((known - 0.5).abs(), known.minimum(1 - known)) > GRADED).any())
        model = "log_odds" if is_graded else "bradley_terry"
    return fit_ranking(pairs, prob, size, model=model)


def _order(score: Tensor) -> list[int]:
    """Numbers of the judged, best first; equal scores keep their order."""
    best = torch.where(score.isnan(), -torch.inf, score).argsort(descending=True, stable=True).tolist()
    return [row for row in best if not math.isnan(float(score[row]))]
