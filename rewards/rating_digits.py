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

from .contract import RewardError
from .vlm_template import Template


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
        engine: `rewards.vlm.VisionLanguageJudge`.
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
        self._score_ids = _ids(engine, words)
        self._digit_ids = _ids(engine, digits) if digits else []

    def __call__(self, asks: Sequence[Any], min_mass: float) -> Ratings:
        """Rate B pictures.

        Args:
            asks: `rewards.vlm.Ask` each.
            min_mass: smallest probability of all scores together that counts as a rating.
        """
        if not asks:
            none = torch.zeros(0)
            return Ratings({"value": none, "std": none, "mass": none, "left_over": none}, [], [])
        reply = self.engine.answer_logits(self.template, asks, self._score_ids, left_over=True)
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
        mean = torch.full((len(asks),), torch.nan, dtype=torch.float64)
        std = mean.clone()
        if rows:
            value, prob = self._leaves([asks[row] for row in rows], logits[rows].softmax(-1))
            mean[rows] = (prob * value).sum(-1)
            std[rows] = (prob * (value - mean[rows, None]).square()).sum(-1).sqrt()
        columns = {"value": mean, "std": std, "mass": mass, "left_over": 1 - mass}
        return Ratings({k: v.float() for k, v in columns.items()}, [""] * len(asks), reasons)

    def _leaves(self, asks: list[Any], prob: Tensor) -> tuple[Tensor, Tensor]:
        """(ratings [L], their probabilities [b, L]) that sum to 1."""
        values = torch.tensor(self.values, dtype=torch.float64)
        if not self._digit_ids:
            return values, prob
        whole = [n for n, value in enumerate(self.values) if value < self.high]
        top = [n for n, value in enumerate(self.values) if value >= self.high]
        tenths = self._digits(asks, [f"{self._words[n]}." for n in whole])
        stems = [f"{self._words[n]}.{digit}" for n in whole for digit in range(10)]
        hundredths = self._digits(asks, stems)
        both = (prob[:, whole, None] * tenths).flatten(1)[..., None] * hundredths
        steps = torch.arange(100, dtype=torch.float64) / 100
        fine = (values[whole][:, None] + steps).flatten()
        return torch.cat([fine, values[top]]), torch.cat([both.flatten(1), prob[:, top]], 1)

    def _digits(self, asks: list[Any], stems: list[str]) -> Tensor:
        """[b, stems, 10] probabilities of the next digit behind each stem."""
        asked = [replace(ask, continuation=stem) for ask in asks for stem in stems]
        reply = self.engine.answer_logits(self.template, asked, self._digit_ids)
        broken = next(filter(None, reply.reasons), None)
        if broken is not None:
            raise RewardError(f"A rating's digits could not be read: {broken}.")
        return reply.logits.double().cpu().view(len(asks), len(stems), 10).softmax(-1)


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
