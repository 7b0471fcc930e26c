# SPDX-License-Identifier: Apache-2.0
"""The commands of rewards on tables of completions: score, agree, evaluate, rank, collect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.servers.chat import chat, serving, words
from visalign.data.sets.completion_files import load_pairs
from visalign.pipelines.cli.app import app

SHOWN = re.compile(r"\[Response \d\]\n(.*?)\n\[End", re.DOTALL)


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    sums = [{"prompt": f"{n} + 2?", "task": "add", "problem": [n, 2], "answer": str(n + 2)} for n in range(1, 7)]
    rows = [{**task, "completion": rf"\boxed{{{task['answer'] if right else 9 * 9}}}", "reward": right}
            for task in sums for right in (1, 0)]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def command(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.output


def test_texts_are_scored_with_their_records_and_shown_on_the_page(answers, tmp_path):
    out = tmp_path / "scores.json"
    code, output = command("score", answers, "-r", "task_answer", "-o", out, "--page", tmp_path / "p.html")
    assert code == 0, output
    assert [row["value"] for row in json.loads(out.read_text())] == [1, 0] * 6
    assert "data:image/svg+xml;base64," in (tmp_path / "p.html").read_text()
    code, output = command("agree", answers, "-r", "task_answer", "--scores", "reward", "--output", tmp_path / "agree")
    assert code == 0 and "+1.00" in output, output
    (tmp_path / "one.jsonl").write_text("\n".join(answers.read_text().splitlines()[1::-1]))
    ranked = tmp_path / "rank.json"
    code, output = command("rank", tmp_path / "one.jsonl", "-r", "task_answer", "-o", ranked)
    assert code == 0 and [row["score"] for row in json.loads(ranked.read_text())["images"]] == [1, 0], output


@pytest.mark.parametrize("form", ["point", "pair"])
def test_a_judge_of_texts_ranks_evaluates_and_votes(answers, tmp_path, monkeypatch, form):
    def by_size(body):
        """Prefer the smaller number, which is right here."""
        numbers = [int(re.sub(r"\D", "", text)) for text in SHOWN.findall(words(body))]
        if "decision" in words(body):
            return chat(f"<answer>Response {1 if numbers[0] < numbers[1] else 2} is better</answer>")
        return chat(rf"\boxed{{{', '.join('9' if number < 20 else '2' for number in numbers)}}}")

    with serving(by_size) as stub:
        monkeypatch.setenv("VISALIGN_JUDGE_URL", stub.url)
        monkeypatch.setenv("VISALIGN_JUDGE_MODEL", "tiny")
        judge = ("-r", "text_judge", "--option", f"form={form}")
        one = tmp_path / "one.jsonl"
        rows = [{"prompt": "What is 1 + 2?", "completion": str(number)} for number in (50, 3, 40)]
        one.write_text("\n".join(map(json.dumps, rows)))
        ranked = tmp_path / "rank.json"
        code, output = command("rank", one, *judge, "-o", ranked)
        assert code == 0 and json.loads(ranked.read_text())["images"][0]["image"] == "text://3", output
        code, output = command("rank", answers, *judge)
        assert code == 2 and "The tables hold 6 prompts" in output
        votes, exported = tmp_path / "v.sqlite", tmp_path / "pairs.jsonl"
        code, output = command("collect", votes, answers, "--judge", "text_judge", "--option", f"form={form}")
        assert code == 0 and "text_judge voted on 6 pairs" in output, output
        assert command("collect", votes, "--export", exported, "--report", tmp_path / "v.html")[0] == 0
        code, output = command("evaluate", exported, *judge)
        assert code == 0 and re.search(r"micro.*100\.0\s%", output, re.DOTALL), output
    pairs = load_pairs(exported).records
    assert len(pairs) == 6 and all(pair["rejected"] == r"\boxed{81}" and pair["share"] == 1 for pair in pairs)
    assert all(pair["ballots"] == [["text_judge", 1.0]] and pair["prob"] > 0.9 for pair in pairs)


@pytest.mark.parametrize(
    ("reward", "reason"), [("jpeg_size", "is a text, and images are judged"), ("spct", "its record has no 'rewards'")]
)
def test_a_reward_that_does_not_fit_fails_row_by_row(answers, reward, reason):
    code, output = command("score", answers, "-r", reward)
    assert code == 1 and reason in " ".join(output.split()) and "12 of 12 scores failed" in output


def test_a_reward_of_texts_refuses_images(tmp_path):
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    code, output = command("score", tmp_path / "a.png", "-r", "repetition", "-p", "a cat")
    assert code == 2 and "repetition judges texts, not images" in " ".join(output.split()), output
