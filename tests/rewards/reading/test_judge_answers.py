# SPDX-License-Identifier: Apache-2.0
"""Judges' texts as a careful person reads them: scores, labels, verdicts; what is unclear is refused."""

from __future__ import annotations

import json
import math

import pytest
import torch

from visalign.rewards.chat.yes_no import read_yes_no
from visalign.rewards.hpsv3.loading import current_key
from visalign.rewards.questions.checklist import ChecklistRule
from visalign.rewards.reading.numbers import AnswerError, statement
from visalign.rewards.reading.ratings import (
    all_aspects,
    boxed_scores,
    final_score,
    lift_label,
    quality_score,
    rational_mean,
    rational_scores,
)
from visalign.rewards.reading.verdicts import FlexAnswer, flex_answer, pair_scores, verdict


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("<answer>3</answer> and <answer> 4 </answer>", "4"), ("<think>5</think> 3", "3")],
        *[("the template opened it</think>\n3", "3"), ("<answer>3</answer> then <answer>4", "3")],
    ],
)
def test_the_last_complete_answer_counts(text, expected):
    assert statement(text).text == expected


VALUES = {
    quality_score: [
        *[("<answer>3.75</answer>", 3.75), ("<think>maybe 2</think><answer>4</answer>", 4)],
        *[("<answer>Score: 4.10 / 5</answer>", 4.1), ("<answer>(1-5): 3</answer>", 3)],
        *[("<answer>On a scale of 1 to 5 I give 3.5</answer>", 3.5), ("2 cats, and I rate it 4", 4)],
        ("<answer>**Rating**: *4.25*</answer>", 4.25),
    ],
    final_score: [
        *[("Final Score: 4.5", 4.5), ("cat (animal): 1\n**Final Score:** 3", 3), ("Final Score: 2/5", 2)],
        *[("**Final Score**: 3.5", 3.5), ("__Final Score: `3.5`__", 3.5)],
    ],
    lift_label: [
        *[("Good", "Good"), ("**Normal**.", "Normal"), ("It is **not** *Good*. It is _Bad_", "Bad")],
        *[("It isn't Good. It is Bad", "Bad"), ("The video is Good, not Bad", "Good")],
        ("I would not say it is Good. It is Normal.", "Normal"),
        *[("It is not blurry and the quality is Good", "Good"), ("I doubt that it is Good. Normal", "Normal")],
    ],
    verdict: [
        ("Image 1 is better", 1),
        ("<think>Image 1 is better in colour.</think><answer>Image 2 is better</answer>", 2),
        ("<answer>I do not agree that Image 1 is better; Image 2 is better</answer>", 2),
        ("Image 1 is worse", 2),
        ("**Image 2** is better", 2),
        ("* Image 1 is sharp\n* **Image 2** is **not** worse, and _Image 2_ is __better__.", 2),
        ("<answer>*Image 1*</answer>", 1),
        ("<answer>Image 2</answer>", 2),
        ("I prefer Image 1", 1),
        ("Both images are equally good", 0),
        ("Neither image is better", 0),
        ("Image 1 is better? No, Image 2 is better.", 2),
        ("I first thought Image 1 is better, but Image 2 is better", 2),
        ("They are not equally good: Image 1 is better", 1),
        ("Image 1 is better in colour, but overall Image 2 is better", 2),
        ("Image 1 is better in colour. Image 2 is better in detail. Overall, Image 1 is better.", 1),
        ("<answer>Image 2 is better</answer> no: <answer>Image 1 is better</answer>", 1),
        ("<answer>The second image</answer>", 2),
        ("The first image is worse than the second one", 2),
        ("Image 1 is better because the text in Image 2 is wrong", 1),
    ],
}
REFUSED = {
    statement: [
        *[("", "wrote nothing"), ("<think>a long thought", "inside its thinking")],
        *[("<think>a thought</think>", "gave no answer"), ("<answer>3", "<answer> is not closed")],
        ("<answer> </answer>", "<answer> is empty"),
    ],
    quality_score: [
        *[("<answer>-2.5</answer>", r"-2.5 is outside \[1, 5\]"), ("<answer>NaN</answer>", "no number")],
        *[("<answer>3,5</answer>", "decimal comma"), ("<answer>3 or 4</answer>", "several numbers")],
        *[("<answer>8/10</answer>", "scale that ends at 5"), ("I see 3 dogs", "without calling it the score")],
    ],
    final_score: [
        *[("Final Score: 7", "outside"), ("final score: 3", "no 'Final Score:'")],
        *[("Final Score: 3,5", "no 'Final Score:'"), ("Final Score: 3\nFinal Score: 4", "twice: 3 and 4")],
        ("Final Score: 4/10", "not on the scale"),
    ],
    lift_label: [
        ("", "must state one of Good, Normal, Bad"),
        ("good", "must state one of Good, Normal, Bad"),
        ("Normal but Bad in places", "must state one of Good, Normal, Bad"),
        ("not Good", "must state one of Good, Normal, Bad"),
        ("I would not say it is Good", "must state one of Good, Normal, Bad"),
        ("The picture is not blurry and Good", "must state one of Good, Normal, Bad"),
        ("It is not really sharp enough to be Good", "may deny the label it names: .* Good"),
        ("Only if it were sharper would it be Good", "may deny the label it names: .* Good"),
    ],
    all_aspects: [
        ("Alignment Score (1-5): 5", "no score for coherence, style"),
        ("Alignment Score: 4\nCoherence Score: 3,5\nStyle Score: 3.5.1", "no score for coherence, style"),
        ("Alignment Score: 6\nCoherence Score: 3\nStyle Score: 2", "6 is outside"),
        ("Alignment Score: 4\nAlignment Score: 2\nCoherence Score: 3\nStyle Score: 2", "alignment twice: 4 and 2"),
    ],
    verdict: [
        ("", "nothing"),
        ("Image 1 is better and Image 2 is better", "calls both pictures better"),
        ("Is Image 1 is better?", "neither"),
        ("Image 1 is not better", "neither 'Image 1 is better' nor"),
        ("I cannot say whether Image 1 is better", "neither"),
        ("Image 10 is better", "neither"),
        ("Saying that Image 1 is better would be wrong", "denies or doubts one"),
        ("Image 2 is not better than Image 1", "denies or doubts one, which leaves a tie open"),
        ("Image 1 is better. All in all they are equally good.", "one picture better and both equal"),
    ],
}


