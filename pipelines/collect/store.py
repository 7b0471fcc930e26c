# SPDX-License-Identifier: Apache-2.0
"""Votes in one SQLite file, each in its own transaction.

    tasks        questions; the answer of gold ones
    annotators   voters: people by a secret, stored as a hash, judges by name
    assignments  which task each voter was shown, in which order, with which sides, as a repeat or not
    votes        answers to assignments; a corrected one is a new row
    last_votes   each assignment with its last answer, which counts, or NULL

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter

from visalign.errors import UserError
from visalign.settings import Natural, settings

from .tasks import SIDES, Form, Task, draw

FORMAT = "visalign votes 2"
CHOICES = (*SIDES, "tie")
LAPSES = 1800.0  # Seconds after which a task that was shown and not answered is free for others
GAP = 5  # Least number of other tasks before a pair is repeated
MAX_NAME = 60
UNSEEN = '{"unseen": true}'  # Stored answer where an image could not be shown

_TABLES = f"""
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE tasks (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, prompt TEXT NOT NULL, images TEXT NOT NULL,
    gold TEXT, extra TEXT NOT NULL);
CREATE TABLE annotators (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, secret TEXT UNIQUE, joined_at REAL NOT NULL);
CREATE TABLE assignments (
    id INTEGER PRIMARY KEY, annotator INTEGER NOT NULL REFERENCES annotators,
    task INTEGER NOT NULL REFERENCES tasks, is_repeat INTEGER NOT NULL, swapped INTEGER NOT NULL,
    position INTEGER NOT NULL, shown_at REAL NOT NULL,
    UNIQUE (annotator, task, is_repeat), UNIQUE (annotator, position));
CREATE INDEX by_task ON assignments (task);
CREATE TABLE votes (
    assignment INTEGER NOT NULL REFERENCES assignments, revision INTEGER NOT NULL,
    client TEXT NOT NULL UNIQUE, answer TEXT NOT NULL, seconds REAL, voted_at REAL NOT NULL,
    PRIMARY KEY (assignment, revision)) WITHOUT ROWID;
CREATE VIEW last_votes AS
    SELECT a.id AS assignment, a.annotator, n.name, n.secret IS NULL AS is_judge, a.task, a.is_repeat,
        a.swapped, a.position, a.shown_at, v.answer, v.answer = '{UNSEEN}' AS is_unseen, v.seconds
    FROM assignments a JOIN annotators n ON n.id = a.annotator LEFT JOIN votes v ON v.assignment = a.id
        AND v.revision = (SELECT MAX(revision) FROM votes WHERE assignment = a.id);
"""
_ASSIGN = (
    "INSERT INTO assignments (annotator, task, is_repeat, swapped, position, shown_at) "
    "SELECT id, ?, ?, ?, ?, ? FROM annotators WHERE name = ?"
)


class VoteRefused(UserError):
    """A voter's request that cannot be granted, with its status in HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def voter_name(name: str) -> str:
    """Normalise the blanks of a name: "Ada " and "Ada" are one voter."""
    name = " ".join(name.split())
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise UserError(f"A name has 1 to {MAX_NAME} letters; got {name[:MAX_NAME]!r}.")
    return name


@settings("plan")
class Plan:
    votes: Natural = 3  # Number of votes on each task; 0: everybody's
    gold_every: Natural = 10  # Each n-th task has a known answer, while there are any; 0: none
    repeat_every: Natural = 15  # Each n-th task repeats an earlier one with its sides exchanged; 0: none
    seed: int = 0  # Random seed of order and sides
    allowed: tuple[Annotated[str, AfterValidator(voter_name)], ...] = ()  # Names that may vote; empty: all


@dataclass(frozen=True)
class Assignment:
    """A task as one voter sees it."""

    assignment: int
    task: Task
    swapped: bool  # Whether the pair's left image is shown on the right
    answer: dict[str, Any] | None = None  # Earlier answer, sides as on the screen

    def image(self, side: str) -> str:
        """Return the image on a side of the screen; a single image is on the left."""
        index = self.task.places.index(side)
        return self.task.images[-1 - index if self.swapped else index]


@dataclass(frozen=True)
class Vote:
    """The last answer to an assignment, sides as in the task."""

    task: int
    annotator: str
    is_judge: bool
    is_repeat: bool  # Whether this is the second answer of this voter to this task
    swapped: bool
    position: int  # Position among the voter's tasks, from 0
    answer: Mapping[str, Any]
    seconds: float | None


