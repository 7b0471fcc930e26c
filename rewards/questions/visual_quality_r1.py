# SPDX-License-Identifier: Apache-2.0
"""VisualQuality-R1: a vision-language model rates the quality of an image from 1 to 5.

Source: Wu et al., "VisualQuality-R1", NeurIPS 2025, arXiv 2505.14460; checkpoint TianheWu/VisualQuality-R1-7B
(Qwen2.5-VL). Upstream samples one text per image, so that a score differs from call to call, and returns a
random number where the text cannot be read. Here `mode="direct"` is the expectation over the digits that the
model would write, the same each time, and `mode="sampled"` the mean of K seeded answers, without those that
cannot be read. The wording of the questions is ours: to ask a checkpoint in the words that it was trained
with, put them into the `judge.json` of its folder (templates "rating" and "rating_thinking").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core.preference.fidelity import FLOOR
from visalign.interfaces import Metadata, Preferences, Scores
from visalign.rewards.base.contract import Request, RewardError, make_scores, read_request, scatter
from visalign.rewards.base.identity import Identity
from visalign.rewards.pairs.as_pairwise import PairsFromScores
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import quality_score
from visalign.rewards.vlm.engine import engine_of
from visalign.rewards.vlm.requests import requests
from visalign.rewards.vlm.template import Template, question
from visalign.rewards.vlm.yes_no import MIN_MASS

LOW, HIGH = 1.0, 5.0

_ASK = (
    "Rate the overall visual quality of this picture. The rating is a number between 1 and 5 with two "
    "decimal places, where 1 stands for very poor and 5 for excellent quality. "
)


RATING = question(
    "rating",
    _ASK + "Write the rating alone, between <answer> and </answer>.",
    answer_prefix="<answer>",
    words={"scores": tuple("12345"), "digits": tuple("0123456789")},
)
RATING_THINKING = question(
    "rating_thinking",
    _ASK
    + "First think it through between <think> and </think>, then write the rating alone between <answer> "
    "and </answer>.",
)


class VisualQuality:
    """Rating of an image's quality from 1 to 5 with its standard deviation; the prompt is not looked at.

    `std` is the spread of one answer, not the error of their mean, as Thurstone's model takes it.
    Direct: value Σ p·s and std √Σ p·(s − value)² over the ratings s that the model may write next; the parts
    hold "mass", the probability of all scores among everything it may write, "left_over", the rest, and for
    ratings with decimals "digit_mass", the share of what begins as a rating that goes on with digits.
    Sampled: mean and standard deviation (ddof 1) of the answers that can be read; the parts hold "readable",
    their share, and `text` is the first of them.

    `compare` is Thurstone's model: P(left better) = Φ((μ_l − μ_r) / √(σ_l² + σ_r² + γ)).
    """

    name = "visual_quality_r1"
    unit = "rating from 1 to 5"
    range = (LOW, HIGH)
    higher_is_better = True

    def __init__(
        self,
        model: Any = "shapes-vlm",
        *,
        mode: Literal["direct", "sampled"] = "direct",
        thinking: bool = False,
        answers: int = 5,
        seed: int = 0,
        temperature: float = 1.0,
        max_new_tokens: int | None = None,
        template: Template | None = None,
        min_mass: float = MIN_MASS,
        variance_floor: float = FLOOR,
        device: str | torch.device = "cpu",
        precision: str = "auto",
        **loading: Any,
    ) -> None:
        """Load the model and choose how it rates.

        Args:
            model: folder, hub id or packaged name; or a loaded `rewards.vlm.VisionLanguageEngine`.
            mode: "direct" or "sampled".
            thinking: let it think before it rates (template "rating_thinking"); needs "sampled".
            answers: K of each image in "sampled"; 1 gives no standard deviation.
            seed: of the answers; an answer depends on it, on the image and on its number alone.
            temperature: of the answers.
            max_new_tokens: of an answer; 2048 with thinking and 16 without when None.
            template: instead of the folder's, or ours. In "direct" its words "scores" are the whole ratings,
                each one token, and "digits" the ten digits where ratings have two decimal places.
            min_mass: smallest probability of all scores together that counts as a rating ("direct"), and
                smallest "digit_mass".
            variance_floor: γ of the comparison, in squared rating steps.
            device: where the model runs.
            precision: of its weights, as in `engine_of`.
            **loading: of `engine_of`: attention, device_map, quantization, max_tokens_per_batch, ...

        Raises:
            ValueError: options that are not allowed.
            RewardError: the model or its score tokens cannot be used.
        """
        _check(mode, thinking, answers, min_mass, variance_floor)
        self.engine = engine_of(model, self.name, device=device, precision=precision, **loading)
        kind = ("rating_thinking", RATING_THINKING) if thinking else ("rating", RATING)
        self.template = template or self.engine.template(*kind)
        self.mode, self.answers, self.seed, self.temperature = mode, answers, seed, temperature
        self.max_new_tokens = max_new_tokens or (2048 if thinking else 16)
        self.variance_floor, self.min_mass = variance_floor, min_mass
        self._pairs = PairsFromScores(self, link="normal", floor=variance_floor)
        self._digits = RatingDigits(self.engine, self.template, LOW, HIGH) if mode == "direct" else None
        drawn = {"answers": answers, "seed": seed, "temperature": temperature}
        own = {"min_mass": min_mass} if mode == "direct" else {**drawn, "max_new_tokens": self.max_new_tokens}
        self._options: dict[str, Any] = {"mode": mode, "variance_floor": variance_floor, **own}

    @property
    def identity(self) -> Identity:
        """What the scores depend on."""
        return Identity(judge=self.name, **self.engine.identity_fields(self.template, **self._options))

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Rating per image; prompts and metadata are not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        blank = Request(request.images, ["-"] * len(request), request.metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(blank, self.template, reasons)
        found = self._direct(queries) if self._digits is not None else self._sampled(queries)
        size, text = len(request), [""] * len(request)
        columns = {key: scatter(column, rows, size) for key, column in found.columns.items()}
        for row, reason, said in zip(rows, found.reasons, found.texts, strict=True):
            reasons[row], text[row] = reason, said
        value, std = columns.pop("value"), columns.pop("std", None)
        shown = text if any(text) else None
        return make_scores(value, reasons, self.unit, std=std, parts=columns, text=shown)

    def compare(
        self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare B pairs of images."""
        return self._pairs.compare(left, right, prompts, metadata)

    def compare_pairs(
        self, images: Any, pairs: Tensor, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare numbered images, each rated once: n images, pairs [N, 2] (left, right)."""
        return self._pairs.compare_pairs(images, pairs, prompts, metadata)

    def _direct(self, queries: list[Any]) -> Ratings:
        assert self._digits is not None  # only called in that mode
        return self._digits(queries, self.min_mass)

    def _sampled(self, queries: list[Any]) -> Ratings:
        reply = self.engine.generate(
            self.template,
            queries,
            answers=self.answers,
            seed=self.seed,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
        )
        size = len(queries)
        value, std, share = (torch.full((size,), torch.nan) for _ in range(3))
        reasons, texts = list(reply.reasons), [""] * size
        for row, answers in enumerate(reply.texts):
            if reasons[row] is not None:
                continue
            written = [self.template.answer_prefix + answer for answer in answers]
            ratings, why, texts[row] = read_ratings(written)
            share[row] = len(ratings) / len(written)
            if len(ratings) < min(2, self.answers):
                reasons[row] = (
                    f"{len(ratings)} of {len(written)} answers hold a rating from {LOW:g} to {HIGH:g}; of "
                    f"the others the first: {why}"
                )
                continue
            found = torch.tensor(ratings, dtype=torch.float64)
            value[row] = found.mean()
            std[row] = found.std() if len(ratings) > 1 else torch.nan
        columns = {"value": value, "std": std, "readable": share}
        if self.answers == 1:
            del columns["std"]
        return Ratings(columns, texts, reasons)


def read_ratings(answers: Sequence[str]) -> tuple[list[float], str, str]:
    """(ratings that could be read, why the first of the others could not, the first readable text) of a
    judge's answers.
    """
    ratings: list[float] = []
    why, first = "", ""
    for answer in answers:
        try:
            rating = quality_score(answer, low=LOW, high=HIGH)
        except AnswerError as error:
            why = why or str(error)
            continue
        first = first if ratings else answer
        ratings.append(rating)
    return ratings, why, first


def _check(mode: str, thinking: bool, answers: int, min_mass: float, variance_floor: float) -> None:
    name = VisualQuality.name
    if mode not in ("direct", "sampled"):
        raise ValueError(f"{name}: mode is {mode!r}; allowed are 'direct' and 'sampled'.")
    if thinking and mode == "direct":
        raise ValueError(f"{name}: thinking needs mode='sampled': a thought has to be written first.")
    if answers < 1:
        raise ValueError(f"{name}: answers is {answers}; allowed are whole numbers from 1.")
    if not 0 <= min_mass < 1:
        raise ValueError(f"{name}: min_mass is {min_mass}; allowed are probabilities from 0 up to below 1.")
    if not variance_floor > 0:
        raise ValueError(f"{name}: variance_floor is {variance_floor}; allowed are numbers above 0.")


@dataclass(frozen=True)
class Ratings:
    """Ratings of B images; NaN where there is a reason."""

    columns: dict[str, Tensor]
    """[B] float32 each: "value", "std" where there is one, and what a score reports beside them."""
    texts: list[str]
    """What was written, or ""."""
    reasons: list[str | None]
    """Why an image has no rating."""


class RatingDigits:
    """Ratings as expectations over the digits that a model would write: no sampling, a variance for free.

    Where ratings have two decimal places, the whole number is read first, then the tenths behind each whole
    number, then the hundredths behind each tenth: P(s.dt) = P(s) P(d | "s.") P(t | "s.d"), each over its own
    set of tokens. The largest rating has no decimals beside ".00". All continuations share the image and
    the question, so that one costs two or three tokens.

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
        """Rate B images. `min_mass` is the smallest probability of all scores together that counts as a
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
