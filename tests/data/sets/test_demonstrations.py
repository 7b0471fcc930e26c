# SPDX-License-Identifier: Apache-2.0
"""Files of demonstrations: read as they are, refused by line."""

from __future__ import annotations

import json

import pytest

from visalign.data.sets.prompt_files import demonstrations_jsonl, load_demonstrations
from visalign.errors import UserError


def test_a_prompt_may_have_several_completions_and_texts_stay_as_they_are(tmp_path):
    records = [
        {"prompt": "1 + 1?\n", "completion": " 2\u2028\n", "level": 1},
        {"prompt": "1 + 1?\n", "completion": "zwei – ²"},
        {"prompt": [{"role": "user", "content": "hi"}], "completion": ""},
    ]
    file = tmp_path / "a.jsonl"
    file.write_bytes(demonstrations_jsonl(records) + b"\n\n")
    assert load_demonstrations(file) == records


def test_the_field_of_the_completion_comes_with_what_a_tool_wrote_of_it(tmp_path):
    file, spans = tmp_path / "a.jsonl", {"tool_answers": [[0, 1]]}
    both = {"prompt": "p", "completion": "c", **spans, "solution": "s", "best": "b"}
    file.write_text(json.dumps(both) + "\n" + json.dumps({"prompt": "p", "solution": "s", "best": "b"}))
    answers = [(r["completion"], r.get("tool_answers")) for r in load_demonstrations(file)]
    assert answers == [("c", [[0, 1]]), ("s", None)]
    assert [(r["completion"], "tool_answers" in r) for r in load_demonstrations(file, "best")] == [("b", False)] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (" \n\n", "has no record"),
        ('{"prompt": "p", "completion": "c"}\n{"prompt": "p"}', "line 2 has no text in the field 'completion'"),
        ('{"completion": "c"}', 'line 1 needs a "prompt"'),
        ('{"prompt": [{"role": "user"}], "completion": "c"}', 'line 1 needs a "prompt"'),
    ],
)
def test_files_that_cannot_be_used(content, message, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        load_demonstrations(file)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no file of demonstrations"):
        load_demonstrations(tmp_path / "no.jsonl")
