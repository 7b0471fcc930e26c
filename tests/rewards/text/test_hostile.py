# SPDX-License-Identifier: Apache-2.0
"""Completions that were written to break a reward or to take a tool's answer for the policy's."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.rewards.text.test_contract import INPUTS
from tests.rewards.text.test_process import TOKENIZER, CountingModel
from tests.rewards.text.test_reward_model import model, tokenizer
from visalign.interfaces import ToolCompletion
from visalign.rewards.catalogue import load_text_reward
from visalign.rewards.code.sandbox import bubblewrap_problem
from visalign.rewards.reading import ratings, verdicts
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.text.process_reward import ProcessRewardModel
from visalign.rewards.text.reward_model import RewardModel
from visalign.rewards.verifiers.geneval_rules import record_problem
from visalign.rewards.verifiers.ocr import wanted_texts

PIECES = (
    *'9{[(}^$%"\\ \n\0\ud800\u0301١²-',
    *("1,", "1/", "2^", "[1,", ",;", "é ", "x=", "** ", "not ", "neither ", "Good ", "not Good ", "score ", "1 or 2 "),
    *("<answer>", "</answer>", "<think>", "\\boxed{", "\\frac{", "\\sqrt ", "\\text{", "```\n", '{"winner":'),
    *('{"score":[', "Image 1 is ", "Image 1 is better, ", "Image 1: 0.5", "Final Score: ", "Style Score:\n"),
)
RUNS = ("score", "Image 1", "Alignment Score", "\\sqrt", "Final Score:", "Image 1 is very", "(1", "1 out")
SPECIAL = ("", "\ud83d", "1e400", "[1e999, NaN]", '{"score": [1' + "0" * 1000 + ", 2]}", "1" + "0" * 5000)
READERS: list[Any] = [
    *(ratings.final_score, ratings.all_aspects, ratings.quality_score, ratings.decision),
    *(ratings.lift_label, ratings.rational_scores, ratings.boxed_scores, ratings.listed_scores),
    *(verdicts.verdict, verdicts.pair_scores, verdicts.aspect_pair_scores, verdicts.flex_answer),
    lambda text: check_clause(text, 1) + check_clause("cat", text),
    lambda text: wanted_texts(text, None),
]
SECONDS = 10.0
"""Time that a completion may take on a busy machine, math-verify's 5 s in it; what is quadratic takes longer."""
SIZES = pytest.mark.parametrize("size", [2_000, pytest.param(50_000, marks=pytest.mark.slow)])


def check_clause(kind: str, count: Any) -> str:
    clause = {"class": kind, "count": count, "color": kind, "position": [kind, count]}
    problem = record_problem({"include": [clause], "exclude": kind})
    assert problem is not None and len(problem) < 400
    return problem


def hostile(size: int) -> list[str]:
    texts = [piece * (size // len(piece)) for piece in PIECES] + [run + sign * size for run in RUNS for sign in " *"]
    return [form.format(t) for t in (*texts, *SPECIAL) for form in ("{}", "<answer>{}</answer>", "\\boxed{{{}}}")]


@pytest.mark.parametrize("name", INPUTS)
@SIZES
def test_no_completion_ends_a_run(name, size):
    options, inputs = INPUTS[name]
    reward: Any = load_text_reward(name, **options)
    record = inputs.get("metadata", [{}])[0]
    for text in hostile(size):
        begun = time.monotonic()
        reward.score([text], ["?"], [record])
        assert time.monotonic() - begun < SECONDS, f"{text[:30]!r} × {len(text)}"


@pytest.mark.parametrize("name", ["reward_model", "process_reward"])
def test_no_completion_ends_a_run_with_a_model(name):
    texts = ["good", *hostile(300)]
    reward = ProcessRewardModel(CountingModel(), tokenizer=TOKENIZER)
    if name == "reward_model":
        reward = RewardModel(model(), tokenizer=tokenizer())
    scores = reward.score(texts, ["two"] * len(texts))
    assert 0 < int(scores.valid.sum()) < len(texts)


@pytest.mark.skipif(bubblewrap_problem() is not None, reason="no sandbox")
def test_no_code_ends_a_run():
    codes = ["9" * 5000, "(" * 5000, "\ud800", "\0", "print('x' * 10**9)", "'", "\\", "["]
    texts = [f"```python\n{code}\n```" for code in codes]
    scores = load_text_reward("code_tests").score(texts, ["?"] * len(texts), [{"tests": ["assert x"]}] * len(texts))
    assert not scores.value.nan_to_num(0.0).any()


@pytest.mark.parametrize("read", READERS)
@SIZES
def test_a_judges_answer_is_read_or_refused_in_time(read, size):
    for text in hostile(size):
        begun = time.monotonic()
        try:
            read(text)
        except AnswerError as error:
            assert len(str(error)) < 300
        assert time.monotonic() - begun < SECONDS, f"{text[:30]!r} × {len(text)}"


@pytest.mark.parametrize(
    ("name", "options", "answer", "record"),
    [
        ("boxed_answer", {}, "\\boxed{4}", {"answer": "4"}),
        ("exact_answer", {"extract": "answer_tag"}, "<answer>4</answer>", {"answer": "4"}),
        ("task_answer", {}, "\\boxed{4}", {"task": "add", "problem": [2, 2], "answer": "4"}),
        ("text_format", {"tags": ["answer"]}, "<answer>4</answer>", {}),
        ("json_format", {"where": "fence"}, "```json\n[4]\n```", {}),
        ("rating", {"rule": "regression", "form": 0.1}, "<answer>4</answer>", {"image": "a.png", "mos": 4.0}),
        ("code_tests", {}, "```\nx = 4\n```", {"tests": ["assert x == 4"]}),
    ],
)
def test_what_a_tool_wrote_is_not_the_policys(name, options, answer, record):
    if name == "code_tests" and (problem := bubblewrap_problem()):
        pytest.skip(problem)
    reward: Any = load_text_reward(name, **options)
    texts = [answer, ToolCompletion("\n" + answer, [(0, 1)]), ToolCompletion(answer, [(0, len(answer))])]
    assert reward.score(texts, ["?"] * 3, [record] * 3).value.gt(0.5).tolist() == [True, True, False]
