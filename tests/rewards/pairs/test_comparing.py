# SPDX-License-Identifier: Apache-2.0
"""Scores as preferences, preferences as win rates: by hand, with failures, calls counted, there and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from tests.support.judges.brightness import Brightness, BrightnessPairs, grey
from visalign.interfaces import PairwiseReward, PointwiseReward, Preferences
from visalign.rewards import FunctionReward, RewardError, WeightedSum, check_reward, load_reward
from visalign.rewards.base import contract
from visalign.rewards.pairs.as_pairwise import as_pairwise
from visalign.rewards.pairs.as_pointwise import GroupWinRate, as_pointwise
from visalign.rewards.pairs.asking import read_preferences

NAN = float("nan")


# scores as preferences


def _compare(reward: Any, left: list[float], right: list[float], **options: Any) -> Preferences:
    return as_pairwise(reward, **options).compare(grey(left), grey(right), ["p"] * len(left))


def test_a_bradley_terry_unit_is_the_logistic_of_the_difference() -> None:
    preferences = _compare(Brightness(unit="Bradley-Terry logit"), [0.75, 0.25], [0.25, 0.25])
    assert preferences.prob[0] == pytest.approx(1 / (1 + math.exp(-0.5))) and preferences.prob[1] == 0.5
    assert preferences.log_odds is not None and preferences.log_odds[0] == pytest.approx(0.5)
    assert preferences.parts["left"].tolist() == [0.75, 0.25] and preferences.parts["right"].tolist() == [0.25, 0.25]


def test_a_bradley_terry_unit_with_std_is_the_logistic_normal_integral() -> None:
    preferences = _compare(Brightness(unit="log-odds", std=1.5), [0.9], [0.2])
    spread = math.hypot(1.5, 1.5)
    exact = quad(lambda z: norm.pdf(z) / (1 + math.exp(-0.7 - spread * z)), -12, 12, epsabs=1e-12)[0]
    assert preferences.prob[0] == pytest.approx(exact, abs=1e-6)


def test_other_units_with_std_are_thurstone() -> None:
    preferences = _compare(Brightness(std=0.3), [0.75, 0.5, 0.1], [0.25, 0.5, 0.9])
    expected = norm.cdf(np.array([0.5, 0.0, -0.8]) / (0.3 * 2**0.5))
    assert preferences.prob.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_without_std_better_is_certain_and_equal_is_a_tie() -> None:
    preferences = _compare(Brightness(), [0.75, 0.5, 0.25], [0.25, 0.5, 0.5])
    assert preferences.prob.tolist() == [1, 0.5, 0]
    lower = _compare(Brightness(higher_is_better=False), [0.75, 0.5, 0.25], [0.25, 0.5, 0.5])
    assert lower.prob.tolist() == [0, 0.5, 1]
    chosen = _compare(Brightness(), [0.75], [0.25], link="logistic")
    assert chosen.prob[0] == pytest.approx(1 / (1 + math.exp(-0.5)))


def test_tails_keep_their_log_odds() -> None:
    preferences = _compare(Brightness(std=0.02), [0.9], [0.1])
    expected = norm.logcdf(0.8 / (0.02 * 2**0.5)) - norm.logsf(0.8 / (0.02 * 2**0.5))
    assert preferences.prob[0] == 1 and preferences.log_odds is not None
    assert float(preferences.log_odds[0]) == pytest.approx(expected, rel=1e-4) and float(preferences.log_odds[0]) > 400


def test_a_failed_image_fails_its_pairs_with_the_side_and_reason() -> None:
    judge = as_pairwise(Brightness())
    preferences = judge.compare([grey([0.5])[0], "no.png"], ["none.png", grey([0.5])[0]], ["p", "p"])
    assert preferences.valid.tolist() == [False, False] and bool(torch.isnan(preferences.prob).all())
    assert preferences.reason == ["right: no such image file: none.png", "left: no such image file: no.png"]


def test_images_are_stacked_for_the_reward_alone(monkeypatch) -> None:
    stacked = []
    monkeypatch.setattr(contract, "as_contract", lambda images: stacked.append(len(images)) or torch.stack(images))
    GroupWinRate(as_pairwise(Brightness())).score(grey([0.1, 0.5, 0.9]), ["p"] * 3, [{"group": 0}] * 3)
    assert stacked == [3], "each stack is a copy of all images"


def test_each_distinct_image_is_scored_once() -> None:
    reward = Brightness()
    judge = as_pairwise(reward)
    images = grey([0.1, 0.2, 0.3, 0.2])
    judge.compare(images[[0, 0, 1, 3]], images[[1, 2, 2, 0]], ["p"] * 4)
    assert reward.seen == 3
    pairs = torch.tensor([[0, 1], [2, 3], [3, 0]])
    preferences = judge.compare_pairs(images, pairs, ["p"] * 4)  # type: ignore[attr-defined]
    assert reward.seen == 6 and preferences.prob.tolist() == [0, 1, 1]


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="link is 'probit'; allowed are auto, logistic, normal"):
        as_pairwise(Brightness(), link="probit")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match="2 left and 1 right images"):
        as_pairwise(Brightness()).compare(grey([0.1, 0.2]), grey([0.1]), ["p", "p"])
    assert isinstance(as_pairwise(Brightness()), PairwiseReward)


# preferences as win rates


def test_round_robin_by_hand() -> None:
    judge = BrightnessPairs(scale=10, bias=2.0)
    reward = as_pointwise(judge)
    scores = reward.score(grey([0.2, 0.5, 0.6]), ["p"] * 3)
    p01, p02, p12 = (1 / (1 + math.exp(10 * gap)) for gap in (0.3, 0.4, 0.1))
    expected = [(p01 + p02) / 2, (1 - p01 + p12) / 2, (2 - p02 - p12) / 2]
    assert scores.value.tolist() == pytest.approx(expected, abs=1e-5)  # the bias has cancelled
    assert len(judge.asked) == len(set(judge.asked)) == 6 == reward.calls and judge.rounds == 1
    assert scores.parts["compared"].tolist() == [2, 2, 2] and scores.unit == "win rate"
    assert isinstance(reward, PointwiseReward) and reward.capabilities.needs_group


def test_hard_answers_in_one_order_are_the_published_win_rates() -> None:
    judge = BrightnessPairs(hard=True)
    scores = as_pointwise(judge, both_orders=False).score(grey([0.2, 0.5, 0.6, 0.5]), ["p"] * 4)
    assert scores.value.tolist() == pytest.approx([0, 0.5, 1, 0.5])
    assert len(judge.asked) == 3  # the two equal images are one
    sides = BrightnessPairs(hard=True)
    as_pointwise(sides, both_orders=False).score(grey([k / 10 for k in range(9)]), ["p"] * 9)
    assert len(sides.asked) == 36
    assert {sum(left == k / 10 for left, _ in sides.asked) for k in range(9)} == {4}


def test_the_published_rule_by_name() -> None:
    """Pref-GRPO's: i before j, hard answers, half a win each for a failure, three decimals."""
    levels = [0.2, 0.5, 0.8, 0.6]
    judge = BrightnessPairs(bias=4.0, fails=lambda left, right: {left, right} == {0.2, 0.6})
    rates = GroupWinRate(judge, rule="published").score(grey(levels), ["a"] * 4)
    assert judge.asked == [(0.2, 0.5), (0.2, 0.8), (0.2, 0.6), (0.5, 0.8), (0.5, 0.6), (0.8, 0.6)]
    # left wins above −0.4 of difference: 0>1, 2>0, 0=3 (failed), 1>2, 1>3, 2>3
    assert rates.value.tolist() == pytest.approx([0.5, 0.667, 0.667, 0.167], abs=1e-7)
    assert rates.valid.all() and rates.parts["compared"].tolist() == [2, 3, 3, 2]
    own = GroupWinRate(judge, both_orders=False, hard=True).score(grey(levels), ["a"] * 4)
    assert own.value.tolist() != rates.value.tolist(), "there odd pairs are turned round"
    rules: Any = ({}, {"hard": True}, {"rule": "published"})
    assert len({str(GroupWinRate(as_pairwise(load_reward("sharpness")), **rule).identity) for rule in rules}) == 3
    with pytest.raises(ValueError, match="rule is 'theirs'; allowed are own, published"):
        GroupWinRate(judge, rule="theirs")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="asks every pair once; leave out both_orders and budget"):
        GroupWinRate(judge, rule="published", budget=0.5)


