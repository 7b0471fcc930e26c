# SPDX-License-Identifier: Apache-2.0
"""Votes in a file: order, sides, repeats, gold; nothing lost or doubled, whoever is killed when."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from visalign.errors import UserError
from visalign.pipelines.collect import store as votes_store
from visalign.pipelines.collect.store import Plan, VoteRefused, VoteStore, mirror_answer
from visalign.pipelines.collect.tasks import Form, Task


def made(path: Path, count: int = 12, gold: int = 0, form: Form | None = None, **plan) -> VoteStore:
    tasks = [
        Task(prompt=f"p{n}", images=(f"/l{n}", f"/r{n}"), gold="left" if n < gold else None) for n in range(count)
    ]
    return VoteStore.create(path, tasks, form or Form(), Plan(**plan))


def answer_all(store: VoteStore, name: str, choice: str = "left", limit: int = 1_000) -> list[votes_store.Assignment]:
    answered = []
    while len(answered) < limit and (question := store.next(name)) is not None:
        store.vote(name, question.assignment, {"choice": choice}, client=f"{name}{len(answered)}", seconds=1.0)
        answered.append(question)
    return answered


def given(store: VoteStore, name: str) -> votes_store.Assignment:
    """The next task, which there must be."""
    question = store.next(name)
    assert question is not None
    return question


def test_order_and_sides_are_drawn_for_each_voter_and_recorded(tmp_path):
    store = made(tmp_path / "v.sqlite", count=40, votes=0, repeat_every=0)
    for name in "ab":
        store.join(name)
    answered = {name: answer_all(store, name) for name in "ab"}
    assert all(len(own) == 40 for own in answered.values())
    orders = [[s.task.prompt for s in answered[name]] for name in "ab"]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    assert 8 <= sum(s.swapped for s in answered["a"]) <= 32  # the left of the screen was chosen always
    for vote in store.votes():
        assert vote.answer["choice"] == ("right" if vote.swapped else "left")
    again = made(tmp_path / "w.sqlite", count=40, votes=0, repeat_every=0)
    again.join("a")
    assert [s.task.prompt for s in answer_all(again, "a")] == orders[0]  # the seed decides it all


def test_repeats_come_later_with_sides_exchanged_and_gold_in_its_turn(tmp_path):
    store = made(tmp_path / "v.sqlite", count=30, gold=4, votes=0, gold_every=5, repeat_every=7)
    store.join("a")
    answered = answer_all(store, "a")
    votes = store.votes()
    assert [v.position for v in votes] == list(range(len(answered)))
    golden = [v.position for v in votes if store.tasks[v.task].gold]
    assert golden == [4, 9, 14, 19]
    for vote in (v for v in votes if v.is_repeat):
        assert (vote.position + 1) % 7 == 0
        (first,) = (v for v in votes if v.task == vote.task and not v.is_repeat)
        assert vote.position - first.position > votes_store.GAP and vote.swapped != first.swapped
        assert store.tasks[vote.task].gold is None
    assert Counter(v.is_repeat for v in votes)[True] == sum((p + 1) % 7 == 0 for p in range(len(answered)))


def test_enough_votes_are_enough_and_what_lapsed_is_given_again(tmp_path, monkeypatch):
    store = made(tmp_path / "v.sqlite", count=3, votes=1, repeat_every=0)
    for name in "abcd":
        store.join(name)
    pending = given(store, "a")
    assert len(answer_all(store, "b")) == 2 and store.next("c") is None  # a looks at the third
    monkeypatch.setattr(votes_store, "LAPSES", -1.0)
    late = given(store, "c")
    assert late is not None and late.task.key == pending.task.key
    assert given(store, "a").assignment == pending.assignment  # still theirs


def test_the_same_vote_twice_counts_once_and_a_correction_replaces(tmp_path):
    store = made(tmp_path / "v.sqlite")
    store.join("a")
    question = given(store, "a")
    for _ in range(3):
        store.vote("a", question.assignment, {"choice": "left"}, client="one", seconds=2)
    assert given(store, "a").assignment != question.assignment
    back = store.before("a", None)
    assert back is not None
    assert back.assignment == question.assignment and back.answer == {"choice": "left"}
    store.vote("a", back.assignment, {"choice": "tie"}, client="two", seconds=1)
    store.vote("a", back.assignment, {"choice": "left"}, client="one", seconds=2)  # late, from a slow net
    (vote,) = store.votes()
    assert vote.answer["choice"] == "tie" and store.progress("a") == (1, 12)


def test_nobody_votes_for_another(tmp_path):
    store = made(tmp_path / "v.sqlite", allowed=(" ada  l ", "bob"))
    secret = store.join(" ada l ")
    store.join("bob")
    assert store.voter(secret) == "ada l", "blanks lock nobody out"
    with pytest.raises(VoteRefused, match="Somebody already votes as 'ada l'"):
        store.join("ada l")
    with pytest.raises(UserError, match="'eve' is not among the invited voters"):
        store.join("eve")
    with pytest.raises(UserError, match="A name has 1 to 60 letters; got ''"):
        store.join("  ")
    with pytest.raises(VoteRefused, match="You are not known here"):
        store.voter("x")
    question = given(store, "ada l")
    with pytest.raises(VoteRefused, match=f"Task {question.assignment} was not given to bob"):
        store.vote("bob", question.assignment, {"choice": "left"}, client="c", seconds=None)
    store.vote("ada l", question.assignment, {"choice": "left"}, client="c", seconds=None)
    other = given(store, "ada l")
    with pytest.raises(VoteRefused, match="The vote 'c' is of another task"):
        store.vote("ada l", other.assignment, {"choice": "left"}, client="c", seconds=None)
    assert len(store.votes()) == 1


def test_files_that_are_none(tmp_path):
    path = tmp_path / "v.sqlite"
    with pytest.raises(UserError, match="There is no file of votes"):
        VoteStore(path)
    path.write_text("hello, this is no database at all")
    with pytest.raises(UserError, match="is no file of votes: file is not a database"):
        VoteStore(path)
    with pytest.raises(UserError, match=r"exists\. To go on with it: visalign collect "):
        made(path)
    other = tmp_path / "o.sqlite"
    sqlite3.connect(other).execute("CREATE TABLE about (name, value)")
    with pytest.raises(UserError, match="is None; this version reads 'visalign votes 2'"):
        VoteStore(other)
    with pytest.raises(UserError, match=r"plan\.votes is -1\. Input should be greater than or equal to 0"):
        Plan(votes=-1)
    with pytest.raises(UserError, match="A name has 1 to 60 letters; got ''"):
        Plan(allowed=("Ada", " "))
    mixed = [Task(prompt="p", images=("/a",)), Task(prompt="p", images=("/a", "/b"))]
    with pytest.raises(UserError, match="single images, pairs or groups of one size"):
        VoteStore.create(tmp_path / "m.sqlite", mixed, Form(), Plan())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.sqlite", "v.sqlite"]


def test_many_at_once_give_each_vote_once(tmp_path):
    store = made(tmp_path / "v.sqlite", count=60, votes=2, repeat_every=0)
    names = [f"n{k}" for k in range(6)]
    for name in names:
        store.join(name)
    with ThreadPoolExecutor(6) as pool:
        answered = list(pool.map(lambda name: answer_all(store, name), names))
    counts = Counter(vote.task for vote in store.votes())
    assert sum(map(len, answered)) == 120 and set(counts.values()) == {2}


VOTER = """
import sys
from pathlib import Path
from visalign.pipelines.collect.store import VoteStore
store = VoteStore(Path(sys.argv[1]))
while (shown := store.next("a")) is not None:
    client = f"a{shown.assignment}"
    print("sending", client, flush=True)
    store.vote("a", shown.assignment, {"choice": "left"}, client=client, seconds=1.0)
    print("kept", client, flush=True)
