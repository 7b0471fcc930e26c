# SPDX-License-Identifier: Apache-2.0
"""UnifiedReward on pairs: which of two images is better, by rank, after thinking, by scores, or as JSON.

Source: Wang et al., UnifiedReward, arXiv 2503.05236, and its version 2.0; UnifiedReward-Think, arXiv
2505.03318; UnifiedReward-Flex, arXiv 2602.02380; UnifiedReward-Edit. Pref-GRPO (arXiv 2508.20751) asks in one
order; models prefer a place, so each pair is asked in both here. The questions are those that the checkpoints
were trained with (`published_wording`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from visalign.interfaces import Metadata, Preferences, RewardCapabilities
from visalign.rewards.base.contract import Request, RewardError, prompt_problem, read_request
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import ASPECTS
from visalign.rewards.reading.verdicts import aspect_pair_scores, flex_answer, pair_scores, verdict
from visalign.rewards.vlm.requests import Query, source_images
from visalign.rewards.vlm.template import Template

from .asking import ServedJudge, failed
from .messages import Reply, question
from .published_wording import PUBLISHED

Mode = Literal["rank", "think", "think_qwen3", "score", "flex", "edit_rank"]


class UnifiedRewardPairs(ServedJudge):
    """Probability that the left of two images is better, asked in both orders.

    Modes: "rank", "think" and "think_qwen3" (UnifiedReward-Think on Qwen2.5-VL and on Qwen3-VL), "score",
    "flex", and "edit_rank" for two edits of the record's "source" after the prompt, their instruction. An
    answer gives 1, 0, or 0.5 for a tie it states ("score": the score itself, of version 2.0 the mean over its
    aspects, which are parts; "flex": the blend of overall and category winners); the probability is the mean
    over the answers of both orders, so that a judge which only looks at the place gives 0.5. The parts
    hold "left_first" and "right_first", P(left better) in each order, and "position_bias", half their
    difference: above 0 it favours the first image.
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
        flex_categories: Literal["all", "first_three"] = "all",
        device: Any = "cpu",
        **asking: Any,
    ) -> None:
        """Say who is asked, and what.

        Args:
            base_url: see `ServedJudge`.
            model: see `ServedJudge`.
            mode: as above.
            both_orders: ask each pair in both orders; one order is half the calls and holds the
                position bias.
            overall_weight: of Flex's overall winner.
            dim_weight: of the mean over Flex's categories.
            category_weights: of Flex's first categories; 1 for those beyond.
            flex_categories: those that count: "all", or "first_three", as in Pref-GRPO's code.
            device: see `ServedJudge`.
            **asking: of `ServedJudge`, K answers in each order; the template holds {prompt} and two images
                (with "edit_rank" the source before them), an answer 2048 tokens.
        """
        for what, given, allowed in (
            ("mode", mode, get_args(Mode)),
            ("flex_categories", flex_categories, ("all", "first_three")),
        ):
            if given not in allowed:
                raise RewardError(f"{self.name}: {what} is {given!r}; allowed are {', '.join(allowed)}.")
        _check_weights(self.name, [overall_weight, dim_weight, *(category_weights or ())])
        self._source = mode == "edit_rank"
        default = question(f"unified_reward_{mode}", PUBLISHED[mode], images=[""] * (2 + self._source))
        asking = {"default": default, "max_new_tokens": 2048, "device": device, **asking}
        super().__init__(base_url, model, **asking)
        self.mode, self.both_orders = mode, both_orders
        self.capabilities = RewardCapabilities(both_orders=both_orders)
        self._blend: dict[str, Any] = {"overall_weight": overall_weight, "dim_weight": dim_weight}
        self._blend["category_weights"] = tuple(category_weights or ())
        self._blend["first"] = 3 if flex_categories == "first_three" else None
        options = {"mode": mode, "both_orders": both_orders, **self.drawing}
        self.identity = self.identified(**options, **(self._blend if mode == "flex" else {}))

    def compare(
        self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare B pairs; of the metadata the "source" of edits is looked at."""
        first = read_request(self.name, left, prompts, metadata)
        second = read_request(self.name, right, prompts, metadata)
        reasons = _unusable(first, second, self.template)
        sources = source_images(first.metadata, reasons) if self._source else {}
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        left_images, right_images = dict(first.images.readable()), dict(second.images.readable())
        queries = []
        for turned in (False, True) if self.both_orders else (False,):
            for row in rows:
                pair = [left_images[row], right_images[row]]
                before = [sources[row]] if self._source else []
                shown = [*before, *(pair[::-1] if turned else pair)]
                queries.append(Query(images=shown, prompt=first.prompts[row]))
        found = self.server.ask(self.template, queries, read=self._read, **self.drawing)
        return self._collect(len(first), rows, reasons, found)

    def _read(self, reply: Reply) -> tuple[dict[str, float], str]:
        """P(first image better), under "prob", with that of aspects, and the text of one answer."""
        text = reply.text
        if self.mode == "score":
            aspects = {name: scores[0] for name, scores in aspect_pair_scores(text).items()}
            if aspects and (missing := [name for name in ASPECTS if name not in aspects]):
                raise AnswerError(f"the judge's text gives no scores for {', '.join(missing)}")
            prob = math.fsum(aspects.values()) / len(aspects) if aspects else pair_scores(text)[0]
            return {"prob": prob, **aspects}, text
        if self.mode == "flex":
            return {"prob": flex_answer(text).preference(**self._blend)}, text
        return {"prob": {1: 1.0, 2: 0.0, 0: 0.5}[verdict(text)]}, text

    def _collect(
        self, size: int, rows: list[int], reasons: list[str | None], found: list[list[Any]]
    ) -> Preferences:
        names = ("prob", "std", "left_first", "right_first", "position_bias")
        columns = {name: torch.full((size,), torch.nan) for name in names}
        text = [""] * size
        for place, row in enumerate(rows):
            orders = found[place :: len(rows)]
            votes: list[list[dict[str, float]]] = []
            for turned, answers in enumerate(orders):
                known = [answer for answer in answers if not isinstance(answer, AnswerError)]
                if len(known) < self.least:
                    where = "the right image first" if turned else "the left image first"
                    reasons[row] = f"with {where}: {failed(answers)}"
                    break
                text[row] = text[row] or known[0][1]
                votes.append(
                    [{name: 1 - p if turned else p for name, p in said.items()} for said, _ in known]
                )
            else:
                for name, value in _summary(votes).items():
                    columns.setdefault(name, torch.full((size,), torch.nan))[row] = value
        valid = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
        prob, std = columns.pop("prob"), columns.pop("std")
        if not self.both_orders:
            columns = {key: columns[key] for key in columns if key not in ("right_first", "position_bias")}
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


def _summary(votes: list[list[dict[str, float]]]) -> dict[str, float]:
    """Columns of one pair from its votes in each order: the mean of the orders, and its standard error."""
    orders = [[vote["prob"] for vote in order] for order in votes]
    means = [math.fsum(order) / len(order) for order in orders]
    spread = [
        torch.tensor(order, dtype=torch.float64).var().item() / len(order)
        for order in orders
        if len(order) > 1
    ]
    said = [vote for order in votes for vote in order]
    aspects = {name for vote in said for name in vote} - {"prob"}
    found = {name: math.fsum(vote[name] for vote in said) / len(said) for name in sorted(aspects)}
    found |= {"prob": math.fsum(means) / len(means), "left_first": means[0]}
    if len(spread) == len(votes):
        found["std"] = math.sqrt(math.fsum(spread)) / len(votes)
    if len(means) == 2:
        found |= {"right_first": means[1], "position_bias": (means[0] - means[1]) / 2}
    return found
