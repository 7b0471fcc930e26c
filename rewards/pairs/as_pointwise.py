# SPDX-License-Identifier: Apache-2.0
"""Win rate of an image inside its group as a score: the reward of Pref-GRPO."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core import group_pairs, win_rates
from visalign.interfaces import Metadata, PairwiseReward, RewardCapabilities, Scores, with_capabilities
from visalign.rewards.base.contract import (
    Request,
    check_choices,
    check_rules,
    group_labels,
    make_scores,
    read_request,
    scatter,
    without_group,
)
from visalign.rewards.base.identity import Identity, with_options

from .asking import PairAnswers, PairAsker, distinct_images
from .ranking import ask_in_rounds, count_calls


def as_pointwise(judge: PairwiseReward, **options: Any) -> GroupWinRate:
    """Make a reward of a pairwise judge: the win rates of `GroupWinRate(judge, **options)`."""
    return GroupWinRate(judge, **options)


class GroupWinRate:
    """Win rate of each image against the others of its group, in [0, 1].

    A group is the images of one `metadata["group_id"]`, which trainers fill in and the judge does not see: two groups
    may have the same prompt. Where no record has the key, it is the images of one prompt, or of one edit. A score
    depends on the group: give `score` whole groups. Without a budget each pair of distinct images is asked once, and
    by default in both orders, the two log-odds averaged: ½ (ℓ_ij − ℓ_ji), so that a judge's bias for one side cancels.
    With a budget the pairs are chosen in rounds (`visalign.core.preference.pairing`), the position bias is a fitted
    parameter, and the value is the win rate that the fit expects against all others.

    A failed comparison is left out, and never a tie. An image without a valid comparison is invalid, and so
    is the only image of its group. Equal images are asked about once and tie with each other. The part
    "compared" counts the valid comparisons of an image.

    Win rates as a reward: Wang et al., Pref-GRPO, arXiv 2508.20751. Their code asks each pair i < j of a
    group once, image i first, takes hard answers, counts a failure as half a win of both, and rounds to three
    decimals: `rule="published"`.

    Args:
        rule: "own" as above, or "published", which sets both_orders, hard and budget itself.
        both_orders: ask each pair in both orders (without a budget); None does so unless the judge averages
            both itself (`RewardCapabilities.both_orders`).
        hard: count p > ½ as a win, p < ½ as a loss, after averaging both orders; otherwise the probability
            itself is the share of a win.
        budget: share of the G(G − 1)/2 pairs of a group that may be asked as single calls, in (0, 1]; None
            for all pairs.
    """

    unit = "win rate"
    range = (0.0, 1.0)
    higher_is_better = True
    capabilities = RewardCapabilities(needs_group=True)

    def __init__(
        self,
        judge: PairwiseReward,
        *,
        rule: Literal["own", "published"] = "own",
        both_orders: bool | None = None,
        hard: bool = False,
        budget: float | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name or f"{judge.name}_win_rate"
        check_choices(self.name, rule=(rule, ("own", "published")))
        self.published, has_budget = rule == "published", budget is not None
        contradicts_rule = self.published and (both_orders or has_budget)
        in_range = budget is None or 0 < budget <= 1
        rules = {
            "rule 'published' asks every pair once; leave out both_orders and budget": not contradicts_rule,
            f"budget is {budget}; allowed are shares in (0, 1], or None for all pairs": in_range,
            "hard with a budget: the fit's win rates are expected; leave one out": not (has_budget and hard),
        }
        check_rules(self.name, rules)
        if self.published:
            both_orders, hard = False, True
        self.judge, self.hard = with_capabilities(judge), hard
        self.both_orders = not self.judge.capabilities.both_orders if both_orders is None else both_orders
        self.budget = budget
        self.calls = 0
        """Comparisons asked since the reward was created."""

    @property
    def identity(self) -> Identity | None:
        """Identity of the judge, with the way in which its answers are asked for and counted."""
        counting = {"both_orders": self.both_orders, "hard": self.hard, "budget": self.budget}
        return with_options(self.judge.identity, win_rate=counting | {"published": self.published})

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images by their win rates; groups may come in any order."""
        request = read_request(self.name, images, prompts, metadata)
        labels = group_labels(self.name, request)
        rows = request.rows
        first, index = distinct_images(request.select(rows, stack=False)[0], [labels[row] for row in rows])
        first_rows = [rows[i] for i in first]
        images, texts, records = request.select(first_rows, stack=False)
        asker = PairAsker(self.judge, images, texts, without_group(records))
        ask = self._round_robin if self.budget is None else self._budgeted
        outcome = ask(asker, [labels[row] for row in first_rows])
        self.calls += asker.calls
        return self._scores(request, rows, index, outcome)

    def _round_robin(self, asker: PairAsker, groups: list[Hashable]) -> _Outcome:
        pairs = group_pairs(groups, len(groups))
        if self.both_orders:
            answers = asker.ask(torch.cat([pairs, pairs.flip(1)]))
            forward, backward = answers.log_odds.view(2, -1)
            both_reasons = zip(answers.reasons[: len(pairs)], answers.reasons[len(pairs) :], strict=True)
            reasons = [first or second for first, second in both_reasons]
            answers = PairAnswers((forward - backward) / 2, reasons)  # ½ (ℓ_ij − ℓ_ji)
        else:
            if not self.published:
                # swap odd pairs, so that each image is on either side about equally often
                pairs = torch.where((pairs.sum(1) % 2 == 1)[:, None], pairs.flip(1), pairs)
            answers = asker.ask(pairs)
        prob = answers.prob
        if self.hard:
            prob = torch.where(torch.isnan(prob), prob, (1 + (prob - 0.5).sign()) / 2)
        if self.published:
            prob = prob.nan_to_num(0.5)
        size = len(groups)
        return _Outcome(pairs, prob, _count_valid(pairs, answers, size), _image_reasons(pairs, answers, size))

    def _budgeted(self, asker: PairAsker, groups: list[Hashable]) -> _Outcome:
        size = len(groups)
        labels = dict.fromkeys(groups)
        sets = [torch.tensor([i for i, group in enumerate(groups) if group == label]) for label in labels]
        calls = [count_calls(len(members), self.budget or 1.0) for members in sets]
        expected = torch.full((size, size), torch.nan, dtype=torch.float64)
        compared = torch.zeros(size)
        reasons: list[str | None] = [None] * size
        for members, comparisons in zip(sets, ask_in_rounds(asker, sets, calls), strict=True):
            expected[members[:, None], members] = comparisons.fit.win_probability()
            pairs, answers = members[comparisons.pairs], comparisons.answers
            compared += _count_valid(pairs, answers, size)
            new_reasons = _image_reasons(pairs, answers, size)
            reasons = [old or new for old, new in zip(reasons, new_reasons, strict=True)]
        expected[compared == 0] = torch.nan
        expected[:, compared == 0] = torch.nan
        pairs = group_pairs(groups, size)
        return _Outcome(pairs, expected[pairs[:, 0], pairs[:, 1]], compared, reasons)

    def _scores(self, request: Request, rows: list[int], index: list[int], outcome: _Outcome) -> Scores:
        """Spread the outcome of the distinct images over the rows; equal images tie with each other."""
        copies: dict[int, list[int]] = {}
        for row, number in enumerate(index):
            copies.setdefault(number, []).append(row)
        pairs: list[tuple[int, int]] = []
        prob: list[float] = []
        for (i, j), p in zip(outcome.pairs.tolist(), outcome.prob.tolist(), strict=True):
            row_pairs = list(itertools.product(copies[i], copies[j]))
            pairs, prob = pairs + row_pairs, prob + [p] * len(row_pairs)
        for equal_rows in copies.values():
            row_pairs = list(itertools.combinations(equal_rows, 2))
            pairs, prob = pairs + row_pairs, prob + [0.5] * len(row_pairs)
        pair_index = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        rates = win_rates(pair_index, torch.tensor(prob, dtype=torch.float64), len(index))
        if self.published:
            rates = (rates * 1000).round() / 1000
        reasons = list(request.images.reasons)
        for row, rate, number in zip(rows, rates.tolist(), index, strict=True):
            if math.isnan(rate):
                reasons[row] = outcome.reasons[number] or "its group has no other image to compare it with"
        size = len(request)
        parts = {"compared": scatter(outcome.compared[index], rows, size)}
        return make_scores(scatter(rates, rows, size), reasons, self.unit, parts=parts)


@dataclass(frozen=True)
class _Outcome:
    pairs: Tensor  # [N, 2] pairs within groups
    prob: Tensor  # [N] share of a win of the first image; NaN where unknown
    compared: Tensor  # [n] number of valid answers about each image
    reasons: list[str | None]  # [n] reason of one failed comparison, if any failed


def _count_valid(pairs: Tensor, answers: PairAnswers, size: int) -> Tensor:
    valid = torch.isfinite(answers.log_odds)
    return torch.bincount(pairs[valid].flatten(), minlength=size).float()


def _image_reasons(pairs: Tensor, answers: PairAnswers, size: int) -> list[str | None]:
    reasons: list[str | None] = [None] * size
    for (i, j), reason in zip(pairs.tolist(), answers.reasons, strict=True):
        reasons[i], reasons[j] = reasons[i] or reason, reasons[j] or reason
    return reasons
