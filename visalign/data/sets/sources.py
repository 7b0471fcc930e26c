# SPDX-License-Identifier: Apache-2.0
"""Preference and quality sets by one name: a file, LAYOUT:FOLDER, or a generated set of the shapes world."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from visalign.data.shapes.preferences import ShapesPreferences
from visalign.errors import UserError, suggestion

from .columns import Columns, coding_of, plain_row, renamed
from .image_references import shapes_reference
from .layouts import PAIR_LAYOUTS, QUALITY_LAYOUTS, load_layout, load_quality_layout
from .records import (
    PreferencePair,
    PreferenceSet,
    QualityRecord,
    QualitySet,
    pair_from_row,
    quality_from_row,
    truth,
)
from .tables import Row, read_rows, require_columns

GENERATED = ("shapes:pairs", "shapes:quality")
SHAPES_PAIRS = 400
"""How many pairs or rated images a generated set has where no limit is given."""


def load_source(
    source: str, *, split: str | None = None, limit: int | None = None, columns: Columns | None = None
) -> PreferenceSet | QualitySet:
    """A preference or quality set, at most `limit` records, unchecked (`visalign.data.sets.checks`).

    Args:
        source: A JSONL, JSON, CSV, TSV or Parquet file (`image_left` in it makes it a preference set, `mos` a
            quality set); LAYOUT:FOLDER with a key of `PAIR_LAYOUTS` or `QUALITY_LAYOUTS`; or "shapes:pairs",
            "shapes:quality".
        split: Which split; None means "test" for a layout of pairs, "heldout" for a generated set, and all of
            a file.
        limit: Of the records.
        columns: How the columns of a file are read, where they have other names or labels.
    """
    is_file = source not in GENERATED and source.partition(":")[0] not in (*PAIR_LAYOUTS, *QUALITY_LAYOUTS)
    if columns is not None and (columns.names or columns.labels) and not is_file:
        raise UserError(f"--map and --labels are for tables, and '{source}' has a layout of its own.")
    if source in GENERATED:
        number = SHAPES_PAIRS if limit is None else limit
        make = shapes_pairs if source == GENERATED[0] else shapes_quality
        return make(number, split=split or "heldout")
    layout, colon, place = source.partition(":")
    if layout in PAIR_LAYOUTS and colon:
        return load_layout(layout, place, split=split or "test", limit=limit)
    if layout in QUALITY_LAYOUTS and colon:
        return load_quality_layout(layout, place, split=split, limit=limit)
    known = (*PAIR_LAYOUTS, *QUALITY_LAYOUTS)
    if not Path(source).exists():
        raise UserError(
            f"There is no set '{source}': it is no file. "
            f"{suggestion(layout, (*known, *GENERATED))}Allowed: a file, {', '.join(GENERATED)}, or "
            f"LAYOUT:FOLDER with LAYOUT one of {', '.join(known)}."
        )
    if Path(source).is_dir():
        raise UserError(
            f"'{source}' is a folder; say whose layout it has, as LAYOUT:{source} with LAYOUT one of "
            f"{', '.join(known)}."
        )
    return _from_file(source, split, limit, columns or Columns())


def _from_file(
    source: str, split: str | None, limit: int | None, columns: Columns
) -> PreferenceSet | QualitySet:
    for _, given in read_rows(source):
        row = renamed(source, given, columns.names)
        if "image_left" not in row and "image_right" not in row and ("mos" in row or "image" in row):
            return load_quality(source, split=split, limit=limit, columns=columns)
        if columns.missing(row, _PAIR[2]):
            require_columns(source, row, _PAIR[2], purpose="a preference set (a quality set: image, mos)")
        return load_preferences(source, split=split, limit=limit, columns=columns)
    raise UserError(f"'{source}' holds no record.")


def load_preferences(
    path: str | Path, *, split: str | None = None, limit: int | None = None, columns: Columns | None = None
) -> PreferenceSet:
    """Read a preference set from a JSONL, JSON, CSV, TSV or Parquet file: one split or all, at most `limit`
    pairs.

    Columns: `prompt`, `image_left`, `image_right`, and what was said: `label` (left, right, tie; A, B; 1 and
    2; 1, 0 and -1; or the share for the left image, 0 to 1), `margin` (above 0 for the left image), or
    `votes` [left, right, tie], or `votes_left`, `votes_right` (counts, or shares of the votes) and
    perhaps `votes_tie`. Optional: `annotator` (a row per annotator: `visalign.data.sets.checks.summed_votes`
    makes one record of a pair's rows), `generator_left` and `generator_right` (or `model_left`,
    `model_right`), `resolution`, `category`, `split`, `prompt_id`. All others are kept in `extra`. Relative
    image paths are taken from the file's folder.
    `visalign.data.sets.checks` says what is odd.

    Raises:
        UserError: Missing file or columns, a row that cannot be read (named by its number), a label that
            contradicts the votes of its row, no such split, or no pair.
    """
    folder = Path(path).parent
    wanted, place = columns or Columns(), folder if columns is None or columns.has_images else None
    pairs, rows = _load(path, split, limit, _PAIR, lambda row: pair_from_row(row, folder=place), wanted)
    return PreferenceSet(name=Path(path).stem, pairs=tuple(pairs), rows=rows)


def load_quality(
    path: str | Path, *, split: str | None = None, limit: int | None = None, columns: Columns | None = None
) -> QualitySet:
    """Read a quality set, as `load_preferences` reads pairs; rows with different directions are refused.

    Columns: `image`, `mos`; optional `std`, `prompt`, `generator`, `resolution`, `category`, `split`,
    `reference`, and `higher_is_better` (equal in all rows; true where it is absent). Others are kept in
    `extra`.
    """
    folder = Path(path).parent
    better: list[bool] = []

    def read(row: Row) -> QualityRecord:
        better.append(truth(row.get("higher_is_better", True)))
        return quality_from_row(row, folder=folder)

    records, rows = _load(path, split, limit, _SCORED, read, columns or Columns())
    if len(set(better)) > 1:
        raise UserError(
            f"'{path}' mixes directions: higher_is_better is true in row {rows[better.index(True)]} and "
            f"false in row {rows[better.index(False)]}. Put scores of different directions into different "
            "files, or turn one sign."
        )
    return QualitySet(name=Path(path).stem, records=tuple(records), higher_is_better=better[0], rows=rows)


_PAIR = ("pair", "a preference set", ("prompt", "image_left", "image_right"))
_SCORED = ("image", "a quality set", ("image", "mos"))


def _load(
    path: str | Path,
    split: str | None,
    limit: int | None,
    kind: tuple[str, str, tuple[str, ...]],
    read: Callable[[Row], Any],
    columns: Columns,
) -> tuple[list[Any], tuple[int, ...]]:
    """(records, their rows) of a file; what is wrong in a row is said with its number."""
    chosen, splits = [], set()
    what, purpose, needed = kind
    for number, given in read_rows(path):
        row = renamed(path, given, columns.names)
        if not splits and (columns.missing(row, needed) or len(row) == 1):
            require_columns(path, row, needed, purpose=purpose)
        splits.add(row.get("split"))
        if split is not None and row.get("split") != split:
            continue
        chosen.append((number, row))
        if limit is not None and len(chosen) >= limit:
            break
    found, rows, coding = [], [], coding_of(chosen, columns, path)
    for number, row in chosen:
        try:
            found.append(read(plain_row(number, row, coding, columns)))
        except UserError as error:
            raise UserError(f"Row {number} of '{path}': {error}") from error
        rows.append(number)
    if not found and split is None:
        raise UserError(f"'{path}' holds no {what}.")
    if not found:
        names = ", ".join(sorted(str(name) for name in splits if name is not None)) or "none at all"
        raise UserError(f"'{path}' holds no {what} of the split '{split}'. Splits in it: {names}.")
    return found, tuple(rows)


def from_dataframe(
    frame: Any, *, name: str = "frame", folder: str | Path = ".", columns: Columns | None = None
) -> PreferenceSet | QualitySet:
    """A set from a pandas data frame, or any with `to_dict("records")`, read as a file with these columns.

    Args:
        frame: Columns as `load_preferences` or `load_quality` reads them.
        name: Of the set.
        folder: Where relative paths of images start.
        columns: How the columns are read, where they have other names or labels.
    """
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / f"{name}.jsonl"
        rows = ({key: _plain(value) for key, value in row.items()} for row in frame.to_dict("records"))
        kept = ({str(key): value for key, value in row.items() if value is not None} for row in rows)
        path.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")
        found = load_source(str(path), columns=columns)
        return _moved(found, path.parent, Path(folder))


def _plain(value: Any) -> Any:
    """A cell as JSON has it: NaN and NaT are no value, numpy's numbers and arrays are Python's."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return None if value is None or value != value else value


