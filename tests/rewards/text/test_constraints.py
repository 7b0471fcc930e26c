# SPDX-License-Identifier: Apache-2.0
"""Constraints of IFEval: each kind met and missed, the share, and records that cannot be checked."""

from __future__ import annotations

import json
import re
from typing import Any

import pandas as pd
import pytest

from visalign.pipelines.shared.parts import build_records
from visalign.rewards.catalogue import load_text_reward
from visalign.rewards.text.constraints import KINDS

TEXTS: dict[str, tuple[dict[str, Any], str, str]] = {  # kind -> (arguments, a text that meets it, one that does not)
    "keywords:existence": ({"keywords": ["Sea", "a.c"]}, "by the seas, a.c", "the sea, abc"),
    "keywords:frequency": ({"keyword": "the", "frequency": 2, "relation": "at least"}, "The other", "an other"),
    "keywords:forbidden_words": ({"forbidden_words": ["cat", "C++"]}, "concatenate", "a C++ cast"),
    "keywords:letter_frequency": ({"letter": "E", "let_frequency": 2, "let_relation": "less than"}, "hE", "hee"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, "a b-c", "a b"),
    "length_constraints:number_sentences": (
        {"num_sentences": 3, "relation": "less than"}, "Pi is 3.14. Ok", "A. B! C"),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "a\n***\nb ***", "a *** *** b"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Two"}, "one\n\n'two', it", "one\n\nit two"),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] [b]", "[a]"),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"}, "a\np. p. s b", "a\nP.S. b"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n - b", "* a\n - b\n* c"),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b c**", "*a* ** **"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Part", "num_sections": 2}, "Part 1 a Part 2", "PART 1 part 2"),
    "detectable_format:constrained_response": ({}, "My answer is maybe.", "Maybe."),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', '{"a": }'),
    "detectable_format:title": ({}, "<<A day>>\nIt", "<< >> <A>"),
    "combination:two_responses": ({}, "a ****** b", "a ****** a"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Why?"}, " why? So", "So why?"),
    "startend:end_checker": ({"end_phrase": "The end."}, 'It was "the end."', "The end. Or"),
    "startend:quotation": ({}, '"a\nb"\n', '"'),
    "change_case:capital_word_frequency": ({"capital_frequency": 2, "capital_relation": "at least"}, "I AM", "I am"),
    "change_case:english_capital": ({}, "A B 1.", "A b"),
    "change_case:english_lowercase": ({}, "a b 1.", "A b"),
    "punctuation:no_comma": ({}, "a; b", "a, b"),
    "text_format": ({"tags": ["a"]}, "<a>1</a>", "<a></a>"),
    "json_format": ({"schema": {"type": "object"}}, "{}", "[]"),
    "length": ({"rule": "soft_overlong", "max_length": 3, "cache": 1}, "a b", "a b c"),
}  # fmt: skip


def _scores(texts: list[str], kinds: Any, arguments: Any = None, **options: Any) -> Any:
    record = {"instruction_id_list": kinds, "kwargs": arguments}
    return load_text_reward("constraints", **options).score(texts, ["?"] * len(texts), [record] * len(texts))


@pytest.mark.parametrize("kind", TEXTS)
def test_a_kind_is_met_and_missed(kind: str) -> None:
    arguments, met, missed = TEXTS[kind]
    scores = _scores([met, missed], [kind], [{**arguments, "of_another_kind": None}])
    assert (scores.value.tolist(), scores.text[1]) == ([1, 0], f"not met: {kind}"), scores
    assert set(TEXTS) == set(KINDS)
    assert _scores(["", " \n"], [kind], [arguments]).value.tolist() == [0, 0], "a blank completion meets nothing"


def test_the_share_is_over_the_constraints_and_kinds_have_columns() -> None:
    kinds = ["punctuation:no_comma", *["keywords:existence"] * 2, "startend:quotation"]
    arguments = [{}, {"keywords": ["sea"]}, {"keywords": ["sky"]}, {}]
    scores = _scores(["the sea", "the sea, the sky"], kinds, arguments)
    assert scores.value.tolist() == [0.5, 0.5]
    assert scores.parts["keywords:existence"].tolist() == [0.5, 1] and scores.parts[kinds[0]].tolist() == [1, 0]
    assert _scores(["the sea", '"sea sky"'], kinds, arguments, rule="all").value.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("kinds", "arguments", "reason"),
    [
        (None, None, "no list 'instruction_id_list' of constraints, as google/IFEval has it"),
        (["punctuation:no_coma"], None, "Did you mean 'punctuation:no_comma'"),
        (["language:response_language"], [{"language": "de"}], "there is no constraint 'language:response_language'"),
        (["punctuation:no_comma"], [{}, {}], "1 constraints and 2 kwargs; give one mapping for each"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1}], "needs 'relation'"),
        (["length_constraints:number_words"], [{"num_words": 3, "relation": "most"}], "='most'; needed is a choice"),
        (["keywords:existence"], [{"keywords": [3]}], r"has keywords=\[3\]; needed is a list of texts"),
        (["keywords:existence"], [{"keywords": []}], r"has keywords=\[\]; needed is a list of texts"),
        (["keywords:existence"], [{"keywords": "sea"}], "has keywords='sea'; needed is a list of texts"),
        (["startend:end_checker"], [{"end_phrase": " "}], "has end_phrase=' '; needed is a text that is not blank"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": True}], "num_bullets=True; needed is a whole"),
        (["detectable_format:number_bullet_lists"], [{"num_bullets": -1}], "num_bullets=-1; needed is a .* from 0"),
        (["text_format"], [{"tags": "think"}], "has tags='think'; needed is a list of texts"),
        (["length"], [{"max_length": "", "cache": 1}], "has max_length=''; needed is a whole number from 1"),
        (["punctuation:no_comma"], ["{}"], r"'kwargs' is \['{}'\]; needed is a list of mappings"),
        (["punctuation:no_comma"], "[{}]", r"'kwargs' is '\[{}\]'; needed is a list of mappings"),
        ([["punctuation:no_comma"]], None, "there is no constraint"),
        ({"punctuation:no_comma": 1}, None, "google/IFEval has it, but {'punctuation:no_comma': 1}"),
        (["length"], [{"rule": "linear"}], "rule 'linear' takes scale"),
    ],
)
def test_a_record_that_cannot_be_checked_gives_no_score(kinds: Any, arguments: Any, reason: str) -> None:
    scores = _scores(["a"], kinds, arguments)
    assert not scores.valid.any()
    assert re.search(reason, scores.reason[0]), scores.reason


def test_a_letter_is_no_pattern() -> None:
    for letter, text in ((".", "abc"), ("(", "a(b")):
        arguments = {"letter": letter, "let_frequency": 1, "let_relation": "at least"}
        assert _scores([text], ["keywords:letter_frequency"], [arguments]).value.item() == float(letter in text)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_of_google_ifeval_are_read(ending: str, tmp_path: Any) -> None:
    kinds = ["punctuation:no_comma", "detectable_content:number_placeholders"]
    arguments = [{"num_placeholders": None}, {"num_placeholders": 1}]
    rows = [{"key": 1, "prompt": "Write.", "instruction_id_list": kinds, "kwargs": arguments}]
    path = tmp_path / f"ifeval.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pd.DataFrame(rows).to_parquet(path)
    records = build_records(str(path), "data.train", chat=True)
    assert load_text_reward("constraints").score(["[a]", "a,"], ["?"] * 2, [*records] * 2).value.tolist() == [1, 0]
