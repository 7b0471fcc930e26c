# SPDX-License-Identifier: Apache-2.0
"""RewardBench 2's rows, from the file to the report: best of four, and questions with several right answers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from visalign.data.sets.sources import load_preferences
from visalign.errors import UserError
from visalign.evaluation.rewards.pair_scores import from_scores
from visalign.evaluation.rewards.preferences import evaluate_preferences

SCORES = {"a": 3.0, "b": 2.0, "c": 2.0, "d": 0.0, "e": math.nan}


def row(name: str, right: str, wrong: str, subset: str = "Math") -> str:
    counts = {"num_correct": len(right), "num_incorrect": len(wrong), "models": []}
    return json.dumps(
        {"id": name, "prompt": f"q {name}", "chosen": [*right], "rejected": [*wrong], "subset": subset, **counts}
    )


def report(folder: Path, *rows: str, limit: int | None = None) -> dict:
    (folder / "set.jsonl").write_text("\n".join(rows))
    pairs = load_preferences(folder / "set.jsonl", limit=limit)
    left, right = ([SCORES[getattr(p, f"image_{side}")[-1]] for p in pairs.pairs] for side in ("left", "right"))
    return evaluate_preferences(pairs, from_scores("judge", "", left, right))


def test_rows_become_questions_of_several_answers(tmp_path):
    best = [row("0", "a", "bcd"), row("1", "b", "dcd"), row("2", "d", "abc"), row("3", "a", "bce")]
    ties = [row("tied:7", "ab", "d", "Ties"), row("ref:7", "c", "d", "Ties"), row("tied:8", "ab", "e", "Ties")]
    result = report(tmp_path, *best, *ties, row("5", "b", "e", "Safety"))
    safety, math_ = sorted(result["slices"]["best_of_n"], key=lambda entry: entry["name"], reverse=True)
    assert (math_["pairs"], math_["accuracy"]["estimate"]) == (3, pytest.approx(0.5))
    assert safety["pairs"] == 0 and safety["accuracy"]["estimate"] is None
    gap, spread = 2.0, 1.0  # of both questions; the third has no score
    assert result["ties"] == (pytest.approx(1 + 0.01 * math.tanh(gap / spread - 1)), 1)
    assert "1.008 for questions with several right answers (1 of them)" in result["notes"][0]
    cut = report(tmp_path, *ties, row("9", "a", "bc"), limit=6)
    assert cut["ties"][1] == 1 and cut["slices"]["best_of_n"][0]["pairs"] == 0, "one pair of the last row is missing"


def test_other_pairs_have_neither(tmp_path):
    result = report(tmp_path, json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}))
    assert "best_of_n" not in result["slices"] and result["ties"] is None


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        *((["a"], wrong, r"chosen \['a'\] and rejected .*needs one text or more") for wrong in ([], [3], ["b", None])),
        (["a"], "b", r"a list of answers as \w+ and one text as rejected. Write rejected"),
        ("a", ["b", "c"], r"a list of answers as \w+ and one text as chosen. Write chosen"),
    ],
)
def test_lists_without_texts_or_on_one_side_only_are_named(tmp_path, right, wrong, message):
    with pytest.raises(UserError, match=rf"Row 2 has {message}"):
        report(tmp_path, row("0", "a", "b"), json.dumps({"prompt": "q", "chosen": right, "rejected": wrong}))
