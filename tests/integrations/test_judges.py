# SPDX-License-Identifier: Apache-2.0
"""Judges as the plain functions of other trainers: larger is better, and a failure is no number."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from visalign.integrations.judges import flow_grpo, text_scores
from visalign.rewards.base.contract import RewardError
from visalign.rewards.catalogue import CATALOGUE, TEXT_CATALOGUE, load_reward, load_text_reward

IMAGES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def dark(images: torch.Tensor, prompts: list[str], metadata: list) -> list[float | None]:
    """Brightness; none for the second image."""
    return [None if i == 1 else float(image.mean()) for i, image in enumerate(images)]


def test_flow_grpo_gets_numbers_and_an_info() -> None:
    judge = load_reward("jpeg_size")
    scores, info = flow_grpo("jpeg_size")(IMAGES, ("a", "b", "c"), {})
    sign = 1 if judge.higher_is_better else -1
    assert info == {} and [sign * x for x in scores] == judge.score(IMAGES, ["a", "b", "c"]).value.tolist()


def told(images: torch.Tensor, prompts: list[str], metadata: list) -> list[float]:
    """What the metadata say."""
    return [float(record["level"]) for record in metadata]


def test_flow_grpo_hands_over_metadata_of_each_and_of_all() -> None:
    judge = flow_grpo(f"{__file__}:told")
    assert judge(IMAGES, ["a"] * 3, [{"level": i} for i in range(3)])[0] == [0, 1, 2]
    assert judge(IMAGES, ["a"] * 3, {"level": 4})[0] == [4, 4, 4]


def test_a_lower_is_better_judge_turns_round() -> None:
    judge = f"{__file__}:dark"
    up = flow_grpo(judge, on_failure="nan")(IMAGES, ["a"] * 3, None)[0]
    down = flow_grpo(judge, on_failure="nan", higher_is_better=False)(IMAGES, ["a"] * 3, None)[0]
    assert up[0] == -down[0] != 0 and math.isnan(up[1])


def test_a_failure_is_said() -> None:
    with pytest.raises(RewardError, match=r"'dark' could not judge 1 of 3 samples; the first is sample 1: dark ret"):
        flow_grpo(f"{__file__}:dark")(IMAGES, ["a"] * 3, [{}] * 3)


def test_texts_are_read_from_conversations() -> None:
    judge = load_text_reward("boxed_answer")
    right, tool = {"role": "assistant", "content": "\\boxed{4}"}, {"role": "tool", "content": "\\boxed{4}"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    parts = {"role": "assistant", "content": [{"type": "text", "text": "\\boxed{4}"}]}
    turns = [[right], "\\boxed{3}", [call, tool, right, tool], [call, tool], [tool], [parts], [], None]
    expected = [1.0, 0.0, 1.0, None, None, None, None, None]
    assert text_scores(judge, turns, ["2+2?"] * 8, [{"answer": "4"}] * 8) == expected
    with pytest.raises(RewardError, match=r"sample 0: the conversation has no assistant message"):
        text_scores(judge, turns[3:], ["2+2?"] * 5, [{"answer": "4"}] * 5, "raise")


def test_judges_that_the_page_names_exist() -> None:
    page = (Path(__file__).parents[2] / "docs/start/hosts.md").read_text()
    judges = set(re.findall(r'(?:judge(?:=|: )|reward_function\("|flow_grpo\(")([a-z]\w+)', page))
    assert {"hps_v2", "boxed_answer", "remote", "repetition"} <= judges
    judges -= {"no", "within"}  # words of the page's sentences
    assert judges <= CATALOGUE.keys() | TEXT_CATALOGUE.keys()