"""


def test_a_vote_that_was_answered_for_survives_kill_9(tmp_path):
    path = tmp_path / "v.sqlite"
    made(path, count=2_000, repeat_every=0).join("a")
    command = [sys.executable, "-c", VOTER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as voter:
        assert voter.stdout is not None
        lines = [voter.stdout.readline() for _ in range(97)]
        os.kill(voter.pid, signal.SIGKILL)
        output = [*lines, *voter.stdout]
    acknowledged = [line.split()[1] for line in output if line.startswith("kept")]
    db = sqlite3.connect(path)
    stored = [client for (client,) in db.execute("SELECT client FROM votes")]
    assert len(acknowledged) > 40 and set(acknowledged) <= set(stored) and len(set(stored)) == len(stored)
    assert len(stored) - len(acknowledged) <= 1  # in the file, but killed before its answer
    assert db.execute("SELECT COUNT(*) FROM votes WHERE revision > 1").fetchone() == (0,)
    store = VoteStore(path)
    open_ = store.next("a")
    assert open_ is not None and f"a{open_.assignment}" not in stored
    assert json.loads(json.dumps(store.progress("a")))[0] == len(stored)


def test_an_answer_seen_in_a_mirror():
    answer = {"choice": "left", "boxes": [["left", 0, 0, 1, 1]], "prob": 0.75, "text": "hand"}
    other = {"choice": "right", "boxes": [["right", 0, 0, 1, 1]], "prob": 0.25, "text": "hand"}
    assert mirror_answer(answer) == other and mirror_answer(other) == answer
    assert mirror_answer({"choice": "tie"}) == {"choice": "tie"}


def test_an_image_that_was_not_seen_is_no_vote_and_leaves_the_pair_to_others(tmp_path):
    store = made(tmp_path / "v.sqlite", count=8, votes=1, repeat_every=2)
    for name in "ab":
        store.join(name)
    unseen = given(store, "a")
    for revision in range(2):
        store.vote("a", unseen.assignment, {"unseen": True}, client=f"u{revision}", seconds=1.0)
    answered = answer_all(store, "a")
    assert store.unseen() == 1 and unseen.task not in [question.task for question in answered]
    assert {vote.task for vote in store.votes()}.isdisjoint({t for t in store.tasks if store.tasks[t] == unseen.task})
    assert [question.task for question in answer_all(store, "b")] == [unseen.task]
    store.vote("a", unseen.assignment, {"choice": "tie"}, client="late", seconds=1.0)
    assert store.unseen() == 0
