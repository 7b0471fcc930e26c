# SPDX-License-Identifier: Apache-2.0
"""Judges of a chat server with their model in this process: the same questions, replies and failures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.judges.vision_language import ONE, noise, tiny_judge
from tests.support.models.vision_language import save_tiny_seeing_model
from visalign.rewards.base.contract import RewardError
from visalign.rewards.catalogue import load_judge
from visalign.rewards.chat.local import LocalModel
from visalign.rewards.chat.unified_reward import UnifiedReward
from visalign.rewards.chat.yes_no import YesNoServer
from visalign.rewards.questions.reward_dance import RewardDance
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.engine import Query

IMAGES = [noise(16, 24, 1), noise(40, 8, 2), noise(16, 24, 3)]
PROMPTS = ["a cat", "a red dog", "a cat"]


def test_texts_equal_the_engines_and_a_cut_off_text_is_a_failure():
    engine = tiny_judge()
    queries = [Query(images=[image], prompt=prompt) for image, prompt in zip(IMAGES, PROMPTS, strict=True)]
    drawing = {"answers": 2, "seed": 3, "temperature": 1.0, "max_new_tokens": 4}
    expected = engine.generate(ONE, queries, **drawing)
    answers = LocalModel(engine, max_failure_rate=1.0).ask(ONE, queries, read=lambda reply: reply.text, **drawing)
    for texts, ended, row in zip(expected.texts, expected.finished, answers, strict=True):
        for text, finished, answer in zip(texts, ended, row, strict=True):
            if finished and text.strip():
                assert answer == text
            else:
                assert isinstance(answer, AnswerError)
    assert not all(finished for row in expected.finished for finished in row), "some answers are cut off"


def test_yes_no_equals_reward_dance():
    """Over the whole vocabulary the first tokens give the log-odds that `RewardDance` reads."""
    engine = tiny_judge()
    template = replace(ONE, words={"yes": ("y",), "no": ("n",)})
    mine = YesNoServer(server=LocalModel(engine), template=template, top_logprobs=1000, min_mass=0.0)
    theirs = RewardDance(engine, template=template, min_mass=0.0)
    scores, expected = mine.score(IMAGES, PROMPTS), theirs.score(IMAGES, PROMPTS)
    assert scores.valid.all()
    torch.testing.assert_close(scores.value, expected.value, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores.parts["mass"], expected.parts["mass"], rtol=1e-4, atol=1e-5)


def test_a_folder_is_loaded_in_this_process(tmp_path, monkeypatch):
    monkeypatch.delenv("VISALIGN_JUDGE_URL", raising=False)
    folder = save_tiny_seeing_model(tmp_path / "judge")
    options = {"max_new_tokens": 2, "max_failure_rate": 1.0, "max_tokens": 10**6, "min_pixels": 64}
    judge = UnifiedReward(model=str(folder), max_pixels=4096, **options)
    scores = judge.score(IMAGES, PROMPTS)
    assert not scores.valid.any() and scores.reason is not None
    assert all("cut off" in str(reason) or "gives no score" in str(reason) for reason in scores.reason)
    assert judge.identity.model == "judge" and judge.identity.weights.strip("+")
    pairs: Any = load_judge("unified_reward_pairs", model=str(folder), run_device="cpu", **options)
    assert pairs.compare(IMAGES, IMAGES[::-1], PROMPTS).valid.tolist() == [False] * 3
    with pytest.raises(RewardError, match="has no option atention"):
        UnifiedReward(model=str(folder), atention="eager")
