# SPDX-License-Identifier: Apache-2.0
"""A cache of judgements on disk, addressed by content: image bytes, prompt, record, and the judge's identity.

One SQLite file per folder, shared by all commands and by processes at the same time. Only valid judgements
are kept: a failure may be gone the next time. Nothing in the file is needed: one that was cut or is no
database is set aside and begun anew, a row that was altered is judged again, and while the disk is full,
read-only or locked the judgements stay in memory. Each of these is said once, as a warning.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from visalign.rewards.base.identity import Identity

from .sqlite_file import ScoreFile, is_damage

FILE = "judgements.sqlite"
_PAUSE = 30.0
"""Seconds for which a disk that failed is left alone."""
_KEPT = 100_000
"""Judgements that are kept in memory while the disk fails."""

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
        """What the judge has said before, for the keys that it has judged.

        Args:
            judge: its identity; another identity has other judgements.
            keys: from `key_of`.
        """
        digest, unique = judge.digest, list(dict.fromkeys(keys))
        kept = ((key, self._kept.get((digest, key))) for key in unique)
        found = {key: said for key, said in kept if said is not None}
        wanted = [key for key in unique if key not in found]
        if wanted:
            found |= self._tried(lambda: self._select(digest, wanted), {})
        hits = sum(key in found for key in keys)
        self.hits, self.misses = self.hits + hits, self.misses + len(keys) - hits
        return {key: _numbers(json.loads(said)) for key, said in found.items()}

    def put(self, judge: Identity, said: Mapping[bytes, Mapping[str, Any]]) -> None:
        """Keep judgements; on the disk all of them or, when interrupted, none.

        Args:
            judge: its identity.
            said: key -> numbers, texts, and nested mappings of them.
        """
        digest = judge.digest
        rows = {(digest, key): json.dumps(_words(value)) for key, value in said.items()}
        with self._lock:
            self._kept_judges[digest] = json.dumps(asdict(judge), sort_keys=True, default=str)
            self._kept |= rows
            if self._tried(self._write, False):
                self._kept.clear()
                self._kept_judges.clear()
            for oldest in list(self._kept)[: max(0, len(self._kept) - _KEPT)]:
                del self._kept[oldest]

    def judges(self) -> dict[str, dict[str, Any]]:
        """digest -> identity of every judge that has something in the cache."""
        found = self._tried(self._file.judges, {}) | self._kept_judges
        return {digest: identity for digest, said in found.items() if (identity := _record(said)) is not None}

    def __len__(self) -> int:
        """Judgements on the disk."""
        return self._tried(self._file.count, 0)

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
        self._say(
            "damage",
            f"The cache '{self._file.path}' was replaced while it was in use ({trouble}). It is used as it "
            "is now; what is missing is judged again.",
        )

    def _begin_anew(self, error: Exception) -> None:
        self.rebuilt = self._file.set_aside()
        self._say(
            "damage",
            f"The cache '{self._file.path}' was damaged ({error}). It was set aside as "
            f"'{self.rebuilt.name}' and begun anew; what was in it is judged again.",
        )
        self._file.open()

    def _tried(self, work: Callable[[], Found], otherwise: Found) -> Found:
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
        self._say(
            "disk",
            f"The cache '{self._file.path}' cannot be used now ({trouble}). Judgements are kept in memory, "
            f"and the file is tried again after {_PAUSE:g} seconds.",
        )
        return otherwise

    def _select(self, judge: str, keys: Sequence[bytes]) -> dict[bytes, str]:
        found, altered = self._file.select(judge, keys)
        if altered:
            self._say(
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

    def _say(self, kind: str, message: str) -> None:
        """Warn of each kind of trouble once."""
        if kind not in self._said:
            self._said.add(kind)
            warnings.warn(message, stacklevel=2)


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


def _record(said: str) -> dict[str, Any] | None:
    """An identity as it was written; None where it was altered on the disk."""
    try:
        found = json.loads(said)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


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
