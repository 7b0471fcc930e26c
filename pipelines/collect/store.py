# SPDX-License-Identifier: Apache-2.0
"""Votes in one SQLite file, each in its own transaction.

    tasks        questions; the answer of gold ones
    annotators   voters: people by a secret, stored as a hash, judges by name
    assignments  which task each voter was shown, in which order, with which sides, again or not
    votes        answers to assignments; a corrected one is a new row, and the last counts

An acknowledged vote is on the disk (write-ahead log, synchronous). A vote that the client sends twice,
because the acknowledgement was lost, has the same `client` and counts once. Several processes may have the
file open: the page's server, a judge that votes, an export.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from visalign.errors import UserError

from .tasks import Form, Task

FORMAT = "visalign votes 1"
SIDES = ("left", "right")
CHOICES = (*SIDES, "tie")
LAPSES = 1800.0
"""Seconds after which a task that was shown and not answered is free for others."""
GAP = 5
"""Least number of other tasks before a pair is repeated."""
MOST_NAME = 60
UNSEEN = '{"unseen": true}'
"""Stored answer where an image could not be shown."""

_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tasks (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, prompt TEXT NOT NULL, images TEXT NOT NULL,
    gold TEXT, more TEXT NOT NULL);
CREATE TABLE annotators (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, secret TEXT UNIQUE, since REAL NOT NULL);
CREATE TABLE assignments (
    id INTEGER PRIMARY KEY, annotator INTEGER NOT NULL REFERENCES annotators,
    task INTEGER NOT NULL REFERENCES tasks, again INTEGER NOT NULL, swapped INTEGER NOT NULL,
    place INTEGER NOT NULL, given REAL NOT NULL,
    UNIQUE (annotator, task, again), UNIQUE (annotator, place));
CREATE INDEX by_task ON assignments (task);
CREATE TABLE votes (
    assignment INTEGER NOT NULL REFERENCES assignments, revision INTEGER NOT NULL,
    client TEXT NOT NULL UNIQUE, answer TEXT NOT NULL, seconds REAL, at REAL NOT NULL,
    PRIMARY KEY (assignment, revision)) WITHOUT ROWID;
CREATE VIEW last_votes AS
    SELECT v.* FROM votes v
    WHERE revision = (SELECT MAX(revision) FROM votes WHERE assignment = v.assignment);
"""
_ASSIGN = "INSERT INTO assignments (annotator, task, again, swapped, place, given) VALUES (?, ?, ?, ?, ?, ?)"


class UnknownVoter(UserError):
    """No voter has this secret or name."""


class NameTaken(UserError):
    """Another voter has this name."""


class WrongAssignment(UserError):
    """The assignment belongs to another voter, or to nobody."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Rules by which tasks are assigned."""

    votes: int = 3
    """Number of votes on each task; 0: everybody's."""
    gold_every: int = 10
    """Each n-th task has a known answer, while there are any; 0: none."""
    repeat_every: int = 15
    """Each n-th task repeats an earlier one with its sides exchanged; 0: none."""
    seed: int = 0
    """Random seed of order and sides."""
    allowed: tuple[str, ...] = ()
    """Names that may vote; empty: all."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A task as one voter sees it."""

    assignment: int
    task: Task
    swapped: bool
    """Whether the pair's left image is shown on the right."""
    answer: dict[str, Any] | None = None
    """Earlier answer, sides as on the screen."""

    def image(self, side: str) -> str:
        """Return the image on a side of the screen; a single image is on the left."""
        index = SIDES.index(side)
        return self.task.images[1 - index if self.swapped else index]


@dataclass(frozen=True, kw_only=True)
class Vote:
    """The last answer to an assignment, sides as in the task."""

    task: int
    annotator: str
    is_judge: bool
    again: bool
    """Whether this is the second answer of this voter to this task."""
    swapped: bool
    place: int
    """Position among the voter's tasks, from 0."""
    answer: Mapping[str, Any]
    seconds: float | None
    at: float


