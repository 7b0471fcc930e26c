# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of text rewards: values by hand, validity, units, breakdown, the contract."""

from __future__ import annotations

import pytest
import torch

from visalign.interfaces import Scores, TextReward
from visalign.rewards import RewardError, TextFunctionReward, WeightedTextSum, check_text_reward

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


def test_contract() -> None:
    inner = WeightedTextSum({"length": (of_text(len), 1.0)}, name="inner")
    judge = WeightedTextSum({"inner": (inner, 1.0), "again": (of_text(len), 2.0)})
    assert isinstance(judge, TextReward) and len(check_text_reward(judge)) == 9
    assert judge.score(["abc"], ["?"]).parts["inner.length"].tolist() == [3]
    over_batch = WeightedTextSum({"a": (of_text(len), 1.0)}, normalise="batch")
    assert over_batch.capabilities.needs_batch and len(check_text_reward(over_batch)) == 8
    with pytest.raises(RewardError, match="a single completion scores otherwise than in a batch"):
        check_text_reward(lambda completions, **_: [len(completions) + len(text) for text in completions])
