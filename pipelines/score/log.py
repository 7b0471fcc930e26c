# SPDX-License-Identifier: Apache-2.0
"""Scores written to a file as they come, so that a long scoring that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from visalign.data.sets.image_references import PARQUET
from visalign.errors import UserError
from visalign.locks import LOCK, check_unlocked, hold_lock
from visalign.rewards.base.identity import Identity

from .image_rows import ImageRow, numbered_frames
from .score import ScoreRow
from .whose import judge_identity

FORMAT = "visalign scores 1"
ENDING = ".part"
"""Of the working file beside an output."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """What a judge said once."""

    value: float | None
    """A score, or log-odds for the left image; None where it failed."""
    std: float | None = None
    reason: str | None = None
    """Why there is no value."""


Entry = TypeVar("Entry", Logged, ScoreRow)


class ScoreLog(Generic[Entry]):
    """A JSONL file: the judges' identities first, then a line per score, flushed with its batch.

    Failed rows are kept for the reader but tried again.

    Args:
        path: The file; None keeps scores in memory alone.
        judges: Name -> what the scores of that judge depend on; all that may be asked.
        entry: What a line holds beside its key.

    Raises:
        UserError: The file holds scores of another judge or of another version of one, or is none of ours, or
            another process, which is named, writes it.
    """

    def __init__(self, path: Path | None, judges: Mapping[str, Identity], entry: type[Entry]) -> None:
        self._found: dict[str, Entry] = {}
        self._file: TextIO | None = None
        self._open = ExitStack()
        if path is not None:
            with self._open:
                self._open.enter_context(hold_lock(_lock_of(path), what=f"'{path}'"))
                self._file = self._open.enter_context(self._begin(path, judges, entry))
                self._open = self._open.pop_all()

    def _begin(self, path: Path, judges: Mapping[str, Identity], entry: type[Entry]) -> TextIO:
        if path.is_file() and path.stat().st_size:
            self._read(path, judges, entry)
        else:
            known = {name: {"digest": i.digest, "identity": asdict(i)} for name, i in judges.items()}
            header = json.dumps({"format": FORMAT, "judges": known}, ensure_ascii=False, default=str)
            path.write_text(header + "\n", encoding="utf-8", errors="backslashreplace")
        return path.open("a", encoding="utf-8", errors="backslashreplace")

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Entry | None:
        """The score of a key, or None where it was not scored or failed."""
        return self._found.get(key)

    def add(self, entries: Mapping[str, Entry]) -> None:
        """Write scores and flush them to the system."""
        for key, entry in entries.items():
            if entry.value is not None:
                self._found[key] = entry
            if self._file is not None:
                self._file.write(json.dumps({"key": key, **asdict(entry)}, ensure_ascii=False) + "\n")
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file, which stays; scores can still be read."""
        self._file = None
        self._open.close()

    def _read(self, path: Path, judges: Mapping[str, Identity], entry: type[Entry]) -> None:
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]  # what stands behind it was cut off while it was written
        lines = whole.decode("utf-8", errors="replace").split("\n")
        header = _object(lines[0])
        if header is None or header.get("format") != FORMAT:
            raise UserError(f"'{path}' holds no scores of ours. Give another --output, or remove it.")
        _check_judges(path, header.get("judges", {}), judges)
        names = {part.name for part in fields(entry)}
        for number, line in enumerate(lines[1:-1], 2):
            row = _object(line)
            if row is None or not names <= row.keys() or not isinstance(row.get("key"), str):
                raise UserError(
                    f"Line {number} of '{path}' is no score. Remove the line; it is scored again."
                )
            if row["value"] is not None:
                self._found[row["key"]] = entry(**{name: row[name] for name in names})
        if len(whole) < len(raw):
            os.truncate(path, len(whole))  # in place: nothing is written anew that could be lost


class RowLog:
    """Scores of rows by several rewards, which a stopped scoring goes on with; see `ScoreLog`.

    Raises:
        UserError: As `ScoreLog`, or the file exists and is not to be continued.
    """

    def __init__(self, path: Path, rewards: Mapping[str, Any], *, resume: bool) -> None:
        check_unlocked(_lock_of(path), what=f"'{path}'")
        if not resume and path.is_file() and path.stat().st_size:
            raise UserError(
                f"'{path}' holds the scores of a run that was stopped. Go on with --resume, or remove it."
            )
        judges = {label: judge_identity(reward) for label, reward in rewards.items()}
        self._log = ScoreLog(path, judges, ScoreRow)

    def get(self, label: str, row: ImageRow) -> ScoreRow | None:
        """The row of an image, or None where it was not scored or failed."""
        return self._log.get(_row_key(label, row))

    def add(self, label: str, rows: Sequence[tuple[ImageRow, ScoreRow]]) -> None:
        """Write rows and flush them to the system."""
        self._log.add({_row_key(label, asked): row for asked, row in rows})

    def __enter__(self) -> RowLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + LOCK)


def part_of(output: Path) -> Path:
    """The working file of an output."""
    return output.with_name(output.name + ENDING)


def score_key(images: Sequence[str], prompt: str, metadata: Mapping[str, Any] | None) -> str:
    """What one score is of, 32 hex digits: images with size and time of their files, prompt, metadata."""
    parts = [[image, *_state(image)] for image in images]
    text = json.dumps([parts, prompt, metadata], ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def number(value: Any) -> float | None:
    """A finite number, or None."""
    found = float(value)
    return found if math.isfinite(found) else None


def _state(reference: str) -> tuple[Any, ...]:
    """Size and time of change of the file that holds an image, or of each frame of a clip's folder: another
    image has another score.
    """
    if reference.startswith(PARQUET):
        reference = reference.removeprefix(PARQUET).rsplit("#", 2)[0]
    place = Path(reference)
    if "://" in reference or not place.is_file():
        return tuple((frame.name, *_state(str(frame))) for frame in numbered_frames(place))
    found = place.stat()
    return found.st_size, found.st_mtime_ns


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _check_judges(path: Path, saved: Mapping[str, Any], judges: Mapping[str, Identity]) -> None:
    """Refuse scores of other judges, or of another version of one."""
    for label, identity in judges.items():
        if label not in saved:
            raise UserError(
                f"'{path}' holds scores of {', '.join(saved)}, not of {label!r}. Ask the same rewards again, "
                "or give another --output."
            )
        if saved[label].get("digest") == identity.digest:
            continue
        mine = json.loads(json.dumps(asdict(identity), default=str))
        theirs = saved[label].get("identity") or {}
        differ = ", ".join(name for name in mine if mine[name] != theirs.get(name))
        raise UserError(
            f"'{path}' holds scores of another version of {label!r}: they differ in "
            f"{differ or 'their digest'}. Remove the file, or give another --output."
        )


def _row_key(label: str, row: ImageRow) -> str:
    return f"{score_key([row.image], row.prompt, row.metadata)}:{label}"
