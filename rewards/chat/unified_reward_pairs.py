# SPDX-License-Identifier: Apache-2.0
"""UnifiedReward on pairs: compares two images by rank, after thinking, by scores, or as JSON.

Source: Wang et al., UnifiedReward, arXiv 2503.05236, and its versions 2.0 and Edit; UnifiedReward-Think, arXiv
2505.03318; UnifiedReward-Flex, arXiv 2602.02380; the questions are those of their training. Pref-GRPO (arXiv
2508.20751) asks in one order; models prefer a position, so here each pair is asked in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from visalign.interfaces import Metadata, Preferences, RewardCapabilities
from visalign.rewards.base.contract import check_choices, read_pairs
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import ASPECTS
from visalign.rewards.reading.verdicts import aspect_pair_scores, flex_answer, pair_scores, verdict
from visalign.rewards.vlm.published import published_prompt
from visalign.rewards.vlm.requests import Query, pair_reasons, source_images
from visalign.rewards.vlm.template import question

from .judge import ChatJudge, failure_reason
from .messages import Reply

Mode = Literal["rank", "think", "think_qwen3", "score", "flex", "edit_rank"]


class UnifiedRewardPairs(ChatJudge):
    """Probability that the left of two images is better, asked in both orders.

    Modes: "rank", "think" and "think_qwen3" (UnifiedReward-Think on Qwen2.5-VL and on Qwen3-VL), "score", "flex", and
    "edit_rank" for two edits of the record's "source" after the prompt, their instruction. An answer gives 1, 0, or
    0.5 for a stated tie ("score": the score itself, of version 2.0 the mean over its aspects, which are parts; "flex":
    half overall, half category winners). The probability is the mean over the answers of both orders, so a judge that
    only sees the position gives 0.5. The parts hold "left_first" and "right_first", P(left better) in each order, and
    "position_bias", half their difference: above 0 it favours the first image.

    Args:
        both_orders: ask each pair in both orders; one order is half the calls and keeps the position bias.
        flex_categories: those that count: "all", or "first_three", as in Pref-GRPO's code.
        **options: of `ChatJudge`, as is the address, with K answers in each order; a template has {prompt}
            and two images (with "edit_rank" the source before them).
    """

    name = "unified_reward_pairs"
    default_max_new_tokens = 2048

    def __init__(
        self,
        *address: str,
        mode: Mode = "rank",
        both_orders: bool = True,
        flex_categories: Literal["all", "first_three"] = "all",
        device: Any = "cpu",
        **options: Any,
    ) -> None:
        allowed = ("all", "first_three")
        check_choices(self.name, mode=(mode, get_args(Mode)), flex_categories=(flex_categories, allowed))
        self._shows_source = mode == "edit_rank"
        images = [""] * (2 + self._shows_source)
        name = f"unified_reward_{mode}"
        self.default_template = question(name, published_prompt(name), images=images)
        super().__init__(*address, device=device, **options)
        self.mode, self.both_orders = mode, both_orders
        self.capabilities = RewardCapabilities(both_orders=both_orders)
        self._categories = 3 if flex_categories == "first_three" else None
        flex = {"first": self._categories} if mode == "flex" else {}
        self.identity = self.make_identity(mode=mode, both_orders=both_orders, **self.sampling, **flex)

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        """Compare B pairs; of the metadata only the "source" of edits is read."""
        request, pairs = read_pairs(self.name, left, right, prompts, metadata)
        reasons = pair_reasons(request, pairs, self.template)
        sources = source_images(request.metadata[: len(pairs)], reasons) if self._shows_source else {}
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        images = dict(request.images.readable())
        queries = []
        for order in (1, -1) if self.both_orders else (1,):
            for row in rows:
                ordered = [images[number] for number in pairs[row].tolist()[::order]]
                source = [sources[row]] if self._shows_source else []
                queries.append(Query(images=[*source, *ordered], prompt=request.prompts[row]))
        answers = self.server.ask(self.template, queries, read=self._read, **self.sampling)
        return self._preferences(rows, reasons, answers)

    def _read(self, reply: Reply) -> tuple[dict[str, float], str]:
        """Return P(first image better), as "prob" and for each aspect, and the text of one answer."""
        text = reply.text
        if self.mode == "score":
            aspects = {name: scores[0] for name, scores in aspect_pair_scores(text).items()}
            if aspects and (missing := [name for name in ASPECTS if name not in aspects]):
                raise AnswerError(f"the judge's text gives no scores for {', '.join(missing)}")
            prob = math.fsum(aspects.values()) / len(aspects) if aspects else pair_scores(text)[0]
            return {"prob": prob, **aspects}, text
        if self.mode == "flex":
            return {"prob": flex_answer(text).preference(first=self._categories)}, text
        return {"prob": {1: 1.0, 2: 0.0, 0: 0.5}[verdict(text)]}, text

    def _preferences(self, rows: list[int], reasons: list[str | None], answers: list[list[Any]]) -> Preferences:
        size = len(reasons)
        names = ("prob", "std", "left_first", "right_first", "position_bias")
        columns = {name: torch.full((size,), torch.nan) for name in names}
        texts = [""] * size
        for index, row in enumerate(rows):
            votes: list[list[dict[str, float]]] = []
            for is_swapped, order_answers in enumerate(answers[index :: len(rows)]):
                readable = [answer for answer in order_answers if not isinstance(answer, AnswerError)]
                if len(readable) < self.min_readable:
                    order = "the right image first" if is_swapped else "the left image first"
                    reasons[row] = f"with {order}: {failure_reason(order_answers)}"
                    break
                texts[row] = texts[row] or readable[0][1]
                votes.append([{key: 1 - p if is_swapped else p for key, p in probs.items()} for probs, _ in readable])
            else:
                for name, value in _average_orders(votes).items():
                    columns.setdefault(name, torch.full((size,), torch.nan))[row] = value
        valid = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
        prob, std = columns.pop("prob"), columns.pop("std")
        if not self.both_orders:
            del columns["right_first"], columns["position_bias"]
        return Preferences(
            prob=prob,
            valid=valid,
            std=std if self.answers > 1 else None,
            parts=columns,
            text=[text if reason is None else "" for text, reason in zip(texts, reasons, strict=True)],
            reason=reasons,
        )


def _average_orders(votes: list[list[dict[str, float]]]) -> dict[str, float]:
    """Return the columns of one pair from its votes in each order: mean of the orders, its standard error."""
    orders = [[vote["prob"] for vote in order] for order in votes]
    means = [math.fsum(order) / len(order) for order in orders]
    all_votes = [vote for order in votes for vote in order]
    aspects = sorted({name for vote in all_votes for name in vote} - {"prob"})
    columns = {name: math.fsum(vote[name] for vote in all_votes) / len(all_votes) for name in aspects}
    columns |= {"prob": math.fsum(means) / len(means), "left_first": means[0]}
    if all(len(order) > 1 for order in orders):
        # std of a mean of n independent means: √(Σ s²/K) / n
        squared = [torch.tensor(o, dtype=torch.float64).var().item() / len(o) for o in orders]
        columns["std"] = math.sqrt(math.fsum(squared)) / len(orders)
    if len(means) == 2:
        columns |= {"right_first": means[1], "position_bias": (means[0] - means[1]) / 2}
    return columns