class VoteStore:
    """A file of votes: `create` a new one, or open one with `VoteStore(path)`; safe for several threads."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"There is no file of votes '{path}'. Create one: visalign collect {path} IMAGES.")
        self.path = path
        self._lock = threading.RLock()  # a transaction calls methods that lock again
        with ExitStack() as opened:
            self._db = opened.enter_context(closing(_connect(path)))
            try:
                about = dict(self._db.execute("SELECT name, value FROM about").fetchall())
            except sqlite3.DatabaseError as error:
                raise UserError(f"'{path}' is no file of votes: {error}.") from error
            if about.get("format") != FORMAT:
                raise UserError(f"'{path}' is {about.get('format')!r}; this version reads {FORMAT!r}.")
            opened.pop_all()
        self._db.execute("PRAGMA synchronous = FULL")  # WAL's default loses the last votes of a power cut
        self.form = TypeAdapter(Form).validate_json(about["form"])
        self.plan = TypeAdapter(Plan).validate_json(about["plan"])
        self.name: str = about["id"]
        """Identifier of this collection, for the browser's cookie."""
        self.tasks: dict[int, Task] = {
            number: Task(prompt=prompt, images=tuple(json.loads(images)), gold=gold, extra=json.loads(extra))
            for number, _, prompt, images, gold, extra in self._fetch("SELECT * FROM tasks ORDER BY id")
        }
        self.places = next(iter(self.tasks.values())).places
        self.is_pairs = len(self.places) == 2
        self.choices = CHOICES if self.is_pairs else self.places[: 0 if len(self.places) == 1 else None]
        """Answers about the images that are shown together; none about a single one."""
        self._orders: dict[str, list[int]] = {}
        self._gold = [number for number, task in self.tasks.items() if task.gold is not None]

    @staticmethod
    def create(path: Path, tasks: Sequence[Task], form: Form, plan: Plan) -> VoteStore:
        if path.exists():
            raise UserError(f"'{path}' exists. To go on with it: visalign collect {path}. For others name another.")
        if len({len(task.images) for task in tasks}) != 1:
            raise UserError(
                "A file of votes asks about single images, pairs or groups of one size: about one of these."
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        about = {"format": FORMAT, "id": secrets.token_hex(8)}
        about |= {"form": json.dumps(asdict(form)), "plan": json.dumps(asdict(plan))}  # type: ignore[arg-type]
        rows = [(t.key, t.prompt, json.dumps(t.images), t.gold, json.dumps(t.extra)) for t in tasks]
        try:
            with _writable(path), closing(_connect(partial)) as db:
                db.executescript(f"PRAGMA journal_mode = WAL; {_TABLES}")
                db.execute("BEGIN")
                db.executemany("INSERT INTO about VALUES (?, ?)", about.items())
                db.executemany("INSERT INTO tasks (key, prompt, images, gold, extra) VALUES (?, ?, ?, ?, ?)", rows)
                db.execute("COMMIT")
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            partial.rename(path)  # only a complete file gets the name
        finally:
            for leftover in path.parent.glob(f"{partial.name}*"):
                leftover.unlink()
        return VoteStore(path)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def join(self, name: str, *, judge: bool = False) -> str:
        """Register a voter and return their secret; a judge may register again."""
        name = voter_name(name)
        if self.plan.allowed and not judge and name not in self.plan.allowed:
            raise UserError(f"{name!r} is not among the invited voters. Use the name that you were given.")
        secret = secrets.token_urlsafe(24)
        with self._transaction() as db:
            voters = self._fetch("SELECT secret FROM annotators WHERE name = ?", name)
            if not voters:
                row = (name, None if judge else _hash(secret), time.time())
                db.execute("INSERT INTO annotators (name, secret, joined_at) VALUES (?, ?, ?)", row)
            elif not judge or voters[0][0] is not None:
                raise VoteRefused(409, f"Somebody already votes as {name!r}. Open your link, or take another name.")
        return secret

    def voter(self, secret: str) -> str:
        rows = self._fetch("SELECT name FROM annotators WHERE secret = ?", _hash(secret))
        if not rows:
            raise VoteRefused(401, "You are not known here. Enter your name first.")
        return rows[0][0]

    def next(self, name: str) -> Assignment | None:
        """Return a voter's open task, else assign a new one; None at the end."""
        with self._transaction() as db:
            for assignment in self._assignments("name = ? AND answer IS NULL ORDER BY position LIMIT 1", name):
                now = (time.time(), assignment.assignment)
                db.execute("UPDATE assignments SET shown_at = ? WHERE id = ?", now)
                return assignment
            if (chosen := self._choose(name)) is None:
                return None
            number = db.execute(_ASSIGN, (*chosen, time.time(), name)).lastrowid
            return self.assignment(name, number or 0)

    def before(self, name: str, assignment: int | None) -> Assignment | None:
        """Return a voter's answered task before this assignment; None starts from the last."""
        earlier = (
            "name = ? AND answer IS NOT NULL AND position < IFNULL((SELECT position FROM assignments "
            "WHERE id = ?), 1e18) ORDER BY position DESC LIMIT 1"
        )
        return next(iter(self._assignments(earlier, name, assignment)), None)

    def assignment(self, name: str, number: int) -> Assignment:
        """Return an assignment of a voter; `VoteRefused` where it is not theirs."""
        rows = self._assignments("assignment = ? AND name = ?", number, name)
        if not rows:
            raise VoteRefused(403, f"Task {number} was not given to {name}.")
        return rows[0]

    def vote(
        self, name: str, assignment: int, answer: Mapping[str, Any], *, client: str, seconds: float | None
    ) -> None:
        """Store an answer, sides as on the screen; the same `client` again changes nothing."""
        swapped = self.assignment(name, assignment).swapped
        text = json.dumps(mirror_answer(answer, self.places) if swapped else dict(answer))
        with self._transaction() as db:
            rows = self._fetch("SELECT assignment FROM votes WHERE client = ?", client)
            if not rows:
                db.execute(
                    "INSERT INTO votes SELECT ?, 1 + IFNULL(MAX(revision), 0), ?, ?, ?, ? FROM votes "
                    "WHERE assignment = ?",
                    (assignment, client, text, seconds, time.time(), assignment),
                )
            elif rows[0][0] != assignment:
                raise VoteRefused(403, f"The vote {client!r} is of another task.")

    def progress(self, name: str) -> tuple[int, int]:
        """Count (answers of a voter, at least as many as they can give in all)."""
        rows = self._fetch("SELECT task FROM last_votes WHERE name = ? AND answer IS NOT NULL", name)
        closed = self._full() | {task for (task,) in rows} | {*self._gold}
        return len(rows), len(rows) + len(self.tasks.keys() - closed)

    def votes(self) -> list[Vote]:
        """List all votes that count, by voter in the order of their tasks; `UNSEEN` does not count."""
        query = (
            "SELECT task, name, is_judge, is_repeat, swapped, position, answer, seconds FROM last_votes "
            "WHERE NOT is_unseen ORDER BY annotator, position"
        )
        return [
            Vote(task, name, bool(judge), bool(again), bool(swapped), position, json.loads(answer), seconds)
            for task, name, judge, again, swapped, position, answer, seconds in self._fetch(query)
        ]

    def voters(self) -> list[dict[str, Any]]:
        """List `name`, `is_judge`, number of `votes`, median `seconds` and time of the `last` vote of each voter."""
        query = (
            "SELECT n.name, n.secret IS NULL, COUNT(v.answer), MAX(voted_at), GROUP_CONCAT(v.seconds) "
            "FROM annotators n LEFT JOIN assignments a ON a.annotator = n.id LEFT JOIN votes v "
            f"ON v.assignment = a.id AND v.revision = 1 AND v.answer != '{UNSEEN}' GROUP BY n.id ORDER BY n.id"
        )
        names = ("name", "is_judge", "votes", "last", "seconds")
        voters: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in self._fetch(query)]
        for voter in voters:
            voter["is_judge"], seconds = bool(voter["is_judge"]), voter["seconds"]
            voter["seconds"] = median(map(float, seconds.split(","))) if seconds else None
        return voters

    def unseen(self) -> int:
        return self._fetch("SELECT COUNT(*) FROM last_votes WHERE is_unseen")[0][0]

    def add_judge_votes(self, name: str, answers: Mapping[int, Mapping[str, Any]]) -> int:
        """Store a judge's new answers to tasks, sides as in the task, and return their number."""
        self.join(name, judge=True)
        with self._transaction() as db:
            answered = {task for (task,) in self._fetch("SELECT task FROM last_votes WHERE name = ?", name)}
            new = [task for task in answers if task not in answered]
            for position, task in enumerate(new, len(answered)):
                number = db.execute(_ASSIGN, (task, 0, 0, position, time.time(), name)).lastrowid
                vote = (number, secrets.token_hex(16), json.dumps(answers[task]), time.time())
                db.execute("INSERT INTO votes VALUES (?, 1, ?, ?, NULL, ?)", vote)
        return len(new)

    def _choose(self, name: str) -> tuple[int, bool, bool, int] | None:
        """Choose (task, is_repeat, swapped, position) for a voter: a gold task, a repeat, or a new one."""
        plan = self.plan
        query = "SELECT task, is_repeat OR is_unseen, swapped FROM last_votes WHERE name = ? ORDER BY position"
        history = self._fetch(query, name)
        position, answered = len(history), {task for task, *_ in history}
        number = draw(plan.seed, name, position)
        gold_due, repeat_due = (
            every > 0 and (position + 1) % every == 0 for every in (plan.gold_every, plan.repeat_every)
        )
        gold = [task for task in self._gold if task not in answered]
        if gold_due and gold:
            task = gold[number % len(gold)]
        else:
            never_again = {task for task, is_last, _ in history if is_last} | {*self._gold}
            earlier = [row for row in history[: max(0, position - GAP)] if row[0] not in never_again]
            if repeat_due and earlier:
                task, _, swapped = earlier[number % len(earlier)]
                return task, True, bool(self.choices) and not swapped, position  # the other side tells a habit
            closed = answered | self._full() | {*self._gold}
            if name not in self._orders:
                self._orders[name] = sorted(self.tasks, key=lambda task: draw(plan.seed, name, task))
            task = next((task for task in self._orders[name] if task not in closed), None)
            if task is None:
                return None
        return task, False, bool(self.choices) and bool(draw(plan.seed, name, task, "side") % 2), position

    def _full(self) -> set[int]:
        """Tasks with enough votes of people, those that somebody is looking at included."""
        if not self.plan.votes:
            return set()
        query = (
            "SELECT task FROM last_votes WHERE NOT is_repeat AND NOT is_judge AND "
            "IFNULL(NOT is_unseen, shown_at > ?) GROUP BY task HAVING COUNT(*) >= ?"
        )
        return {task for (task,) in self._fetch(query, time.time() - LAPSES, self.plan.votes)}

    def _assignments(self, where: str, *values: Any) -> list[Assignment]:
        query = f"SELECT assignment, task, swapped, answer FROM last_votes WHERE {where}"
        assignments = []
        for number, task, swapped, text in self._fetch(query, *values):
            answer = text and json.loads(text)
            answer = mirror_answer(answer, self.places) if answer and swapped else answer
            assignments.append(Assignment(number, self.tasks[task], bool(swapped), answer))
        return assignments

    def _fetch(self, query: str, *values: Any) -> list[Any]:
        with self._lock, _writable(self.path):
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, _writable(self.path), self._db:  # commits at the end, or rolls back
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db


def mirror_answer(answer: Mapping[str, Any], sides: Sequence[str] = SIDES) -> dict[str, Any]:
    """Reverse the places in an answer: exchange the sides of a pair."""
    other = dict(zip(sides, reversed(sides), strict=True)) | {"tie": "tie"}
    mirrors: dict[str, Callable[[Any], Any]] = {
        "choice": lambda choice: other[choice],
        "prob": lambda prob: 1 - prob,
        "boxes": lambda boxes: [[other[side], *box] for side, *box in boxes],
    }
    return {name: mirrors[name](value) if name in mirrors else value for name, value in answer.items()}


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Refuse a request where the disk is full, or the file is locked or damaged; it changes nothing."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise VoteRefused(507, f"'{path.name}' cannot be used: {error}. Free some space, or repair it.") from error


def _connect(path: Path) -> sqlite3.Connection:
    with _writable(path):
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)  # others write
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _hash(secret: str) -> str:
    """Hash a secret: who reads the file cannot vote in a voter's name."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
