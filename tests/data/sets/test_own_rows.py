# SPDX-License-Identifier: Apache-2.0
"""Rows as GSM8K and TRL have them: renamed fields, conversations as prompts, completions and pairs."""

from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest

from visalign.data.sets.completion_files import load_pairs, load_votes
from visalign.data.sets.prompt_files import load_demonstrations, load_prompts
from visalign.data.sets.tables import read_rows
from visalign.data.sets.text_rows import refer_to_texts, text_prompt
from visalign.errors import UserError

ASKED, RIGHT, WRONG = (
    {"role": role, "content": text} for role, text in zip(["user", *["assistant"] * 2], "?ab", strict=True)
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
GSM8K = [{"question": f"{n} + 1?", "answer": f"{n + 1}\n#### {n + 1}"} for n in range(3)]


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_fields_are_renamed(tmp_path, ending):
    path = write(tmp_path / f"rows.{ending}", GSM8K)
    records = load_prompts(path, names={"prompt": "question"}, chat=True)
    assert records == [{"prompt": row["question"], "answer": row["answer"]} for row in GSM8K]
    message = r"1 has no field 'quest', which data.map.prompt \(--map\) names. Did you mean 'question'\?.*are question"
    with pytest.raises(UserError, match=message):
        load_prompts(path, names={"prompt": "quest"}, chat=True)
    assert load_prompts(path, chat=True) == records  # GSM8K's rows need no map
    with pytest.raises(UserError, match=r"data\.map=\{prompt: FIELD\} in a configuration, --map prompt=FIELD"):
        load_prompts(path)


def test_prompts_may_be_conversations_for_language_models_alone(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": [ASKED], "answer": "a"}] * 2)
    with pytest.warns(UserWarning, match="1 repeated"):
        assert load_prompts(path, chat=True) == [{"prompt": [ASKED], "answer": "a"}]
    with pytest.raises(UserError, match='"prompt" that is text, such as'):
        load_prompts(path)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, RIGHT]},
        {"messages": [ASKED, RIGHT, {"role": "user", "content": "thanks!"}]},
        {"prompt": [ASKED], "completion": [{**RIGHT, "content": [{"type": "text", "text": "a"}]}]},
        {"prompt": [ASKED], "completion": "a"},
        {"question": [ASKED], "solution": [RIGHT]},
    ],
)
def test_demonstrations_as_trl_has_them(tmp_path, row):
    path = write(tmp_path / "rows.jsonl", [row])
    record = load_demonstrations(path, names={"prompt": "question"} if "question" in row else {})[0]
    assert (record["prompt"], record["completion"]) == ([ASKED], "a")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"role": "user", "content": "Write a poem"}, r"line 2 has 2 messages, and none is the assistant's"),
        ({**RIGHT, "content": " "}, "line 2: the message .* is no answer to learn"),
        ({**RIGHT, "content": "Wait.", "tool_calls": [CALL]}, "line 2: the message .* is no answer to learn"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "line 2: the message .* is no answer to learn"),
    ],
)
def test_only_words_of_the_assistant_are_demonstrations(tmp_path, answer, message):
    rows = [{"messages": [ASKED, RIGHT]}, {"messages": [{"role": "system", "content": "Be brief."}, answer]}]
    with pytest.raises(UserError, match=message):
        load_demonstrations(write(tmp_path / "rows.jsonl", rows))


