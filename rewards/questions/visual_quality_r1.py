# SPDX-License-Identifier: Apache-2.0
"""VisualQuality-R1: a vision-language model rates the quality of an image from 1 to 5.

Source: Wu et al., "VisualQuality-R1", NeurIPS 2025, arXiv 2505.14460; checkpoint TianheWu/VisualQuality-R1-7B
(Qwen2.5-VL). Upstream samples one text per image and returns a random number where it cannot be read. Here
`mode="direct"` is the expectation over the digits that the model would write, and `mode="sampled"` the mean of K
seeded answers, without the unreadable ones. Both questions are the published ones; the `judge.json` of a folder
replaces them (templates "rating" and "rating_thinking").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core.preference.fidelity import FLOOR
from visalign.interfaces import Metadata, Preferences, RewardCapabilities, Scores
from visalign.rewards.base.contract import RewardError, check_choices, check_rules, read_request, scatter_scores
from visalign.rewards.pairs.as_pairwise import PairsFromScores
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import quality_score
from visalign.rewards.vlm.engine import EngineJudge
from visalign.rewards.vlm.generation import check_drawing
from visalign.rewards.vlm.published import published_prompt
from visalign.rewards.vlm.requests import Query, requests
from visalign.rewards.vlm.template import Template, question
from visalign.rewards.vlm.yes_no import MIN_MASS

from .q_align import moments

LOW, HIGH = 1.0, 5.0
Ratings = tuple[dict[str, Tensor], list[str], list[str | None]]
"""(columns [B] float32: "value", "std" if there is one, and parts; readable texts; reasons) of B images."""

_ASK = published_prompt("visual_quality_r1")
_CHAT = {"add_vision_id": True}
RATING = question(
    "rating",
    f"{_ASK} Output the final answer with only one score in <answer> </answer> tags.",
    answer_prefix="<answer>",
    chat=_CHAT,
    words={"scores": tuple("12345"), "digits": tuple("0123456789")},
)
RATING_THINKING = question(
    "rating_thinking",
    f"{_ASK} First output the thinking process in <think> </think> tags and then output the final answer with "
    "only one score in <answer> </answer> tags.",
    chat=_CHAT,
)


class VisualQuality(EngineJudge):
    """Rating of an image's quality from 1 to 5 with its standard deviation; the prompt is ignored.

    `std` is the spread of one answer, as in Thurstone's model, which `compare` is: P(left better) = Φ((μ_l − μ_r) /
    √(σ_l² + σ_r² + γ)). Direct: value Σ p·s and std √Σ p·(s − value)² over the ratings s that the model may write
    next; the parts hold "mass", the probability of all scores among everything it may write, "left_over", the rest,
    and for ratings with decimals "digit_mass", the share of what begins as a rating that goes on with digits. Sampled:
    mean and standard deviation (ddof 1) of the readable answers; the part "readable" is their share, and `text` the
    first of them.

    Args:
        thinking: let it think before it rates (template "rating_thinking"); needs "sampled".
        answers: K of each image in "sampled"; 1 gives no standard deviation.
        max_new_tokens: of an answer; 2048 with thinking and 16 without when None.
        template: replaces the folder's, or ours. In "direct" its words "scores" are the whole ratings, each one token,
            and "digits" the ten digits where ratings have two decimal places.
        min_mass: smallest probability of all scores together that counts as a rating ("direct"), and smallest
            "digit_mass".
    """

    name = "visual_quality_r1"
    unit = "rating from 1 to 5"
    range = (LOW, HIGH)
    higher_is_better = True
    capabilities = RewardCapabilities(needs_prompt=False)

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
        device: str | torch.device = "cpu",
        **loading: Any,
    ) -> None:
        max_new_tokens = (2048 if thinking else 16) if max_new_tokens is None else max_new_tokens
        check_drawing(answers, temperature, max_new_tokens)
        check_choices(self.name, mode=(mode, ("direct", "sampled")))
        rules = {
            "thinking needs mode='sampled': a thought is written first": not thinking or mode == "sampled",
            f"min_mass is {min_mass}; allowed are probabilities below 1": 0 <= min_mass < 1,
        }
        check_rules(self.name, rules)
        super().__init__(model, RATING_THINKING if thinking else RATING, template, device=device, **loading)
        self.answers = answers
        self._digits = RatingDigits(self.engine, self.template, min_mass) if mode == "direct" else None
        self._pairs = PairsFromScores(self, link="normal", floor=FLOOR)
        self._sampling = {"answers": answers, "seed": seed, "temperature": temperature}
        self._sampling["max_new_tokens"] = max_new_tokens
        options = {"min_mass": min_mass} if mode == "direct" else self._sampling
        self.options = {"mode": mode, "variance_floor": FLOOR, **options}

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        size = len(request)
        reasons, texts = list(request.images.reasons), [""] * size
        rows, queries = requests(replace(request, prompts=["-"] * size), self.template, reasons)
        columns, row_texts, row_reasons = (self._digits or self._sample)(queries)
        for row, reason, text in zip(rows, row_reasons, row_texts, strict=True):
            reasons[row], texts[row] = reason, text
        return scatter_scores(columns, rows, reasons, self.unit, text=texts if any(texts) else None)

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        """Compare B pairs of images by Thurstone's model."""
        return self._pairs.compare(left, right, prompts, metadata)

    def compare_pairs(
        self, images: Any, pairs: Tensor, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare numbered images, each rated once: n images, pairs [N, 2] (left, right)."""
        return self._pairs.compare_pairs(images, pairs, prompts, metadata)

    def _sample(self, queries: list[Query]) -> Ratings:
        generated = self.engine.generate(self.template, queries, **self._sampling)
        value, std, readable = (torch.full((len(queries),), torch.nan) for _ in range(3))
        reasons, texts = list(generated.reasons), [""] * len(queries)
        for row, answers in enumerate(generated.texts):
            if reasons[row] is not None:
                continue
            ratings: list[float] = []
            failure = ""
            for answer in (self.template.answer_prefix + answer for answer in answers):
                try:
                    ratings.append(quality_score(answer))
                    texts[row] = texts[row] or answer
                except AnswerError as error:
                    failure = failure or str(error)
            readable[row] = len(ratings) / len(answers)
            if len(ratings) < min(2, self.answers):
                count = f"{len(ratings)} of {len(answers)} answers hold a rating from {LOW:g} to {HIGH:g}"
                reasons[row] = f"{count}; of the others the first: {failure}"
                continue
            rating = torch.tensor(ratings, dtype=torch.float64)
            value[row], std[row] = rating.mean(), rating.std() if len(ratings) > 1 else torch.nan
        columns = {"value": value, "readable": readable}
        return columns if self.answers == 1 else {**columns, "std": std}, texts, reasons


class RatingDigits:
    """Ratings as expectations over the digits that a model would write: no sampling, and a variance.

    Where ratings have two decimal places, the whole number is read first, then the tenths behind each whole number,
    then the hundredths behind each tenth: P(s.dt) = P(s) P(d | "s.") P(t | "s.d"), each over its own set of tokens.
    The largest rating has no decimals but ".00". All continuations share the image and the question, so that each
    costs two or three tokens. The options are those of `VisualQuality`.
    """

    def __init__(self, engine: Any, template: Template, min_mass: float) -> None:
        self._scores = tuple(template.words.get("scores", ()))
        digits = tuple(template.words.get("digits", ()))
        try:
            self.values = [float(word) for word in self._scores]
        except ValueError:
            self.values = []
        is_on_scale = all(LOW <= value <= HIGH for value in self.values)
        is_different = len(set(self.values)) == len(self._scores) > 0
        if not is_on_scale or not is_different or digits not in ((), tuple("0123456789")):
            raise ValueError(
                f"The template {template.name!r} has the scores {list(self._scores)} and digits "
                f"{list(digits)}; needed are different numbers from {LOW:g} to {HIGH:g}: "
                '"scores": ["1", "2", ...], and no digits or "0" to "9".'
            )
        self.engine, self.template, self.min_mass = engine, template, min_mass
        self._columns = ("value", "std", "mass", "left_over", *(("digit_mass",) if digits else ()))
        self._score_ids = _token_ids(engine, self._scores)
        self._digit_ids = _token_ids(engine, digits) if digits else []

    def __call__(self, queries: Sequence[Query]) -> Ratings:
        if not queries:
            return dict.fromkeys(self._columns, torch.zeros(0)), [], []
        answer = self.engine.answer_logits(self.template, queries, self._score_ids, left_over=True)
        mass, reasons = answer.mass, list(answer.reasons)
        for row, row_mass in enumerate(mass.tolist()):
            if reasons[row] is None and not row_mass >= self.min_mass:
                share = f"{row_mass:.2g} of the probability, and min_mass is {self.min_mass:g}"
                reasons[row] = f"the model writes no rating: scores have {share}"
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        mean = torch.full((len(queries),), torch.nan, dtype=torch.float64)
        std, digit_mass = mean.clone(), mean.clone()
        if rows:
            prob = answer.logits[rows].double().softmax(-1)
            values, prob, digit_mass[rows] = self._distribution([queries[row] for row in rows], prob)
            mean[rows], std[rows] = moments(prob, values)
        for row in rows:
            row_mass = float(digit_mass[row].nan_to_num(0.0))
            if not row_mass >= self.min_mass or not math.isfinite(float(mean[row])):
                share = f"{row_mass:.2g} of those begun are complete, and min_mass is {self.min_mass:g}"
                reasons[row] = f"the model writes no digits behind the point of its rating: {share}"
                mean[row] = std[row] = torch.nan
        columns = {"value": mean, "std": std, "mass": mass, "left_over": 1 - mass, "digit_mass": digit_mass}
        return {key: columns[key].float() for key in self._columns}, [""] * len(queries), reasons

    def _distribution(self, queries: list[Query], prob: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the probabilities of whole numbers [b, scores] by their decimals.

        The result is (ratings [L], their probabilities [b, L] that sum to 1, probability of complete ratings [b]).
        """
        values = torch.tensor(self.values, dtype=torch.float64)
        if not self._digit_ids:
            return values, prob, torch.ones(len(prob), dtype=torch.float64)
        integers = [n for n, value in enumerate(self.values) if value < HIGH]
        top = [n for n, value in enumerate(self.values) if value >= HIGH]
        tenths, tenths_mass = self._next_digits(queries, [f"{self._scores[n]}." for n in integers])
        stems = [f"{self._scores[n]}.{digit}" for n in integers for digit in range(10)]
        hundredths, hundredths_mass = self._next_digits(queries, stems)
        to_tenths = (prob[:, integers, None] * tenths).flatten(1)  # P(s) P(d | "s.")
        to_hundredths = to_tenths[..., None] * hundredths
        ratings = (values[integers][:, None] + torch.arange(100, dtype=torch.float64) / 100).flatten()
        digit_mass = tenths_mass.repeat_interleave(10, 1) * hundredths_mass
        complete = (to_tenths * digit_mass).sum(1) + prob[:, top].sum(1)
        all_prob = torch.cat([to_hundredths.flatten(1), prob[:, top]], 1)
        return torch.cat([ratings, values[top]]), all_prob, complete

    def _next_digits(self, queries: list[Query], stems: list[str]) -> tuple[Tensor, Tensor]:
        """Behind each stem: ([b, stems, 10] shares of the digits, [b, stems] probability of any digit)."""
        continued = [replace(query, continuation=stem) for query in queries for stem in stems]
        answer = self.engine.answer_logits(self.template, continued, self._digit_ids, left_over=True)
        failure = next(filter(None, answer.reasons), None)
        if failure is not None:
            raise RewardError(f"A rating's digits could not be read: {failure}.")
        shape = (len(queries), len(stems))
        return answer.logits.double().softmax(-1).view(*shape, 10), answer.mass.view(shape)


def _token_ids(engine: Any, words: Sequence[str]) -> list[int]:
    ids = list(engine.token_ids(list(words)))
    if len(ids) != len(words):
        raise RewardError(f"Two of the words {list(words)} are one token of this model; give different ones.")
    return ids
