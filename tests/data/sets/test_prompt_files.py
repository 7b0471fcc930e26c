# SPDX-License-Identifier: Apache-2.0
"""Prompt files: what is read, what is skipped aloud, what is refused."""

from __future__ import annotations

import json
import math

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from visalign.data.sets.prompt_files import load_prompts, record_key
from visalign.errors import UserError


def _write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_text_and_json_lines(tmp_path):
    records = load_prompts(_write(tmp_path, "a.txt", " a red circle \na cross"))
    assert records == [{"prompt": "a red circle"}, {"prompt": "a cross"}]
    records = load_prompts(_write(tmp_path, "a.jsonl", '{"prompt": "a cross ", "tag": "colors"}\n'))
    assert records == [{"prompt": "a cross", "tag": "colors"}]


def test_only_line_feeds_end_a_line(tmp_path):
    odd = "a\u2028red\u0085circle\x0c"
    line = json.dumps({"prompt": odd}, ensure_ascii=False)
    path = tmp_path / "a.jsonl"
    path.write_bytes(f"{line}\r\n".encode() + b'{"prompt": "b"}')
    assert [r["prompt"] for r in load_prompts(path)] == [odd.strip(), "b"]
    assert [r["prompt"] for r in load_prompts(_write(tmp_path, "a.txt", "a\u2028b\nc"))] == ["a\u2028b", "c"]


def test_blank_lines_and_duplicates_are_skipped_with_a_warning(tmp_path):
    path = _write(tmp_path, "a.txt", "a\n\n  \nb\na\n")
    with pytest.warns(UserWarning, match=r"skipped 2 blank lines and 1 repeated prompts"):
        assert [r["prompt"] for r in load_prompts(path)] == ["a", "b"]
    rows = [{"prompt": "a", "level": math.nan}] * 2
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.warns(UserWarning, match=r"1 repeated prompts"):
        assert [record["prompt"] for record in load_prompts(tmp_path / "a.parquet")] == ["a"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n \n", "holds no prompt"),
        ("a.jsonl", '{"prompt": "\\ud83d\\ude00"}\n{"prompt": "\\ud83d"}', "Line 2 of .* has half a character"),
        ("a.jsonl", '{"words": "a"}', 'line 1 needs a "prompt" that is text'),
        (
            "a.jsonl",
            '{"prompt": "a", "tag": "x"}\n{"prompt": "a", "tag": "y"}',
            "lines 1 and 2 give the prompt 'a' two",
        ),
    ],
)
def test_refused_files(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        load_prompts(_write(tmp_path, name, text))


def test_what_holds_no_prompts_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds 0 images and no captions: cat.png has its caption in cat.txt"):
        load_prompts(tmp_path)
    with pytest.raises(UserError, match=r"no prompt set 'shapes:test'.*shapes:train, shapes:composed, shapes:heldout"):
        load_prompts("shapes:test")
    with pytest.raises(UserError, match=r"no prompt set 'a\.csv': give an existing file"):
        load_prompts("a.csv")


def test_a_source_may_be_a_list_of_images(tmp_path):
    names = [str(tmp_path / f"{name}.png") for name in ("cup", "table")]
    for name in names:
        Image.new("RGB", (8, 8)).save(name)
    file = tmp_path / "edits.jsonl"
    records = [{"prompt": "join them", "source": source} for source in (names, names[::-1], names[0])]
    file.write_text("\n".join(json.dumps(record) for record in records))
    assert load_prompts(file, edits="needed") == records
    sources = "\n".join(names), "\n".join(names[::-1]), names[0]
    assert [record_key(record) for record in records] == [("join them", source) for source in sources]
    assert record_key({"prompt": "a", "source": [names[0]]}) == ("a", names[0])
    for words in (["coco", "laion"], []):
        assert record_key({"prompt": "a", "source": words}) == ("a",)
    black = torch.zeros(3, 2, 2)
    memory = [record_key({"prompt": "a", "source": [black, torch.ones(3, 2, n)]}) for n in (2, 3, 2)]
    assert memory[0] == memory[2] != memory[1]
    message = r"line 1: the source is \[.*; give the path of an image, one, since the model edits one image"
    with pytest.raises(UserError, match=message):
        load_prompts(file, edits="needed", several=False)
    file.write_text(json.dumps({"prompt": "a", "source": names[:1]}))
    assert len(load_prompts(file, edits="needed", several=False)) == 1
    absent = [names[0], "absent.png"]
    for source, reason in ((absent, "'absent.png' is no image"), ([], "give the path"), ([1], "give")):
        file.write_text(json.dumps({"prompt": "a", "source": source}))
        with pytest.raises(UserError, match=f"line 1.*{reason}"):
            load_prompts(file, edits="needed")
