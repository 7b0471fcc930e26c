# SPDX-License-Identifier: Apache-2.0
"""Completions of tables as references: columns, sides, conversations, and what stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from visalign.data.sets.checks import check_preferences, check_quality
from visalign.data.sets.image_references import CompletionText, missing_files, resolve_image
from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.sets.sources import load_source
from visalign.data.sets.text_rows import refer_to_texts, text_prompt, text_record


@pytest.mark.parametrize(
    ("row", "added"),
    [
        ({"prompt": "p", "completion": "a"}, {"image": "text://a"}),
        ({"prompt": "p", "completion": [{"role": "assistant", "content": "a"}]}, {"image": "text://a"}),
        ({"prompt": "p", "completion": "a", "reward": 0.5}, {"image": "text://a", "mos": 0.5, "reward": 0.5}),
        ({"prompt": "p", "completion": ["a", "b"]}, None),
        ({"prompt": "p", "image": "a.png", "completion": "a"}, None),
        ({"prompt": "p", "chosen": "a"}, None),
    ],
)
def test_a_completion_stands_where_an_image_does(row, added):
    assert refer_to_texts(row) == (row if added is None else {"prompt": "p"} | added)


def test_the_side_of_the_chosen_is_drawn_and_conversations_come_back():
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    sides = set()
    for number in range(8):
        prompt = [*turns, {"role": "user", "content": "?"}]
        chosen, rejected = ([*prompt, {"role": "assistant", "content": f"{w}{number}"}] for w in ("good", "bad"))
        row = refer_to_texts({"chosen": chosen, "rejected": rejected})
        assert row[f"image_{row['label']}"] == f"text://good{number}"
        assert text_prompt(row["prompt"]) == chosen[:-1]
        sides.add(row["label"])
    assert sides == {"left", "right"}
    assert text_prompt('[{"a": 1}]') == '[{"a": 1}]' and text_prompt('[{"x') == '[{"x'


ASKED = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Pet?\n\nAssistant:"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        (f"{ASKED} I like cats", f"{ASKED} I like", ASKED),
        (f"{ASKED} I like cats", f"{ASKED} I like catfish", ASKED),
        (f"{ASKED} I like cats", ASKED, ASKED),
        ("The sky is blue", "The sky is green", "The sky is"),
        ("Say it: catfish", "Say it: cattle", "Say it:"),
        ("Say it: no, never", "Say it: no", "Say it: no"),
    ],
)
def test_answers_of_texts_without_a_prompt_are_whole(chosen, rejected, prompt):
    row = refer_to_texts({"chosen": chosen, "rejected": rejected})
    other = "right" if row["label"] == "left" else "left"
    texts = {f"text://{chosen.removeprefix(prompt)}", f"text://{rejected.removeprefix(prompt)}"}
    assert row["prompt"] == prompt and {row["image_left"], row["image_right"]} == texts
    assert row[f"image_{other}"] == f"text://{rejected.removeprefix(prompt)}"


def test_sets_of_texts_are_read_and_checked(tmp_path: Path):
    pairs = load_source("tasks:pairs", limit=12)
    assert isinstance(pairs, PreferenceSet) and check_preferences(pairs, judge_sees_sides=True) == []
    assert missing_files([pair.image_left for pair in pairs.pairs]) == []
    text = resolve_image(pairs.pairs[0].image_left)
    assert isinstance(text, CompletionText) and "boxed" in text
    assert text_record(pairs.pairs[0].image_left, pairs.pairs[0].extra)["answer"]
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": prompt, "completion": "4", "reward": score} for prompt, score in (("2 + 2", 1), ("2 + 3", 0))]
    path.write_text("\n".join(map(json.dumps, [*rows, {**rows[0], "completion": "x" * 5000}])))
    records = load_source(str(path))
    assert isinstance(records, QualitySet) and [r.mos for r in records.records] == [1, 0, 1]
    assert check_quality(records) is not None, "one text under two prompts is two records"
