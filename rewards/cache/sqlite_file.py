# SPDX-License-Identifier: Apache-2.0
"""The SQLite file of a `ScoreCache`: its tables, a sum for each row, and what counts as damage.

SQLite checks the form of its pages and not what stands in them, so each judgement has a CRC-32.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

VERSION = 2
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
    "sum INTEGER, PRIMARY KEY (judge, key)) WITHOUT ROWID",
)


class Damaged(sqlite3.DatabaseError):
    """The pages of the file do not fit together."""


class ScoreFile:
    """Judgements as rows (judge, key, said, sum); every call opens and closes the file.

    Args:
        path: of the file; `open` makes it.
    """

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
            for statement in _SCHEMA:
                link.execute(statement)
            if version == 1:  # had no sums
                link.create_function("row_sum", 3, row_sum, deterministic=True)
                if b"sum" not in {row[1] for row in link.execute("PRAGMA table_info(judgements)")}:
                    link.execute("ALTER TABLE judgements ADD COLUMN sum INTEGER")
                link.execute("UPDATE judgements SET sum = row_sum(judge, key, said)")
            link.execute(f"PRAGMA user_version = {VERSION}")

    def select(self, judge: str, keys: Sequence[bytes]) -> tuple[dict[bytes, str], int]:
        """What a judge said, by key, and how many rows were altered on the disk.

        Args:
            judge: digest of its identity.
            keys: wanted; those that are not there are left out.
        """
        found: dict[bytes, str] = {}
        altered = 0
        with closing(self.connect()) as link:
            for start in range(0, len(keys), _CHUNK):
                part = keys[start : start + _CHUNK]
                marks = ",".join("?" * len(part))
                query = f"SELECT key, said, sum FROM judgements WHERE judge = ? AND key IN ({marks})"
                for key, said, known in link.execute(query, (judge, *part)):
                    if row_sum(judge, key, said) == known:
                        found[bytes(key)] = said.decode()
                    else:
                        altered += 1
        return found, altered

    def insert(self, judges: Mapping[str, str], rows: Iterable[tuple[str, bytes, str]]) -> None:
        """Write rows; all of them or none.

        Args:
            judges: digest -> identity.
            rows: (digest, key, what was said).
        """
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


def row_sum(judge: str | bytes, key: bytes, said: str | bytes) -> int:
    """CRC-32 of a row.

    Args:
        judge: digest of its identity.
        key: of the judgement.
        said: the judgement.
    """
    judge, said = (part.encode() if isinstance(part, str) else part for part in (judge, said))
    return zlib.crc32(said, zlib.crc32(key, zlib.crc32(judge)))


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error means that the file is not whole, rather than locked, full or read-only.

    Args:
        error: what SQLite raised.
    """
    if isinstance(error, Damaged):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code in _DAMAGE or code & 0xFF in _DAMAGE)
