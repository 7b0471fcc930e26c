# SPDX-License-Identifier: Apache-2.0
"""Pairs and votes from files: three layouts, what is left out, bad input by its message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from visalign.data.sets.completion_files import load_pairs, load_rankings, load_votes
from visalign.errors import UserError


def _file(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "a.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def _judged(*rows: tuple[str, str, float | str]) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": text, "reward": reward} for prompt, text, reward in rows]


PAIR = {"prompt": "p", "chosen": "good", "rejected": "bad"}
VOTE = {"prompt": "p", "completion": "good", "label": True}


def test_answers_of_transcripts_keep_the_words_that_both_begin_with(tmp_path):
    prompt = "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Which pet?\n\nAssistant:"
    answers = {"chosen": " I like cats.", "rejected": " I like catfish."}
    path = _file(tmp_path, {name: prompt + text for name, text in answers.items()})
    assert load_votes(path).records == [
        {"prompt": prompt, "completion": answers[name], "label": name == "chosen"} for name in answers
    ]
    asked = {"prompt": prompt.removesuffix("\n\nAssistant:"), **answers}
    assert load_pairs(_file(tmp_path, asked)).records == [asked]


def test_the_best_and_the_worst_of_judged_completions_become_a_pair(tmp_path):
    rows = _judged(("p", "mid", 0.5), ("q", "x", 1), ("p", "bad", 0), ("p", "good", 1), ("q", "y", 1))
    pairs = load_pairs(_file(tmp_path, *rows, *_judged(("r", "same", 0), ("r", "same", 1))))
    assert pairs.records == [PAIR] and pairs.left_out == {"equal": 1, "ties": 1}
    with pytest.raises(UserError, match="no pair of completions of which one is better: left out 1 ties"):
        load_pairs(_file(tmp_path, *_judged(("q", "x", 1), ("q", "y", 1))))


def test_what_a_tool_wrote_goes_with_the_completions(tmp_path):
    rows = _judged(("p", "good", 1), ("p", "bad", 0))
    pair = {**PAIR, "chosen_tool_answers": [[1, 2]]}
    path = _file(tmp_path, {**rows[0], "tool_answers": [[1, 2]]}, {**rows[1], "tool_answers": None})
    assert load_pairs(path).records == [pair]
    good, bad = load_votes(_file(tmp_path, pair)).records
    assert good["tool_answers"] == [[1, 2]] and "tool_answers" not in bad


def test_votes_come_from_labels_pairs_and_rewards(tmp_path):
    bad = {"prompt": "p", "completion": "bad", "label": False}
    assert load_votes(_file(tmp_path, VOTE, {**bad, "label": 0})).records == [VOTE, bad]
    assert load_votes(_file(tmp_path, PAIR)).records == [VOTE, bad]
    path = _file(tmp_path, *_judged(("p", "good", 0.7), ("p", "bad", 0.2)))
    assert [r["label"] for r in load_votes(path, threshold=0.5).records] == [True, False]
    with pytest.raises(UserError, match="all 2 votes are bad; KTO learns from both"):
        load_votes(path)


@pytest.mark.parametrize(
    ("load", "rejected", "fault"),
    [(load_pairs, " ", "empty"), (load_votes, " ", "empty"), (load_pairs, "good", "equal")],
)
def test_unusable_completions_are_refused_or_left_out(load, rejected, fault, tmp_path):
    path = _file(tmp_path, PAIR, {**PAIR, "rejected": rejected})
    with pytest.raises(UserError, match=rf"1 of \d records .* have {fault} completions.*rows 2\..*unusable=drop"):
        load(path)
    usable = load(path, unusable="drop")
    assert usable.records[0]["prompt"] == PAIR["prompt"] and usable.left_out == {fault: 1}


@pytest.mark.parametrize(
    ("load", "row", "message"),
    [
        (load_pairs, {"chosen": "Cat.", "rejected": "Catfish."}, "lacks the column 'prompt'"),
        (load_pairs, {"prompt": "p", "chosen": "a", "rejcted": "b"}, "lacks the column 'rejected'.*'rejcted'"),
        (load_votes, {**VOTE, "label": "maybe"}, "Row 1 of .*: label 'maybe' is neither true"),
        (
            load_pairs,
            {**PAIR, "chosen": [{"content": "a"}] * 2},
            "chosen is .* a completion a text or a list of one message",
        ),
        (load_pairs, _judged(("p", "a", "x"))[0], "Row 1 of .*: reward is 'x'"),
        (load_pairs, _judged(("p", "a", 10**400))[0], "Row 1 of .*: reward is 1000"),
    ],
)
def test_bad_rows_by_their_message(load, row, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load(_file(tmp_path, row))


def test_columns_of_another_layout_may_be_empty(tmp_path: Path) -> None:
    rows = [{**row, "chosen": None, "rejected": None} for row in _judged(("p", "good", 1), ("p", "bad", 0))]
    assert load_pairs(_file(tmp_path, *rows)).records == [PAIR]
    (tmp_path / "a.csv").write_text("prompt,completion,reward,label,chosen\np,good,1,,\np,bad,0,,\n")
    assert [vote["label"] for vote in load_votes(tmp_path / "a.csv").records] == [True, False]


def test_the_header_of_a_sheet_with_empty_cells_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    cells = [(f"p{k}", "good", "bad", 2.0 if k == 0 else None) for k in range(4)]
    pandas.DataFrame(cells, columns=["prompt", "chosen", "rejected", "by"]).to_excel(tmp_path / "a.xlsx", index=False)
    reads, read_excel = list[Any](), pandas.read_excel
    monkeypatch.setattr(pandas, "read_excel", lambda *path, **how: reads.append(how) or read_excel(*path, **how))
    rankings = load_rankings(tmp_path / "a.xlsx", names={"margin": "by"}).records
    assert [ranking.get("margin") for ranking in rankings] == [2.0, None, None, None] and len(reads) == 2
