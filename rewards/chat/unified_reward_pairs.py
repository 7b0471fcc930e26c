# SPDX-License-Identifier: Apache-2.0
"""UnifiedReward on pairs: which of two pictures is better, by rank, after thinking, by scores, or as JSON.

Source: Wang et al., UnifiedReward, arXiv 2503.05236; UnifiedReward-Think, arXiv 2505.03318; UnifiedReward-
Flex. Pref-GRPO (arXiv 2508.20751) asks in one order; models prefer a place, so each pair is asked in both
here. The questions ask for the published forms of the answer in our own words; `template` takes the
published ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from visalign.interfaces import Metadata, Preferences
from visalign.rewards.base.contract import Request, RewardError, prompt_problem, read_request
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.verdicts import flex_answer, pair_scores, verdict
from visalign.rewards.vlm.requests import Query
from visalign.rewards.vlm.template import Template

from .asking import ServedJudge, failed
from .messages import Reply, question

_LABELS = ("Image 1:", "Image 2:")
_TASK = (
    "These two pictures were generated from the text caption below. Compare how well they agree with the "
    "caption, how real and detailed they are, and how they look. "
)
_CAPTION = "\n\nText Caption: [{prompt}]"
_SENTENCES = "'Image 1 is better' or 'Image 2 is better'"


def _pair(name: str, text: str) -> Template:
    return question(f"unified_reward_{name}", _TASK + text + _CAPTION, pictures=_LABELS)


TEMPLATES = {
    "rank": _pair("rank", f"Answer with one of these sentences alone: {_SENTENCES}."),
    "think": _pair(
        "think",
        "First compare them between <think> and </think>, dimension by dimension, each with a score from "
        "1 to 10 for both. Then write between <answer> and </answer> one of these sentences alone: "
        f"{_SENTENCES}.",
    ),
    "score": _pair(
        "score",
        "Give each a score from 0 to 1, the two adding up to 1, in this form alone:\n\n"
        "Image 1: X\nImage 2: Y",
    ),
    "flex": _pair(
        "flex",
        "Compare them in the categories semantic alignment, image quality and aesthetics, each with "
        "sub-dimensions of your choice in which the two scores add up to 10. Answer with one JSON object "
        'alone: {"categories": [{"name": "...", "dims": [{"name": "...", "score_1": 0, "score_2": 0}], '
        '"cat_reason": "...", "cat_winner": "Image 1" or "Image 2"}], "reason": "...", "winner": "Image 1" '
        'or "Image 2"}.',
    ),
}
"""Our questions, by mode."""

Mode = Literal["rank", "think", "score", "flex"]


class UnifiedRewardPairs(ServedJudge):
    """Probability that the left of two pictures is better, asked in both orders.

    An answer gives 1, 0, or 0.5 for a tie it states ("score": the score itself; "flex": the blend of overall
    and category winners); the probability is the mean over the answers of both orders, so that a judge which
    only looks at the place gives 0.5. The parts hold "left_first" and "right_first", P(left better) in each
    order, and "position_bias", half their difference: above 0 it favours the first picture.
    """

    name = "unified_reward_pairs"

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        mode: Mode = "rank",
        both_orders: bool = True,
        overall_weight: float = 1.0,
        dim_weight: float = 1.0,
        category_weights: Sequence[float] | None = None,
        **asking: Any,
    ) -> None:
        """Say who is asked, and what.

        Args:
            base_url: see `ServedJudge`.
            model: see `ServedJudge`.
            mode: "rank", "think", "score" or "flex".
            both_orders: ask each pair in both orders; one order is half the calls and holds the
                position bias.
            overall_weight: of Flex's overall winner.
            dim_weight: of the mean over Flex's categories.
            category_weights: of Flex's first categories; 1 for those beyond.
            **asking: of `ServedJudge`, K answers in each order; the template holds two pictures and {prompt},
                an answer 2048 tokens.
        """
        if mode not in TEMPLATES:
            raise RewardError(f"{self.name}: mode is {mode!r}; allowed are {', '.join(TEMPLATES)}.")
        _check_weights(self.name, [overall_weight, dim_weight, *(category_weights or ())])
        super().__init__(base_url, model, **{"default": TEMPLATES[mode], "max_new_tokens": 2048, **asking})
        self.mode, self.both_orders = mode, both_orders
        self._blend: dict[str, Any] = {"overall_weight": overall_weight, "dim_weight": dim_weight}
        self._blend["category_weights"] = tuple(category_weights or ())
        options = {"mode": mode, "both_orders": both_orders, **self.drawing}
        self.identity = self.identified(**options, **(self._blend if mode == "flex" else {}))

    def compare(
        self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare B pairs; metadata is not looked at."""
        first = read_request(self.name, left, prompts, metadata)
        second = read_request(self.name, right, prompts, metadata)
        reasons = _unusable(first, second, self.template)
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        left_images, right_images = dict(first.images.readable()), dict(second.images.readable())
        queries = [
            Query(images=[left_images[row], right_images[row]], prompt=first.prompts[row]) for row in rows
        ]
        if self.both_orders:
            queries += [Query(images=list(query.images)[::-1], prompt=query.prompt) for query in queries]
        found = self.server.ask(self.template, queries, read=self._read, **self.drawing)
        return self._collect(len(first), rows, reasons, found)

    def _read(self, reply: Reply) -> tuple[float, str]:
        """P(first picture better) and the text of one answer."""
        if self.mode == "score":
            return pair_scores(reply.text)[0], reply.text
        if self.mode == "flex":
            return flex_answer(reply.text).preference(**self._blend), reply.text
        return {1: 1.0, 2: 0.0, 0: 0.5}[verdict(reply.text)], reply.text

    def _collect(
        self, size: int, rows: list[int], reasons: list[str | None], found: list[list[Any]]
    ) -> Preferences:
        names = ("prob", "std", "left_first", "right_first", "position_bias")
        columns = {name: torch.full((size,), torch.nan) for name in names}
        text = [""] * size
        for place, row in enumerate(rows):
            orders = found[place :: len(rows)]
            votes: list[list[float]] = []
            for turned, answers in enumerate(orders):
                known = [answer for answer in answers if not isinstance(answer, AnswerError)]
                if len(known) < self.least:
                    where = "the right image first" if turned else "the left image first"
                    reasons[row] = f"with {where}: {failed(answers)}"
                    break
                text[row] = text[row] or known[0][1]
                votes.append([1 - prob if turned else prob for prob, _ in known])
            else:
                for name, value in _summary(votes).items():
                    columns[name][row] = value
        valid = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
        prob, std = columns.pop("prob"), columns.pop("std")
        if not self.both_orders:
            columns = {"left_first": columns["left_first"]}
        return Preferences(
            prob=prob,
            valid=valid,
            std=std if self.answers > 1 else None,
            parts=columns,
            text=[said if reason is None else "" for said, reason in zip(text, reasons, strict=True)],
            reason=reasons,
        )


