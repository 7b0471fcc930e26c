# SPDX-License-Identifier: Apache-2.0
"""Q-Align's levels: the model's own expectation, answers without a level, checkpoints with own code."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.judges.vision_language import noise, tiny_engine
from visalign.rewards import RewardError, check_reward, load_reward
from visalign.rewards.questions.q_align import LEVELS, QAlign
from visalign.rewards.vlm.engine import Query

IMAGES = [noise(16, 24, 1), noise(40, 8, 2)]


def test_the_score_is_the_expectation_over_the_first_tokens_of_the_levels():
    engine = tiny_engine()
    judge = QAlign(engine, min_mass=0.0)
    scores = judge.score(IMAGES, ["", "what it shows is not looked at"])
    ids = engine.token_ids(list("egfpb"))
    queries = [Query(images=[image], prompt="-") for image in IMAGES]
    everything = engine.answer_logits(judge.template, queries, range(72)).logits.double()
    prob = everything[:, ids].softmax(-1)
    mean = prob @ torch.tensor([5.0, 4, 3, 2, 1], dtype=torch.float64)
    assert scores.value.tolist() == pytest.approx(mean.tolist(), rel=1e-6)
    spread = torch.stack([(p * (torch.arange(5, 0, -1) - m) ** 2).sum() for p, m in zip(prob, mean, strict=True)])
    assert scores.std is not None and scores.std.tolist() == pytest.approx(spread.sqrt().tolist(), rel=1e-5)
    mass = everything.softmax(-1)[:, ids].sum(-1)
    assert scores.parts["mass"].tolist() == pytest.approx(mass.tolist(), rel=1e-5)
    assert list(scores.parts) == [*LEVELS, "mass"] and scores.value[0] != scores.value[1]


def test_the_published_words():
    template = QAlign(tiny_engine(), task="aesthetics").template
    assert template.messages[0]["content"][0]["text"] == "How would you rate the aesthetics of this image?\n"
    assert template.answer_prefix == "The aesthetics of the image is"


def test_a_model_that_names_no_level_gives_no_score():
    strict = QAlign(tiny_engine(), min_mass=0.999).score(IMAGES, ["a", "b"])
    assert not strict.valid.any() and strict.reason is not None
    assert "the model names no level: the five words have" in str(strict.reason[0])
    lost = QAlign(tiny_engine()).score(["no-such.png"], ["a"])
    assert not lost.valid.any() and "no such image file" in str(lost.reason)
    with pytest.raises(ValueError, match="min_mass is 1"):
        QAlign(tiny_engine(), min_mass=1)


def test_checkpoints_with_code_of_their_own_are_refused_by_name(tmp_path):
    folder = tmp_path / "one-align"
    folder.mkdir()
    auto = {"AutoModelForCausalLM": "modeling_mplug_owl2.MPLUGOwl2LlamaForCausalLM"}
    (folder / "config.json").write_text(json.dumps({"model_type": "mplug_owl2", "auto_map": auto}))
    with pytest.raises(RewardError, match=r"one-align is a 'mplug_owl2', which transformers .* does not know"):
        load_reward("q_align", model=str(folder))


def test_the_contract():
    check_reward(QAlign(tiny_engine(), min_mass=0.0), tolerance=1e-5)
