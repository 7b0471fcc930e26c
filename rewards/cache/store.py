# SPDX-License-Identifier: Apache-2.0
"""Scores on disk by content: image bytes, prompt, record and the reward's identity.

One SQLite file (WAL) per folder, shared by all commands and by processes at the same time. Only valid scores
are stored: a failure may be gone the next time. A row that cannot be read is computed again. A file that
fails while it is in use (locked, full, damaged) is left alone for the rest of the run, with one warning.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from visalign.rewards.base.identity import Identity

FILE = "judgements.sqlite"
VERSION = 5
_CHUNK = 500
"""Keys per query: SQLite limits the parameters of a statement."""
_TABLE = (
    "CREATE TABLE IF NOT EXISTS scores (judge TEXT NOT NULL, key BLOB NOT NULL, entry TEXT NOT NULL, "
    "PRIMARY KEY (judge, key)) WITHOUT ROWID"
)


class ScoreCache:
    """Entries {"columns": numbers by name, "text"} by judge and key, in a folder's `judgements.sqlite`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / FILE
        self._has_failed = False
        try:
            with closing(self._connect()) as connection, connection:
                version = connection.execute("PRAGMA user_version").fetchone()[0]
                if version <= VERSION:
                    connection.execute(_TABLE)
                    connection.execute(f"PRAGMA user_version = {VERSION}")
        except sqlite3.Error as error:
            raise OSError(f"The cache '{self.path}' cannot be opened: {error}. Remove it, or give another.") from error
        if version > VERSION:
            raise ValueError(
                f"The cache '{self.path}' is of version {version}, after our {VERSION}. Use another folder."
            )

    def get(self, judge: Identity, keys: Sequence[bytes]) -> dict[bytes, dict[str, Any]]:
        """Return the stored entries of the keys (`key_of`) that have one."""
        if self._has_failed:
            return {}
        unique, entries = list(dict.fromkeys(keys)), {}
        try:
            with closing(self._connect()) as connection:
                for start in range(0, len(unique), _CHUNK):
                    part = unique[start : start + _CHUNK]
                    marks = ",".join("?" * len(part))
                    query = f"SELECT key, entry FROM scores WHERE judge = ? AND key IN ({marks})"
                    entries |= dict(connection.execute(query, (judge.digest, *part)))
        except sqlite3.Error as error:
            self._give_up(error)
        return {key: entry for key, text in entries.items() if (entry := _read_entry(text)) is not None}

    def put(self, judge: Identity, entries: Mapping[bytes, Mapping[str, Any]]) -> None:
        """Store entries, all of them or, when interrupted, none."""
        if self._has_failed:
            return
        rows = [(judge.digest, key, json.dumps(entry)) for key, entry in entries.items()]
        try:
            with closing(self._connect()) as connection, connection:
                connection.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?, ?)", rows)
        except sqlite3.Error as error:
            self._give_up(error)

    def __len__(self) -> int:
        with closing(self._connect()) as connection:
            return int(connection.execute("SELECT COUNT(*) FROM scores").fetchone()[0])

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=60.0)
        connection.text_factory = bytes  # an altered byte may not be UTF-8
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def _give_up(self, error: sqlite3.Error) -> None:
        self._has_failed = True
        warnings.warn(
            f"The cache '{self.path}' cannot be used ({error}). For the rest of this run scores are computed "
            "and not stored. Free the disk or the file, or remove it if it is damaged.",
            stacklevel=3,
        )


def key_of(contents: Iterable[bytes], prompt: str, record: Mapping[str, Any] | None) -> bytes:
    """Compute the key of a sample: SHA-256 over its images' content digests in order, the prompt, and its
    record (values that JSON lacks by their `repr`).
    """
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    text = prompt.encode("utf-8", "surrogatepass")
    digest.update(len(text).to_bytes(8, "big") + text)
    digest.update(json.dumps(record, sort_keys=True, default=repr).encode())
    return digest.digest()


def _read_entry(text: bytes) -> dict[str, Any] | None:
    """Decode an entry; None where it was altered on the disk, or written by an earlier version."""
    try:
        entry = json.loads(text)
        numbers = [entry["columns"]["main"], *entry["columns"].values()]
        is_readable = all(isinstance(number, float | int) for number in numbers) and math.isfinite(numbers[0])
        return entry if is_readable and isinstance(entry["text"], str | None) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