def test_hard_rounds_the_averaged_answer_and_contradictions_tie() -> None:
    judge = BrightnessPairs(scale=1, bias=5, hard=True)  # always for the left one
    assert as_pointwise(judge).score(grey([0.2, 0.5]), ["p"] * 2).value.tolist() == [0.5, 0.5]
    soft = BrightnessPairs(scale=1, bias=5)
    assert as_pointwise(soft, hard=True).score(grey([0.2, 0.5]), ["p"] * 2).value.tolist() == [0, 1]


def test_groups_are_prompts_or_a_key() -> None:
    judge = BrightnessPairs(hard=True)
    images = grey([0.1, 0.9, 0.2, 0.8, 0.3])
    scores = as_pointwise(judge).score(images, ["a", "b", "a", "b", "c"])
    assert scores.value[:4].tolist() == [0, 1, 1, 0] and scores.valid.tolist() == [True] * 4 + [False]
    assert scores.reason is not None and scores.reason[4] == "its group has no other image to compare it with"
    assert len(judge.asked) == 4
    edits = [{"source": name} for name in ("x.png", "y.png", "x.png", "y.png", "x.png")]
    assert as_pointwise(judge).score(images, ["a"] * 5, edits).value.tolist() == [0, 1, 0.5, 0, 1]
    with pytest.raises(ValueError, match=r"metadata\[1\] has no 'group_id'; give each one, or no"):
        as_pointwise(judge).score(images[:2], ["a", "a"], [{"group_id": 1}, {}])
    keyed = as_pointwise(BrightnessPairs(hard=True))
    records = [{"group_id": k} for k in (0, 0, 1, 1, 1)]
    assert keyed.score(images, ["a"] * 5, records).value.tolist() == [0, 1, 0, 1, 0.5]
    with pytest.raises(ValueError, match="group 0 has the prompts 'a' and 'b'"):
        keyed.score(images[:2], ["a", "b"], records[:2])


