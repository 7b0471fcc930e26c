# SPDX-License-Identifier: Apache-2.0
"""A cache of judgements on disk, addressed by content: image bytes, prompt, record, and the judge's identity.

One SQLite file per folder, shared by all commands and by processes at the same time. Only valid judgements
are kept: a failure may be gone the next time. A file that was cut or is no database is set aside and begun
anew; nothing in it is needed.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .identity import Identity

FILE = "judgements.sqlite"
_VERSION = 1
_CHUNK = 500
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS judges (digest TEXT PRIMARY KEY, identity TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS judgements (judge TEXT NOT NULL, key BLOB NOT NULL, said TEXT NOT NULL, "
    "PRIMARY KEY (judge, key)) WITHOUT ROWID",
)


class ScoreCache:
    """Judgements by (judge, key).

    Args:
        folder: gets the file `judgements.sqlite`; made if missing.

    Attributes:
        rebuilt: where a damaged file was set aside when this one was opened, or None.

    Raises:
        ValueError: the file was written by a later version.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.rebuilt: Path | None = None
        self.hits = self.misses = 0
        path = self.folder / FILE
        try:
            self._open(path)
        except sqlite3.OperationalError as error:  # locked, read-only, full: the file itself may be sound
            raise OSError(
                f"The cache '{path}' cannot be opened: {error}. Free or unlock it, or give another folder."
            ) from error
        except sqlite3.DatabaseError:
            self.rebuilt = _set_aside(path)
            self._open(path)

    def _open(self, path: Path) -> None:
        with closing(self._connect(path)) as link, link:
            damage = link.execute("PRAGMA quick_check(1)").fetchone()[0]
            if damage != "ok":
                raise sqlite3.DatabaseError(damage)
            version = link.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise ValueError(
                    f"The cache '{path}' is of version {version}, this program writes {_VERSION}. Use "
                    "another folder, or a later visalign."
                )
            for statement in _SCHEMA:
                link.execute(statement)
            link.execute(f"PRAGMA user_version = {_VERSION}")
        self._path = path

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
        link = sqlite3.connect(path, timeout=60.0)
        link.execute("PRAGMA journal_mode = WAL")
        link.execute("PRAGMA synchronous = NORMAL")
        return link

    def get(self, judge: Identity, keys: Sequence[bytes]) -> dict[bytes, dict[str, Any]]:
        """What the judge has said before, for the keys that it has judged.

        Args:
            judge: its identity; another identity has other judgements.
            keys: from `key_of`.
        """
        found: dict[bytes, dict[str, Any]] = {}
        unique = list(dict.fromkeys(keys))
        with closing(self._connect(self._path)) as link:
            for start in range(0, len(unique), _CHUNK):
                part = unique[start : start + _CHUNK]
                marks = ",".join("?" * len(part))
                rows = link.execute(
                    f"SELECT key, said FROM judgements WHERE judge = ? AND key IN ({marks})",
                    (judge.digest, *part),
                )
                found.update((bytes(key), _numbers(json.loads(said))) for key, said in rows)
        hits = sum(key in found for key in keys)
        self.hits, self.misses = self.hits + hits, self.misses + len(keys) - hits
        return found

    def put(self, judge: Identity, said: Mapping[bytes, Mapping[str, Any]]) -> None:
        """Keep judgements; all of them or, when interrupted, none.

        Args:
            judge: its identity.
            said: key -> numbers, texts, and nested mappings of them.
        """
        rows = [(judge.digest, key, json.dumps(_words(value))) for key, value in said.items()]
        identity = json.dumps(asdict(judge), sort_keys=True, default=str)
        with closing(self._connect(self._path)) as link, link:
            link.execute("INSERT OR IGNORE INTO judges VALUES (?, ?)", (judge.digest, identity))
            link.executemany("INSERT OR REPLACE INTO judgements VALUES (?, ?, ?)", rows)

    def judges(self) -> dict[str, dict[str, Any]]:
        """digest -> identity of every judge that has something in the cache."""
        with closing(self._connect(self._path)) as link:
            rows = link.execute("SELECT digest, identity FROM judges").fetchall()
        return {digest: json.loads(identity) for digest, identity in rows}

    def __len__(self) -> int:
        with closing(self._connect(self._path)) as link:
            return int(link.execute("SELECT COUNT(*) FROM judgements").fetchone()[0])


def key_of(contents: Iterable[bytes], prompt: str, record: Mapping[str, Any] | None) -> bytes:
    """The address of a judgement: SHA-256 over the images' content digests, the prompt and its record.

    Args:
        contents: digest of each image, in order.
        prompt: exact text.
        record: its metadata; JSON values, others by their `repr`.
    """
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    text = prompt.encode("utf-8", "surrogatepass")
    digest.update(len(text).to_bytes(8, "big") + text)
    digest.update(json.dumps(record, sort_keys=True, default=repr).encode())
    return digest.digest()


def _set_aside(path: Path) -> Path:
    """Move a damaged file away, with what belongs to it; the first free name is taken."""
    number = 1
    while (place := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.replace(place)
    for ending in ("-wal", "-shm"):
        path.with_name(path.name + ending).unlink(missing_ok=True)
    return place


def _words(value: Any) -> Any:
    """Numbers that JSON does not have, as words."""
    if isinstance(value, Mapping):
        return {key: _words(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            float(value["float"]) if value.keys() == {"float"} else {k: _numbers(v) for k, v in value.items()}
        )
    return value
