# SPDX-License-Identifier: Apache-2.0
"""Ratings in words: the order of images as VisualQuality-R1 pays it, its ablations, what is no rating."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from visalign.core import fidelity_rewards
from visalign.rewards.catalogue import load_text_reward
from visalign.rewards.text.rating import RatingReward, VerdictReward

ANSWERS = {"a": (["5", "4", "5"], 4.5), "b": (["2", "3", "oh"], 2.0), "c": (["3", "1", "2"], 2.0)}


def given(answers: dict[str, Any] = ANSWERS, **more: Any) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """Completions with images in turn, prompts, records."""
    count = max(len(texts) for texts, _ in answers.values())
    rows = [
        (f"<answer>{texts[k]}</answer>", {"image": image, "mos": mos, "set": "s", **more})
        for k in range(count)
        for image, (texts, mos) in answers.items()
        if k < len(texts)
    ]
    return [text for text, _ in rows], ["?"] * len(rows), [record for _, record in rows]


def test_fidelity_is_the_cores_over_all_images_that_are_judged_together():
    scores = RatingReward().score(*given())
    answers = torch.tensor([[5.0, 4, 5], [2, 3, math.nan], [3, 1, 2]], dtype=torch.float64)
    expected = fidelity_rewards(answers, torch.tensor([4.5, 2.0, 2.0]).double())
    result = scores.value.view(3, 3).T.double()
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert scores.valid.sum() == 8 and scores.reason is not None and "no number" in str(scores.reason[7])
    assert scores.text is not None and scores.text[0] == "5" and float(scores.parts["rating"][1]) == 2


def test_other_rules_by_hand():
    """binary: "4" of a leads b and c, whose labels are lower: 1; "3" of b trails a (right) and leads c by
    1, where the labels are equal: (1 + ½)/2.
    regression: 1 − |4 − 4.5|/4."""
    binary = RatingReward("binary").score(*given()).value.view(3, 3)
    assert binary[1].tolist() == pytest.approx([1.0, 0.75, 0.75]) and binary[0, 1] == 1.0
    regression = RatingReward("regression")
    assert not regression.capabilities.needs_batch and RatingReward().capabilities.needs_batch
    assert float(regression.score(*given()).value.view(3, 3)[1, 0]) == 0.875


def test_images_of_another_set_are_not_compared():
    completions, prompts, records = given()
    for record in records:
        record["set"] = "other" if record["image"] == "c" else "s"
    separate = RatingReward().score(completions, prompts, records).value.view(3, 3)
    pair = RatingReward().score(*given({"a": ANSWERS["a"], "b": ANSWERS["b"]})).value.view(3, 2)
    torch.testing.assert_close(separate[:, :2], pair, equal_nan=True)
    assert separate[:, 2].tolist() == [0.0, 0.0, 0.0], "nothing to compare with: no signal"


def test_the_form_is_paid_or_what_cannot_be_read_is_masked():
    paid, masked = RatingReward(form=0.5).score(*given()), RatingReward().score(*given())
    torch.testing.assert_close(paid.value[masked.valid], masked.value[masked.valid] + 0.5)
    assert bool(paid.valid.all()) and float(paid.value[7]) == 0.0
    prefilled = RatingReward(prefilled="<answer>").score(["4</answer>", "x"], ["?"] * 2, given()[2][:2])
    assert prefilled.valid.tolist() == [True, False]


def test_a_verdict_is_right_or_wrong():
    reward = load_text_reward("verdict", words=["no", "yes"])
    labels = [{"label": 1.0}, {"label": 0.2}, {"label": 0.2}, {"label": 0.6}, {"label": 0.5}, {}]
    scores = reward.score(["No.", "yes", "no, since", "perhaps", "yes", "yes"], ["?"] * 6, labels)
    assert scores.value.tolist()[:4] == [1.0, 1.0, -1.0, -1.0] and scores.valid.tolist() == [True] * 4 + [False] * 2
    scores_of_sentences = load_text_reward("verdict").score(
        ["<think>a</think> Image 2 is better", "Image 1 is better", "both are equal"], ["?"] * 3, labels[1:4]
    )
    assert scores_of_sentences.value.tolist() == [1.0, -1.0, -1.0] and scores_of_sentences.text == [
        "the second",
        "the first",
        "a tie",
    ]
    for words in (["yes"], ["yes", "yes"], "no"):
        with pytest.raises(ValueError, match=r"words is .*give two texts that differ"):
            VerdictReward(words=words)


def test_records_without_a_label_are_said():
    scores = RatingReward().score(["<answer>4</answer>"] * 2, ["?"] * 2, [{"image": "a", "mos": 3.0}, {}])
    assert scores.valid.tolist() == [True, False] and scores.reason is not None
    assert scores.reason[1] == "its record has no image and finite mos"
    with pytest.raises(ValueError, match="form is -1"):
        RatingReward(form=-1)


def test_boxed_scores_go_from_1_to_10():
    """1 − |7 − 9.25| / 9 = .75; what the other form writes is no score."""
    reward = RatingReward("regression", reads="boxed")
    records = [{"image": "a", "mos": mos} for mos in (9.25, 10.0, 11.0)]
    texts = [r"fine \boxed{7}", "<answer>4</answer>", r"\boxed{7}"]
    scores = reward.score(texts, ["?"] * 3, records)
    assert scores.value.tolist()[0] == 0.75 and scores.valid.tolist() == [True, False, False]
    assert scores.reason is not None and "regression compares ratings of 1 to 10" in str(scores.reason[2])


@pytest.mark.parametrize("text", ["**first**", "(first)", "<answer>first</answer>", "first: yes", "First."])
def test_the_first_word_of_the_answer_is_the_verdict(text):
    reward = load_text_reward("verdict", words=("first", "second"))
    assert reward.score([text], ["?"], [{"label": 0.9}]).value.tolist() == [1.0]


@pytest.mark.parametrize(
    ("answer", "rewards", "value", "remark"),
    [
        (r"Principles: ... Critique: ... \boxed{7, 3, 5}", [1.0, 0.0, 0.5], 1.0, "7, 3, 5"),
        (r"\boxed{7, 7, 5}", [1.0, 0.0, 0.5], -1.0, "7, 7, 5"),
        (r"\boxed{3, 7, 5}", [1.0, 0.0, 0.5], -1.0, "3, 7, 5"),
        (r"\boxed{7, 3}", [1.0, 0.0, 0.5], -1.0, "the judge boxed 2 scores, 3 were asked for"),
        (r"\boxed{11, 3}", [1.0, 0.0], -1.0, "the judge's number 11 is outside [1, 10]"),
        ("both are good", [1.0, 0.0], -1.0, r"the judge's text has no \boxed{score}"),
        (r"\boxed{10}", [10.0], 1.0, "10"),
        (r"\boxed{9}", [10.0], -1.0, "9"),
        (r"\boxed{7, 3}", [1.0, 1.0], None, "no 'rewards'"),
        (r"\boxed{7, 3}", "1, 0", None, "no 'rewards'"),
    ],
)
def test_spct_pays_for_the_best_response_alone_in_front(answer, rewards, value, remark):
    scores = load_text_reward("spct").score([answer], ["?"], [{"rewards": rewards}])
    assert scores.text is not None and scores.reason is not None
    if value is None:
        assert math.isnan(float(scores.value)) and remark in str(scores.reason[0])
    else:
        assert float(scores.value) == value and scores.text[0] == remark
