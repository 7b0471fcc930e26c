# SPDX-License-Identifier: Apache-2.0
"""Rows of scores written to a file as they come: what was scored before a stop is not scored again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

from visalign.errors import UserError
from visalign.rewards.base.identity import Identity

from .image_rows import ImageRow
from .log import judge_identity, score_key
from .score import ScoreRow

FORMAT = "visalign score rows 1"
ENDING = ".part"
"""Of the working file beside an output."""


def part_of(output: Path) -> Path:
    """The working file of an output."""
    return output.with_name(output.name + ENDING)


class RowLog:
    """A JSONL file: the rewards' identities first, then a line per row, each flushed with its batch.

    Failed rows are kept for the reader, but tried again.

    Args:
        path: The file.
        rewards: Label -> reward, all that may be asked.
        resume: Whether the file is to be continued.

    Raises:
        UserError: The file exists and is not to be continued, holds rows of another version of a reward, or
            is none of ours.
    """

    def __init__(self, path: Path, rewards: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self._identities = {label: judge_identity(reward) for label, reward in rewards.items()}
        self._found: dict[str, ScoreRow] = {}
        self._file: TextIO | None = None
        if path.is_file() and path.stat().st_size:
            if not resume:
                raise UserError(
                    f"'{path}' holds the scores of a run that was stopped. Go on with --resume, or remove it."
                )
            self._read()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._header() + "\n", encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def __len__(self) -> int:
        return len(self._found)

    def get(self, label: str, row: ImageRow) -> ScoreRow | None:
        """The row of an image, or None where it was not scored or failed."""
        return self._found.get(_key(label, row))

    def add(self, label: str, rows: Sequence[tuple[ImageRow, ScoreRow]]) -> None:
        """Write rows and flush them to the system."""
        assert self._file is not None
        for asked, row in rows:
            key = _key(label, asked)
            if row.value is not None:
                self._found[key] = row
            self._file.write(json.dumps({"key": key, **asdict(row)}, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; it stays."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _header(self) -> str:
        judges = {
            label: {"digest": identity.digest, "identity": asdict(identity)}
            for label, identity in self._identities.items()
        }
        return json.dumps({"format": FORMAT, "judges": judges}, ensure_ascii=False, default=str)

    def _read(self) -> None:
        lines = self.path.read_text(encoding="utf-8").split("\n")
        header = _object(lines[0])
        if header is None or header.get("format") != FORMAT:
            raise UserError(f"'{self.path}' holds no scores of ours. Give another --output, or remove it.")
        self._check(header.get("judges", {}))
        whole = lines[:-1]  # what stands after the last line feed was cut off while it was written
        names = {entry.name for entry in fields(ScoreRow)}
        for number, line in enumerate(whole[1:], 2):
            row = _object(line)
            if row is None or not names <= row.keys() or not isinstance(row.get("key"), str):
                raise UserError(
                    f"Line {number} of '{self.path}' is no row of scores. Remove the line; it is scored "
                    "again."
                )
            if row["value"] is not None:
                self._found[row["key"]] = ScoreRow(**{name: row[name] for name in names})
        if lines[-1]:
            self.path.write_text("\n".join(whole) + "\n", encoding="utf-8")

    def _check(self, saved: Mapping[str, Any]) -> None:
        """Refuse rows of another version of a reward."""
        for label, identity in self._identities.items():
            if label not in saved:
                raise UserError(
                    f"'{self.path}' holds scores of {', '.join(saved)}, not of {label!r}. Ask the same "
                    "rewards again, or give another --output."
                )
            if saved[label].get("digest") == identity.digest:
                continue
            theirs = saved[label].get("identity") or {}
            names = {entry.name for entry in fields(Identity)}
            differ = identity.differences(Identity(**theirs)) if theirs.keys() == names else []
            raise UserError(
                f"'{self.path}' holds scores of another version of {label!r}: they differ in "
                f"{', '.join(differ) or 'their digest'}. Remove the file, or give another --output."
            )


def _key(label: str, row: ImageRow) -> str:
    return f"{score_key([row.image], row.prompt, row.metadata)}:{label}"


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except json.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None
