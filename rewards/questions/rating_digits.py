# SPDX-License-Identifier: Apache-2.0
"""The expectation of a rating over the digits that a model would write: no sampling, and a variance for free.

Where ratings have two decimal places, the whole number is read first, then the tenths behind each whole
number, then the hundredths behind each tenth: P(s.dt) = P(s) P(d | "s.") P(t | "s.d"), each over its own set
of tokens. The largest rating has no decimals beside ".00". All continuations share the picture and the
question, so that one costs two or three tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from visalign.rewards.base.contract import RewardError
from visalign.rewards.vlm.template import Template


@dataclass(frozen=True)
class Ratings:
    """Ratings of B pictures; NaN where there is a reason."""

    columns: dict[str, Tensor]
    """[B] float32 each: "value", "std" where there is one, and what a score reports beside them."""
    texts: list[str]
    """What was written, or ""."""
    reasons: list[str | None]
    """Why a picture has no rating."""


class RatingDigits:
    """Reads ratings off the next tokens' probabilities.

    Args:
        engine: `rewards.vlm.VisionLanguageEngine`.
        template: ends where the rating begins; its words "scores" are whole ratings, "digits" the digits 0
            to 9 in order, where ratings have two decimal places.
        low: smallest rating.
        high: largest rating.

    Raises:
        ValueError: no scores, scores that are no numbers in [low, high], or digits that are not 0 to 9.
        RewardError: a score or digit that is not one token of the model.
    """

    def __init__(self, engine: Any, template: Template, low: float, high: float) -> None:
        words = tuple(template.words.get("scores", ()))
        digits = tuple(template.words.get("digits", ()))
        self.values = [_number(word, low, high, template.name) for word in words]
        if not words or len(set(self.values)) != len(words):
            raise ValueError(
                f"The template {template.name!r} has the scores {list(words)}; needed are different numbers "
                f'from {low:g} to {high:g}: "scores": ["1", "2", ...].'
            )
        if digits and digits != tuple("0123456789"):
            raise ValueError(
                f"The digits of template {template.name!r} are {list(digits)}; needed are '0' to '9' in "
                "order."
            )
        self.engine, self.template, self.high = engine, template, high
        self._words = words
        more = ("digit_mass",) if digits else ()
        self._names = ("value", "std", "mass", "left_over", *more)
        self._score_ids = _ids(engine, words)
        self._digit_ids = _ids(engine, digits) if digits else []

    def __call__(self, queries: Sequence[Any], min_mass: float) -> Ratings:
        """Rate B pictures. `min_mass` is the smallest probability of all scores together that counts as a
        rating; of what begins as one also the smallest share that goes on with digits.
        """
        if not queries:
            none = torch.zeros(0)
            return Ratings(dict.fromkeys(self._names, none), [], [])
        reply = self.engine.answer_logits(self.template, queries, self._score_ids, left_over=True)
        logits = reply.logits.double().cpu()
        mass = (logits.logsumexp(-1) - reply.log_total.double().cpu()).exp().clamp(max=1.0)
        reasons = list(reply.reasons)
        for row, share in enumerate(mass.tolist()):
            if reasons[row] is None and not share >= min_mass:
                reasons[row] = (
                    f"the model writes no rating: scores have {share:.2g} of the probability, and at least "
                    f"{min_mass:g} is asked for"
                )
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        mean = torch.full((len(queries),), torch.nan, dtype=torch.float64)
        std, whole = mean.clone(), mean.clone()
        if rows:
            value, prob, whole[rows] = self._leaves([queries[row] for row in rows], logits[rows].softmax(-1))
            mean[rows] = (prob * value).sum(-1)
            std[rows] = (prob * (value - mean[rows, None]).square()).sum(-1).sqrt()
        for row in rows:
            share = float(whole[row].nan_to_num(0.0))
            if not share >= min_mass or not math.isfinite(float(mean[row])):
                reasons[row] = (
                    "the model writes no digits behind the point of its rating: complete ratings have "
                    f"{share:.2g} of the probability of all that begin as one, and at least {min_mass:g} is "
                    "asked for"
                )
                mean[row] = std[row] = torch.nan
        columns = {"value": mean, "std": std, "mass": mass, "left_over": 1 - mass, "digit_mass": whole}
        return Ratings({k: columns[k].float() for k in self._names}, [""] * len(queries), reasons)

    def _leaves(self, queries: list[Any], prob: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(ratings [L], their probabilities [b, L] that sum to 1, what complete ratings have of all [b])."""
        values = torch.tensor(self.values, dtype=torch.float64)
        if not self._digit_ids:
            return values, prob, torch.ones(len(prob), dtype=torch.float64)
        whole = [n for n, value in enumerate(self.values) if value < self.high]
        top = [n for n, value in enumerate(self.values) if value >= self.high]
        tenths, tenths_mass = self._digits(queries, [f"{self._words[n]}." for n in whole])
        stems = [f"{self._words[n]}.{digit}" for n in whole for digit in range(10)]
        hundredths, hundredths_mass = self._digits(queries, stems)
        first = (prob[:, whole, None] * tenths).flatten(1)
        both = first[..., None] * hundredths
        steps = torch.arange(100, dtype=torch.float64) / 100
        fine = (values[whole][:, None] + steps).flatten()
        share = tenths_mass.repeat_interleave(10, 1) * hundredths_mass
        complete = (first * share).sum(1) + prob[:, top].sum(1)
        return torch.cat([fine, values[top]]), torch.cat([both.flatten(1), prob[:, top]], 1), complete

    def _digits(self, queries: list[Any], stems: list[str]) -> tuple[Tensor, Tensor]:
        """Behind each stem: ([b, stems, 10] shares of the digits, [b, stems] probability of any digit)."""
        asked = [replace(query, continuation=stem) for query in queries for stem in stems]
        reply = self.engine.answer_logits(self.template, asked, self._digit_ids, left_over=True)
        broken = next(filter(None, reply.reasons), None)
        if broken is not None:
            raise RewardError(f"A rating's digits could not be read: {broken}.")
        logits = reply.logits.double().cpu().view(len(queries), len(stems), 10)
        total = reply.log_total.double().cpu().view(len(queries), len(stems))
        return logits.softmax(-1), (logits.logsumexp(-1) - total).exp().clamp(max=1.0)


def _number(word: str, low: float, high: float, name: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ValueError(f"The score {word!r} of template {name!r} is no number from {low:g} to {high:g}.")
    return value


def _ids(engine: Any, words: Sequence[str]) -> list[int]:
    ids = list(engine.token_ids(list(words)))
    if len(ids) != len(words):
        raise RewardError(f"Two of the words {list(words)} are one token of this model; give different ones.")
    return ids
