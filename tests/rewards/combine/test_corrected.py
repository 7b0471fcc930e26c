# SPDX-License-Identifier: Apache-2.0
"""GDRO's score corrected by quality: by hand, failures, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from visalign.rewards import FunctionReward, RewardError, load_reward


def test_by_hand_and_failures_are_no_scores() -> None:
    judges: Any = [
        FunctionReward(lambda images, prompts, values=values: values, name="r")
        for values in ([1.0, 0.5, 1, 0.2], [4.5, 3, math.nan, 1])
    ]
    scores = load_reward("corrected", reward=judges[0], quality=judges[1]).score(torch.zeros(4, 3, 4, 4), ["a"] * 4)
    assert scores.value[[0, 1, 3]].tolist() == pytest.approx([1.7, 0.2, -0.2])
    assert scores.valid.tolist() == [True, True, False, True] and scores.parts["quality"][0] == 4.5


def test_names_and_refusals() -> None:
    named = load_reward("corrected", reward="shapes_verifier", quality="sharpness", options={"mode": "mixed"})
    assert named.score(torch.zeros(1, 3, 64, 64), ["a red circle"]).parts.keys() == {"reward", "quality"}
    with pytest.raises(RewardError, match=r"quality is vendi_gain, and it compares the images of a group\. Give"):
        load_reward("corrected", reward="sharpness", quality="vendi_gain")
    lower = FunctionReward(lambda images, prompts: [0.0], name="faults", higher_is_better=False)
    with pytest.raises(RewardError, match=r"reward is faults, and lower is better"):
        load_reward("corrected", reward=lower, quality="sharpness")
