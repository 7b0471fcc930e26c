# SPDX-License-Identifier: Apache-2.0
"""RewardDance: a vision-language model's log-odds of "yes" to one question about an image or a pair.

Source: Wu et al., "RewardDance: Reward Scaling in Visual Generation", arXiv 2509.08826; no code is out. The reward is
P("yes") where the answer begins, after one prefill; a reason behind the decision does not change it. Our choices:
log-odds over all spellings of yes and no instead of the probability of one token, which saturates; a pair asked in
both orders; the wording of the questions, which a model folder's `judge.json` replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core import both_orders
from visalign.interfaces import Metadata, Preferences, RewardCapabilities, Scores
from visalign.rewards.base.contract import (
    Request,
    check_choices,
    check_rules,
    read_pairs,
    read_request,
    scatter,
    scatter_scores,
)
from visalign.rewards.vlm.engine import EngineJudge
from visalign.rewards.vlm.requests import Query, askable_rows, check_fields, pair_reasons, requests
from visalign.rewards.vlm.template import Template, question
from visalign.rewards.vlm.yes_no import MIN_MASS, Odds, YesNoReader

Value = Literal["log_odds", "prob"]
UNITS: dict[str, tuple[str, tuple[float, float]]] = {
    "log_odds": ("log-odds of yes", (float("-inf"), float("inf"))),
    "prob": ("probability of yes", (0.0, 1.0)),
}

_ONE = (
    "A text-to-image model made this picture for the caption below.\nCaption: {prompt}{instruction}\n"
    "Judge whether it shows all that the caption asks for, and nothing that contradicts it. "
)
_TWO = (
    "A text-to-image model made both pictures for the caption below. The first one is the reference.\n"
    "Caption: {prompt}{instruction}\nJudge whether the second picture is better than the first. "
)
_WORD, _REASON = "Answer yes or no.", "Answer yes or no first, then give your reasons in a few sentences."
YES_NO = question("yes_no", _ONE + _WORD)
EXPLAIN = question("explain", _ONE + _REASON)
PAIR = question("pair", _TWO + _WORD, images=("", ""))
PAIR_EXPLAIN = question("pair_explain", _TWO + _REASON, images=("", ""))


class _YesNoJudge(EngineJudge):
    """Model, question, and how its answer is read.

    Args:
        instruction: task-specific criteria, filled in for the template's {instruction}.
        decision_first: ask for reasons behind the decision; the score is still read at the decision.
        write_reasons: also generate the reasons, into `text`; needs decision_first.
        yes: spellings of yes instead of the template's, each one token of the model.
        min_mass: smallest probability of yes and no together that counts as an answer.
        options: the judge's own, for the identity.
    """

    name: str
    short_question: Template  # Our question, where the folder has none of its name
    long_question: Template  # Our question with reasons behind the decision

    def __init__(
        self,
        model: Any,
        *,
        instruction: str = "",
        decision_first: bool = False,
        write_reasons: bool = False,
        template: Template | None = None,
        yes: Sequence[str] | None = None,
        no: Sequence[str] | None = None,
        min_mass: float = MIN_MASS,
        max_new_tokens: int = 128,
        options: Mapping[str, Any],
        **loading: Any,
    ) -> None:
        one_word = "write_reasons without decision_first: the question then asks for one word; set both"
        check_rules(self.name, {one_word: decision_first or not write_reasons})
        super().__init__(model, self.long_question if decision_first else self.short_question, template, **loading)
        self._fields = check_fields(self.template, instruction=instruction)
        self._read = YesNoReader(self.engine, self.template, yes=yes, no=no, min_mass=min_mass)
        self._reason_tokens = max_new_tokens if write_reasons else 0
        self.options = {**options, "instruction": instruction, "min_mass": min_mass, **self._read.spellings}
        self.options |= {"reason_tokens": max_new_tokens} if write_reasons else {}  # a cache keeps the text

    def _odds_with_gradient(self, images: Sequence[Sequence[Tensor]], prompts: Sequence[str]) -> Tensor:
        """Compute the log-odds [B] of yes, differentiable in the images of each question; NaN without an answer."""
        rows = askable_rows(self.template, prompts)
        queries = [Query(images=images[row], prompt=prompts[row], fields=self._fields) for row in rows]
        log_odds = torch.full((len(prompts),), torch.nan)
        log_odds[rows] = self._read(queries, gradient=True).log_odds
        return log_odds

    def _write_reasons(self, rows: list[int], size: int, queries: Sequence[Query], odds: Odds) -> list[str] | None:
        """Generate the reasons greedily, decision included; None where they are not asked for."""
        if not self._reason_tokens:
            return None
        text = [""] * size
        decided = [index for index, reason in enumerate(odds.reasons) if reason is None]
        continued = [replace(queries[index], continuation=odds.decision[index]) for index in decided]
        answers = self.engine.generate(
            self.template, continued, answers=1, temperature=0.0, max_new_tokens=self._reason_tokens
        )
        for index, texts in zip(decided, answers.texts, strict=True):
            text[rows[index]] = odds.decision[index] + (texts[0] if texts else "")
        return text


class RewardDance(_YesNoJudge):
    """Log-odds (or probability) that the answer to a yes/no question about one image is yes.

    Parts of the scores: "log_odds", "prob" (σ of it), "mass" (probability of yes and no over the whole vocabulary) and
    "prob_vocabulary" (that of yes alone).

    Args:
        value: "log_odds", or "prob" as in the paper, over yes and no.
        **options: instruction, decision_first, write_reasons, template ("yes_no" or "explain" of the folder), yes, no,
            min_mass, max_new_tokens, and those of `engine_of`.
    """

    name = "reward_dance"
    higher_is_better = True
    short_question, long_question = YES_NO, EXPLAIN

    def __init__(
        self,
        model: Any = "shapes-vlm",
        *,
        value: Value = "log_odds",
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> None:
        check_choices(self.name, value=(value, UNITS))
        self.value, self.unit, self.range = value, *UNITS[value]
        super().__init__(model, device=device, options={"value": value}, **options)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons, self._fields)
        odds = self._read(queries)
        for row, reason in zip(rows, odds.reasons, strict=True):
            reasons[row] = reason
        prob = odds.log_odds.sigmoid()
        columns = {"log_odds": odds.log_odds, "prob": prob, "mass": odds.mass, "prob_vocabulary": prob * odds.mass}
        columns["value"] = columns[self.value]
        text = self._write_reasons(rows, len(request), queries, odds)
        return scatter_scores(columns, rows, reasons, self.unit, text=text)

    def score_with_gradient(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Score images [B, 3, H, W] in [0, 1], differentiably in the pixels: [B] float32, NaN without an answer."""
        log_odds = self._odds_with_gradient([[image] for image in images], prompts)
        return log_odds if self.value == "log_odds" else log_odds.sigmoid()


