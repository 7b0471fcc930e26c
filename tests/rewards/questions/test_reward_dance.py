# SPDX-License-Identifier: Apache-2.0
"""RewardDance: log-odds over sets of tokens, the rest of the probability, orders, reasons, references."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.judges.vision_language import (
    KINDS,
    PROMPTS,
    ScriptedEngine,
    ask_text,
    given,
    images,
    tiny_engine,
    why,
)
from visalign.rewards import RewardError, check_reward
from visalign.rewards.questions.reward_dance import EXPLAIN, RewardDance, RewardDancePairs
from visalign.rewards.questions.reward_dance_reference import ReferenceReward
from visalign.rewards.vlm.yes_no import SUREST

LETTERS = {"yes": ["y", "s"], "no": ["n"], "min_mass": 0.0}
"""Spellings for a model whose tokens are letters."""
ASK = ask_text("ok {prompt}?")
TWO = ask_text("better {prompt}?", images=2)


def scripted(probability, **options):
    return RewardDance(ScriptedEngine(lambda template, ask: probability), **options)


def brightness(*words):
    """An engine whose share of yes, among yes and no, is the last image's brightness."""

    def probability(template, ask):
        level = float(ask.images[-1].mean())
        return {"yes": 0.9 * level, "no": 0.9 * (1 - level)}

    return ScriptedEngine(probability)


def test_log_odds_count_all_spellings_and_report_the_remaining_mass():
    judge = scripted({"yes": 0.3, "Yes": 0.2, " yes": 0.1, "no": 0.1, "No": 0.1, "5": 0.2})
    scores = judge.score(images(1), ["a cat"])
    assert scores.value[0] == pytest.approx(math.log(0.6 / 0.2), abs=1e-5)
    assert scores.parts["prob"][0] == pytest.approx(0.75, abs=1e-6)
    assert scores.parts["mass"][0] == pytest.approx(0.8, abs=1e-6)
    assert scores.parts["prob_vocabulary"][0] == pytest.approx(0.6, abs=1e-6)
    assert (judge.unit, judge.range) == ("log-odds of yes", (-math.inf, math.inf))


def test_probability_is_the_sigmoid_and_has_its_own_unit():
    judge = scripted({"yes": 0.3, "no": 0.6}, value="prob")
    scores = judge.score(images(2), ["a", "b"])
    assert torch.allclose(scores.value, torch.full((2,), 1 / 3))
    assert scores.unit == "probability of yes" and judge.range == (0.0, 1.0)


def test_a_model_that_answers_neither_is_masked_not_scored():
    scores = scripted({"yes": 0.04, "no": 0.01, "7": 0.95}).score(images(1), ["a"])
    assert not scores.valid[0] and math.isnan(scores.value[0])
    assert "neither yes nor no" in why(scores, 0) and "0.05" in why(scores, 0)
    unmasked = scripted({"yes": 0.04, "no": 0.01}, min_mass=0.0).score(images(1), ["a"])
    assert unmasked.value[0] == pytest.approx(math.log(4), abs=1e-5)


def test_certainty_is_the_surest_answer_and_finite():
    judge = scripted({"yes": 1.0})
    assert judge.score(images(1), ["a"]).value.tolist() == [SUREST]
    sure = scripted({"no": 0.9}).score(images(1), ["a"])
    assert sure.valid[0] and sure.value.tolist() == [-SUREST] and 0 < float(sure.parts["prob"]) < 1e-30
    nearly = scripted({"yes": 0.9, "no": 1e-30}).score(images(1), ["a"]).value
    assert float(nearly) == pytest.approx(math.log(0.9e30), abs=1e-3) and float(nearly) < SUREST
    neither = scripted({"7": 1.0}, min_mass=0.0).score(images(1), ["a"])
    assert not neither.valid[0] and "log-odds are no number" in why(neither, 0)


@pytest.mark.parametrize("prompt", ["", " \n\t", "\u200b\ufeff"])
def test_an_empty_prompt_is_masked(prompt):
    scores = scripted({"yes": 0.5, "no": 0.4}).score(images(2), [prompt, "a"])
    assert scores.valid.tolist() == [False, True] and "empty" in why(scores, 0)


