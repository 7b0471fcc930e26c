# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of text rewards: values by hand, validity, units, breakdown, the contract."""

from __future__ import annotations

import pytest
import torch

from visalign.interfaces import Scores, TextReward
from visalign.rewards import (
    RewardError,
    TextFunctionReward,
    VerifiableAnswer,
    WeightedTextSum,
    check_text_reward,
)

TEXTS = ["4", "5", "", "22"]
PROMPTS = ["?"] * 4
RECORDS = [{"answer": "4"}, {"answer": "4"}, {"answer": "4"}, None]


def of_text(function, **options) -> TextFunctionReward:
    return TextFunctionReward(function, **{"name": "mine", "unit": "points", **options})


def fixed(values, **options) -> TextFunctionReward:
    """A reward that answers the same numbers to any four completions."""
    return of_text(lambda completions: values, **options)


def total(rewards, **options) -> Scores:
    return WeightedTextSum(rewards, **options).score(TEXTS, PROMPTS, RECORDS)


def test_sum_by_hand_with_breakdown() -> None:
    scores = total({"a": (fixed([1.0, 2, 3, 4]), 2.0), "length": (of_text(len, higher_is_better=False), 0.5)})
    assert scores.value.tolist() == [1.5, 3.5, 6, 7] and scores.value.dtype == torch.float32
    assert scores.unit == "points" and scores.valid.all()
    assert scores.parts["a"].tolist() == [1, 2, 3, 4] and scores.parts["length"].tolist() == [1, 1, 0, 2]
    assert scores.parts["length.weighted"].tolist() == [-0.5, -0.5, 0, -1]
    assert torch.equal(scores.parts["a.weighted"] + scores.parts["length.weighted"], scores.value)


def test_an_invalid_part_makes_the_sum_invalid_with_its_reason() -> None:
    answer = VerifiableAnswer(compare="exact", name="answer")
    scores = total({"answer": (answer, 1.0), "shape": (fixed([1.0, None, 1, 1], unit=answer.unit), 1.0)})
    assert scores.valid.tolist() == [True, False, True, False]
    assert scores.reason is not None and scores.reason[1] == "shape: mine returned None or NaN for it"
    assert str(scores.reason[3]).startswith("answer: ")
    assert scores.value[[0, 2]].tolist() == [2, 1] and scores.value[[1, 3]].isnan().all()
    assert scores.parts["answer"][1] == 0 and scores.parts["shape"][3] == 1


def test_weight_zero_only_records_and_prompts_reach_every_reward() -> None:
    def asked(prompt, completion):
        return float(len(prompt))

    chat = [{"role": "user", "content": "?"}]
    judge = WeightedTextSum(
        {"a": (of_text(len), 1.0), "b": (of_text(asked, unit="other"), 0), "c": (of_text(len), 3.0)}
    )
    scores = judge.score(["x", "yy"], [chat, "long"])
    assert scores.value.tolist() == [4, 8] and scores.parts["b"].tolist() == [1, 4]
    assert "b.weighted" not in scores.parts


class Answering:
    """Returns what it is told to."""

    name, unit, range, higher_is_better = "odd", "u", (0.0, 1.0), True

    def __init__(self, answer) -> None:
        self.answer = answer

    def score(self, completions, prompts, metadata=None):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def answer(value) -> Scores:
    return Scores(value=torch.tensor(value), valid=torch.ones(len(value), dtype=torch.bool), unit="u")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (KeyError("gone"), r"Reward 'mine' raised KeyError: 'gone'.*For a sample that cannot be judged"),
        (
            [1.0] * 4,
            r"returned a list; it must return .*visalign\.rewards\.check_text_reward\(reward\) finds",
        ),
        (answer([1.0] * 3), r"Reward 'mine' returned 'value' as \[3\] for 4 completions"),
        (RewardError("my own words"), "^my own words$"),
    ],
)
def test_a_reward_that_breaks_its_contract_is_named(given, message) -> None:
    with pytest.raises(RewardError, match=message):
        total({"mine": (Answering(given), 1.0)})


def test_contract() -> None:
    inner = WeightedTextSum({"length": (of_text(len), 1.0)}, name="inner")
    judge = WeightedTextSum({"inner": (inner, 1.0), "again": (of_text(len), 2.0)})
    assert isinstance(judge, TextReward) and len(check_text_reward(judge)) == 9
    assert judge.score(["abc"], ["?"]).parts["inner.length"].tolist() == [3]
    over_batch = WeightedTextSum({"a": (of_text(len), 1.0)}, normalise="batch")
    assert over_batch.capabilities.needs_batch and len(check_text_reward(over_batch)) == 8
    with pytest.raises(RewardError, match="a completion alone scores otherwise than in a batch"):
        check_text_reward(lambda completions, **_: [len(completions) + len(text) for text in completions])
