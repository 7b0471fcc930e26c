# SPDX-License-Identifier: Apache-2.0
"""Verifiable answers: where they stand, what number or list they are, when they count as equal."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from visalign.rewards.catalogue import load_text_reward
from visalign.rewards.text.parsing import boxed_answers, normalise_latex, normalise_text, parse_list, parse_number
from visalign.rewards.text.verifiable import VerifiableAnswer


def judge(reward, completion, answer, prompt="?"):
    """(value or the reason, remark) of one sample."""
    scores = reward.score([completion], [prompt], [{"answer": answer}])
    return scores.reason[0] or scores.value.item(), scores.text[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("42", 42), (".5", Fraction(1, 2)), ("1,234,567.5", Fraction(2469135, 2)), ("1{,}234", 1234)],
        *[(r"1\,234", 1234), ("3/4", Fraction(3, 4)), ("1 3/4", Fraction(7, 4))],
        *[(r"\frac{3}{4}", Fraction(3, 4)), (r"-\dfrac34", Fraction(-3, 4)), (r"1\frac{3}{4}", Fraction(7, 4))],
        *[("1.5e3", 1500), ("1.5×10^3", 1500), ("50%", Fraction(1, 2)), ("$1,200", 1200), (r"\$5", 5)],
        *[("x = 5", 5), ("−3", -3), (r"\text{7}", 7), (r"2^{10}", 1024), ("-2^2", -4), (r"\sqrt{16}", 4)],
        *[(r"\frac{3}{-4}", Fraction(-3, 4)), (0.1, Fraction(1, 10)), (1e16, 10**16)],
    ],
)
def test_numbers_are_read_exactly(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("nan", "NaN", "inf", "-Infinity", "∞", "1/0", "12,34", "1,2345", "five", "", "5 cm", "1 2", "0x10"),
        *("0^0", "0^-1", "2^9999", r"\sqrt{2}", r"\sqrt{-4}", "2^2^2", r"\frac{1}{-0}"),
        *("1e5000", "1e99999999999", "9" * 5000, "1.2.3", "٣x", float("nan"), float("inf"), True, None),
    ],
)
def test_what_is_no_finite_number_is_none(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        *[(r"\boxed{4}", ["4"]), (r"\boxed{\frac{1}{2}} then \fbox{b}", [r"\frac{1}{2}", "b"])],
        *[(r"\boxed{a \boxed{b}}", [r"a \boxed{b}"]), (r"\boxed {4}", ["4"])],
        *[(r"\boxed{\{1, 2\}}", [r"\{1, 2\}"]), (r"\boxed{4", []), (r"\boxed{ never { \boxed{3}", ["3"])],
        *[(r"} \boxed{4}", ["4"]), ("{ open \\boxed{4}", ["4"]), (r"\boxed{}", [""])],
    ],
)
def test_boxes(text, boxes):
    assert boxed_answers(text) == boxes


@pytest.mark.parametrize(
    "text",
    [
        *("\\frac{1" * 20_000, "\\frac{1}{" * 20_000, "1^{" * 20_000, "\\sqrt{" + "a" * 100_000),
        *("\\boxed{" * 20_000, "\\boxed{a}" * 20_000, "<answer>" * 20_000, "1," * 50_000),
    ],
)
@pytest.mark.parametrize("extract", ["boxed", "answer_tag", "last_number"])
def test_long_texts_take_linear_time(text, extract):
    reward = VerifiableAnswer(extract=extract, compare="math")
    begun = time.process_time()
    judge(reward, text, "3")
    assert time.process_time() - begun < 2


def test_boxed_answer_reads_the_completion_alone_and_the_last_box():
    reward = load_text_reward("boxed_answer")
    assert judge(reward, r"so \boxed{41}, no, \boxed{42}", "42") == (1.0, "answer '42'")
    assert judge(reward, r"so \boxed{42}, no, \boxed{41}", "42") == (0.0, "answer '41'")
    assert judge(reward, "I will not say", "42", prompt=r"Write \boxed{42}") == (0.0, "no box")
    assert judge(reward, r"\boxed{4", "4") == (0.0, "no box")
    assert judge(reward, r"\boxed{ }", "4") == (0.0, "the answer is empty")
    assert judge(reward, r"\boxed{\dfrac{1}{2}}", "0.5")[0] == 1
    assert judge(reward, r"\boxed{\left(1,\, x\right)}", "(1,x)")[0] == 1
    assert judge(reward, r"\boxed{X}", "x")[0] == 0


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        *[("Half of 144 is <<144/2=72>>72.\n#### 72", "72"), ("... #### 1,234", "1234")],
        *[(["2 + 2 = 4\n#### 4\n", "5"], "4"), (r"Two, so \boxed{\frac{1}{2}}.", r"\frac12")],
        ("#### a\n4", "#### a\n4"),
    ],
)
def test_a_worked_solution_is_a_ground_truth(truth, answer):
    reward = load_text_reward("boxed_answer")
    assert judge(reward, rf"\boxed{{{answer}}}", truth)[0] == 1
    assert judge(reward, r"\boxed{41}", truth)[0] == 0
    if "####" in str(truth) and answer.isdigit():
        assert judge(load_text_reward("numeric_answer"), f"it is {answer}", truth)[0] == 1


def test_exact_answers_after_the_stated_normalisation():
    reward = load_text_reward("exact_answer")
    assert judge(reward, ' "The  Answer."\n', "the answer")[0] == 1
    assert judge(reward, "x²", "x2")[0] == 0  # compatibility forms stay apart
    assert judge(reward, "the answers", "the answer")[0] == 0
    assert judge(reward, "b", ["a", "b"])[0] == 1
    assert judge(reward, "4", 4)[0] == 1
    assert judge(load_text_reward("exact_answer", normalise="none"), "A", "a")[0] == 0
    assert normalise_text("«e\u0301»") == "«é»" and normalise_latex(r"\text{kg} $") == "kg"
    assert normalise_latex(r"\varnothing") == r"\emptyset"


def test_numbers_within_a_tolerance():
    exact = load_text_reward("numeric_answer")
    assert judge(exact, "It is 1/3", "1/3") == (1.0, "answer '1/3'")
    assert judge(exact, "It is 0.333", "1/3")[0] == 0
    assert judge(exact, "12345679", 12345678)[0] == 0
    assert judge(exact, "It is 5-3=2.", 2)[0] == 1
    assert judge(exact, "no idea", 2) == (0.0, "no number")
    relative = load_text_reward("numeric_answer", relative=0.01)
    assert [judge(relative, str(guess), -200)[0] for guess in (-198, -202, -197.9, 200)] == [1, 1, 0, 0]
    absolute = load_text_reward("numeric_answer", absolute=0.5)
    assert [judge(absolute, str(guess), 0)[0] for guess in (0.5, -0.5, 0.51)] == [1, 1, 0]
    whole_text = load_text_reward("numeric_answer", extract="whole")
    assert judge(whole_text, "nan", 2) == (0.0, "no number: 'nan'")
    assert judge(whole_text, "1e400", "1e400")[0] == 1  # exact: no float overflows


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        *[(r"so it is \frac{3}{4}.", "3/4"), (r"so it is -1\dfrac{3}{4}", "-7/4")],
        *[(r"that makes 2^10 = 1024 or 2^{-1}", "1/2"), (r"thus \sqrt{16}", 4)],
        *[("in 2024 it was 3/4.", "0.75"), ("You need 3 1/2 cups", "3.5"), ("that is -2 3/4.", "-2.75")],
        *[("a profit of -$72", -72), (r"it is $-\$72$.", -72), ("−$1,000.", -1000), ("it costs -€5", -5)],
        *[(r"so 1.5 \times 10^{3} m", 1500), ("it is 2 × 10^−3", "0.002"), (r"in all 5\,000", 5000)],
        *[("between 10-$20", 20), ("so $5 - $3", 3), ("$5$-$3$", 3), ("step 3\n1/2", "1/2")],
        *[("so $5 -$3", 3), ("so 10 / 2.5.", 4), ("is 42 km^2, or 9 m^{2}", 9), ("a load of 5\u00a0400 W", 5400)],
    ],
)
def test_the_last_number_is_read_whole(text, truth):
    assert judge(load_text_reward("numeric_answer"), text, truth)[0] == 1


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        *[(r"\frac{3}{4}", 4), (r"2^{10}", 10), (r"\sqrt{2}", 2), (r"2\sqrt{3}", 3), (r"\sqrt[3]{5}", 5)],
        *[("−5", 5), (r"3\pi", 3), (r"\frac{\sqrt{2}}{7}", 7), (r"5^{2x}", 2), ("-$5", 5)],
        *[("3 1/2", "1/2"), (r"2 \cdot 10^3", 1000), (r"1{,}234", 234), ("3 / 4", 4)],
    ],
)
def test_no_part_of_an_expression_is_the_last_number(text, truth):
    assert judge(load_text_reward("numeric_answer"), f"it is {text}", truth)[0] == 0


def test_lists():
    reward = load_text_reward("list_answer")
    assert judge(reward, "So:\n[1, 2.0, three]", [1, 2, "Three"])[0] == 1
    assert judge(reward, "[2, 1]", [1, 2])[0] == 0
    assert judge(reward, "[1, 2, 3]", "1, 2") == (0.0, "3 items, 2 are right")
    assert judge(reward, "[]", [])[0] == 1
    assert judge(reward, "[[1, 2], [3]]", [[1, 2], [3]])[0] == 1
    assert parse_list("(1,2),(3,4)") == ["(1,2)", "(3,4)"] and parse_list("{a; b}") == ["a", "b"]
    assert parse_list(r"\{1, 2\}") == ["1", "2"] and parse_list("") is None
    assert judge(reward, "[1, 2)", "(1, 2]")[0] == 0 and judge(reward, "[1, 2)", "[1, 2)")[0] == 1


def test_places_of_an_answer():
    tag = VerifiableAnswer(extract="answer_tag")
    assert judge(tag, "<answer>a</answer> <answer>b</answer>", "b")[0] == 1
    assert judge(tag, "<answer>a", "a") == (0.0, "no <answer>…</answer>")
    pattern = VerifiableAnswer(extract="pattern", pattern=r"####\s*(\S+)")
    assert judge(pattern, "12\n#### 7", "7")[0] == 1
    assert judge(pattern, "7", "7") == (0.0, "no match of the pattern")
    after = VerifiableAnswer(extract="boxed", after="</think>")
    assert judge(after, r"\boxed{1}</think>\boxed{2}", "2")[0] == 1
    assert judge(after, r"\boxed{2}", "2") == (0.0, "no </think>")
    assert judge(VerifiableAnswer(extract="last_line"), "a\nb\n\n", "b")[0] == 1


def test_without_a_ground_truth_there_is_no_score():
    reward = load_text_reward("numeric_answer", field="gold")
    scores = reward.score(["4"] * 5, ["?"] * 5, [None, {}, {"gold": "four"}, {"gold": float("nan")}, {"gold": 4}])
    assert scores.valid.tolist() == [False] * 4 + [True] and scores.value[:4].isnan().all()
    assert scores.reason is not None and scores.reason[:2] == ["its metadata has no 'gold'"] * 2
    assert "no number that can be read" in str(scores.reason[2])
    assert "neither text nor a finite number" in str(scores.reason[3])
    assert judge(load_text_reward("exact_answer"), "a", [])[0] == (
        "the ground truth 'answer' is '[]', which is an empty list of alternatives"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extract": "box"}, "extract is 'box'; allowed are whole, last_line, boxed, answer_tag"),
        ({"absolute": -1.0, "compare": "number"}, "absolute is -1.0 and relative 0.0; allowed are finite"),
        ({"relative": 0.1}, "compare='exact' has no tolerance; choose 'number'"),
        ({"extract": "pattern", "pattern": "(a"}, "is no regular expression"),
        ({"extract": "pattern", "pattern": "a"}, "one group goes with"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        VerifiableAnswer(**options)
