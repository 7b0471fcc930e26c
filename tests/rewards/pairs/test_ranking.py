# SPDX-License-Identifier: Apache-2.0
"""`rank`: pointwise and pairwise judges, budgets, intervals, bias, failures."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.judges.brightness import Brightness, BrightnessPairs, grey
from visalign.rewards.pairs.asking import PairAsker
from visalign.rewards.pairs.ranking import ask_in_rounds, count_calls, rank

VALUES = [0.05 * k for k in (3, 17, 9, 1, 12, 6, 15, 10, 4, 19, 8, 14)]
BEST_FIRST = sorted(range(12), key=lambda k: -VALUES[k])


def test_a_pointwise_judge_ranks_by_its_mean_with_its_interval() -> None:
    ranking = rank(grey(VALUES), "p", Brightness(std=0.1))
    assert ranking.order == BEST_FIRST and ranking.calls == 12 and ranking.unit == "brightness"
    torch.testing.assert_close(ranking.high - ranking.score, torch.full((12,), 0.16448536))
    torch.testing.assert_close(ranking.score - ranking.low, torch.full((12,), 0.16448536))
    plain = rank(grey(VALUES), "p", Brightness(higher_is_better=False))
    assert plain.order == BEST_FIRST[::-1] and bool(torch.isnan(plain.low).all()) and plain.bias is None


@pytest.mark.parametrize("method", ["active", "swiss"])
def test_a_graded_judge_on_a_budget(method: Any) -> None:
    judge = BrightnessPairs(scale=8, bias=0.6)
    ranking = rank(grey(VALUES), "p", judge, method=method)
    assert ranking.calls == len(judge.asked) == 19 == count_calls(12, 0.3) and len(set(judge.asked)) == 19
    assert ranking.order == BEST_FIRST and ranking.unit == "log-odds"
    assert ranking.bias == pytest.approx(0.6, abs=0.05) and ranking.bias_std is not None
    true = 8 * (torch.tensor(VALUES) - sum(VALUES) / 12)
    torch.testing.assert_close(ranking.score, true, atol=0.1, rtol=0)
    assert bool(((ranking.low < true) & (true < ranking.high)).all()) and judge.rounds <= 4


def test_hard_answers_are_fitted_as_votes() -> None:
    judge = BrightnessPairs(hard=True)
    ranking = rank(grey(VALUES), "p", judge, budget=1.0)
    assert ranking.order == BEST_FIRST and ranking.unit == "Bradley-Terry logits" and ranking.calls == 66
    narrow = rank(grey(VALUES), "p", BrightnessPairs(hard=True), budget=1.0, level=0.5)
    assert bool((narrow.high - narrow.low < ranking.high - ranking.low).all())
    thurstone = rank(grey(VALUES), "p", BrightnessPairs(hard=True), budget=1.0, model="thurstone")
    assert thurstone.unit == "standard normal units" and thurstone.order == BEST_FIRST


def test_failed_calls_count_but_are_left_out_of_the_fit() -> None:
    judge = BrightnessPairs(fails=lambda a, b: 0.5 in (a, b))
    ranking = rank([*grey([0.1, 0.5, 0.9, 0.3]), "no.png"], "p", judge, budget=1.0)
    assert ranking.order == [2, 3, 0] and ranking.valid.tolist() == [True, False, True, True, False]
    assert ranking.reason == [None, "no answer", None, None, "no such image file: no.png"]
    assert math.isnan(ranking.score[1]) and math.isnan(ranking.low[4]) and ranking.calls == 6


def test_equal_images_are_one_item_and_few_images_work() -> None:
    judge = BrightnessPairs()
    ranking = rank(grey([0.5, 0.1, 0.5]), "p", judge, budget=2.0)
    assert ranking.order == [0, 2, 1] and ranking.score[0] == ranking.score[2] and ranking.calls <= 2
    for count in (1, 2):
        same = rank(grey([0.5] * count), "p", judge)
        assert same.order == [] and same.reason == ["there is no image with other pixels to compare it with"] * count
    nothing = rank(["no.png"], "p", judge)
    assert nothing.order == [] and nothing.calls == 0
    pair = rank(grey([0.1, 0.9]), "p", judge, budget=0.01)
    assert pair.order == [1, 0] and pair.calls == 1


def test_several_groups_go_through_the_same_rounds() -> None:
    judge = BrightnessPairs()
    asker = PairAsker(judge, list(grey([0.1, 0.4, 0.9, 0.2, 0.8, 0.6, 0.3])), ["p"] * 7, [None] * 7)
    sets = [torch.tensor([0, 2, 4, 6]), torch.tensor([1, 3]), torch.tensor([5])]
    one, two, three = ask_in_rounds(asker, sets, [4, 1, 0])
    assert one.fit.score.argsort().tolist() == [0, 3, 2, 1] and len(one.pairs) == 4
    assert len(two.pairs) == 1 and len(three.pairs) == 0 and judge.rounds == 2
    groups = [{0.1, 0.9, 0.8, 0.3}, {0.4, 0.2}]
    assert all(any({a, b} <= members for members in groups) for a, b in judge.asked)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="budget is 0; allowed are shares"):
        rank(grey([0.1, 0.2]), "p", BrightnessPairs(), budget=0)
    with pytest.raises(ValueError, match="level is 95"):
        rank(grey([0.1, 0.2]), "p", BrightnessPairs(), level=95)