def test_wrong_options_are_refused():
    engine = ScriptedEngine()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"value": "logit"}, "value is 'logit'; allowed are log_odds, prob"),
        ({"write_reasons": True}, "write_reasons without decision_first"),
        ({"yes": ["yes", "no"], "no": ["no"]}, "of yes and no"),
        ({"yes": ["maybe"]}, "'maybe' is several tokens"),
        ({"yes": "yes"}, r"Write \['yes'\]"),
        ({"template": ask_text("{question} {prompt}")}, r"'test' has .*fills no \{question\}"),
        ({"template": ASK, "instruction": "look at hands"}, r"an instruction needs \{instruction\}"),
    ]
    for options, message in refused:
        with pytest.raises((RewardError, ValueError), match=message):
            RewardDance(engine, **options)
    with pytest.raises(RewardError, match="None of the words"):
        RewardDance(tiny_engine())


def test_reasons_are_written_behind_the_decision_and_change_no_score():
    def probability(template, ask):
        assert template is EXPLAIN
        return {"yes": 0.1, "Yes": 0.2, "no": 0.5}

    engine = ScriptedEngine(probability, lambda template, ask: [", because " + ask.continuation])
    plain = RewardDance(engine, decision_first=True).score(images(2), ["a", "b"])
    scores = RewardDance(engine, decision_first=True, write_reasons=True).score(images(2), ["a", "b"])
    assert torch.equal(plain.value, scores.value) and plain.text is None
    assert scores.text == ["no, because no"] * 2
    assert {ask.continuation for ask in engine.generated} == {"no"}


def test_pairs_are_asked_in_both_orders_and_a_bias_cancels():
    def probability(template, ask):
        level = float(ask.images[1].mean() - ask.images[0].mean()) + 0.7  # likes the second image
        return {"yes": 0.8 * torch.tensor(level).sigmoid().item(), "no": 0.8 * torch.tensor(-level).sigmoid().item()}

    dark, bright = torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 8, 8)
    judge = RewardDancePairs(ScriptedEngine(probability))
    verdicts = judge.compare(bright, dark, ["a"])
    assert given(verdicts.log_odds)[0] == pytest.approx(1.0, abs=1e-5)
    assert verdicts.parts["second_bias"][0] == pytest.approx(0.7, abs=1e-5)
    assert verdicts.parts["left_second"][0] == pytest.approx(1.7, abs=1e-5)
    assert verdicts.parts["left_first"][0] == pytest.approx(0.3, abs=1e-5)
    assert verdicts.parts["mass"][0] == pytest.approx(0.8, abs=1e-5)
    turned = judge.compare(dark, bright, ["a"])
    assert torch.allclose(verdicts.prob + turned.prob, torch.ones(1))
    once = RewardDancePairs(ScriptedEngine(probability), both_orders=False)
    assert given(once.compare(bright, dark, ["a"]).log_odds)[0] == pytest.approx(1.7, abs=1e-5)


