# SPDX-License-Identifier: Apache-2.0
"""A cache of judgements on disk, addressed by content: image bytes, prompt, record, and the judge's identity.

One SQLite file per folder, shared by all commands and by processes at the same time. Only valid judgements
are kept: a failure may be gone the next time. Nothing in the file is needed: one that was cut or is no
database is set aside and begun anew, a row that was altered is judged again, and while the disk is full,
read-only or locked the judgements stay in memory. Each of these is said once, as a warning. SQLite checks the
form of its pages and not what stands in them, so each judgement is signed with the user's own key
(HMAC-SHA256; `~/.local/share/visalign/cache.key`, or the text of VISALIGN_CACHE_KEY): whoever may write the
file, but has not the key, cannot make a judge say what it did not. People who share a cache share
VISALIGN_CACHE_KEY.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import sqlite3
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from visalign.rewards.base.identity import Identity

FILE = "judgements.sqlite"
_PAUSE = 30.0
"""Seconds for which a disk that failed is left alone."""
_KEPT = 100_000
"""Judgements that are kept in memory while the disk fails."""

VERSION = 3
_CHUNK = 500
_DAMAGE = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_IOERR_SHORT_READ,
    sqlite3.SQLITE_ERROR,  # a table is missing
)
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS judges (digest TEXT PRIMARY KEY, identity TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS judgements (judge TEXT NOT NULL, key BLOB NOT NULL, said TEXT NOT NULL, "
    "sum BLOB, PRIMARY KEY (judge, key)) WITHOUT ROWID",
)

Found = TypeVar("Found")


class ScoreCache:
    """Judgements by (judge, key).

    Args:
        folder: gets the file `judgements.sqlite`; made if missing.

    Attributes:
        rebuilt: where a damaged file was set aside last, or None.
        hits: keys that were known.
        misses: keys that were not.

    Raises:
        ValueError: the file was written by a later version.
        OSError: the file cannot be opened for another reason than damage.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rebuilt: Path | None = None
        self.hits = self.misses = 0
        self._file = ScoreFile(self.folder / FILE)
        self._kept: dict[tuple[str, bytes], str] = {}
        self._kept_judges: dict[str, str] = {}
        self._lock = threading.Lock()
        self._rest_until = -math.inf
        self._said: set[str] = set()
        try:
            self._open()
        except sqlite3.Error as error:  # locked, read-only, full: the file itself may be sound
            raise OSError(
                f"The cache '{self._file.path}' cannot be opened: {error}. Free or unlock it, or give "
                "another folder."
            ) from error

    def get(self, judge: Identity, keys: Sequence[bytes]) -> dict[bytes, dict[str, Any]]:
        """What the judge has said before, for those of the keys (`key_of`) that it has judged."""
        digest, unique = judge.digest, list(dict.fromkeys(keys))
        kept = ((key, self._kept.get((digest, key))) for key in unique)
        found = {key: said for key, said in kept if said is not None}
        wanted = [key for key in unique if key not in found]
        if wanted:
            found |= self._with_repair(lambda: self._select(digest, wanted), {})
        hits = sum(key in found for key in keys)
        self.hits, self.misses = self.hits + hits, self.misses + len(keys) - hits
        return {key: json.loads(said) for key, said in found.items()}

    def put(self, judge: Identity, said: Mapping[bytes, Mapping[str, Any]]) -> None:
        """Keep judgements (key -> numbers, texts, nested mappings); on the disk all of them or, when
        interrupted, none.
        """
        digest = judge.digest
        rows = {(digest, key): json.dumps(value) for key, value in said.items()}
        with self._lock:
            self._kept_judges[digest] = json.dumps(asdict(judge), sort_keys=True, default=str)
            self._kept |= rows
            if self._with_repair(self._write, False):
                self._kept.clear()
                self._kept_judges.clear()
            for oldest in list(self._kept)[: max(0, len(self._kept) - _KEPT)]:
                del self._kept[oldest]

    def judges(self) -> dict[str, dict[str, Any]]:
        """digest -> identity of every judge that has something in the cache."""
        found = self._with_repair(self._file.judges, {}) | self._kept_judges
        return {digest: identity for digest, said in found.items() if (identity := _record(said)) is not None}

    def __len__(self) -> int:
        """Judgements on the disk."""
        return self._with_repair(self._file.count, 0)

    def _open(self) -> None:
        """Open the file, or begin it anew."""
        try:
            self._file.open()
        except sqlite3.Error as error:
            if not is_damage(error):
                raise
            self._begin_anew(error)

    def _reopen(self, trouble: Exception) -> None:
        """After damage; another process may have mended it meanwhile."""
        self._open()
        self._warn_once(
            "damage",
            f"The cache '{self._file.path}' was replaced while it was in use ({trouble}). It is used as it "
            "is now; what is missing is judged again.",
        )

    def _begin_anew(self, error: Exception) -> None:
        self.rebuilt = self._file.set_aside()
        self._warn_once(
            "damage",
            f"The cache '{self._file.path}' was damaged ({error}). It was set aside as "
            f"'{self.rebuilt.name}' and begun anew; what was in it is judged again.",
        )
        self._file.open()

    def _with_repair(self, work: Callable[[], Found], otherwise: Found) -> Found:
        """What `work` finds in the file; a damaged one is rebuilt, one that cannot be used is left alone."""
        if time.monotonic() < self._rest_until:
            return otherwise
        for mend in (self._reopen, self._begin_anew, None):
            try:
                return work()
            except sqlite3.Error as error:
                trouble: Exception = error
                if mend is None or not is_damage(error):
                    break
            try:
                mend(trouble)
            except (sqlite3.Error, OSError, ValueError) as error:
                trouble = error
                break
        self._rest_until = time.monotonic() + _PAUSE
        self._warn_once(
            "disk",
            f"The cache '{self._file.path}' cannot be used now ({trouble}). Judgements are kept in memory, "
            f"and the file is tried again after {_PAUSE:g} seconds.",
        )
        return otherwise

    def _select(self, judge: str, keys: Sequence[bytes]) -> dict[bytes, str]:
        found, altered = self._file.select(judge, keys)
        if altered:
            self._warn_once(
                "rows",
                f"The cache '{self._file.path}' holds judgements that were altered on the disk ({altered} of "
                "those just asked for); they are judged again.",
            )
        return found

    def _write(self) -> bool:
        self._file.insert(
            self._kept_judges, [(judge, key, said) for (judge, key), said in self._kept.items()]
        )
        return True

    def _warn_once(self, kind: str, message: str) -> None:
        """Warn of each kind of trouble once."""
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(message, stacklevel=2)


