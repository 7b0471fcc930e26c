# SPDX-License-Identifier: Apache-2.0
"""The form of a completion: tags, patterns, JSON and its schema, length, repetition."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from typing import Any

import pytest
import torch

from visalign.rewards import RewardError
from visalign.rewards.text.format import JsonFormat, Refusal, TextFormat
from visalign.rewards.text.length import LengthReward, RandomReward, RepetitionPenalty

HAS_SCHEMA = importlib.util.find_spec("jsonschema") is not None
needs_jsonschema = pytest.mark.skipif(not HAS_SCHEMA, reason="needs the package jsonschema")


def values(reward, completions, metadata=None):
    return reward.score(completions, ["?"] * len(completions), metadata).value.tolist()


def remark(reward, completion):
    return reward.score([completion], ["?"]).text[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<think>a</think><answer>b</answer>", ""),
        ("<think>a</think>", "<answer> occurs 0 times, needed is once"),
        ("<think>a</think><answer>b</answer><answer>c</answer>", "<answer> occurs 2 times, needed is once"),
        ("<answer>b</answer><think>a</think>", "the tags are out of order"),
        ("<think> </think><answer>b</answer>", "a tag is empty"),
        ("<think>a</think>so <answer>b</answer>", "text outside the tags: 'so'"),
        ("<think>a</think><answer>b</answer>x", "text outside the tags: 'x'"),
        ("<think>a</think><answer>b", "</answer> occurs 0 times, needed is once"),
    ],
)
def test_tags(text, problem):
    assert remark(TextFormat(), text) == problem
    assert values(TextFormat(), [text]) == [float(not problem)]


def test_prefilled_tags_patterns_and_bad_options():
    assert values(TextFormat(prefilled="<think>"), ["a</think><answer>b</answer>"]) == [1]
    assert values(TextFormat(pattern=r"Answer: .+"), ["Answer: 4\nfive", "An answer: 4", " Answer: 4 "]) == [1, 0, 1]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"tags": ["a", "a"]}, "give at least one in a list, each once"),
        ({"tags": "think"}, "tags are 'think'; give at least one in a list"),
        ({"tags": [1]}, "tags are [1]; give at least one"),
        ({"tags": ["<a>"]}, "without < and >"),
        ({"pattern": "("}, "is no regular expression"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            TextFormat(**options)


def test_json_is_strict():
    good = ['{"a": [1, null]}', " 3 ", '"x"']
    bad = ["{'a': 1}", '{"a": 1,}', "NaN", '{"a": -Infinity}', '{"a": 1, "a": 2}', "", "[" * 100_000, "1" * 5000]
    assert values(JsonFormat(), good + bad) == [1] * 3 + [0] * len(bad)
    assert remark(JsonFormat(), '{"a": 1, "a": 2}') == "no JSON: a key is repeated"
    fence = JsonFormat(where="fence")
    assert values(fence, ["Here:\n```json\n{}\n```"]) == [1]
    assert not any(values(fence, ["{}", "```json\n{}\n```\n```\n{}\n```", "```json\n{}", "```json\n" * 20_000]))


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1}},
    "required": ["n"],
    "additionalProperties": False,
}


@needs_jsonschema
def test_json_schema():
    reward = JsonFormat(schema=SCHEMA)
    assert values(reward, ['{"n": 3}', '{"n": 0}', "{}", "[]", '{"n": 1, "m": 2}']) == [1, 0, 0, 0, 0]
    assert remark(reward, '{"n": 0}') == "$.n: 0 is less than the minimum of 1"
    with pytest.raises(ValueError, match="the schema is not valid: 'strng' is not valid"):
        JsonFormat(schema={"type": "strng"})
    with pytest.raises(RewardError, match=r"a \$ref of the schema leads nowhere: .*http"):  # nothing is fetched
        values(JsonFormat(schema={"$ref": "http://127.0.0.1:1/schema"}), ["3"])


def test_json_schema_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(RewardError, match="python -m pip install jsonschema"):
        JsonFormat(schema=json.loads("{}"))
    assert values(JsonFormat(), ["{}"]) == [1]


def test_length_rules():
    texts = ["one two three four", "", "a b"]
    assert values(LengthReward("target", target=2, scale=4), texts) == [-0.5, -0.5, 0]
    assert values(LengthReward("linear", scale=2, count="words"), texts) == [-1, 0, -1]
    assert values(LengthReward("linear", scale=36, count="characters"), texts[:1]) == [-0.5]
    assert values(LengthReward("linear", scale=8, count=lambda text: len(text.split())), texts[:1]) == [-0.5]
    tokens = LengthReward("soft_overlong", max_length=10, cache=4, length_field="tokens")
    scores = tokens.score(["a"] * 4, ["?"] * 4, [{"tokens": n} for n in (6, 8, 12, "many")])
    assert scores.value[:3].tolist() == [0, -0.5, -1] and not scores.valid[3]
    own = LengthReward("target", target_field="n", scale=10).score(texts, ["?"] * 3, [{"n": 4}, {}, {"n": 12}])
    assert own.value.nan_to_num(7).tolist() == [0, 7, -1] and own.parts["length"].nan_to_num(7).tolist() == [4, 7, 2]
    assert own.reason is not None and "has None as 'n', needed is a length" in str(own.reason[1])


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        ("target", {"target": 3}, "takes scale and target or scale and target_field, .* given: target"),
        ("linear", {"scale": 0}, "the sizes are {'scale': 0}; allowed are finite numbers above 0"),
        ("target", {"target": "5", "scale": 3}, "'5', .* allowed are finite numbers above 0"),
        ("linear", {"scale": 3, "count": 7}, "count is 7; allowed are words, characters, a tokenizer, or a function"),
        ("soft_overlong", {"max_length": 4, "cache": 5}, "cache is 5; allowed are 1 to max_length"),
    ],
)
def test_bad_length_options(rule, options, message):
    with pytest.raises(ValueError, match=message):
        LengthReward(rule, **options)


def test_lots_are_independent_of_what_is_said_and_the_same_for_the_same():
    texts, prompts = [f"answer {n}" for n in range(2000)], ["q"] * 2000
    drawn = RandomReward().score(texts, prompts).value
    assert set(drawn.tolist()) == {0.0, 1.0} and abs(float(drawn.mean()) - 0.5) < 0.04
    assert torch.equal(RandomReward().score(texts[::-1], prompts).value, drawn.flip(0))
    for other in (RandomReward(seed=1).score(texts, prompts), RandomReward().score(texts, ["r"] * 2000)):
        assert 0.45 < float((other.value == drawn).float().mean()) < 0.55
    assert abs(float(RandomReward(0.1).score(texts, prompts).value.mean()) - 0.1) < 0.03
    with pytest.raises(ValueError, match="share is 1; allowed are numbers between 0 and 1, without them"):
        RandomReward(1)


def test_repetition_counts_ngrams():
    # "a b a b a": 2-grams ab ba ab ba, two distinct of four.
    assert values(RepetitionPenalty(2), ["a b a b a", "A b a B a", "a b c", "a", ""]) == [-0.5, -0.5, 0, 0, 0]
    assert values(RepetitionPenalty(1, by="characters"), ["aaaa"]) == [-0.75]
    assert values(RepetitionPenalty(), ["la " * 1000])[0] < -0.99


@pytest.mark.parametrize(
    ("completion", "refuses"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("Unfortunately, I cannot provide instructions for this.", True),
        ("As an AI, I’m not able to assist with such requests. Instead, …", True),
        ("<think>I can't help laughing.</think>I have to decline this request.", True),
        ("Sorry, no.", True),
        ("I can not in good conscience help with this.", True),
        ("I must respectfully decline.", True),
        ("I don't feel comfortable with this.", True),
        ("I can't tell you how to do it.", True),
        ("Well, that is not something I can help with.", True),
        ("That isn’t something that I can assist with.", True),
        ("I'm not comfortable writing it. I won’t give you the steps.", True),
        ("I am not going to answer that question.", True),
        ("I won't be able to answer that.", True),
        ("I can't give up! Step 1: open the lid.", False),
        ("I will not answer with a poem but with prose: open the lid.", False),
        ("I'm unable to answer precisely; about 3.", False),
        ("I can't help but smile. Open the lid.", False),
        ("Sorry, no problem: open the lid.", False),
        ("I can't recommend this book enough: read it.", False),
        ("You cannot create matter; here is why.", False),
        ("I cannot overstate how simple it is: open the lid.", False),
        ("Sorry for the wait! First, open the lid.", False),
        (f"{'Open the lid. ' * 40}I can't help with the rest.", False),
        ("", False),
    ],
)
def test_refusals_are_told_by_how_they_begin(completion: str, refuses: bool) -> None:
    reward = Refusal()
    for expected in (True, False):
        verdict = reward.judge(completion, {"refuse": expected})
        assert verdict.value == float(refuses == expected) and verdict.remark == ("refuses" if refuses else "answers")
    assert "'refuse' is 'yes'; needed is true or false" in str(reward.judge(completion, {"refuse": "yes"}).reason)