@pytest.mark.parametrize(("read", "text", "value"), [(read, *row) for read, rows in VALUES.items() for row in rows])
def test_what_is_clear_is_read(read, text, value):
    assert read(text) == value


@pytest.mark.parametrize(("read", "text", "reason"), [(read, *row) for read, rows in REFUSED.items() for row in rows])
def test_what_is_unclear_is_refused(read, text, reason):
    with pytest.raises(AnswerError, match=reason):
        read(text)


def test_aspects():
    text = "Alignment Score (1-5): 4\nCoherence Score (1-5): 3.5\nStyle Score (1-5): 2"
    assert all_aspects(text) == {"alignment": 4, "coherence": 3.5, "style": 2}
    assert all_aspects("style score: 2\nAlignment score: 4\n**Coherence Score** (1-5): 3")["coherence"] == 3
    assert rational_scores("1. Text Faithfulness\nScore: 3,5\nScore: 4")["text_faithfulness"] == 4


def test_rational_rewards():
    scores = rational_scores(
        "# Detailed Judgement\n1. Text Faithfulness:\n## Score: 3.5\n"
        "2. Physical and Visual Quality:\n## Score: 9\n3. Text Rendering:\n## Score: N/A\n# Summary: Score: 1"
    )
    assert scores == {"text_faithfulness": 3.5, "physical_quality": 9.0, "text_rendering": "N/A"}
    assert rational_mean(scores) == pytest.approx((3.75 - 1) / 3)
    assert rational_scores("Text Faithfulness: Score: 2")["text_faithfulness"] == 2
    with pytest.raises(AnswerError, match="no aspect a number"):
        rational_mean(rational_scores("no scores"))


def test_boxed_scores():
    assert boxed_scores(r"Principles ... \boxed{3} ... finally \boxed{ 8 }") == [8]
    assert boxed_scores(r"\boxed{7, 8.5}", count=2) == [7, 8.5]
    for text, reason in (
        ("8", "no .boxed"),
        (r"\boxed{8, 9}", "boxed 2 scores, 1 were asked for"),
        (r"\boxed{high}", "no number"),
        (r"\boxed{11}", "outside"),
        (r"\boxed{nan}", "no number"),
        (r"<think>\boxed{8}", "inside its thinking"),
    ):
        with pytest.raises(AnswerError, match=reason):
            boxed_scores(text)


def test_verdict_of_other_names():
    options = ("Video 1 is better", "Video 2 is better")
    assert verdict("Video 2 is better", options=options) == 2
    with pytest.raises(AnswerError, match="neither 'Video 1"):
        verdict("Image 2 is better", options=options)


def test_pair_scores():
    assert pair_scores("Image 1: 0.7\nImage 2: 0.3") == (0.7, 0.3)
    assert pair_scores("Image 1 Score: 0.66, Image 2 Score: 0.33") == (0.66, 0.33)
    for text, reason in (
        ("Image 1: 0.7", "no score for Image 2"),
        ("Image 1: 0.7\nImage 2: 0.7", "do not add up to 1"),
        ("Image 1: 1.5\nImage 2: -0.5", "do not add up"),
        ("Image 1: 0.7 Image 1: 0.6 Image 2: 0.3", "several scores for Image 1"),
        ("0.7 0.3", "no score for Image 1"),
    ):
        with pytest.raises(AnswerError, match=reason):
            pair_scores(text)