class RewardDancePairs(_YesNoJudge):
    """Probability that the left of two images is better: the question with a reference, in both orders.

    With ℓ(a, b) the log-odds of yes to "is b better than the reference a", the left image's log-odds are ½ (ℓ(right,
    left) − ℓ(left, right)), so a bias for one position cancels. Parts: "left_second", ℓ(right, left), "left_first",
    −ℓ(left, right), "second_bias", half of their difference, and "mass", the smaller one of both orders.

    Args:
        both_orders: ask in both orders; otherwise once, with the right image as the reference, as the paper.
        **options: as for `RewardDance` (templates "pair" and "pair_explain", the first image is the reference);
            `min_mass` counts in each order, and reasons are written for the order with the left image second.
    """

    name = "reward_dance_pairs"
    short_question, long_question = PAIR, PAIR_EXPLAIN

    def __init__(
        self,
        model: Any = "shapes-pairs",
        *,
        both_orders: bool = True,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> None:
        self.both_orders = both_orders
        self.capabilities = RewardCapabilities(both_orders=both_orders, takes_gpu_images=True)
        super().__init__(model, device=device, options={"both_orders": both_orders}, **options)

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        """Compare B pairs of images; metadata is ignored."""
        return self._compare(*read_pairs(self.name, left, right, prompts, metadata))

    def compare_pairs(
        self, images: Any, pairs: Tensor, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare numbered images: n images with n prompts, pairs [N, 2] (left, right) of one prompt each."""
        return self._compare(read_request(self.name, images, prompts, metadata), pairs.cpu())

    def compare_with_gradient(self, left: Sequence[Tensor], right: Sequence[Tensor], prompts: Sequence[str]) -> Tensor:
        """Compute the log-odds [B] of `compare`, differentiable in the images [3, H, W] that require a gradient."""
        second = self._odds_with_gradient(list(zip(right, left, strict=True)), prompts)
        if not self.both_orders:
            return second
        return (second - self._odds_with_gradient(list(zip(left, right, strict=True)), prompts)) / 2

    def _compare(self, request: Request, pairs: Tensor) -> Preferences:
        size, orders = len(pairs), 1 + self.both_orders
        reasons = pair_reasons(request, pairs, self.template)
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        readable = dict(request.images.readable())
        queries = [
            Query(images=[readable[first], readable[second]], prompt=request.prompts[i], fields=self._fields)
            for i, j in pairs[rows].tolist()
            for first, second in ((j, i), (i, j))[:orders]
        ]
        odds = self._read(queries)
        for index, row in enumerate(rows):
            reasons[row] = next(filter(None, odds.reasons[index * orders : (index + 1) * orders]), None)
        left_second = odds.log_odds[::orders]
        unasked = torch.full_like(left_second, torch.nan)
        right_second = odds.log_odds[1::orders] if self.both_orders else unasked
        log_odds, bias = both_orders(left_second, right_second)
        columns = {
            "left_second": left_second,
            "left_first": -right_second,
            "second_bias": bias,
            "mass": odds.mass.view(-1, orders).amin(1) if rows else odds.mass,
            "value": log_odds if self.both_orders else left_second,
        }
        valid = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
        parts = {k: torch.where(valid, scatter(v, rows, size), torch.nan) for k, v in columns.items()}
        value = parts.pop("value")
        first_order = Odds(left_second, odds.mass[::orders], odds.decision[::orders], odds.reasons[::orders])
        text = self._write_reasons(rows, size, queries[::orders], first_order)
        return Preferences(prob=value.sigmoid(), valid=valid, log_odds=value, parts=parts, text=text, reason=reasons)