def test_a_pair_fails_with_the_side_that_is_broken():
    judge = RewardDancePairs(brightness())
    verdicts = judge.compare([images(1)[0], "no.png"], images(2), ["a", "b"])
    assert verdicts.valid.tolist() == [True, False] and why(verdicts, 1).startswith("the left image: no such image")
    assert math.isnan(verdicts.prob[1]) and math.isnan(verdicts.parts["mass"][1])
    pairs = torch.tensor([[0, 1], [0, 2]])
    verdicts = judge.compare_pairs(images(3), pairs, ["a", "a", "b"])
    assert verdicts.valid.tolist() == [True, False] and "different prompts" in why(verdicts, 1)
    with pytest.raises(ValueError, match="2 left and 3 right"):
        judge.compare(images(2), images(3), ["a", "b"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_contract_holds_on_each_family(kind):
    judge = RewardDance(tiny_engine(kind), template=ASK, **LETTERS)
    check_reward(judge, images=images(4), prompts=PROMPTS)


def test_log_odds_equal_those_from_transformers():
    engine = tiny_engine()
    judge = RewardDance(engine, template=ASK, **LETTERS)
    scores = judge.score(images(1), ["a cat"])
    text = engine.processor.apply_chat_template(
        ASK.filled({"prompt": "a cat"}), tokenize=False, add_generation_prompt=True
    )
    levels = images(1)[0].mul(255).round().byte()
    inputs = engine.processor(text=[text], images=[levels], return_tensors="pt")
    with torch.no_grad():
        prob = engine.model(**inputs).logits[0, -1].float().softmax(-1)
    ids = {word: engine.token_ids([word])[0] for word in "ysn"}
    yes, no = prob[ids["y"]] + prob[ids["s"]], prob[ids["n"]]
    assert scores.value[0] == pytest.approx(math.log(yes / no), abs=1e-4)
    assert scores.parts["mass"][0] == pytest.approx(float(yes + no), abs=1e-5)


def test_pairs_on_a_model_are_antisymmetric_and_numbered_ones_agree():
    judge = RewardDancePairs(tiny_engine(), template=TWO, **LETTERS)
    left, right = images(3), images(3, seed=1)
    verdicts, turned = judge.compare(left, right, PROMPTS[:3]), judge.compare(right, left, PROMPTS[:3])
    assert torch.allclose(given(verdicts.log_odds), -given(turned.log_odds), atol=1e-5)
    numbered = judge.compare_pairs(torch.cat([left, right]), torch.tensor([[0, 3], [1, 4], [2, 5]]), PROMPTS[:3] * 2)
    assert torch.allclose(given(verdicts.log_odds), given(numbered.log_odds), atol=1e-6)
    assert (given(verdicts.log_odds).abs() > 1e-6).all()


def test_references_are_averaged_in_log_odds_and_missing_ones_masked():
    judge = ReferenceReward(RewardDancePairs(tiny_engine(), template=TWO, **LETTERS), {"a": images(2, seed=3)})
    pictures = images(3)
    scores = judge.score(pictures, ["a", "a", "b"], [None, {"references": images(1, seed=4)}, None])
    assert scores.valid.tolist() == [True, True, False] and "no readable reference" in why(scores, 2)
    one, none = {"references": images(1, seed=4)[0]}, {"references": None}
    lost = [{"references": name} for name in ("gone.png", "parquet://gone#image#0")]
    odd = judge.score(images(5), ["a"] * 5, [one, none, {"references": 5}, *lost])
    assert odd.valid.tolist() == [True, True, False, False, False] and odd.parts["references"].tolist()[:2] == [1, 2]
    assert (
        "its references: images[0] is a int" in why(odd, 2)
        and "no readable reference" in why(odd, 3)
        and "No such" in why(odd, 4)
    )
    single = [given(judge.judge.compare(pictures[:1], ref[None], ["a"]).log_odds)[0] for ref in images(2, seed=3)]
    assert scores.value[0] == pytest.approx(float(sum(single)) / 2, abs=1e-5)
    assert scores.parts["references"].tolist()[:2] == [2, 1]
    assert scores.parts["spread"][0] == pytest.approx(float(torch.stack(single).std()), abs=1e-5)
    unknown: Any = "raw"
    with pytest.raises(ValueError, match="value is 'raw'"):
        ReferenceReward(judge.judge, value=unknown)


def test_images_are_ranked_by_wins_and_those_without_a_comparison_come_last():
    levels = torch.tensor([0.2, 0.9, 0.5, 0.7])
    pictures = [level.expand(3, 8, 8) for level in levels]
    for both_orders in (True, False):
        judge = RewardDancePairs(brightness(), both_orders=both_orders)
        assert ReferenceReward(judge).rank(["missing.png", *pictures], "a") == [2, 4, 3, 1, 0]
        assert len(judge.engine.asked) == 12  # each of 6 pairs in both orders, whoever swaps them
    assert ReferenceReward(judge).rank(["missing.png", pictures[0]], "a") == [0, 1]
