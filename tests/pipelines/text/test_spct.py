# SPDX-License-Identifier: Apache-2.0
"""Prompts to train a judge of texts on (SPCT): responses in a drawn order, true rewards, the number of the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from visalign.errors import UserError
from visalign.pipelines.text.config import HeldoutPromptsConfig
from visalign.pipelines.text.parts import text_records
from visalign.rewards.chat.text_judge import SCORES, question_fields
from visalign.rewards.text.rating import ScoresReward


def records(folder: Path, rows: list[dict], question: str = "{prompt}|{responses}") -> list:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return list(text_records("train", HeldoutPromptsConfig(train=str(path), heldout="x", question=question), 0))


def test_the_order_is_drawn_and_the_record_names_the_best(tmp_path: Path):
    rows = [{"prompt": f"p{n}", "chosen": "good", "rejected": "bad"} for n in range(8)]
    found = records(tmp_path, rows)
    assert {record["best"] for record in found} == {1, 2}
    for record in found:
        assert record["prompt"].split("[Response ")[record["best"]].splitlines()[1] == "good"
        assert record["rewards"][record["best"] - 1] == max(record["rewards"]) == 1
        scores = ["9" if number == record["best"] else "4" for number in (1, 2)]
        answer = rf"\boxed{{{', '.join(scores)}}}"
        assert ScoresReward().score([answer], ["?"], [record]).value.tolist() == [1]


def test_lists_are_asked_about_as_the_judge_itself_asks(tmp_path: Path):
    rows = [{"prompt": "three", "completions": ["aaa1", "bbb2", "ccc3"], "scores": [1, 9, 5]}]
    rows += [{"prompt": "tied", "completions": ["a", "b"], "scores": [2, 2]}]
    (record,) = records(tmp_path, rows, "text_judge")
    assert sorted(record["rewards"]) == [1, 5, 9] and record["rewards"][record["best"] - 1] == 9
    shown = sorted(("aaa1", "bbb2", "ccc3"), key=record["prompt"].index)
    (message,) = SCORES.filled({"prompt": "three", **question_fields(shown)})
    assert (
        message["content"][0]["text"] == record["prompt"] and r"\boxed{score 1, score 2, score 3}" in record["prompt"]
    )


def test_packaged_tasks_and_what_has_no_best(tmp_path: Path):
    config = HeldoutPromptsConfig(size=6, heldout="tasks:heldout", question="{prompt} {responses}")
    assert len(text_records("train", config, 0)) == 6 and len(text_records("heldout", config, 0)) == 285
    with pytest.raises(UserError, match=r"no prompt of '.*' has one best response"):
        records(tmp_path, [{"prompt": "p", "completions": ["a", "b"], "scores": [1, 1]}])