def key_of(contents: Iterable[bytes], prompt: str, record: Mapping[str, Any] | None) -> bytes:
    """The address of a judgement: SHA-256 over the images' content digests in order, the prompt, and its
    record (values that JSON lacks by their `repr`).
    """
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    text = prompt.encode("utf-8", "surrogatepass")
    digest.update(len(text).to_bytes(8, "big") + text)
    digest.update(json.dumps(record, sort_keys=True, default=repr).encode())
    return digest.digest()


def _record(said: str) -> dict[str, Any] | None:
    """An identity as it was written; None where it was altered on the disk."""
    try:
        found = json.loads(said)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


class Damaged(sqlite3.DatabaseError):
    """The pages of the file do not fit together."""


class ScoreFile:
    """Judgements as rows (judge, key, said, sum); each call opens and closes the file, which `open` makes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def connect(self) -> sqlite3.Connection:
        """A connection that waits a minute for other writers and reads texts as bytes."""
        link = sqlite3.connect(self.path, timeout=60.0)
        link.text_factory = bytes  # an altered byte may be no text
        link.execute("PRAGMA journal_mode = WAL")
        link.execute("PRAGMA synchronous = NORMAL")
        return link

    def open(self) -> None:
        """Check the file, and make what is missing in it.

        Raises:
            Damaged: its pages do not fit together.
            sqlite3.Error: it is no database, or cannot be opened.
            ValueError: a later version wrote it.
        """
        row_sum("", b"", "")  # there is a key
        with closing(self.connect()) as link, link:
            said = link.execute("PRAGMA quick_check(1)").fetchone()[0]
            if said != b"ok":
                raise Damaged(" ".join(said.decode(errors="replace").split()))
            version = link.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise ValueError(
                    f"The cache '{self.path}' is of version {version}, this program writes {VERSION}. Use "
                    "another folder, or a later visalign."
                )
            if version == VERSION:
                for table in ("judges", "judgements"):
                    link.execute(f"SELECT 1 FROM {table} LIMIT 1")
                return
            link.execute("DROP TABLE IF EXISTS judgements")  # of a version that signed nothing
            for statement in _SCHEMA:
                link.execute(statement)
            link.execute(f"PRAGMA user_version = {VERSION}")

    def select(self, judge: str, keys: Sequence[bytes]) -> tuple[dict[bytes, str], int]:
        """What a judge said, by key, and how many rows were altered on the disk."""
        found: dict[bytes, str] = {}
        altered = 0
        with closing(self.connect()) as link:
            for start in range(0, len(keys), _CHUNK):
                part = keys[start : start + _CHUNK]
                marks = ",".join("?" * len(part))
                query = f"SELECT key, said, sum FROM judgements WHERE judge = ? AND key IN ({marks})"
                for key, said, known in link.execute(query, (judge, *part)):
                    if hmac.compare_digest(
                        row_sum(judge, key, said), known if isinstance(known, bytes) else b""
                    ):
                        found[bytes(key)] = said.decode()
                    else:
                        altered += 1
        return found, altered

    def insert(self, judges: Mapping[str, str], rows: Iterable[tuple[str, bytes, str]]) -> None:
        """Write rows (digest of the judge, key, what was said) and identities; all of them or none."""
        summed = [(judge, key, said, row_sum(judge, key, said)) for judge, key, said in rows]
        with closing(self.connect()) as link, link:
            link.executemany("INSERT OR IGNORE INTO judges VALUES (?, ?)", list(judges.items()))
            link.executemany("INSERT OR REPLACE INTO judgements VALUES (?, ?, ?, ?)", summed)

    def judges(self) -> dict[str, str]:
        """digest -> identity."""
        with closing(self.connect()) as link:
            rows = link.execute("SELECT digest, identity FROM judges").fetchall()
        return {digest.decode(errors="replace"): said.decode(errors="replace") for digest, said in rows}

    def count(self) -> int:
        """Judgements in the file."""
        with closing(self.connect()) as link:
            return int(link.execute("SELECT COUNT(*) FROM judgements").fetchone()[0])

    def set_aside(self) -> Path:
        """Move the file away, with what belongs to it; the first free name is taken."""
        number = 1
        while (place := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        self.path.replace(place)
        for ending in ("-wal", "-shm"):
            self.path.with_name(self.path.name + ending).unlink(missing_ok=True)
        return place


def row_sum(judge: str | bytes, key: bytes, said: str | bytes) -> bytes:
    """The signature of a row."""
    parts = [part.encode() if isinstance(part, str) else part for part in (judge, key, said)]
    content = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hmac.digest(_secret(os.environ.get("VISALIGN_CACHE_KEY")), content, "sha256")[:16]


@cache
def _secret(given: str | None) -> bytes:
    """The user's key; made at the first use, where only the user can read it."""
    if given:
        return given.encode()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    path = Path(data) / "visalign" / "cache.key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            handle, name = tempfile.mkstemp(dir=path.parent)  # that only the user may read
            with os.fdopen(handle, "wb") as file:
                file.write(secrets.token_hex(32).encode())
            with suppress(FileExistsError):  # another process was quicker: its key is the user's
                os.link(name, path)
            os.unlink(name)
        key = path.read_bytes()
    except OSError as error:
        raise OSError(
            f"The key of caches '{path}' cannot be read or made ({error.strerror}). Set VISALIGN_CACHE_KEY "
            "to a secret text of your own."
        ) from error
    if len(key) < 64:
        raise OSError(f"The key of caches '{path}' is not whole. Remove it; what was cached is judged again.")
    return key


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error means that the file is not whole, rather than locked, full or read-only."""
    if isinstance(error, Damaged):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code in _DAMAGE or code & 0xFF in _DAMAGE)
