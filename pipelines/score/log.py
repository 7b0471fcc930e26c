# SPDX-License-Identifier: Apache-2.0
"""Scores written to a file batch by batch, so that a stopped scoring can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from visalign.data.sets.image_references import file_and_position
from visalign.data.sets.prompt_files import listed_sources
from visalign.errors import UserError
from visalign.locks import LOCK, hold_lock

from .image_rows import numbered_frames
from .provenance import reward_identity

FORMAT = "visalign scores 1"


@dataclass(frozen=True, kw_only=True)
class Logged:
    value: float | None  # Score, or log-odds for the left image; None where it failed
    std: float | None = None
    reason: str | None = None


class ScoreLog:
    """JSONL file with the rewards' identities first, then a line per score, flushed with its batch.

    Without a path scores are kept in memory. Failed rows are written, but tried again. `entry` is a score's dataclass.
    """

    def __init__(self, path: Path | None, rewards: Mapping[str, Any], entry: type, *, resume: bool = True) -> None:
        self._entries: dict[str, Any] = {}
        self._file: TextIO | None = None
        self._open = ExitStack()
        if path is None:
            return
        identities = {label: reward_identity(reward) for label, reward in rewards.items()}
        with self._open:
            self._open.enter_context(hold_lock(path.with_name(path.name + LOCK), what=f"'{path}'"))
            is_begun = path.is_file() and path.stat().st_size > 0
            if is_begun and not resume:
                raise UserError(f"'{path}' holds the scores of a run that was stopped. Add --resume, or remove it.")
            if is_begun:
                self._read(path, {label: identity.digest for label, identity in identities.items()}, entry)
            else:
                judges = {name: {"digest": i.digest, "identity": asdict(i)} for name, i in identities.items()}
                header = json.dumps({"format": FORMAT, "judges": judges}, ensure_ascii=False, default=str)
                path.write_text(header + "\n", encoding="utf-8", errors="backslashreplace")
            self._file = self._open.enter_context(path.open("a", encoding="utf-8", errors="backslashreplace"))
            self._open = self._open.pop_all()

    def get(self, key: str) -> Any:
        """Return the entry of a key, or None where it is missing or failed."""
        return self._entries.get(key)

    def add(self, entries: Mapping[str, Any]) -> None:
        self._entries |= {key: entry for key, entry in entries.items() if entry.value is not None}
        if self._file is not None:
            for key, entry in entries.items():
                self._file.write(json.dumps({"key": key, **asdict(entry)}, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file = None
        self._open.close()

    def _read(self, path: Path, digests: Mapping[str, str], entry: type) -> None:
        raw = path.read_bytes()
        complete = raw[: raw.rfind(b"\n") + 1]  # the rest was cut off while it was written
        first, *lines = complete.decode("utf-8", errors="replace").split("\n")[:-1] or [""]
        header = _parse_object(first)
        if header.get("format") != FORMAT:
            raise UserError(f"'{path}' holds no scores of ours. Give another --output, or remove it.")
        for label, digest in digests.items():
            if header["judges"].get(label, {}).get("digest") != digest:
                labels = ", ".join(header["judges"])
                raise UserError(f"'{path}' holds scores of {labels}, not of this {label!r}. Give another --output.")
        names = {field.name for field in fields(entry)}
        for number, line in enumerate(lines, 2):
            row = _parse_object(line)
            if not names | {"key"} <= row.keys():
                raise UserError(f"Line {number} of '{path}' is no score. Remove the line; it is scored again.")
            if row["value"] is not None:
                self._entries[row["key"]] = entry(**{name: row[name] for name in names})
        os.truncate(path, len(complete))  # in place: a rewritten file could be lost


def partial_path(output: Path) -> Path:
    """Path of the file that collects the scores until the output is complete."""
    return output.with_name(f"{output.name}.part")


def score_key(images: Sequence[str], prompt: str, metadata: Mapping[str, Any] | None) -> str:
    """Hash the inputs of a score to 32 hex digits: images, sources, their files' size and time, prompt, metadata."""
    sources = [source for source in listed_sources((metadata or {}).get("source")) if isinstance(source, str)]
    parts = [[image, *_file_state(image)] for image in (*images, *sources)]
    text = json.dumps([parts, prompt, metadata], ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _file_state(reference: str) -> tuple[Any, ...]:
    """Size and modification time of an image's file, or of each frame of a clip's folder."""
    path = Path(file := file_and_position(reference)[0])
    if "://" in file or not path.is_file():
        return tuple((frame.name, *_file_state(str(frame))) for frame in numbered_frames(path))
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _parse_object(line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
