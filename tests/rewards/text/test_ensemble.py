# SPDX-License-Identifier: Apache-2.0
"""Sums and ensembles of text rewards: values by hand, failures, the use of a deviation, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from visalign.interfaces import Scores, TextReward
from visalign.pipelines.shared.sections import RewardsConfig, RewardTerm
from visalign.pipelines.text.parts import text_sum
from visalign.rewards import RewardError, TextEnsemble, TextFunctionReward, WeightedTextSum, check_text_reward
from visalign.rewards.catalogue import load_text_reward

TEXTS, PROMPTS = ["a", "bb", "ccc"], ["?"] * 3


def fixed(values: Any, **options: Any) -> TextFunctionReward:
    return TextFunctionReward(lambda completions: values, **{"name": "mine", "unit": "points", **options})


def pair(**options: Any) -> TextEnsemble:
    """Apart by 2, by nothing, and with a member that cannot judge."""
    return TextEnsemble({"first": fixed([1.0, 2, 3]), "second": fixed([3.0, 2, None])}, **options)


class Doubtful:
    """4, 4 and 4 with σ = 0, 2 and an unknown one."""

    name, unit, range, higher_is_better = "doubtful", "points", (0.0, 5.0), True

    def score(self, completions: Any, prompts: Any, metadata: Any = None) -> Scores:
        value, std = torch.full((3,), 4.0), torch.tensor([0.0, 2.0, math.nan])
        return Scores(value=value, std=std, valid=torch.ones(3, dtype=torch.bool), unit="points")


def test_mean_and_deviation_by_hand_and_a_member_that_fails_is_no_score() -> None:
    scores = pair().score(TEXTS, PROMPTS)
    assert scores.value[:2].tolist() == [2, 2] and bool(scores.value[2].isnan())
    assert scores.std is not None and scores.std[:2].tolist() == pytest.approx([math.sqrt(2), 0])
    assert scores.valid.tolist() == [True, True, False] and scores.parts["first"].tolist() == [1, 2, 3]
    assert scores.reason is not None
    assert scores.reason[2] == "1 of 2 members judged it: second: mine returned None: not for this sample"
    lenient = pair(min_members=1).score(TEXTS, PROMPTS)
    assert lenient.value.tolist() == [2, 2, 3] and lenient.std is not None and bool(lenient.std[2].isnan())


def test_members_by_name_with_options() -> None:
    options = {"name": "length", "max_length": 3}
    reward: Any = load_text_reward("ensemble", members={"a": {**options, "cache": 1}, "b": {**options, "cache": 2}})
    assert reward.members["a"].name == "length" and reward.unit == reward.members["b"].unit
    by_name: Any = load_text_reward("ensemble", members=["exact_answer", "numeric_answer"])
    assert list(by_name.members) == ["exact_answer", "numeric_answer"]


@pytest.mark.parametrize(
    ("members", "error", "message"),
    [
        (["length", "length"], RewardError, "ensemble: members is .*; give different names, or {label: {name"),
        ("length", RewardError, "members is 'length'; give different names"),
        (["exact_answer", "exat"], RewardError, "no text reward 'exat'"),
        ({"a": 3, "b": "length"}, RewardError, "member 'a' is 3; give a reward's name or its options"),
    ],
)
def test_members_that_cannot_be(members: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TextEnsemble(members)


@pytest.mark.parametrize(
    ("term", "expected"),
    [
        ({}, [4.0, 4.0, 4.0]),
        ({"uncertainty": "lower_bound", "strength": 0.5}, [4.0, 3.0, math.nan]),
        ({"uncertainty": "weight", "reference": 1.0}, [4.0, 1 + 3 * math.exp(-2), math.nan]),
        ({"uncertainty": "advantage"}, [4.0, 4.0, math.nan]),
    ],
)
def test_a_term_uses_the_deviation_and_a_certain_score_stays(term: dict[str, Any], expected: Any) -> None:
    total = text_sum(RewardsConfig(terms={"a": RewardTerm(**term)}), {"a": Doubtful()})
    result = total.score(TEXTS, PROMPTS)
    assert result.value.tolist() == pytest.approx(expected, nan_ok=True)
    if term:
        assert result.reason is not None and result.reason[2] == "a: the judge gave no standard deviation for it"
    assert result.parts["a.std"][:2].tolist() == [0, 2]
    assert total.capabilities.advantage_weights == ({"a": 1.0} if term.get("uncertainty") == "advantage" else {})


def test_without_a_deviation_nothing_can_be_weighed() -> None:
    for how in ("lower_bound", "advantage"):
        config = RewardsConfig(terms={"a": RewardTerm(uncertainty=how)})  # type: ignore[arg-type]
        with pytest.raises(RewardError, match=r"'(mine|a)' gives no standard deviation.* Take an ens"):
            text_sum(config, {"a": fixed([1.0, 2, 3])}).score(TEXTS, PROMPTS)
    rewards = {"a": (Doubtful(), 1.0), "b": (Doubtful(), 0.0)}
    for weights in ({"b": 1.0}, {"a": -1.0}, {"c": 1.0}):
        with pytest.raises(ValueError, match=r"advantage_weights are .*weight above 0 \(a\)"):
            WeightedTextSum(rewards, advantage_weights=weights)


def test_a_sum_of_sums_keeps_the_contract() -> None:
    def of_text(function: Any, **options: Any) -> TextFunctionReward:
        return TextFunctionReward(function, **{"name": "mine", "unit": "points", **options})

    judge = WeightedTextSum({"a": (fixed([1.0, 2, 3]), 2.0), "length": (of_text(len, higher_is_better=False), 0.5)})
    scores = judge.score(TEXTS, PROMPTS)
    assert scores.value.tolist() == [1.5, 3, 4.5] and scores.parts["length.weighted"].tolist() == [-0.5, -1, -1.5]
    inner = WeightedTextSum({"length": (of_text(len), 1.0)}, name="inner")
    judge = WeightedTextSum({"inner": (inner, 1.0), "again": (of_text(len), 2.0)})
    assert isinstance(judge, TextReward) and len(check_text_reward(judge)) == 9
    assert judge.score(["abc"], ["?"]).parts["inner.length"].tolist() == [3]
    over_batch = WeightedTextSum({"a": (of_text(len), 1.0)}, normalise="batch")
    assert over_batch.capabilities.needs_batch and len(check_text_reward(over_batch)) == 8
    with pytest.raises(RewardError, match="a single completion scores otherwise than in a batch"):
        check_text_reward(lambda completions, **_: [len(completions) + len(text) for text in completions])