def _moved(found: Any, old: Path, new: Path) -> Any:
    """A set whose images lie below another folder."""

    def place(reference: str) -> str:
        inside = Path(reference).is_relative_to(old)
        return str(new / Path(reference).relative_to(old)) if inside else reference

    if isinstance(found, QualitySet):
        records = tuple(replace(record, image=place(record.image)) for record in found.records)
        return replace(found, records=records)
    sides = ("image_left", "image_right")
    pairs = (replace(p, **{side: place(getattr(p, side)) for side in sides}) for p in found.pairs)
    return replace(found, pairs=tuple(pairs))


def to_dataframe(source: PreferenceSet | QualitySet) -> Any:
    """A set as a pandas data frame, a row per record, that `from_dataframe` reads back equal."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise UserError("A data frame needs pandas: python -m pip install 'visalign[dataframe]'.") from error
    records = source.pairs if isinstance(source, PreferenceSet) else source.records
    return pandas.DataFrame([record.to_row() for record in records])


def write_rows(path: str | Path, records: Iterable[PreferencePair | QualityRecord]) -> Path:
    """Write a set as JSONL, one record per line; a file that exists is refused, missing folders are made."""
    place = Path(path)
    if place.exists():
        raise UserError(f"'{place}' exists, and nothing is overwritten. Give another name or remove it.")
    place.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(record.to_row(), ensure_ascii=False, allow_nan=False) for record in records)
    place.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return place


def shapes_pairs(count: int, *, seed: int = 0, split: str = "heldout") -> PreferenceSet:
    """Pairs of the shapes world ("train" or "heldout") with votes; an image is drawn when it is asked for.

    The generators are the styles in which the scenes are drawn; `extra` has the true utilities, what the pair
    differs in, GenEval's record for verifiers, and a teacher's reason.
    """
    source = ShapesPreferences(seed, split=split)
    pairs = []
    for number in range(count):
        pair = source.pair(number)
        left, right = pair.votes
        pairs.append(
            PreferencePair(
                prompt=pair.prompt,
                image_left=shapes_reference(split, seed, "pair", number, "left"),
                image_right=shapes_reference(split, seed, "pair", number, "right"),
                label=left / (left + right),
                votes=(left, right, 0),
                generator_left=pair.left.style,
                generator_right=pair.right.style,
                category=pair.record["tag"],
                split=split,
                extra={
                    "kind": pair.kind,
                    "utility_left": pair.utility[0],
                    "utility_right": pair.utility[1],
                    "prob": pair.prob,
                    "record": pair.record,
                    "reason": pair.reason,
                },
            )
        )
    return PreferenceSet(name="shapes-pairs", pairs=tuple(pairs))


def shapes_quality(count: int, *, seed: int = 0, split: str = "heldout") -> QualitySet:
    """Rated images of the shapes world, "train" or "heldout"."""
    source = ShapesPreferences(seed, split=split)
    records = []
    for number in range(count):
        rated = source.quality(number)
        records.append(
            QualityRecord(
                image=shapes_reference(split, seed, "quality", number),
                mos=rated.mos,
                std=rated.std,
                generator=rated.scene.style,
                category=rated.scene.distortion.kind,
                split=split,
            )
        )
    return QualitySet(name="shapes-quality", records=tuple(records))
