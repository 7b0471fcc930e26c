# SPDX-License-Identifier: Apache-2.0
"""VisualQuality-R1: expectation over digits, seeded answers, what cannot be read."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.judges.vision_language import PROMPTS, ScriptedEngine, ask_text, given, images, tiny_engine, why
from visalign.core import thurstone_probability
from visalign.rewards import RewardError, check_reward
from visalign.rewards.questions.visual_quality_r1 import RATING, RATING_THINKING, VisualQuality

WHOLE = ask_text("rate", answer_prefix="<answer>", words={"scores": tuple("12345")})
FINE = ask_text("rate", answer_prefix="<answer>", words=RATING.words)


def direct(probability, template=WHOLE, **options):
    return VisualQuality(ScriptedEngine(lambda _, ask: probability(ask)), template=template, **options)


def test_whole_ratings_have_the_mean_and_deviation_of_their_tokens():
    judge = direct(lambda ask: {"2": 0.2, "3": 0.4, "5": 0.2})
    scores = judge.score(images(1), [""])
    mean = 0.25 * 2 + 0.5 * 3 + 0.25 * 5
    variance = 0.25 * (2 - mean) ** 2 + 0.5 * (3 - mean) ** 2 + 0.25 * (5 - mean) ** 2
    assert scores.value[0] == pytest.approx(mean, abs=1e-5)
    assert given(scores.std)[0] == pytest.approx(math.sqrt(variance), abs=1e-5)
    assert scores.parts["mass"][0] == pytest.approx(0.8, abs=1e-6)
    assert scores.parts["left_over"][0] == pytest.approx(0.2, abs=1e-6)


def test_two_decimals_are_read_behind_each_digit():
    table = {"": {"3": 0.5, "5": 0.5}, "3.": {"2": 0.25, "7": 0.75}, "3.2": {"5": 1.0}, "3.7": {"0": 0.5, "9": 0.5}}
    any_digit = {digit: 0.1 for digit in "0123456789"}
    scores = direct(lambda ask: table.get(ask.continuation, any_digit), FINE).score(images(1), [""])
    leaves = {3.25: 0.125, 3.70: 0.1875, 3.79: 0.1875, 5.0: 0.5}
    mean = sum(value * prob for value, prob in leaves.items())
    variance = sum(prob * (value - mean) ** 2 for value, prob in leaves.items())
    assert scores.value[0] == pytest.approx(mean, abs=1e-5)
    assert given(scores.std)[0] == pytest.approx(math.sqrt(variance), abs=1e-5)


def test_a_model_that_writes_no_rating_is_masked():
    scores = direct(lambda ask: {"9": 0.95, "3": 0.05}).score(images(1), [""])
    assert not scores.valid[0] and "writes no rating" in why(scores, 0)
    assert math.isnan(scores.value[0]) and math.isnan(given(scores.std)[0])
    assert direct(lambda ask: {"3": 0.05}, min_mass=0.0).score(images(1), [""]).value[0] == pytest.approx(3.0)


def test_improbable_digits_make_no_rating():
    """Behind "3." the model writes something else: what is left of the digits is rounding noise."""

    def probability(ask):
        noise = {digit: 1e-9 for digit in "0123456789"}
        return {"3": 0.6, "5": 0.4 * (1 - len(ask.continuation) / 9)} if not ask.continuation else noise

    judge = direct(probability, FINE, min_mass=0.5)
    scores = judge.score(images(1), [""])
    assert not scores.valid[0] and math.isnan(scores.value[0]) and math.isnan(given(scores.std)[0])
    assert "writes no digits behind the point" in why(scores, 0) and "0.4 of those begun" in why(scores, 0)
    lenient = direct(probability, FINE, min_mass=0.3).score(images(1), [""])
    assert lenient.valid[0] and lenient.parts["digit_mass"][0] == pytest.approx(0.4, abs=1e-6)


def test_the_mass_of_the_digits_by_hand():
    def probability(ask):
        if not ask.continuation:
            return {"2": 0.5, "3": 0.25, "5": 0.25}
        if len(ask.continuation) == 3:
            return {"0": 0.5, "5": 0.3}
        return {"0": 0.6} if ask.continuation == "2." else {"1": 0.1, "2": 0.1}

    scores = direct(probability, FINE, min_mass=0.0).score(images(1), [""])
    hand = 0.5 * 0.6 * 0.8 + 0.25 * 0.2 * 0.8 + 0.25
    assert scores.parts["digit_mass"][0] == pytest.approx(hand, abs=1e-6)


def answering(*texts, prefix="", **options):
    engine = ScriptedEngine(answers=lambda _, ask: list(texts))
    template = ask_text("rate", answer_prefix=prefix)
    return VisualQuality(engine, mode="sampled", answers=len(texts), template=template, **options)


def test_sampled_ratings_are_averaged_and_failures_left_out():
    judge = answering(
        "<think>dull</think><answer>3.50</answer>",
        "<answer>great</answer>",
        "<answer>4.5</answer>",
        "<answer>7</answer>",
    )
    scores = judge.score(images(1), [""])
    assert scores.value[0] == pytest.approx(4.0) and given(scores.std)[0] == pytest.approx(math.sqrt(0.5))
    assert scores.parts["readable"][0] == 0.5 and given(scores.text)[0].startswith("<think>dull")


@pytest.mark.parametrize("texts", [("nice", "good"), ("<answer>3</answer>", "nice"), ("<answer>9.5</answer>", "")])
def test_unreadable_answers_are_masked(texts):
    scores = answering(*texts).score(images(2), ["", ""])
    assert not scores.valid.any() and scores.value.isnan().all() and given(scores.std).isnan().all()
    assert "of 2 answers hold a rating from 1 to 5" in why(scores, 0)


def test_comparison_is_thurstones_model():
    def probability(ask):
        bright = float(ask.images[0].mean()) > 0.5
        return {"4": 0.8, "5": 0.2} if bright else {"2": 0.5, "3": 0.5}

    judge = direct(probability)
    dark, bright = torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 8, 8)
    preferences = judge.compare(bright, dark, ["a"])
    leads = [torch.tensor(value) for value in (4.2, 2.5, 0.16, 0.25)]
    hand = float(thurstone_probability(*leads, floor=0.05**2))
    assert preferences.prob[0] == pytest.approx(hand, abs=1e-5)
    assert judge.compare(bright, bright, ["a"]).prob[0] == pytest.approx(0.5)
    numbered = judge.compare_pairs(torch.cat([bright, dark]), torch.tensor([[0, 1], [1, 0]]), ["a", "a"])
    assert numbered.prob.tolist() == pytest.approx([hand, 1 - hand], abs=1e-5)


def test_the_default_questions_are_the_published_ones():
    assert (RATING.digest, RATING_THINKING.digest) == ("1739d3dd965a", "8f9bb2c911c5")


def test_wrong_options_are_refused():
    engine = ScriptedEngine()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"mode": "both"}, "mode is 'both'"),
        ({"thinking": True}, "thinking needs mode='sampled'"),
        ({"answers": 0}, "answers is 0"),
        ({"template": ask_text("x", words={"scores": ("good", "bad")})}, r"\['good', 'bad'\] and digits"),
        ({"template": ask_text("x", words={"scores": ("1", "7")})}, "needed are different numbers from 1"),
        ({"template": ask_text("x", words={"scores": ("1",), "digits": ("1",)})}, 'no digits or "0" to "9"'),
    ]
    for options, message in refused:
        with pytest.raises((ValueError, RewardError), match=message):
            VisualQuality(engine, **options)
    with pytest.raises(RewardError, match="several tokens"):
        VisualQuality(engine, template=ask_text("x", words={"scores": ("1", "2.5")}))


@pytest.mark.parametrize("template", [WHOLE, FINE])
def test_the_contract_holds_on_a_model(template):
    judge = VisualQuality(tiny_engine(), template=template, min_mass=0.0)
    check_reward(judge, images=images(4), prompts=PROMPTS)
