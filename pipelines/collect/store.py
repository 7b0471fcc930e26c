# SPDX-License-Identifier: Apache-2.0
"""Votes in one SQLite file, each in a transaction of its own.

    tasks        what is asked; the answer of gold ones
    annotators   who may vote: people by a secret of which a hash is kept, judges by name
    assignments  who was shown what, in which order, with which image on which side, again or not
    votes        what was said of an assignment; a corrected one is a new row, and the last counts

A vote that was answered for is on the disk (write-ahead log, synchronous); one that the client sends twice,
because it did not hear the answer, is known by its `client` and counts once. Several processes may have the
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visalign.errors import UserError

from .tasks import Form, Task

FORMAT = "visalign votes 1"
SIDES = ("left", "right")
CHOICES = (*SIDES, "tie")
LAPSES = 1800.0
"""Seconds after which a task that somebody was shown and did not answer is free for others."""
GAP = 5
"""A repeated pair comes after at least so many others."""
MOST_NAME = 60
UNSEEN = '{"unseen": true}'
"""An answer as it is kept: an image could not be shown."""

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


class Unknown(UserError):
    """Nobody of that secret."""


class Taken(UserError):
    """A name that somebody else has."""


class NotYours(UserError):
    """An assignment of somebody else, or of nobody."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How tasks are handed out."""

    votes: int = 3
    """Wanted of each task; 0: of everybody."""
    gold_every: int = 10
    """Each n-th task has a known answer, while there are such; 0: none."""
    repeat_every: int = 15
    """Each n-th task was shown to this voter before, sides exchanged; 0: none."""
    seed: int = 0
    """Of order and sides."""
    allowed: tuple[str, ...] = ()
    """Names that may vote; none: all."""

    def __post_init__(self) -> None:
        for name in ("votes", "gold_every", "repeat_every"):
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; allowed are 0 and more.")


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a voter is to answer."""

    assignment: int
    task: Task
    swapped: bool
    """Whether the pair's left image stands on the right."""
    answer: dict[str, Any] | None = None
    """As on the screen, where it was answered before."""

    def image(self, side: str) -> str:
        """The image on that side of the screen; the one image stands on the left."""
        place = SIDES.index(side)
        return self.task.images[(1 - place) if self.swapped else place]


@dataclass(frozen=True, kw_only=True)
class Vote:
    """A vote as it counts, sides as in the task."""

    task: int
    """Number of the task."""
    annotator: str
    is_judge: bool
    again: bool
    """Whether this is the second answer of this voter to this task."""
    swapped: bool
    place: int
    """The how-manieth task of this voter it was."""
    answer: Mapping[str, Any]
    seconds: float | None
    at: float