def test_two_groups_of_one_prompt_are_compared_separately_in_a_sum() -> None:
    judge, received = BrightnessPairs(hard=True), []

    def plain(images: Any, prompts: list[str], metadata: list[Any]) -> list[float]:
        received.extend(metadata)
        return [0.0] * len(prompts)

    total = WeightedSum(
        {"wins": (as_pointwise(judge), 1.0), "plain": (FunctionReward(plain), 0.0)}, allow_mixed_units=True
    )
    images = grey([0.1, 0.9, 0.2, 0.8])
    records = [{"group_id": group, "tag": "t"} for group in (0, 1, 1, 0)]
    assert total.capabilities.needs_group
    assert total.score(images, ["a"] * 4, records).value.tolist() == [0, 1, 0, 1]
    assert total.score(images, ["a"] * 4).value.tolist() == pytest.approx([0, 1, 1 / 3, 2 / 3])
    assert received[:4] == [{"tag": "t"}] * 4, "a judge of single images does not see the group"


def test_failures_are_left_out_and_never_ties() -> None:
    judge = BrightnessPairs(hard=True, fails=lambda a, b: 0.9 in (a, b) and 0.5 in (a, b))
    scores = as_pointwise(judge).score(grey([0.1, 0.5, 0.9]), ["p"] * 3)
    assert scores.value.tolist() == [0, 1, 1] and scores.parts["compared"].tolist() == [2, 1, 1]
    mute = BrightnessPairs(fails=lambda a, b: 0.5 in (a, b))
    scores = as_pointwise(mute).score(grey([0.1, 0.5, 0.9]), ["p"] * 3)
    assert scores.valid.tolist() == [True, False, True] and math.isnan(scores.value[1])
    assert scores.reason == [None, "no answer", None]
    one_order = BrightnessPairs(fails=lambda a, b: a > b)
    assert not as_pointwise(one_order).score(grey([0.1, 0.5]), ["p"] * 2).valid.any()


