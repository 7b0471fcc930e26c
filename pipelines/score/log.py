# SPDX-License-Identifier: Apache-2.0
"""Scores written to a file as they come, so that a long scoring that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from visalign.data.sets.image_references import PARQUET
from visalign.errors import UserError
from visalign.rewards.base.identity import Identity

FORMAT = "visalign scores 1"


@dataclass(frozen=True, kw_only=True)
class Logged:
    """What a judge said once."""

    value: float | None
    """A score, or log-odds for the left image; None where it failed."""
    std: float | None = None
    reason: str | None = None
    """Why there is no value."""


class ScoreLog:
    """A JSONL file: the judge's identity first, then a line per score.

    Failed rows are kept for the reader but tried again.

    Args:
        path: The file; None keeps scores in memory alone.
        name: Of the judge.
        identity: What its scores depend on.

    Raises:
        UserError: The file holds scores of another version of the judge, or is none of ours.
    """

    def __init__(self, path: Path | None, name: str, identity: Identity) -> None:
        self.path = path
        self._found: dict[str, Logged] = {}
        self._file: TextIO | None = None
        if path is None:
            return
        if path.is_file() and path.stat().st_size:
            self._read(path, name, identity)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            header = {
                "format": FORMAT,
                "judge": name,
                "digest": identity.digest,
                "identity": asdict(identity),
            }
            path.write_text(json.dumps(header, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Logged | None:
        """The score of a key, or None where it was not scored or failed."""
        return self._found.get(key)

    def add(self, entries: Mapping[str, Logged]) -> None:
        """Write scores and flush them to the system."""
        for key, entry in entries.items():
            if entry.value is not None:
                self._found[key] = entry
            if self._file is not None:
                row = {"key": key} | {
                    name: value for name, value in asdict(entry).items() if value is not None
                }
                self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Close the file; scores can still be read."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, path: Path, name: str, identity: Identity) -> None:
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]  # what stands behind it was cut off while it was written
        lines = whole.decode("utf-8", errors="replace").split("\n")
        header = _object(lines[0])
        if header is None or header.get("format") != FORMAT:
            raise UserError(f"'{path}' holds no scores of ours. Give another --output, or remove it.")
        if header.get("digest") != identity.digest:
            raise UserError(
                f"'{path}' holds scores of {header.get('judge')!r}, and {name!r} is another judge or "
                f"another version of it: they differ in {_differences(header.get('identity'), identity)}. "
                "Remove the file, or give another --output."
            )
        for number, line in enumerate(lines[1:-1], 2):
            row = _object(line)
            if row is None or not isinstance(row.get("key"), str):
                raise UserError(
                    f"Line {number} of '{path}' is no score. Remove the line; it is scored again."
                )
            if row.get("value") is not None:
                self._found[row["key"]] = Logged(value=float(row["value"]), std=row.get("std"))
        if len(whole) < len(raw):
            os.truncate(path, len(whole))  # in place: nothing is written anew that could be lost


def judge_identity(judge: Any) -> Identity:
    """The judge's own identity, or one from its name, unit, class and source file where it has none.

    What such a judge reads besides, weights or settings, is not known: give it an identity to have that seen.

    Args:
        judge: Any judge.
    """
    own = getattr(judge, "identity", None)
    if isinstance(own, Identity):
        return own
    kind = f"{type(judge).__module__}:{type(judge).__qualname__}"
    options = {"unit": getattr(judge, "unit", "probability")}
    return Identity(judge=judge.name, model=kind, weights=_source(judge), options=options)


def _source(judge: Any) -> str:
    """SHA-256 of the files that a judge's class, and the user's function in it, are written in."""
    digest = hashlib.sha256()
    for part in (type(judge), getattr(judge, "_function", None)):
        with suppress(TypeError, OSError):  # built in, made on the fly: there is no file
            digest.update(Path(inspect.getfile(part)).read_bytes())  # type: ignore[arg-type]
    return digest.hexdigest()


def score_key(images: Sequence[str], prompt: str, metadata: Mapping[str, Any] | None) -> str:
    """What one score is of: image references with size and time of their files, prompt, metadata.

    Args:
        images: One reference, or two in their order.
        prompt: The prompt.
        metadata: The prompt's record, if any.

    Returns:
        32 hex digits.
    """
    parts = [[image, *_state(image)] for image in images]
    text = json.dumps([parts, prompt, metadata], ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def number(value: Any) -> float | None:
    """A finite number, or None."""
    found = float(value)
    return found if math.isfinite(found) else None


def _state(reference: str) -> tuple[int, int] | tuple[()]:
    """Size and time of change of the file that holds a picture: another picture has another score."""
    if reference.startswith(PARQUET):
        reference = reference.removeprefix(PARQUET).rsplit("#", 2)[0]
    place = Path(reference)
    if "://" in reference or not place.is_file():
        return ()
    found = place.stat()
    return found.st_size, found.st_mtime_ns


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _differences(saved: Any, identity: Identity) -> str:
    mine = json.loads(json.dumps(asdict(identity), default=str))
    theirs = saved if isinstance(saved, dict) else {}
    names = [name for name in mine if mine[name] != theirs.get(name)]
    return ", ".join(names) or "their digest"