class VoteStore:
    """A file of votes. `make` begins one, `VoteStore(path)` opens it; any number of threads may use it."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(
                f"There is no file of votes '{path}'. Begin one: visalign collect {path} SOURCE, where "
                "SOURCE are the images."
            )
        self.path = path
        self._lock = threading.RLock()
        self._db = _connect(path)
        try:
            found = dict(self._db.execute("SELECT name, value FROM about").fetchall())
            if found.get("format") != FORMAT:
                raise UserError(f"'{path}' is {found.get('format')!r}; this version reads {FORMAT!r}.")
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise UserError(f"'{path}' is no file of votes: {error}.") from error
        except UserError:
            self._db.close()
            raise
        self._db.execute("PRAGMA synchronous = FULL")
        self.form, self.plan = Form.from_json(found["form"]), _plan(found["plan"])
        self.name: str = found["id"]
        """Of this collection, for the browser's cookie."""
        self.tasks: dict[int, Task] = {}
        for number, prompt, images, gold, more in self._db.execute(
            "SELECT id, prompt, images, gold, more FROM tasks ORDER BY id"
        ):
            self.tasks[number] = Task(
                prompt=prompt, images=tuple(json.loads(images)), gold=gold, more=json.loads(more)
            )
        self._orders: dict[str, list[int]] = {}
        self._gold = [number for number, task in self.tasks.items() if task.gold is not None]
        self._asked = len(self.tasks) - len(self._gold)

    @staticmethod
    def make(path: Path, tasks: Sequence[Task], form: Form, plan: Plan) -> VoteStore:
        """Begin a file.

        Raises:
            UserError: it exists, or tasks of pairs and of single images are mixed.
        """
        if path.exists():
            raise UserError(f"'{path}' exists. Leave the images out to go on with it, or name another file.")
        sizes = {len(task.images) for task in tasks}
        if len(sizes) != 1:
            raise UserError("A file of votes asks about pairs or about single images, not about both.")
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            db = _connect(half)
            about = {"format": FORMAT, "id": secrets.token_hex(8)}
            about |= {"form": form.to_json(), "plan": json.dumps(vars(plan))}
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
            half.rename(path)
        finally:
            for leftover in path.parent.glob(f"{half.name}*"):
                leftover.unlink()
        return VoteStore(path)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def join(self, name: str, *, judge: bool = False) -> str:
        """Enter somebody, and return their secret; a judge that is there already goes on.

        Raises:
            UserError: no name, one that is not allowed, or `Taken`.
        """
        name = " ".join(name.split())
        if not name or len(name) > MOST_NAME or not name.isprintable():
            raise UserError(f"A name has 1 to {MOST_NAME} letters; got {name[:MOST_NAME]!r}.")
        if self.plan.allowed and not judge and name not in self.plan.allowed:
            raise UserError(f"{name!r} is not among those who were asked. Use the name that you were given.")
        secret = secrets.token_urlsafe(24)
        kept = None if judge else _hash(secret)
        with self._writing() as db:
            there = db.execute("SELECT secret FROM annotators WHERE name = ?", (name,)).fetchone()
            if there is not None and not (judge and there[0] is None):
                raise Taken(
                    f"Somebody votes as {name!r} already. Open your own link, which says who you are, or "
                    "take another name."
                )
            if there is None:
                db.execute(
                    "INSERT INTO annotators (name, secret, since) VALUES (?, ?, ?)", (name, kept, time.time())
                )
        return secret

    def who(self, secret: str) -> str:
        """The name behind a secret.

        Raises:
            Unknown: there is none.
        """
        with self._lock:
            found = self._db.execute(
                "SELECT name FROM annotators WHERE secret = ?", (_hash(secret),)
            ).fetchone()
        if found is None:
            raise Unknown("You are not known here. Say your name first.")
        return found[0]

    def next(self, name: str) -> Assignment | None:
        """What somebody is to answer now: what they were shown and left, else a new task; None at the end."""
        with self._writing() as db:
            who = self._number(db, name)
            open_ = db.execute(
                "SELECT id, task, swapped FROM assignments a WHERE annotator = ? AND NOT EXISTS "
                "(SELECT 1 FROM votes WHERE assignment = a.id) ORDER BY place LIMIT 1",
                (who,),
            ).fetchone()
            if open_ is not None:
                db.execute("UPDATE assignments SET given = ? WHERE id = ?", (time.time(), open_[0]))
                return Assignment(assignment=open_[0], task=self.tasks[open_[1]], swapped=bool(open_[2]))
            chosen = self._choose(db, who, name)
            if chosen is None:
                return None
            task, again, swapped, place = chosen
            row = db.execute(
                "INSERT INTO assignments (annotator, task, again, swapped, place, given) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (who, task, again, swapped, place, time.time()),
            )
            assert row.lastrowid is not None
            return Assignment(assignment=row.lastrowid, task=self.tasks[task], swapped=swapped)

    def before(self, name: str, assignment: int | None) -> Assignment | None:
        """What somebody answered before this assignment, or last where it is None."""
        with self._lock:
            found = self._db.execute(
                "SELECT a.id, a.task, a.swapped, v.answer FROM assignments a JOIN last_votes v "
                "ON v.assignment = a.id JOIN annotators n ON n.id = a.annotator WHERE n.name = ? "
                "AND a.place < IFNULL((SELECT place FROM assignments WHERE id = ?), 1e18) "
                "ORDER BY a.place DESC LIMIT 1",
                (name, assignment),
            ).fetchone()
        if found is None:
            return None
        swapped = bool(found[2])
        answer = mirrored(json.loads(found[3])) if swapped else json.loads(found[3])
        return Assignment(assignment=found[0], task=self.tasks[found[1]], swapped=swapped, answer=answer)

    def shown(self, name: str, assignment: int) -> Assignment:
        """What somebody was shown.

        Raises:
            NotYours: it was not shown to them.
        """
        with self._lock:
            found = self._db.execute(
                "SELECT a.task, a.swapped FROM assignments a JOIN annotators n ON n.id = a.annotator "
                "WHERE a.id = ? AND n.name = ?",
                (assignment, name),
            ).fetchone()
        if found is None:
            raise NotYours(f"Task {assignment} was not given to {name}.")
        return Assignment(assignment=assignment, task=self.tasks[found[0]], swapped=bool(found[1]))

    def vote(
        self, name: str, assignment: int, answer: Mapping[str, Any], *, client: str, seconds: float | None
    ) -> None:
        """Keep an answer, sides as on the screen. The same `client` again changes nothing.

        Raises:
            NotYours: the assignment is somebody else's.
        """
        shown = self.shown(name, assignment)
        kept = json.dumps(mirrored(answer) if shown.swapped else dict(answer))
        with self._writing() as db:
            there = db.execute("SELECT assignment FROM votes WHERE client = ?", (client,)).fetchone()
            if there is not None:
                if there[0] != assignment:
                    raise NotYours(f"The vote {client!r} is of another task.")
                return
            db.execute(
                "INSERT INTO votes SELECT ?, 1 + IFNULL(MAX(revision), 0), ?, ?, ?, ? FROM votes "
                "WHERE assignment = ?",
                (assignment, client, kept, seconds, time.time(), assignment),
            )

    def progress(self, name: str) -> tuple[int, int]:
        """(answered by somebody, at least as many as they can answer in all)."""
        with self._lock:
            mine = self._db.execute(
                "SELECT a.task FROM assignments a JOIN annotators n ON n.id = a.annotator WHERE n.name = ? "
                "AND EXISTS (SELECT 1 FROM votes WHERE assignment = a.id)",
                (name,),
            ).fetchall()
            full = self._full(self._db) if self.plan.votes else set()
        closed = full | {task for (task,) in mine}
        gold = sum(self.tasks[task].gold is not None for task in closed)
        return len(mine), len(mine) + max(0, self._asked - len(closed) + gold)

    def votes(self) -> list[Vote]:
        """All votes that count, `UNSEEN` does not; by voter in the order in which they were shown."""
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
        """How often an image could not be shown."""
        with self._lock:
            found = self._db.execute("SELECT COUNT(*) FROM last_votes WHERE answer = ?", (UNSEEN,))
            return found.fetchone()[0]

    def judged(self, name: str, answers: Mapping[int, Mapping[str, Any]]) -> int:
        """Enter a judge's answers to tasks, sides as in the task; those that it answered before stay.

        Returns:
            How many were new.
        """
        self.join(name, judge=True)
        with self._writing() as db:
            who = self._number(db, name)
            there = {t for (t,) in db.execute("SELECT task FROM assignments WHERE annotator = ?", (who,))}
            new = [task for task in answers if task not in there]
            for place, task in enumerate(new, len(there)):
                row = db.execute(
                    "INSERT INTO assignments (annotator, task, again, swapped, place, given) "
                    "VALUES (?, ?, 0, 0, ?, ?)",
                    (who, task, place, time.time()),
                )
                db.execute(
                    "INSERT INTO votes VALUES (?, 1, ?, ?, NULL, ?)",
                    (row.lastrowid, secrets.token_hex(16), json.dumps(answers[task]), time.time()),
                )
        return len(new)

    def _choose(self, db: sqlite3.Connection, who: int, name: str) -> tuple[int, bool, bool, int] | None:
        """(task, again, swapped, place) of somebody's next task."""
        seen = db.execute(
            "SELECT task, again, swapped FROM assignments WHERE annotator = ? ORDER BY place", (who,)
        ).fetchall()
        place, plan = len(seen), self.plan
        known = {task for task, _, _ in seen}
        order = self._order(name)
        gold = [task for task in self._gold if task not in known]
        if not (gold and plan.gold_every and (place + 1) % plan.gold_every == 0):
            gold = []
        if plan.repeat_every and (place + 1) % plan.repeat_every == 0 and not gold:
            twice = {task for task, again, _ in seen if again}
            away = twice | self._unseen(db, who)
            earlier = [s for s in seen[: max(0, place - GAP)] if s[0] not in away and self._is_asked(s[0])]
            if earlier:
                task, _, swapped = earlier[_drawn(plan.seed, name, place) % len(earlier)]
                return task, True, len(self.tasks[task].images) == 2 and not swapped, place
        full = self._full(db) if plan.votes and not gold else set()
        fresh = (task for task in order if task not in known and task not in full and self._is_asked(task))
        task = gold[_drawn(plan.seed, name, place) % len(gold)] if gold else next(fresh, None)
        if task is None:
            return None
        is_pair = len(self.tasks[task].images) == 2
        return task, False, is_pair and bool(_drawn(plan.seed, name, task, "side") % 2), place

    def _unseen(self, db: sqlite3.Connection, who: int) -> set[int]:
        """Tasks whose images somebody could not see."""
        rows = db.execute(
            "SELECT a.task FROM assignments a JOIN last_votes v ON v.assignment = a.id "
            f"WHERE a.annotator = ? AND v.answer = '{UNSEEN}'",
            (who,),
        )
        return {task for (task,) in rows}

    def _is_asked(self, task: int) -> bool:
        return self.tasks[task].gold is None

    def _full(self, db: sqlite3.Connection) -> set[int]:
        """Tasks with enough people's votes, those that somebody is looking at included."""
        rows = db.execute(
            "SELECT a.task FROM assignments a JOIN annotators n ON n.id = a.annotator WHERE NOT a.again "
            "AND n.secret IS NOT NULL AND "
            "(a.given > ? OR EXISTS (SELECT 1 FROM votes WHERE assignment = a.id)) AND NOT EXISTS "
            f"(SELECT 1 FROM last_votes WHERE assignment = a.id AND answer = '{UNSEEN}') "
            "GROUP BY a.task HAVING COUNT(*) >= ?",
            (time.time() - LAPSES, self.plan.votes),
        )
        return {task for (task,) in rows}

    def _order(self, name: str) -> list[int]:
        """All tasks as this voter meets them."""
        if name not in self._orders:
            self._orders[name] = sorted(self.tasks, key=lambda task: _drawn(self.plan.seed, name, task))
        return self._orders[name]

    def _number(self, db: sqlite3.Connection, name: str) -> int:
        found = db.execute("SELECT id FROM annotators WHERE name = ?", (name,)).fetchone()
        if found is None:
            raise Unknown(f"Nobody votes as {name!r}.")
        return found[0]

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction; on an error nothing of it is kept."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")


def mirrored(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer about a pair with its sides exchanged."""
    other = dict(zip(SIDES, SIDES[::-1], strict=True))
    found = dict(answer)
    if found.get("choice") in other:
        found["choice"] = other[found["choice"]]
    if found.get("prob") is not None:
        found["prob"] = 1 - found["prob"]
    if "boxes" in found:
        found["boxes"] = [[other[side], *box] for side, *box in found["boxes"]]
    return found


def _plan(text: str) -> Plan:
    found = json.loads(text)
    return Plan(**found | {"allowed": tuple(found["allowed"])})


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
    db.execute("PRAGMA foreign_keys = ON")
    return db


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def _drawn(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")
