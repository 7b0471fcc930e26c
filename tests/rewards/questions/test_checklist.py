# SPDX-License-Identifier: Apache-2.0
"""The checklist judge: questions, masks and weights as data, soft and hard answers, questions left out."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.support.judges.vision_language import PROMPTS, ScriptedEngine, ask_text, given, images, tiny_engine, why
from visalign.rewards import check_reward
from visalign.rewards.questions.checklist import SHAPES_CHECKLIST, VISIONREWARD_MASKS, Checklist
from visalign.rewards.questions.vision_reward import VisionReward
from visalign.rewards.vlm.template import JudgeSettings

LETTERS = {"yes": ["y", "s"], "no": ["n"], "min_mass": 0.0}
QUESTION = ask_text("{question}?")
FACE = {"questions": ["face", "eyes good", "sharp", "a {prompt}"], "coef": [2.0, 0.5, 1.0], "intercept": 0.25}
RULE = {"masked_features": {"0": [1]}, "has_alignment": False}


def engine(probabilities, **options):
    """Says yes with the question's share of 0.9; None leaves it unanswered."""

    def probability(template, ask):
        yes = probabilities.get(ask.fields.get("question"), 0.5)
        return {"7": 1.0} if yes is None else {"yes": 0.9 * yes, "no": 0.9 * (1 - yes)}

    return ScriptedEngine(probability, **options)


def score(probabilities, rule=RULE, **options):
    judge = VisionReward(engine(probabilities), checklist={**FACE, **rule}, **options)
    return judge.score(images(1), ["cat"])


def test_soft_score_is_the_weighted_sum_with_its_mask():
    scores = score({"face": 0.5, "eyes good": 0.9, "sharp": 0.2, "a cat": 0.75})
    hand = 0.25 + 2.0 * (2 * 0.9 - 1) * 0.5 + 0.5 * (2 * 0.2 - 1) + 1.0 * 0.5
    assert scores.value[0] == pytest.approx(hand, abs=1e-5)
    assert scores.parts["sharp"][0] == pytest.approx(-0.6, abs=1e-5)
    assert scores.parts["unanswered"][0] == 0 and scores.text is None


def test_hard_answers_are_plus_and_minus_one():
    answers = {"face": 0.6, "eyes good": 0.9, "sharp": 0.2, "a cat": 0.75}
    assert score(answers, answers="hard").value[0] == pytest.approx(0.25 + 2 - 0.5 + 1)
    hidden = {**answers, "face": 0.4}
    assert score(hidden, answers="hard").value[0] == pytest.approx(0.25 + 0 - 0.5 + 1)


def test_an_unanswered_question_counts_zero_and_is_named():
    scores = score({"face": 1.0 - 1e-9, "eyes good": 0.9, "sharp": None, "a cat": 0.75})
    assert scores.valid[0] and scores.value[0] == pytest.approx(0.25 + 2 * 0.8 + 0.5, abs=1e-4)
    assert math.isnan(scores.parts["sharp"][0]) and scores.parts["unanswered"][0] == 1
    assert "'sharp'" in given(scores.text)[0] and "neither yes nor no" in given(scores.text)[0]


def test_an_unanswered_mask_hides_the_questions_it_masks():
    scores = score({"face": None, "eyes good": 0.9, "sharp": 0.2, "a cat": 0.75})
    assert scores.value[0] == pytest.approx(0.25 - 0.3 + 0.5, abs=1e-5)


def test_too_many_unanswered_questions_mask_the_image():
    none = {"face": None, "eyes good": None, "sharp": None}
    scores = score(none)
    assert not scores.valid[0] and "3 of 4 questions have no answer" in why(scores, 0)
    assert score(none, max_unanswered=1.0).valid[0]


def test_alignment_defaults_to_the_same_models_yes():
    rule = {**RULE, "coef": [3.0, 2.0, 0.5, 1.0], "has_alignment": True}
    answers = {"face": 0.5, "eyes good": 0.5, "sharp": 0.5, "a cat": 0.5, None: 0.8}
    scores = score(answers, rule)
    assert scores.value[0] == pytest.approx(0.25 + 3 * 0.8, abs=1e-5)
    assert scores.parts["alignment"][0] == pytest.approx(0.8, abs=1e-6)

    class Fixed:
        name, unit, range, higher_is_better = "fixed", "1", (0.0, 1.0), True

        def score(self, images, prompts, metadata=None):
            from visalign.rewards.base.contract import make_scores

            return make_scores(torch.full((len(prompts),), 0.5), [None, "cannot"][: len(prompts)], "1")

    judge = VisionReward(engine(answers), checklist={**FACE, **rule}, alignment=Fixed())
    scores = judge.score(images(2), ["cat", "cat"])
    assert scores.value[0] == pytest.approx(0.25 + 1.5, abs=1e-5)
    assert scores.valid.tolist() == [True, False] and why(scores, 1) == "alignment: cannot"


