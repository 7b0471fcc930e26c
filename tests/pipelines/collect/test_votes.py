# SPDX-License-Identifier: Apache-2.0
"""What votes say: numbers by hand, the page, the export and its readers; judges that vote; the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tests.support.judges.brightness import Brightness, BrightnessPairs
from visalign.data.sets.annotation_tools import to_label_studio
from visalign.data.sets.checks import check_preferences
from visalign.data.sets.sources import load_preferences, load_quality
from visalign.errors import UserError
from visalign.evaluation.pages.votes_page import file_tables, models_line, votes_page
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.interfaces import Preferences, RewardCapabilities
from visalign.pipelines.cli.app import app
from visalign.pipelines.collect.judge_votes import judge_votes
from visalign.pipelines.collect.store import Plan, VoteStore
from visalign.pipelines.collect.tasks import QUALITY_WORDS, SIDES, Form, Task
from visalign.pipelines.collect.votes import export_rows, report, select_votes, vote_rows, with_images, write_rows

SETTINGS = IntervalSettings(resamples=200)


def made(tmp_path: Path, count: int = 8, *, single: bool = False, gold: int = 0, **form) -> VoteStore:
    """Pairs of a dark left and a bright right image."""
    tasks = []
    for number in range(count):
        paths = [tmp_path / f"{side}{number}.png" for side in "lr"]
        for path, level in zip(paths, (50, 150), strict=True):
            Image.new("RGB", (8, 8), (level + number,) * 3).save(path)
        images, answer = tuple(map(str, paths[: 1 if single else 2])), "right" if number < gold else None
        extra = {"generator_left": "old", "seed": number}
        tasks.append(Task(prompt=f"p{number}", images=images, gold=answer, extra=extra))
    plan = Plan(votes=0, repeat_every=3, gold_every=2)
    return VoteStore.create(tmp_path / "v.sqlite", tasks, Form(**form), plan)


def vote_all(store: VoteStore, name: str, answer_to) -> None:
    """Answer everything; `answer_to` gives the answer to a task, sides as in the task."""
    store.join(name)
    while (question := store.next(name)) is not None:
        answer = answer_to(question.task)
        other = {"left": "right", "right": "left"}
        if question.swapped and answer.get("choice") in other:
            answer = answer | {"choice": other[answer["choice"]]}
        store.vote(name, question.assignment, answer, client=f"{name} {question.assignment}", seconds=2.0)


def number_of(task: Task) -> int:
    return int(task.prompt[1:])


def test_three_voters_by_hand(tmp_path):
    """a and b say right always, c for every other pair: 4 of 8 pairs are 2 to 1, the others unanimous."""
    store = made(tmp_path)
    for name in "ab":
        vote_all(store, name, lambda task: {"choice": "right"})
    vote_all(store, "c", lambda task: {"choice": "left" if number_of(task) % 2 else "right"})
    votes = select_votes(store)
    summary = report(store, votes, SETTINGS)
    # each voter answered 8 pairs and 1 to 3 of them again
    assert summary["tasks"] == summary["voted"] == 8 and summary["votes"] == len(votes) > 24
    # observed disagreement 4·2·2/(3−1)... of 24 votes and their mirror images: expected ½ of all pairs
    disagreement, total, sides = 2 * 4 * (9 - 5) / 2, 48, 24
    assert summary["alpha"]["estimate"] == pytest.approx(1 - (total - 1) * disagreement / (total**2 - 2 * sides**2))
    a, _, c = summary["annotators"]
    assert a["rest"]["estimate"] == pytest.approx((4 + 4 * 0.5) / 8) and c["rest"]["estimate"] == 0.5
    assert a["repeats"]["estimate"] == 1.0 and a["seconds"] == 2.0 and a["gold"]["estimate"] is None
    assert a["reliability"] > c["reliability"]
    assert summary["split"] == 4 and {d["task"] % 2 for d in summary["disputed"]} == {0}
    page = votes_page(summary, with_images(store, summary))
    assert page.count("data:image/png") == 8 and "Most disputed" in page
    (table,) = file_tables(summary)
    assert [row[0] for row in table.rows] == ["a", "b", "c"]


def test_gold_is_asked_for_the_voter_alone(tmp_path):
    store = made(tmp_path, gold=2)
    vote_all(store, "a", lambda task: {"choice": "left"})
    summary = report(store, select_votes(store), SETTINGS)
    assert summary["annotators"][0]["gold"]["estimate"] == 0.0 and summary["voted"] == 6
    assert len(export_rows(store, select_votes(store))) == 6
    assert "Nothing has two votes" in " ".join(summary["notes"])
    assert "All votes are for the left image of the table" in " ".join(summary["notes"])


def test_the_export_is_a_preference_set_with_all_that_was_said(tmp_path):
    store = made(tmp_path, text=True, checklist=("bright?",))
    vote_all(store, "a", lambda task: {"choice": "right", "text": "dark", "checklist": {"bright?": False}})
    vote_all(store, "b", lambda task: {"choice": "left" if number_of(task) < 2 else "right"})
    path = tmp_path / "votes.jsonl"
    write_rows(path, export_rows(store, select_votes(store)))
    preferences = load_preferences(path)
    assert [pair.votes for pair in preferences.pairs[:3]] == [(1, 1, 0), (1, 1, 0), (0, 2, 0)]
    assert [pair.label for pair in preferences.pairs[:3]] == [0.5, 0.5, 0.0]
    first = preferences.pairs[0]
    assert first.ballots == (("a", 0.0), ("b", 1.0)) and first.generator_left == "old"
    assert first.extra["answers"] == [{"annotator": "a", "text": "dark"}] and first.extra["seed"] == 0
    assert first.extra["checklist"] == {"bright?": [0, 1]}
    assert json.loads(path.read_text().split("\n")[0])["image_left"] == "l0.png"  # goes where its folder goes
    assert check_preferences(preferences) is not None
    soft = export_rows(store, select_votes(store), model=True)
    write_rows(tmp_path / "soft.jsonl", soft)
    labels = [pair.label for pair in load_preferences(tmp_path / "soft.jsonl").pairs]
    assert 0 < labels[2] < labels[0] < 1 and soft[0]["vote_share"] == 0.5
    only = export_rows(store, select_votes(store, ["b"]))
    assert [row["votes"] for row in only] == [[0, 1, 0]] * 8
    with pytest.raises(UserError, match="Nobody voted as 'c'"):
        select_votes(store, ["c"])


def test_grades_of_single_images_become_a_quality_set(tmp_path):
    store = made(tmp_path, single=True, slider=QUALITY_WORDS)
    for name, shift in (("a", 0.0), ("b", 0.5), ("c", 1.0)):
        vote_all(store, name, lambda task, shift=shift: {"slider": 1 + number_of(task) / 4 + shift})
    summary = report(store, select_votes(store), SETTINGS)
    assert summary["alphas"]["slider"]["estimate"] > 0.5
    a, b, _ = summary["annotators"]
    assert a["above_the_rest"] == pytest.approx(-0.75) and b["above_the_rest"] == pytest.approx(0.0)
    path = tmp_path / "quality.jsonl"
    write_rows(path, export_rows(store, select_votes(store)))
    records = load_quality(path).records
    assert records[2].mos == pytest.approx(2.0) and records[2].std == pytest.approx(0.5)
    assert "apart" in votes_page(summary, with_images(store, summary))
    with pytest.raises(UserError, match="--model is of pairs"):
        export_rows(store, select_votes(store), model=True)
    with pytest.raises(UserError, match="A judge votes on pairs"):
        judge_votes(store, Brightness(), "bright")


def test_judges_vote_under_their_own_names_and_go_on(tmp_path):
    store = made(tmp_path)
    assert judge_votes(store, Brightness(), "bright", batch_size=3) == (8, [])
    assert judge_votes(store, Brightness(), "bright") == (0, [])
    ranks: Any = Brightness()
    ranks.capabilities = RewardCapabilities(needs_batch=True)
    assert judge_votes(store, ranks, "ranks") == (8, []) and ranks.most == 2, "a vote is on the pair alone"
    judge_votes(store, BrightnessPairs(), "pairs")
    vote_all(store, "a", lambda task: {"choice": "right"})
    votes = select_votes(store)
    assert {v.answer["choice"] for v in votes if v.is_judge} == {"right"}
    summary = report(store, votes, SETTINGS)
    assert (summary["people"], summary["judges"]) == (1, 3)
    of_people = select_votes(store, ["bright", "ranks", "pairs"])
    assert [row["votes"] for row in export_rows(store, of_people)] == [[0, 1, 0]] * 8


class Halting:
    name = "halting"

    def compare(self, left, right, prompts, metadata=None):
        """The first pair fails; in the others the left is better by its place alone."""
        self.records = list(metadata or [])
        valid = torch.tensor([prompt != "p0" for prompt in prompts])
        prob = torch.where(valid, 1.0, math.nan)  # a certain answer is bounded and averaged as well
        return Preferences(prob=prob, valid=valid, reason=[None if ok else "too dark" for ok in valid.tolist()])


def test_models_are_ranked_and_named_in_every_export(tmp_path):
    store = made(tmp_path)
    for number, task in store.tasks.items():
        names = {"generator_left": "old", "generator_right": "new"}
        store.tasks[number] = replace(task, extra=names)
    vote_all(store, "a", lambda task: {"choice": "tie" if number_of(task) < 2 else "right"})
    votes = select_votes(store)
    summary = report(store, votes, SETTINGS)
    first, second = summary["models"]
    assert (first["name"], first["estimate"], first["pairs"]) == ("new", 7 / 8, 8)
    assert second["estimate"] == 1 / 8 and second["low"] == pytest.approx(1 - first["high"])
    assert "new against old: 87.5" in models_line(summary)[0] and models_line(summary)[0].endswith("new is preferred.")
    assert '<section id="models">' in votes_page(summary, []) and file_tables(summary)[1].name == "models"
    three = summary | {"models": [first, second, first | {"name": "third"}]}
    assert "third 87.5" in models_line(three)[0]
    task, *_ = to_label_studio(vote_rows(store, votes))
    assert task["data"]["generator_right"] == export_rows(store, votes)[0]["generator_right"] == "new"


def test_failures_are_no_votes_and_a_place_is_no_opinion(tmp_path):
    store = made(tmp_path)
    new, reasons = judge_votes(store, Halting(), "halting")
    assert new == 7 and len(reasons) == 1 and reasons[0].endswith("l0.png: too dark")
    votes = store.votes()
    assert {v.answer["choice"] for v in votes} == {"tie"}
    assert np.allclose([v.answer["prob"] for v in votes], 0.5, atol=1e-6)


def test_folders_alone_start_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).mkdir()
        Image.new("RGB", (8, 8), "red" if name == "a" else "blue").save(f"{name}/1.png")
    reply = CliRunner().invoke(app, ["collect", "a", "b", "-p", "a cat", "--judge", "sharpness"])
    assert reply.exit_code == 0 and "voted on 1 pairs" in reply.output and Path("votes.sqlite").is_file(), reply.output


def test_the_command(tmp_path):
    run = CliRunner()
    store = made(tmp_path)
    store.close()
    (tmp_path / "v.sqlite").unlink()
    file = str(tmp_path / "new.sqlite")
    table = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "p", "image_left": f"l{n}.png", "image_right": f"r{n}.png"} for n in range(4)]
    table.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    reply = run.invoke(app, ["collect", file, str(table), "--judge", "sharpness"])
    assert reply.exit_code == 0 and "sharpness voted on 4 pairs" in reply.output
    for tool in ("label-studio", "argilla"):
        path = tmp_path / f"{tool}.json"
        assert run.invoke(app, ["collect", file, "--export", str(path), "--format", tool]).exit_code == 0
        assert {(p.image_left, p.label) for p in load_preferences(path).pairs} == {
            (str(tmp_path / f"l{n}.png"), 0.5) for n in range(4)
        }
    reply = run.invoke(app, ["collect", file, "--export", f"{tmp_path}/e.jsonl", "--report", f"{tmp_path}/r.html"])
    assert reply.exit_code == 0 and "4 records" in reply.output and (tmp_path / "r.html").is_file()
    for arguments, why in (
        ([file, "--single", "--export", "x.jsonl"], "The questions and voters of a file are fixed at its start"),
        ([file, "--export", "x.json", "--format", "argilla", "--model"], "argilla writes the label of every vote"),
        ([file, "--export", "x.jsonl", "--format", "argilla"], ".json"),
        ([file, "--model"], "--model says how --export writes labels"),
        ([file, "--export", "x.txt"], ".jsonl"),
        ([file, "--report", str(tmp_path / "s.html"), "--leave-out", "sharpness"], "no vote besides those left"),
    ):
        reply = run.invoke(app, ["collect", *arguments])
        assert reply.exit_code == 2 and why in reply.output.replace("\n", " "), reply.output


def test_the_share_of_votes_for_chosen_goes_with_the_sides(tmp_path):
    texts = ("text://plain", "text://rich")
    tasks = [
        Task(prompt=f"p{number}", images=texts[:: 1 - 2 * (number % 2)], extra={"metadata": f'{{"answer": {number}}}'})
        for number in range(6)
    ]
    store = VoteStore.create(tmp_path / "t.sqlite", tasks, Form(), Plan(votes=0, repeat_every=0))
    for name, favourite in (("a", "rich"), ("b", "rich"), ("c", "plain")):
        vote_all(store, name, lambda task, text=favourite: {"choice": SIDES[task.images.index(f"text://{text}")]})
    rows = export_rows(store, select_votes(store), model=True)
    assert {row["chosen"] for row in rows} == {"rich"}
    assert [row["vote_share"] for row in rows] == pytest.approx([2 / 3] * 6)
    judge_votes(store, judge := Halting(), "halting")
    assert [record["answer"] for record in judge.records] == [*range(6)] * 2, "a CSV holds metadata as JSON"


def test_grades_of_pairs_are_exported_and_other_tools_are_told_what_they_lack(tmp_path):
    store = made(tmp_path, slider=QUALITY_WORDS, text=True, checklist=("bright?",))
    vote_all(store, "a", lambda task: {"choice": "right", "slider": 4.0, "text": "dark"})
    vote_all(store, "b", lambda task: {"choice": "right", "slider": 2.5})
    vote_all(store, "c", lambda task: {"choice": "right", "checklist": {"bright?": number_of(task) > 3}})
    vote_all(store, "d", lambda task: {"choice": "right", "checklist": {"bright?": number_of(task) > 3}})
    rows = export_rows(store, select_votes(store))
    assert rows[0]["answers"] == [{"annotator": "a", "slider": 4.0, "text": "dark"}, {"annotator": "b", "slider": 2.5}]
    summary = report(store, select_votes(store), SETTINGS)
    assert summary["alphas"]["bright?"]["estimate"] == 1.0 and summary["alphas"]["slider"]["estimate"] < 0
    assert summary["annotators"][0]["above_the_rest"] == 1.5
    assert summary["alphas"]["bright?"]["low"] is None, "no resample differs from a perfect agreement"
    assert "bright?" in votes_page(summary, [])
    with pytest.warns(
        UserWarning, match=r"label of each vote. Left out: checklist of 16 votes, slider of 16 votes, text of 8 votes"
    ):
        assert len(vote_rows(store, select_votes(store))) == 32