def _page(winner: object, *winners: object) -> str:
    categories = [{"name": f"c{index}", "cat_winner": choice} for index, choice in enumerate(winners)]
    return json.dumps({"categories": categories, "winner": winner})


def test_flex():
    answer = flex_answer("Here:\n```json\n" + _page("Image 1", "Image 2", "tie", "Image 1/2") + "\n```")
    assert answer == FlexAnswer(1, {"c0": 2, "c1": 0, "c2": None})
    # overall 1; categories (0 + 0.5) / 2, the unreadable one left out
    assert answer.preference() == pytest.approx((1 + 0.25) / 2)
    assert answer.preference(first=1) == 0.5
    assert flex_answer(_page("Image 2")).preference() == 0
    assert flex_answer('{"a": {"b": 1}} {"winner": "Image 2", "x": "{"}').winner == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"winner": "Image 1"', "no complete JSON"),
        ('{"categories": []}', "no complete JSON object with a winner"),
        (_page("Image 1 and Image 2"), "not exactly one"),
        (_page(None), "not exactly one"),
    ],
)
def test_flex_refuses(text, reason):
    with pytest.raises(AnswerError, match=reason):
        flex_answer(text)


def test_yes_no_list():
    answer = read_yes_no({" Yes": math.log(0.5), "yes": math.log(0.1), "NO": math.log(0.2), "Maybe": math.log(0.1)})
    assert answer.log_odds == answer.bound == pytest.approx(math.log(3))
    assert (answer.prob, answer.mass) == pytest.approx((0.75, 0.8))
    assert answer.missing is None


def test_a_missing_side_leaves_the_log_odds_undefined_and_bounded():
    answer = read_yes_no({"yes": math.log(0.7), "The": math.log(0.2)})
    assert answer.missing == "no" and math.isnan(answer.log_odds) and math.isnan(answer.prob)
    assert answer.mass == pytest.approx(0.7)
    assert answer.bound == pytest.approx(math.log(0.7 / 0.1))  # what the list leaves is 0.1, below its last, 0.2
    other = read_yes_no({"no": math.log(0.5), "a": math.log(0.02)})
    assert other.bound == pytest.approx(-math.log(0.5 / 0.02)) and other.missing == "yes"
    assert math.isfinite(read_yes_no({"yes": 0.0}).bound)
    assert read_yes_no({"▁ja": -1.0, "Ġnein": -1.0}, yes=("ja",), no=("nein",)).bound == 0
    certain = read_yes_no({"no": 0.0})
    assert -20 < certain.bound < -10
    with pytest.raises(AnswerError, match=r"both have probability 0\.3, min_mass is 0\.4"):
        read_yes_no({"yes": math.log(0.1), "no": math.log(0.2), "The": math.log(0.7)}, min_mass=0.4)


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        *[({"Maybe": -0.1}, "neither yes nor no .*'Maybe' leads"), ({}, "neither yes nor no")],
        *[({"yes": math.nan}, "is nan"), ({"yes": 2.0}, "is 2")],
    ],
)
def test_yes_no_list_refuses(listed, reason):
    with pytest.raises(AnswerError, match=reason):
        read_yes_no(listed)


def test_checklist_by_hand():
    rule = ChecklistRule.from_dict({"coef": [2.0, 1.0, 0.5], "intercept": [0.25], "masked_features": {"0": [2]}})
    yes = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.5, 1.0, 0.0]], dtype=torch.float64)
    # alignment 0.1: 0.2 + x1 + 0.5·x2·m0 + 0.25
    expected = [0.95, 1.45, -0.05, 1.2]
    scores = rule.score(yes, torch.full((4,), 0.1, dtype=torch.float64))
    assert scores.tolist() == pytest.approx(expected)
    soft = yes.clamp(0.1, 0.9).requires_grad_()
    alignment = torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(rule.score, (soft, alignment))
    assert rule.score(torch.tensor([[torch.nan, 1, 1]]), torch.ones(1)).isnan().all()


def test_checklist_file_keys():
    with pytest.raises(ValueError, match=r"coef at least; given: ..weights"):
        ChecklistRule.from_dict({"weights": [1.0]})


def test_key_map():
    old = ("visual.merger.ln_q.weight", "model.norm.weight", "rm_head.0.weight", "lm_head.weight", "modelling.x")
    new = [current_key(key) for key in old]
    assert new == ["model.visual.merger.ln_q.weight", "model.language_model.norm.weight", *old[2:]]
    assert [current_key(key) for key in new] == new
