# SPDX-License-Identifier: Apache-2.0
"""Preference and quality sets in files of one's own: JSONL, JSON, CSV, TSV, Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from visalign.errors import UserError

from .records import PreferencePair, PreferenceSet, QualityRecord, QualitySet
from .rows import pair_from_row, quality_from_row, truth
from .tables import read_rows, require_columns


def load_preferences(
    path: str | Path, *, split: str | None = None, limit: int | None = None
) -> PreferenceSet:
    """Read a preference set.

    Columns: `prompt`, `image_left`, `image_right`, and what was said: `label` (left, right, tie, or a number
    0 to 1, the share for the left image), or `votes` [left, right, tie], or `votes_left`, `votes_right` and
    perhaps `votes_tie`. Optional: `generator_left`, `generator_right`, `resolution`, `category`, `split`,
    `prompt_id`. All others are kept in `extra`. Relative image paths are taken from the file's folder.

    Args:
        path: A JSONL, JSON, CSV, TSV or Parquet file.
        split: Keep this split alone.
        limit: Read at most so many pairs.

    Returns:
        At least one pair, in the order of the file; `visalign.data.sets.checks` says what is odd.

    Raises:
        UserError: Missing file or columns, a row that cannot be read (named by its number), a label that
            contradicts the votes of its row, no such split, or no pair.
    """
    pairs, rows, splits = [], [], set()
    for number, row in read_rows(path):
        if not splits and not pairs:
            require_columns(path, row, ("prompt", "image_left", "image_right"), purpose="a preference set")
        splits.add(row.get("split"))
        if split is not None and row.get("split") != split:
            continue
        with _Named(path, number):
            pairs.append(pair_from_row(row, folder=Path(path).parent))
        rows.append(number)
        if limit is not None and len(pairs) >= limit:
            break
    _check_some(path, pairs, split, splits, "pair")
    return PreferenceSet(name=Path(path).stem, pairs=tuple(pairs), rows=tuple(rows))


def load_quality(path: str | Path, *, split: str | None = None, limit: int | None = None) -> QualitySet:
    """Read a quality set.

    Columns: `image`, `mos`; optional `std`, `prompt`, `generator`, `resolution`, `category`, `split`,
    `reference`, and `higher_is_better` (equal in all rows; true where it is absent). Others are kept in
    `extra`. Relative image paths are taken from the file's folder.

    Args:
        path: A JSONL, JSON, CSV, TSV or Parquet file.
        split: Keep this split alone.
        limit: Read at most so many images.

    Returns:
        At least one record, in the order of the file.

    Raises:
        UserError: As in `load_preferences`; or rows with different directions.
    """
    records, rows, splits, directions = [], [], set(), {}
    for number, row in read_rows(path):
        if not splits and not records:
            require_columns(path, row, ("image", "mos"), purpose="a quality set")
        splits.add(row.get("split"))
        if split is not None and row.get("split") != split:
            continue
        with _Named(path, number):
            directions.setdefault(truth(row.get("higher_is_better", True)), number)
            records.append(quality_from_row(row, folder=Path(path).parent))
        rows.append(number)
        if limit is not None and len(records) >= limit:
            break
    _check_some(path, records, split, splits, "image")
    if len(directions) > 1:
        raise UserError(
            f"'{path}' mixes directions: higher_is_better is true in row {directions[True]} and false in row "
            f"{directions[False]}. Put scores of different directions into different files, or turn one sign."
        )
    better = next(iter(directions))
    return QualitySet(name=Path(path).stem, records=tuple(records), higher_is_better=better, rows=tuple(rows))


def write_rows(path: str | Path, records: Iterable[PreferencePair | QualityRecord]) -> Path:
    """Write a set as JSONL, one record per line.

    Args:
        path: A new file; missing folders are made.
        records: Pairs or scored images.

    Returns:
        The path.

    Raises:
        UserError: The file exists.
    """
    place = Path(path)
    if place.exists():
        raise UserError(f"'{place}' exists, and nothing is overwritten. Give another name or remove it.")
    place.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(record.to_row(), ensure_ascii=False, allow_nan=False) for record in records)
    place.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return place


class _Named:
    """Puts file and row before what is wrong in a row."""

    def __init__(self, path: str | Path, number: int) -> None:
        self.place = f"Row {number} of '{path}'"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, UserError):
            raise UserError(f"{self.place}: {error}") from error


def _check_some(
    path: str | Path, found: Sequence[object], split: str | None, splits: set[Any], what: str
) -> None:
    if found:
        return
    if split is None:
        raise UserError(f"'{path}' holds no {what}.")
    names = ", ".join(sorted(str(name) for name in splits if name is not None)) or "none at all"
    raise UserError(f"'{path}' holds no {what} of the split '{split}'. Splits in it: {names}.")
