# SPDX-License-Identifier: Apache-2.0
"""VQAScore and Soft-TIFA: probabilities of the right words, by hand and of the model itself."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.judges.vision_language import ONE, ScriptedEngine, images, noise, tiny_judge
from visalign.rewards import RewardError, check_reward, load_reward
from visalign.rewards.questions.vqa import GENEVAL2, SHOWS, SoftTifa, VqaScore
from visalign.rewards.vlm.engine import Query


def test_vqa_score_is_the_probability_of_yes_among_all_words():
    engine = tiny_judge()
    samples = [noise(16, 24, 1), noise(40, 8, 2)]
    scores = VqaScore(engine, template=ONE, answer="y").score(samples, ["a cat", "a dog"])
    everything = engine.answer_logits(
        ONE,
        [Query(images=[p], prompt=t) for p, t in zip(samples, ["a cat", "a dog"], strict=True)],
        range(len(engine.model.get_output_embeddings().weight)),
    ).logits.double()
    yes = engine.token_ids(["y"])[0]
    assert scores.value.tolist() == pytest.approx(everything.softmax(-1)[:, yes].tolist(), rel=1e-5)
    assert SHOWS.messages[0]["content"][1]["text"] == 'Does this figure show "{prompt}"? Please answer Yes or No.'
    with pytest.raises(RewardError, match="has no option atention"):
        VqaScore("shapes-vlm", atention="eager")


def test_the_question_and_spellings_of_geneval_2():
    engine = tiny_judge()
    judge = VqaScore(engine, rule="geneval2")
    queries = [Query(images=[noise(16, 24, 1)], prompt="a cat")]
    ids = range(len(engine.model.get_output_embeddings().weight))
    prob = engine.answer_logits(GENEVAL2, queries, ids).logits.double().softmax(-1)[0]
    first = [engine.processor.tokenizer.encode(form)[0] for form in ("Yes", "yes", " yes", " Yes")]
    value = judge.score([noise(16, 24, 1)], ["a cat"]).value[0]
    assert float(value) == pytest.approx(float(prob[first].sum()), rel=1e-5)


def test_soft_tifa_by_hand():
    answers = {"How many?": {"four": 0.3, "4": 0.2, "five": 0.5}, "Is it red?": {"Yes": 0.1, "yes": 0.1, "no": 0.8}}
    words = ("four", "4", "five", "Yes", "yes", "no")
    engine = ScriptedEngine(lambda template, ask: answers[ask.prompt], words=words)
    record = {"vqa_list": [["How many?", "four"], ["Is it red?", "Yes"]]}
    pair = {"question": "How many?", "answer": "four"}
    records = [record, {}, {"vqa_list": [["How many?"]]}, {"vqa_list": [pair]}, {"vqa_list": [4]}]
    hard = SoftTifa(engine).score(images(5), list("abcde"), records)
    soft = SoftTifa(engine, mean="arithmetic").score(images(3), ["a", "b", "c"], records[:3])
    assert hard.value[0] == pytest.approx(math.sqrt(0.5 * 0.2), rel=1e-5)
    assert soft.value[0] == pytest.approx((0.5 + 0.2) / 2, rel=1e-5)
    assert hard.text is not None and hard.text[0] == "least probable: Is it red? (0.2)"
    assert hard.valid.tolist() == [True] + [False] * 4 and hard.reason is not None
    assert hard.reason[1] == 'its record has no "vqa_list", a list of [question, answer]'
    assert all("is no [question, answer]" in str(reason) for reason in hard.reason[2:])


def test_the_contract():
    judge = load_reward("vqa_score")
    samples = torch.rand(3, 3, 64, 64, generator=torch.Generator().manual_seed(1)).mul(255).round() / 255
    check_reward(judge, images=samples, prompts=["a red circle", "two blue squares", "a circle"])
    assert judge.identity.model == "shapes-vlm"  # type: ignore[attr-defined]


def test_a_graph_of_questions_by_hand():
    answers = {"cat?": {"Yes": 0.6, "no": 0.4}, "mat?": {"Yes": 0.2, "no": 0.8}, "red?": {"Yes": 0.9, "no": 0.1}}
    engine = ScriptedEngine(lambda template, ask: answers[ask.prompt], words=("Yes", "yes", "no"))
    record = {"vqa_list": [[text, "Yes"] for text in ("red?", "cat?", "mat?")]}
    graphs = [[[2], [], [1]], [[], [], [1]], [[1], [0], []], [[3], [], []], [[]], [[True], [], []]]
    scores = SoftTifa(engine, mean="graph").score(
        images(6), ["a"] * 6, [record | {"vqa_parents": parents} for parents in graphs]
    )
    # the mat is answered no, and with it what is red on it; a circle of right answers stays right
    assert scores.value[:3].tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3])
    assert scores.valid.tolist() == [True] * 3 + [False] * 3 and scores.reason is not None
    assert "name question 3; there are 3" in str(scores.reason[3]) and "3 lists of indices" in str(scores.reason[4])
    assert "name question True; there are 3" in str(scores.reason[5])