def test_unreadable_images_are_outside_the_group() -> None:
    images = [grey([0.1])[0], "no.png", grey([0.5])[0]]
    scores = as_pointwise(BrightnessPairs(hard=True)).score(images, ["p"] * 3)
    assert scores.valid.tolist() == [True, False, True] and scores.value[[0, 2]].tolist() == [0, 1]
    assert scores.reason is not None and scores.reason[1] == "no such image file: no.png"
    nothing = as_pointwise(BrightnessPairs()).score(["no.png"], ["p"])
    assert nothing.valid.tolist() == [False]


def test_equal_images_tie_and_share_their_comparisons() -> None:
    judge = BrightnessPairs(scale=10)
    scores = as_pointwise(judge).score(grey([0.5, 0.5, 0.6]), ["p"] * 3)
    p = 1 / (1 + math.exp(1))
    assert scores.value.tolist() == pytest.approx([(0.5 + p) / 2] * 2 + [1 - p], abs=1e-6)
    assert len(judge.asked) == 2
    same = as_pointwise(judge).score(grey([0.5, 0.5]), ["p"] * 2)
    assert same.value.tolist() == [0.5, 0.5] and len(judge.asked) == 2


@pytest.mark.parametrize("hard", [False, True])
def test_a_budget_asks_less_and_agrees(hard: bool) -> None:
    values = [0.05 * k for k in (3, 17, 9, 1, 12, 6, 15, 10, 4, 19, 8, 14)]
    full = as_pointwise(BrightnessPairs(scale=8, bias=0.5)).score(grey(values), ["p"] * 12)
    judge = BrightnessPairs(scale=8, bias=0.5, hard=hard)
    few = as_pointwise(judge, budget=0.4).score(torch.cat([grey(values), grey(values)]), ["p"] * 12 + ["q"] * 12)
    assert len(judge.asked) == 2 * 26 and judge.rounds < 9  # both groups in the same rounds
    for group in (few.value[:12], few.value[12:]):
        error = (group - full.value).abs().max()
        assert float(error) < (0.25 if hard else 0.02)
    assert bool(few.valid.all()) and float(few.parts["compared"][:12].sum()) == 52


def test_a_group_score_passes_all_contract_checks_but_independence() -> None:
    reward = as_pointwise(BrightnessPairs())
    passed = check_reward(reward, prompts=["p"] * 4)
    assert len(passed) == 10 and "a score does not depend on its neighbours" not in passed


def test_wrong_options_and_wrong_judges_are_refused() -> None:
    with pytest.raises(ValueError, match=r"budget is 1.5; allowed are shares in \(0, 1\]"):
        GroupWinRate(BrightnessPairs(), budget=1.5)
    with pytest.raises(ValueError, match="hard with a budget"):
        GroupWinRate(BrightnessPairs(), budget=0.5, hard=True)

    class Short:
        name = "short"

        def compare(self, left: Any, right: Any, prompts: Any, metadata: Any = None) -> Preferences:
            if prompts == ["boom"] * 2:
                raise KeyError("first_index")
            return Preferences(prob=torch.ones(1), valid=torch.ones(1, dtype=torch.bool))

    with pytest.raises(RewardError, match="Judge 'short' returned 1 for 2 pairs"):
        as_pointwise(Short()).score(grey([0.1, 0.2]), ["p"] * 2)
    with pytest.raises(RewardError, match="Reward 'short' raised KeyError"):
        as_pointwise(Short()).score(grey([0.1, 0.2]), ["boom"] * 2)


def test_answers_that_are_no_probabilities_are_failures() -> None:
    answers = read_preferences(
        Preferences(
            prob=torch.tensor([0.5, 1.5, NAN, NAN, 1.0]),
            valid=torch.tensor([True, True, True, False, True]),
            log_odds=torch.tensor([0.25, NAN, NAN, NAN, NAN]),
        )
    )
    assert answers.reasons == [
        None,
        "the preference is no probability",
        "the preference is no probability",
        "no reason given",
        None,
    ]
    assert answers.log_odds[0] == 0.25 and answers.log_odds[4] == 12
    assert answers.prob[4] == 1 and bool(torch.isnan(answers.prob[1:4]).all())


def test_a_missing_standard_deviation_is_no_certainty() -> None:
    preferences = _compare(Brightness(std=NAN), [0.75], [0.25])
    assert not preferences.valid[0] and preferences.prob.isnan().all()
    assert "without its standard deviation" in str((preferences.reason or [""])[0])