class VoteStore:
    """A file of votes: `create` a new one, or open one with `VoteStore(path)`; safe for several threads."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(
                f"There is no file of votes '{path}'. Create one: visalign collect {path} SOURCE, where "
                "SOURCE are the images."
            )
        self.path = path
        self._lock = threading.RLock()
        self._db = _connect(path)
        try:
            about = dict(self._db.execute("SELECT name, value FROM about").fetchall())
            if about.get("format") != FORMAT:
                raise UserError(f"'{path}' is {about.get('format')!r}; this version reads {FORMAT!r}.")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise UserError(f"'{path}' is no file of votes: {error}.") from error
        except UserError:
            self._db.close()
            raise
        self._db.execute("PRAGMA synchronous = FULL")
        self.form, self.plan = _from_json(Form, about["form"]), _from_json(Plan, about["plan"])
        self.name: str = about["id"]
        """Identifier of this collection, for the browser's cookie."""
        self.tasks: dict[int, Task] = {
            number: Task(prompt=prompt, images=tuple(json.loads(images)), gold=gold, more=json.loads(more))
            for number, prompt, images, gold, more in self._db.execute(
                "SELECT id, prompt, images, gold, more FROM tasks ORDER BY id"
            )
        }
        self.is_pairs = len(next(iter(self.tasks.values())).images) == 2
        self._orders: dict[str, list[int]] = {}
        self._gold = [number for number, task in self.tasks.items() if task.gold is not None]

    @staticmethod
    def create(path: Path, tasks: Sequence[Task], form: Form, plan: Plan) -> VoteStore:
        """Create a file."""
        if path.exists():
            raise UserError(f"'{path}' exists. Leave the images out to go on with it, or name another file.")
        if len({len(task.images) for task in tasks}) != 1:
            raise UserError("A file of votes asks about pairs or about single images, not about both.")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        about = {"format": FORMAT, "id": secrets.token_hex(8)}
        about |= {"form": json.dumps(asdict(form)), "plan": json.dumps(asdict(plan))}
        try:
            db = _connect(partial)
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(_TABLES)
            db.execute("BEGIN")
            db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
            db.executemany(
                "INSERT INTO tasks (key, prompt, images, gold, more) VALUES (?, ?, ?, ?, ?)",
                [(t.key, t.prompt, json.dumps(t.images), t.gold, json.dumps(t.more)) for t in tasks],
            )
            db.execute("COMMIT")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            db.close()
            partial.rename(path)
        finally:
            for leftover in path.parent.glob(f"{partial.name}*"):
                leftover.unlink()
        return VoteStore(path)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def join(self, name: str, *, judge: bool = False) -> str:
        """Register a voter and return their secret; a judge may register again."""
        name = " ".join(name.split())
        if not name or len(name) > MOST_NAME or not name.isprintable():
            raise UserError(f"A name has 1 to {MOST_NAME} letters; got {name[:MOST_NAME]!r}.")
        if self.plan.allowed and not judge and name not in self.plan.allowed:
            raise UserError(f"{name!r} is not among the invited voters. Use the name that you were given.")
        secret = secrets.token_urlsafe(24)
        with self._transaction() as db:
            voter = db.execute("SELECT secret FROM annotators WHERE name = ?", (name,)).fetchone()
            if voter is None:
                row = (name, None if judge else _hash(secret), time.time())
                db.execute("INSERT INTO annotators (name, secret, since) VALUES (?, ?, ?)", row)
            elif not judge or voter[0] is not None:
                raise NameTaken(
                    f"Somebody already votes as {name!r}. Open your own link, which identifies you, or take "
                    "another name."
                )
        return secret

    def who(self, secret: str) -> str:
        """Return the name of a secret's voter; `UnknownVoter` where there is none."""
        row = self._fetch("SELECT name FROM annotators WHERE secret = ?", _hash(secret))
        if row is None:
            raise UnknownVoter("You are not known here. Enter your name first.")
        return row[0]

    def next(self, name: str) -> Assignment | None:
        """Return a voter's open task, else assign a new one; None at the end."""
        with self._transaction() as db:
            voter = self._voter(name)
            row = self._fetch(
                "SELECT id, task, swapped FROM assignments a WHERE annotator = ? AND NOT EXISTS "
                "(SELECT 1 FROM votes WHERE assignment = a.id) ORDER BY place LIMIT 1",
                voter,
            )
            if row is not None:
                number, task, swapped = row
                db.execute("UPDATE assignments SET given = ? WHERE id = ?", (time.time(), number))
            else:
                chosen = self._choose(voter, name)
                if chosen is None:
                    return None
                task, _, swapped, _ = chosen
                number = db.execute(_ASSIGN, (voter, *chosen, time.time())).lastrowid or 0
            return Assignment(assignment=number, task=self.tasks[task], swapped=bool(swapped))

    def before(self, name: str, assignment: int | None) -> Assignment | None:
        """Return a voter's answered task before this assignment; None starts from the last."""
        row = self._fetch(
            "SELECT a.id, a.task, a.swapped, v.answer FROM assignments a JOIN last_votes v "
            "ON v.assignment = a.id JOIN annotators n ON n.id = a.annotator WHERE n.name = ? "
            "AND a.place < IFNULL((SELECT place FROM assignments WHERE id = ?), 1e18) "
            "ORDER BY a.place DESC LIMIT 1",
            name,
            assignment,
        )
        if row is None:
            return None
        number, task, swapped, text = row
        answer = mirror_answer(json.loads(text)) if swapped else json.loads(text)
        return Assignment(assignment=number, task=self.tasks[task], swapped=bool(swapped), answer=answer)

    def shown(self, name: str, assignment: int) -> Assignment:
        """Return an assignment of a voter; `WrongAssignment` where it is not theirs."""
        row = self._fetch(
            "SELECT a.task, a.swapped FROM assignments a JOIN annotators n ON n.id = a.annotator "
            "WHERE a.id = ? AND n.name = ?",
            assignment,
            name,
        )
        if row is None:
            raise WrongAssignment(f"Task {assignment} was not given to {name}.")
        return Assignment(assignment=assignment, task=self.tasks[row[0]], swapped=bool(row[1]))

    def vote(
        self, name: str, assignment: int, answer: Mapping[str, Any], *, client: str, seconds: float | None
    ) -> None:
        """Store an answer, sides as on the screen; the same `client` again changes nothing."""
        swapped = self.shown(name, assignment).swapped
        text = json.dumps(mirror_answer(answer) if swapped else dict(answer))
        with self._transaction() as db:
            row = self._fetch("SELECT assignment FROM votes WHERE client = ?", client)
            if row is None:
                db.execute(
                    "INSERT INTO votes SELECT ?, 1 + IFNULL(MAX(revision), 0), ?, ?, ?, ? FROM votes "
                    "WHERE assignment = ?",
                    (assignment, client, text, seconds, time.time(), assignment),
                )
            elif row[0] != assignment:
                raise WrongAssignment(f"The vote {client!r} is of another task.")

    def progress(self, name: str) -> tuple[int, int]:
        """Count (answers of a voter, at least as many as they can give in all)."""
        with self._lock:
            answered = self._db.execute(
                "SELECT a.task FROM assignments a JOIN annotators n ON n.id = a.annotator WHERE n.name = ? "
                "AND EXISTS (SELECT 1 FROM votes WHERE assignment = a.id)",
                (name,),
            ).fetchall()
            closed = self._full() | {task for (task,) in answered}
        open_tasks = sum(task.gold is None and number not in closed for number, task in self.tasks.items())
        return len(answered), len(answered) + open_tasks

    def votes(self) -> list[Vote]:
        """List all votes that count, by voter in the order of their tasks; `UNSEEN` does not count."""
        with self._lock:
            rows = self._db.execute(
                "SELECT a.task, n.name, n.secret IS NULL, a.again, a.swapped, a.place, v.answer, v.seconds, "
                "v.at FROM last_votes v JOIN assignments a ON a.id = v.assignment "
                f"JOIN annotators n ON n.id = a.annotator WHERE v.answer <> '{UNSEEN}' ORDER BY n.id, a.place"
            ).fetchall()
        return [
            Vote(
                task=task,
                annotator=name,
                is_judge=bool(judge),
                again=bool(again),
                swapped=bool(swapped),
                place=place,
                answer=json.loads(answer),
                seconds=seconds,
                at=at,
            )
            for task, name, judge, again, swapped, place, answer, seconds, at in rows
        ]

    def unseen(self) -> int:
        """Count how often an image could not be shown."""
        return self._fetch("SELECT COUNT(*) FROM last_votes WHERE answer = ?", UNSEEN)[0]

    def add_judge_votes(self, name: str, answers: Mapping[int, Mapping[str, Any]]) -> int:
        """Store a judge's new answers to tasks, sides as in the task, and return their number."""
        self.join(name, judge=True)
        with self._transaction() as db:
            voter = self._voter(name)
            rows = db.execute("SELECT task FROM assignments WHERE annotator = ?", (voter,)).fetchall()
            answered = {task for (task,) in rows}
            new = [task for task in answers if task not in answered]
            for place, task in enumerate(new, len(answered)):
                number = db.execute(_ASSIGN, (voter, task, 0, 0, place, time.time())).lastrowid
                vote = (number, secrets.token_hex(16), json.dumps(answers[task]), time.time())
                db.execute("INSERT INTO votes VALUES (?, 1, ?, ?, NULL, ?)", vote)
        return len(new)

    def _choose(self, voter: int, name: str) -> tuple[int, bool, bool, int] | None:
        """Choose (task, again, swapped, place) of a voter's next task: gold, a repeat, or a new one."""
        plan = self.plan
        history = self._db.execute(
            "SELECT task, again, swapped FROM assignments WHERE annotator = ? ORDER BY place", (voter,)
        ).fetchall()
        place, tasks_seen = len(history), {task for task, _, _ in history}
        pick = _draw(plan.seed, name, place)
        gold = [task for task in self._gold if task not in tasks_seen]
        if gold and plan.gold_every and (place + 1) % plan.gold_every == 0:
            task = gold[pick % len(gold)]
        else:
            if plan.repeat_every and (place + 1) % plan.repeat_every == 0:
                excluded = (
                    {task for task, again, _ in history if again} | self._unseen_by(voter) | {*self._gold}
                )
                earlier = [row for row in history[: max(0, place - GAP)] if row[0] not in excluded]
                if earlier:
                    task, _, swapped = earlier[pick % len(earlier)]
                    return task, True, self.is_pairs and not swapped, place
            excluded = tasks_seen | self._full() | {*self._gold}
            new = next((task for task in self._order(name) if task not in excluded), None)
            if new is None:
                return None
            task = new
        return task, False, self.is_pairs and bool(_draw(plan.seed, name, task, "side") % 2), place

    def _unseen_by(self, voter: int) -> set[int]:
        """Tasks whose images a voter could not see."""
        rows = self._db.execute(
            "SELECT a.task FROM assignments a JOIN last_votes v ON v.assignment = a.id "
            f"WHERE a.annotator = ? AND v.answer = '{UNSEEN}'",
            (voter,),
        )
        return {task for (task,) in rows}

    def _full(self) -> set[int]:
        """Tasks with enough votes of people, those that somebody is looking at included."""
        if not self.plan.votes:
            return set()
        rows = self._db.execute(
            "SELECT a.task FROM assignments a JOIN annotators n ON n.id = a.annotator WHERE NOT a.again "
            "AND n.secret IS NOT NULL AND "
            "(a.given > ? OR EXISTS (SELECT 1 FROM votes WHERE assignment = a.id)) AND NOT EXISTS "
            f"(SELECT 1 FROM last_votes WHERE assignment = a.id AND answer = '{UNSEEN}') "
            "GROUP BY a.task HAVING COUNT(*) >= ?",
            (time.time() - LAPSES, self.plan.votes),
        )
        return {task for (task,) in rows}

    def _order(self, name: str) -> list[int]:
        """All tasks in this voter's order."""
        if name not in self._orders:
            self._orders[name] = sorted(self.tasks, key=lambda task: _draw(self.plan.seed, name, task))
        return self._orders[name]

    def _voter(self, name: str) -> int:
        row = self._fetch("SELECT id FROM annotators WHERE name = ?", name)
        if row is None:
            raise UnknownVoter(f"Nobody votes as {name!r}.")
        return row[0]

    def _fetch(self, query: str, *values: Any) -> Any:
        """First row of a query, or None."""
        with self._lock:
            return self._db.execute(query, values).fetchone()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block in one transaction, which an error rolls back."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")


def mirror_answer(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Exchange the sides in an answer about a pair."""
    other = {"left": "right", "right": "left"}
    mirrored = dict(answer)
    if answer.get("choice") in other:
        mirrored["choice"] = other[answer["choice"]]
    if answer.get("prob") is not None:
        mirrored["prob"] = 1 - answer["prob"]
    if "boxes" in answer:
        mirrored["boxes"] = [[other[side], *box] for side, *box in answer["boxes"]]
    return mirrored


Settings = TypeVar("Settings", Form, Plan)


def _from_json(settings: type[Settings], text: str) -> Settings:
    values: dict[str, Any] = json.loads(text)
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return settings(**values)


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _draw(*key: object) -> int:
    """Draw a number from a hash, so that the seed determines every assignment."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "big")