def test_an_empty_prompt_is_masked_where_a_question_asks_about_it():
    judge = VisionReward(engine({}), checklist={**FACE, **RULE})
    assert judge.score(images(2), [" ", "cat"]).valid.tolist() == [False, True]
    plain = {"questions": ["sharp"], "coef": [1.0], "has_alignment": False}
    assert VisionReward(engine({}), checklist=plain).score(images(1), [""]).valid[0]


def test_range_holds_every_score():
    judge = VisionReward(engine({}), checklist={**FACE, **RULE})
    assert judge.range == pytest.approx((0.25 - 3.5, 0.25 + 3.5), abs=1e-4)
    answers = dict.fromkeys(("face", "eyes good", "sharp", "a cat", None), 1.0 - 1e-9)
    for weight, low, high in ((3.0, -3.25, 6.75), (-3.0, -6.25, 3.75), (0.0, -3.25, 3.75)):
        rule = {**RULE, "coef": [weight, 2.0, 0.5, 1.0], "has_alignment": True}
        judge = VisionReward(engine(answers), checklist={**FACE, **rule})
        assert judge.range == pytest.approx((low, high), abs=1e-4)
        assert float(judge.score(images(1), ["cat"]).value[0]) == pytest.approx(3.75 + weight, abs=1e-3)


def test_visionrewards_two_files_are_read(tmp_path):
    lines = [f"Question {number}?" for number in range(30)]
    (tmp_path / "q.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    weights = [2.0, *(number / 10 for number in range(27))]
    (tmp_path / "w.json").write_text(json.dumps({"coef": weights, "intercept": 0.0}), encoding="utf-8")
    checklist = Checklist.from_visionreward(tmp_path / "q.txt", tmp_path / "w.json")
    assert checklist.questions == tuple(lines) and checklist.rule.masked == VISIONREWARD_MASKS
    nested = {"coef": [weights], "intercept": [0.5]}
    (tmp_path / "w.json").write_text(json.dumps(nested), encoding="utf-8")
    assert Checklist.from_visionreward(tmp_path / "q.txt", tmp_path / "w.json").rule.intercept == 0.5
    (tmp_path / "q.txt").write_text("only one\n", encoding="utf-8")
    with pytest.raises(ValueError, match="masks name question"):
        Checklist.from_visionreward(tmp_path / "q.txt", tmp_path / "w.json")


def test_a_checklist_round_trips_through_a_file_and_the_folder(tmp_path):
    checklist = {**FACE, **RULE}
    (tmp_path / "c.json").write_text(json.dumps(checklist), encoding="utf-8")
    read = Checklist.read(tmp_path / "c.json")
    assert read == Checklist.from_dict(checklist)
    real = tiny_engine(settings=JudgeSettings(rest={"checklist": checklist}))
    judge = VisionReward(real, template=QUESTION, **LETTERS)
    assert judge.checklist == read
    assert VisionReward(tiny_engine(), template=QUESTION, alignment=judge, **LETTERS).checklist is SHAPES_CHECKLIST


def test_wrong_data_is_refused(tmp_path):
    rule = {"coef": [1, 1], "has_alignment": False}
    for record, message in (
        ({"questions": ["a", "a"], **rule}, "no question twice"),
        ({"questions": ["a"], **rule}, "2 weights for 1 features"),
        ({"coef": [1]}, 'object with "questions"'),
    ):
        with pytest.raises(ValueError, match=message):
            Checklist.from_dict(record)
    with pytest.raises(ValueError, match=r"none\.json cannot be read"):
        Checklist.read(tmp_path / "none.json")
    with pytest.raises(ValueError, match="max_unanswered is 2"):
        VisionReward(engine({}), max_unanswered=2)
    with pytest.raises(ValueError, match=r"has no \{question\}"):
        VisionReward(engine({}), template=ask_text("no place"))


def test_the_contract_holds_on_a_model():
    align = {**FACE, **RULE, "has_alignment": True, "coef": [1.0, 2.0, 0.5, 1.0]}
    folder = JudgeSettings(templates={"yes_no": ask_text("ok {prompt}")})
    judge = VisionReward(tiny_engine(settings=folder), checklist=align, template=QUESTION, **LETTERS)
    check_reward(judge, images=images(4), prompts=PROMPTS)