@pytest.mark.parametrize(
    ("row", "record"),
    [
        ({"messages": [ASKED]}, {"prompt": [ASKED]}),
        ({"messages": [ASKED, {**RIGHT, "content": ["a"]}]}, {"prompt": [ASKED], "answer": "a"}),
        ({"messages": [ASKED, RIGHT], "answer": "7"}, {"prompt": [ASKED], "answer": "7"}),
        (
            {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a"}]},
            {"prompt": [ASKED], "answer": "a"},
        ),
    ],
)
def test_whole_conversations_are_prompts_whose_last_answer_is_the_reference(tmp_path, row, record):
    assert load_prompts(write(tmp_path / "rows.jsonl", [row]), chat=True) == [record]


@pytest.mark.parametrize("prompt", [{}, {"prompt": "?"}, {"prompt": [ASKED]}])
def test_pairs_as_trl_has_them(tmp_path, prompt):
    before = [] if isinstance(prompt.get("prompt"), list) else [ASKED]
    row = {**prompt, "chosen": [*before, RIGHT], "rejected": [*before, WRONG], "more": 1}
    path = write(tmp_path / "rows.jsonl", [row])
    assert load_pairs(path).records == [{"prompt": [ASKED], "chosen": "a", "rejected": "b", "more": 1}]
    assert [vote["label"] for vote in load_votes(path).records] == [True, False]


def turns(*pairs):
    return [{"from": role, "value": text} for role, text in pairs]


DEVELOPER, SYSTEM = ({"role": role, "content": "D"} for role in ("developer", "system"))
CALLED = json.dumps({"name": "add", "arguments": {"a": 1}})


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"conversations": turns(("human", "?"), ("chatgpt", "a")), "system": "D"}, [SYSTEM, ASKED]),
        ({"messages": [DEVELOPER, ASKED, RIGHT], "system": "S"}, [SYSTEM, ASKED]),
        (
            {"conversations": turns(("human", "?"), ("function_call", CALLED), ("observation", "2"), ("gpt", "a"))},
            [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}],
        ),
        ({"prompt": [DEVELOPER, ASKED], "answer": "a"}, [SYSTEM, ASKED]),
        ({"prompt": turns(("human", "?")), "system": "D", "answer": "a"}, [SYSTEM, ASKED]),
    ],
    ids=["system-column", "developer", "function-call", "prompt", "system-of-prompt"],
)  # fmt: skip
def test_roles_of_other_programs_are_those_of_chat_templates(tmp_path, row, prompt):
    path = write(tmp_path / "rows.jsonl", [row])
    assert load_demonstrations(path)[0]["prompt"] == prompt
    assert load_prompts(path, chat=True)[0]["prompt"] == prompt


@pytest.mark.parametrize("form", [list, json.dumps])
def test_roles_of_pairs_are_those_of_chat_templates(tmp_path, form):
    row = {"prompt": form([DEVELOPER, ASKED]), "chosen": "a", "rejected": "b"}
    assert load_pairs(write(tmp_path / "rows.jsonl", [row])).records[0]["prompt"] == [SYSTEM, ASKED]
    assert text_prompt(refer_to_texts(row)["prompt"]) == [SYSTEM, ASKED]


@pytest.mark.parametrize(
    ("role", "text", "message"),
    [
        (
            "critic",
            "No.",
            "line 1 has the message .*'critic'.* whose role is none of system, user, assistant, tool, dev",
        ),
        ("function_call", "{}", "line 1 has the function_call '{}'; needed is JSON"),
        ("function_call", "add(1)", r"line 1 has the function_call 'add\(1\)'; needed is JSON"),
    ],
)
@pytest.mark.parametrize("load", [load_demonstrations, lambda path: load_prompts(path, chat=True)])
def test_roles_that_no_template_reads_are_refused(tmp_path, load, role, text, message):
    with pytest.raises(UserError, match=message):
        load(write(tmp_path / "rows.jsonl", [{"conversations": turns(("human", "?"), (role, text), ("gpt", "a"))}]))


@pytest.mark.parametrize("load", [load_demonstrations, lambda path: load_prompts(path, chat=True), load_pairs])
@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"prompt": [ASKED], "tools": [{"type": "function"}]}, "1 conversations have a column 'tools'"),
        ({"prompt": "?", "system": "D"}, "1 plain prompts have a column 'system'"),
    ],
)
def test_columns_that_do_not_reach_the_model_are_named(tmp_path, load, row, column):
    path = write(tmp_path / "rows.jsonl", [{**row, "answer": "a", "chosen": "a", "rejected": "b"}])
    with pytest.warns(UserWarning, match=f"{column}, which the model does not see"):
        load(path)


@pytest.mark.parametrize("sign", [";", "\t", "|"])
def test_commas_become_points_in_columns_of_numbers_alone(tmp_path, sign):
    columns = {
        "prompt": (["8,10", "3,4"], ["8,10", "3,4"]),
        "answer": (["1,234", "3,5"], ["1,234", "3,5"]),
        "gold": (["1,234", "42"], ["1,234", "42"]),  # may be thousands
        "place": (["3,5", "left"], ["3,5", "left"]),
        "a_left": (["1,234", "0,5"], ["1.234", "0.5"]),
        "other": (["-3,25e-4", "NaN"], ["-3.25e-4", "NaN"]),
        "clip": (["0,5", "NA"], ["0.5", "NA"]),
        "mos": (["3,125", "4,250"], ["3.125", "4.250"]),
        "label": (["0,25", "left"], ["0.25", "left"]),
    }
    lines = [columns, *zip(*(cells for cells, _ in columns.values()), strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(map(sign.join, lines)), encoding="utf-8-sig")
    expected = [
        dict(zip(columns, cells, strict=True)) for cells in zip(*(new for _, new in columns.values()), strict=True)
    ]
    assert [row for _, row in read_rows(tmp_path / "a.csv")] == expected