def _check_weights(name: str, weights: Sequence[float]) -> None:
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or sum(weights[:2]) <= 0:
        raise RewardError(
            f"{name}: the weights are {list(weights)}; allowed are finite numbers from 0, and one of "
            "overall_weight and dim_weight above 0."
        )


def _unusable(first: Request, second: Request, template: Template) -> list[str | None]:
    """Why a pair cannot be asked about."""
    reasons: list[str | None] = []
    for row, prompt in enumerate(first.prompts):
        lost = [
            f"the {side} image: {reason}"
            for side, reason in (("left", first.images.reasons[row]), ("right", second.images.reasons[row]))
            if reason is not None
        ]
        if not lost and "prompt" in template.fields and (empty := prompt_problem(prompt)):
            lost = [empty]
        reasons.append("; ".join(lost) or None)
    return reasons


def _summary(votes: list[list[float]]) -> dict[str, float]:
    """Columns of one pair from its votes in each order: the mean of the orders, and its standard error."""
    means = [math.fsum(order) / len(order) for order in votes]
    spread = [
        torch.tensor(order, dtype=torch.float64).var().item() / len(order)
        for order in votes
        if len(order) > 1
    ]
    found = {"prob": math.fsum(means) / len(means), "left_first": means[0]}
    if len(spread) == len(votes):
        found["std"] = math.sqrt(math.fsum(spread)) / len(votes)
    if len(means) == 2:
        found |= {"right_first": means[1], "position_bias": (means[0] - means[1]) / 2}
    return found
