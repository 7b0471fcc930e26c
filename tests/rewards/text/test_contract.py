# SPDX-License-Identifier: Apache-2.0
"""The request of a text reward, user functions, the catalogue, and `check_text_reward`."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from visalign.data.sets.image_references import CompletionText
from visalign.interfaces import Scores, TextReward, ToolCompletion, score_named, with_capabilities
from visalign.rewards import RewardError
from visalign.rewards.catalogue import TEXT_CATALOGUE, load_text_reward
from visalign.rewards.checks import check_text_reward
from visalign.rewards.code.sandbox import bubblewrap_problem
from visalign.rewards.text.callables import TextFunctionReward
from visalign.rewards.text.combine import WeightedTextSum
from visalign.rewards.text.completions import CompletionPairs
from visalign.rewards.text.contract import read_text_request

ANSWERS = {"completions": ["4", r"\boxed{4}", "5"], "metadata": [{"answer": "4"}, {"answer": "4"}, {}]}
RATED = [{"image": f"{n}.png", "mos": float(n)} for n in (4, 3, 2)]
NEED_A_MODEL = ("reward_model", "process_reward", "text_judge", "text_grm")
INPUTS = {
    **dict.fromkeys(("exact_answer", "numeric_answer", "boxed_answer", "list_answer"), ({}, ANSWERS)),
    **dict.fromkeys(("text_format", "json_format", "repetition", "random"), ({}, {})),
    "task_answer": (
        {},
        {
            "completions": [r"2 + 2 = 4. \boxed{4}", r"\boxed{5}", "4"],
            "metadata": [{"task": "add", "problem": [2, 2], "answer": "4"}] * 2 + [None],
        },
    ),
    "length": ({"max_length": 4, "cache": 2}, {}),
    "environment": ({}, {"completions": [ToolCompletion("a", (), 1.0), ToolCompletion("b", (), 0.0), "no"]}),
    "refusal": ({}, {"completions": ["No, I must decline.", "4", "no"], "metadata": [{"refuse": True}] * 2 + [{}]}),
    "tool_calls": ({"most": 2}, {"completions": [ToolCompletion("a", (), None, n) for n in (0, 3)] + ["no"]}),
    "constraints": (
        {},
        {
            "completions": ["Yes.", "No, no.", "no"],
            "metadata": [{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}] * 2 + [{}],
        },
    ),
    "code_tests": ({}, {"completions": ["```\nx = 4\n```", "no"], "metadata": [{"tests": ["assert x == 4"]}] * 2}),
    "reward_fusion": (
        {"reward": "exact_answer", "pool": [{"prompt": "What is 2 + 2??", "answer": "5"}], "threshold": 0.8},
        {**ANSWERS, "prompts": ["What is 2 + 2?"] * 3},
    ),
    "rating": ({}, {"completions": ["4", "2", "no"], "metadata": RATED}),
    "ensemble": ({"members": {n: {"name": "length", "max_length": 4, "cache": n} for n in (1, 2)}}, {}),
    "spct": (
        {},
        {"completions": [r"\boxed{7, 3}", r"\boxed{7, 7}", "no"], "metadata": [{"rewards": [1, 0]}] * 2 + [{}]},
    ),
    "verdict": ({}, {"completions": ["A", "B", "no"], "metadata": [{"label": 0.9}] * 2 + [{}]}),
}


@pytest.mark.parametrize("name", [name for name in TEXT_CATALOGUE if name not in NEED_A_MODEL])
def test_every_entry_of_the_catalogue_keeps_the_contract(name):
    if name == "code_tests" and (problem := bubblewrap_problem()):
        pytest.skip(problem)
    options, inputs = INPUTS[name]
    reward: Any = load_text_reward(name, **options)
    needs_batch = reward.capabilities.needs_batch
    assert isinstance(reward, TextReward)
    passed = check_text_reward(reward, **inputs)
    independence = "a score does not depend on its neighbours"
    assert len(passed) == 8 + (independence in passed) and (independence in passed) != needs_batch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("one", ["?"], None), "completions is a str; needed is a list, one string per sample"),
        ((["a"], "?", None), "prompts is a str; needed is a list, one string, or list of messages"),
        ((["a", "b"], ["?"], None), "2 completions and 1 prompts; give one prompt each"),
        (([None], ["?"], None), r"completions\[0\] is the NoneType None; needed is a string"),
        ((["a"], [3], None), r"prompts\[0\] is the int 3; needed is a string, or list of messages"),
        ((["a"], ["?"], {"answer": ["a"]}), "metadata is a dict; needed is a list, one mapping or None"),
        ((["a"], ["?"], []), "0 metadata records for 1 completions; give one each, or None"),
        ((["a"], ["?"], ["a"]), r"metadata\[0\] is the str 'a'; needed is a mapping or None"),
    ],
)
def test_bad_requests(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        read_text_request("judge", *arguments)


def test_conversations_are_prompts_and_an_empty_batch_is_allowed():
    chat = [{"role": "user", "content": "2 + 2?"}]
    assert read_text_request("judge", ["4"], [chat], None).prompts == [chat]
    for name, (options, _) in INPUTS.items():
        assert len(load_text_reward(name, **options).score([], [], None)) == 0, name


def trl_style(prompts, completions, answer, **columns):
    both = zip(completions, answer, strict=True)
    return [None if right is None else float(right in completion) for completion, right in both]


def test_the_form_of_trl():
    scores = TextFunctionReward(trl_style).score(
        ["a4", "b", "c"], ["?"] * 3, [{"answer": "4", "extra": 1}, {"answer": "4"}, None]
    )
    assert scores.value[:2].tolist() == [1, 0] and scores.valid.tolist() == [True, True, False]
    assert scores.reason == [None, None, "trl_style returned None: not for this sample"]
    for answer in (np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), (1, True), [np.float32(1), torch.tensor(2)]):
        assert TextFunctionReward(lambda completions, a=answer: a).score(["a", "b"], ["?"] * 2).valid.all()


def test_completions_are_texts_or_trls_lists_of_messages():
    def trl_chat(completions, **columns):
        return [float(len(messages[0]["content"])) for messages in completions]

    assert TextFunctionReward(trl_chat, completions_as="messages").score(["abc"], ["?"]).value.tolist() == [3]


def test_one_completion_at_a_time():
    assert TextFunctionReward(len).score(["abc", ""], ["?"] * 2).value.tolist() == [3, 0]

    def match(completion, answer, strict=False):
        return float(completion == answer)

    scores = TextFunctionReward(match).score(["a", "b"], ["?"] * 2, [{"answer": "a"}, None])
    assert scores.value.tolist() == [1, 0]
    with pytest.raises(RewardError, match=r"asks for answer; offered are prompt, completion and the metadata's"):
        TextFunctionReward(match).score(["a"], ["?"])
    with pytest.raises(ValueError, match=r"\(text, answer\); which is"):
        TextFunctionReward(lambda text, answer: 0.0)


def test_dotted_paths_and_files(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text(
        "def short(completion):\n    return -len(completion)\n\n"
        "class Judge:\n    name = unit = 'j'\n    range = (0.0, 1.0)\n    higher_is_better = True\n"
        "    def __init__(self, k=1):\n        self.k = k\n"
        "    def score(self, completions, prompts, metadata=None):\n"
        "        return self.k\n\njudge = Judge()\nnumber = 3\n"
    )
    assert load_text_reward(f"{file}:short", unit="chars").score(["ab"], ["?"]).value.tolist() == [-2]
    assert load_text_reward(f"{file}:Judge", k=5).score([], []) == 5  # type: ignore[comparison-overlap]
    monkeypatch.syspath_prepend(tmp_path)
    assert load_text_reward("mine:judge").name == "j"
    sys.modules.pop("mine")
    for name, options, message in (
        ("boxed_anser", {}, "There is no text reward 'boxed_anser'. Did you mean 'boxed_answer'? Allowed"),
        (f"{file}:number", {}, "is a int without name, unit, range, higher_is_better, score"),
        ("visalign.rewards.statistics:Sharpness", {}, "judges images: its score() takes them first"),
        ("boxed_answer", {"tolerance": 1}, "Its options: extract, compare"),
    ):
        with pytest.raises(RewardError, match=re.escape(message)):
            load_text_reward(name, **cast(Any, options))


class Base:
    name, unit, range, higher_is_better = "mine", "u", (0.0, 1.0), True

    def score(self, completions, prompts, metadata=None):
        size = len(read_text_request(self.name, completions, prompts, metadata))
        return Scores(value=torch.ones(size), valid=torch.ones(size, dtype=torch.bool), unit="u")


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda completions: [1.0], "raised RewardError: Reward '<lambda>' returned 1 scores for 4"),
        (lambda completion: None, "it judged none of the completions"),
    ],
)
def test_each_broken_promise_is_found(reward, message):
    with pytest.raises(RewardError, match=message):
        check_text_reward(reward)


def test_a_good_reward_passes():
    assert len(check_text_reward(Base())) == 9
    assert len(check_text_reward(lambda completion: len(completion))) == 9
    with pytest.raises(ValueError, match="give two or more of both"):
        check_text_reward(Base(), completions=["a"])


class Lookup(Base):
    """A user's class that raises where a completion is not in its table."""

    def score(self, completions, prompts, metadata=None):
        values = torch.tensor([{"a": 1.0}[text] for text in completions])
        return Scores(value=values, valid=values > 0, unit="u")


@pytest.mark.parametrize(
    "reward",
    [Lookup(), lambda completion: {"a": 1.0}[completion], lambda completions: Lookup().score(completions, []).value],
)
@pytest.mark.parametrize("in_a_sum", [False, True])
def test_what_a_reward_raises_names_the_sample_and_the_line(reward, in_a_sum):
    reward = reward if isinstance(reward, Lookup) else TextFunctionReward(reward, name="mine")
    reward = WeightedTextSum({"mine": (reward, 1.0)}) if in_a_sum else reward
    message = r"Reward 'mine' raised KeyError: 'b' \(.*test_contract\.py, line \d+\) on sample 5 of 7 \(the first is 0"
    with pytest.raises(RewardError, match=message):
        score_named(reward, list("aaaaaba"), ["?"] * 7, name="mine")


def test_a_comparison_of_texts_gets_its_records():
    records, texts = [], [CompletionText("a")]
    judge = SimpleNamespace(name="mine", compare=lambda left, right, prompts, metadata: records.extend(metadata))
    CompletionPairs(with_capabilities(judge)).compare(texts, texts, ["p"], [{"rubric": "b"}])
    assert records == [{"rubric": "b"}]
