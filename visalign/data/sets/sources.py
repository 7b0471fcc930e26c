# SPDX-License-Identifier: Apache-2.0
"""Preference and quality sets by one name: a file, LAYOUT:FOLDER, or a generated set of the shapes world."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast

from visalign.data.shapes.preferences import ShapesPreferences
from visalign.data.text_tasks.tasks import heldout_tasks, text_tasks, wrong_solutions
from visalign.errors import UserError, suggestion

from .columns import (
    Columns,
    fill_images,
    names_of_rows,
    parse_bool,
    read_pair,
    read_quality,
    read_table,
    rename_columns,
)
from .hub_datasets import FORMS, find_table
from .image_references import TEXT, shapes_reference
from .layouts import PAIR_LAYOUTS, QUALITY_LAYOUTS, load_layout
from .prompt_files import demonstrations_jsonl
from .ratings import mean_ratings
from .records import PreferencePair, PreferenceSet, QualityRecord, QualitySet
from .tables import Row, listed, require_columns, select_split
from .text_rows import refer_to_texts

GENERATED = ("shapes:pairs", "shapes:quality")
CAPTIONED = "shapes:images"  # Generated images with their prompts, of `shapes_images`
TASK_PAIRS = "tasks:pairs"  # Completions: the solution of each packaged task, and that of another
SHAPES_PAIRS = 400  # Default number of pairs or rated images of a generated set
MOST_GENERATED = 100_000  # Largest number of them: all are drawn before the first is judged
_NEEDED = {"pairs": ("prompt", "image_left", "image_right"), "quality": ("image", "mos")}

_VOTES = {"votes", "votes_left", "votes_right"}  # Columns that may stand for the label
Kind = Literal["pairs", "quality"]


def load_source(
    source: str, *, split: str | None = None, limit: int | None = None, columns: Columns | None = None
) -> PreferenceSet | QualitySet:
    """Load a preference or quality set, at most `limit` records, unchecked (`visalign.data.sets.checks`).

    `source` is a table (`visalign.data.sets.tables.READERS`; `image_left` in it makes it a preference set, `mos` a
    quality set), whose `columns` may have other names or labels; a dataset of the hub (`find_table`); LAYOUT:FOLDER
    with a key of `PAIR_LAYOUTS` or `QUALITY_LAYOUTS`; or "shapes:pairs", "shapes:quality". A `split` of None means
    "test" for a layout of pairs, "heldout" for a generated set, and all of a file.
    """
    layout, _, path = source.partition(":")
    layouts = (*PAIR_LAYOUTS, *QUALITY_LAYOUTS)
    has_layout = is_named_set(source)
    if has_layout and columns is not None and (columns.names or columns.labels):
        raise UserError(f"--map, --labels and --scores NAME=COLUMN are for tables; '{source}' has its own layout.")
    if source in GENERATED:
        generate = shapes_pairs if source == GENERATED[0] else shapes_quality
        return generate(SHAPES_PAIRS if limit is None else limit, split=split or "heldout")
    if source == TASK_PAIRS:
        return task_pairs(limit, split=split or "heldout")
    if has_layout:
        return load_layout(layout, path, split=split, limit=limit)
    table = find_table(source)
    if not table.is_file():
        raise UserError(
            f"There is no set '{source}'. {suggestion(layout, (*layouts, *GENERATED))}Allowed: a file, {FORMS}, "
            f"{', '.join(GENERATED)}, or LAYOUT:FOLDER with LAYOUT one of {', '.join(layouts)}."
        )
    return _read_file(table, None, split, limit, columns)


def is_named_set(source: str) -> bool:
    """Return whether a source is LAYOUT:FOLDER or generated, and no file or folder."""
    layout, colon, _ = source.partition(":")
    return source in (*GENERATED, TASK_PAIRS) or (bool(colon) and layout in {*PAIR_LAYOUTS, *QUALITY_LAYOUTS})


def load_preferences(
    path: str | Path, *, split: str | None = None, limit: int | None = None, columns: Columns | None = None
) -> PreferenceSet:
    """Read a preference set from a JSONL, JSON, CSV, TSV or Parquet file, at most `limit` pairs of a split.

    Columns: `prompt`, `image_left`, `image_right`, and the preference: `label` (left, right, tie; A, B; or
    the share for the left image, 0 to 1; others as `Columns.labels` says), or counts of votes, `votes` [left,
    right, tie] or `votes_left`, `votes_right` and perhaps `votes_tie`; next to votes the label wins, and votes for
    another side are not learnt from.
    Optional: `annotator` (a row per annotator: `visalign.data.sets.checks.summed_votes` makes one record of a
    pair's rows), `generator_left` and `generator_right`, `resolution`, `category`, `split`, `prompt_id`. All
    others are kept in `extra`. Relative image paths are taken from the file's folder.
    """
    return cast("PreferenceSet", _read_file(path, "pairs", split, limit, columns))


def load_quality(
    path: str | Path, *, split: str | None = None, limit: int | None = None, columns: Columns | None = None
) -> QualitySet:
    """Read a quality set, as `load_preferences` reads pairs; rows with different directions are refused.

    Columns: `image`, `mos`; optional `std`, `prompt`, `generator`, `resolution`, `category`, `split`, `reference`,
    `annotator` (a row per rating, of which an image's mean counts), and `higher_is_better` (equal in all rows; true
    where it is absent). Others are kept in `extra`.
    """
    return cast("QualitySet", _read_file(path, "quality", split, limit, columns))


def from_dataframe(
    frame: Any, *, name: str = "frame", folder: str | Path = ".", columns: Columns | None = None
) -> PreferenceSet | QualitySet:
    """Read a set from a pandas data frame, or any with `to_dict("records")`, as a file with these columns.

    Relative paths of images start at the folder.
    """

    def plain(cell: Any) -> Any:
        value = cell.tolist() if hasattr(cell, "tolist") else cell
        return None if value is None or value != value else value  # NaN and NaT are missing

    rows = ({str(key): plain(cell) for key, cell in row.items()} for row in frame.to_dict("records"))
    columns = columns or Columns()
    rows_with_names = names_of_rows(enumerate(rows, 1), columns.names, is_judged=True)
    renamed = ((number, rename_columns(name, row, names)) for number, row, names in rows_with_names)
    filled = ((number, {key: cell for key, cell in row.items() if cell is not None}) for number, row in renamed)
    return _read_set(Path(folder) / name, name, filled, None, columns)


def to_dataframe(source: PreferenceSet | QualitySet) -> Any:
    """Convert a set to a pandas data frame, a row per record, that `from_dataframe` reads back equal."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise UserError("A data frame needs pandas: python -m pip install 'visalign[dataframe]'.") from error
    records = source.pairs if isinstance(source, PreferenceSet) else source.records
    return pandas.DataFrame([record.to_row() for record in records])


def write_rows(path: str | Path, records: Iterable[PreferencePair | QualityRecord]) -> Path:
    """Write a set as JSONL; an existing file is refused, missing folders are created."""
    path = Path(path)
    if path.exists():
        raise UserError(f"'{path}' exists, and nothing is overwritten. Give another name or remove it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(demonstrations_jsonl(record.to_row() for record in records))
    return path


def _read_file(
    path: str | Path, kind: Kind | None, split: str | None, limit: int | None, columns: Columns | None
) -> PreferenceSet | QualitySet:
    columns = columns or Columns()
    rows = read_table(path, columns.names, is_judged=True)
    return _read_set(Path(path), Path(path).stem, rows, kind, columns, split=split, limit=limit)


def _read_set(
    path: Path,
    name: str,
    rows: Iterator[tuple[int, Row]],
    kind: Kind | None,
    columns: Columns,
    *,
    split: str | None = None,
    limit: int | None = None,
) -> PreferenceSet | QualitySet:
    """Read numbered rows with our column names; the columns tell the kind None."""
    number, first = next(rows, (0, {}))
    purpose = "a quality set" if kind == "quality" else "a preference set"
    if kind is None:
        is_pair = "image_left" in first or "image_right" in first
        kind = "quality" if not is_pair and ("mos" in first or "image" in first) else "pairs"
        purpose = "a quality set" if kind == "quality" else "a preference set (a quality set: image, mos)"
    needed = _NEEDED[kind] if kind == "quality" or _VOTES & first.keys() else (*_NEEDED[kind], "label")
    if kind == "quality":  # a mapped column is there, and a cell may be empty
        needed = tuple(name for name in needed if name not in columns.names)
    if number and (columns.missing(first, needed) or len(first) == 1):
        missing = next((name for name in needed if name not in first), "")
        purpose = f"{purpose}; --map {missing}=COLUMN names another"
        require_columns(path, first, needed, purpose=purpose)
    selected = select_split(f"'{path}'", chain([(number, first)] if number else [], rows), split, limit)
    folder, coding = path.parent if columns.has_images else None, columns.coding()
    records: list[Any] = []
    for number, row in selected:
        filled = row if columns.has_images else fill_images(number, row)
        try:
            if kind == "pairs":
                records.append(read_pair(filled, coding, folder, needs_prompt=columns.needs_prompt))
            else:
                records.append(read_quality(filled, folder))
        except UserError as error:
            raise UserError(f"Row {number} of '{path}': {error}") from error
    numbers = tuple(number for number, _ in selected)
    if kind == "pairs":
        return PreferenceSet(name=name, pairs=tuple(records), rows=numbers)
    directions = {parse_bool(row.get("higher_is_better", True)) for _, row in selected}
    if len(directions) > 1 or None in directions:
        raise UserError(f"'{path}': higher_is_better must be true or false, and the same in all rows.")
    return mean_ratings(
        QualitySet(name=name, records=tuple(records), higher_is_better=True in directions, rows=numbers)
    )


def join_scores(source: PreferenceSet | QualitySet, *paths: str | Path) -> PreferenceSet | QualitySet:
    """Add the scores of other tables to a set, image by image; no existing column is replaced, the first table counts.

    A table is what `visalign score` writes (image, reward, value), or has a column per score. Images match by path, or
    by a file name that one image of the table and one of the set has. Of an image scored for several prompts the
    scores of the record's own count. Pairs get NAME_left and NAME_right, images NAME.
    """
    is_pairs = isinstance(source, PreferenceSet)
    ends = {"image_left": "_left", "image_right": "_right"} if is_pairs else {"image": ""}
    records: list[Any] = list(source.pairs if is_pairs else source.records)
    images = {getattr(record, side) for record in records for side in ends}
    same_name = Counter(Path(image).name for image in images)
    joined: list[Row] = [{} for _ in records]
    names: dict[str, None] = {}
    for path in paths:
        scores, full_paths = _scores_by_image(Path(path))
        by_name: dict[str, list[str]] = {}
        for image in scores:
            by_name.setdefault(Path(image).name, []).append(image)
        matches: dict[str, dict[str, Row]] = {}
        for image in images:
            of_name = by_name.get(Path(image).name, []) if same_name[Path(image).name] == 1 else []
            options = [full_paths.get(image, "")]
            if not image.startswith(TEXT):
                options += [str(Path(image).resolve()), *of_name[: len(of_name) == 1]]
            matches[image] = next((scores[option] for option in options if option in scores), {})
        if not any(matches.values()):
            raise UserError(
                f"None of the images of '{source.name}' is in '{path}'. It names {listed(list(full_paths), limit=2)}. "
                "Images match by path, or by a file name that one image of each has."
            )
        for record, columns in zip(records, joined, strict=True):
            for side, end in ends.items():
                prompts = matches[getattr(record, side)]
                only = next(iter(prompts.values())) if len(prompts) == 1 else {}
                values = prompts.get("", {}) | prompts.get(record.prompt, only)
                names |= dict.fromkeys(name for name in values if not name.endswith("_std"))
                columns |= {f"{name}{end}": v for name, v in values.items() if f"{name}{end}" not in columns}
    counts = {name: sum(all(f"{name}{end}" in row for end in ends.values()) for row in joined) for name in names}
    if incomplete := [f"{name} for {count}" for name, count in counts.items() if count < len(records)]:
        message = f"Of {len(records)} records of '{source.name}' the joined tables have {listed(incomplete)}"
        warnings.warn(f"{message}; the others count as failed.", stacklevel=2)
    records = [replace(r, extra=columns | dict(r.extra)) for r, columns in zip(records, joined, strict=True)]
    return replace(source, **{"pairs" if is_pairs else "records": tuple(records)})


def _scores_by_image(path: Path) -> tuple[dict[str, dict[str, Row]], dict[str, str]]:
    """Read (full path of an image -> prompt -> its scores, path as the table writes it -> full path)."""
    scores: dict[str, dict[str, Row]] = {}
    full_paths: dict[str, str] = {}
    for _, row in read_table(path, {}):
        require_columns(path, row, ("image",), purpose="a table of scores")
        image = str(row["image"])
        full_paths[image] = image if image.startswith(TEXT) else str((path.parent / image).resolve())
        columns = scores.setdefault(full_paths[image], {}).setdefault(str(row.get("prompt", "")), {})
        if "reward" in row and ("value" in row or "reason" in row):
            columns[str(row["reward"])] = row.get("value")
            if row.get("std") is not None:
                columns[f"{row['reward']}_std"] = row["std"]
        else:
            columns |= {name: value for name, value in row.items() if name not in ("image", "prompt")}
    return scores, full_paths


def lower_rewards(rows: Iterable[Row]) -> set[str]:
    """Name the rewards of which lower is better in rows that `visalign score` wrote."""
    return {str(row["reward"]) for row in rows if "reward" in row and parse_bool(row.get("higher_is_better")) is False}


def _generator(count: int, seed: int, split: str) -> ShapesPreferences:
    if count > MOST_GENERATED:
        raise UserError(f"A generated set has at most {MOST_GENERATED} records; got {count}. Give a smaller number.")
    return ShapesPreferences(seed, split=split)


def shapes_pairs(count: int, *, seed: int = 0, split: str = "heldout") -> PreferenceSet:
    """Generate voted pairs of the shapes world; images are drawn when they are opened.

    `extra` has the true utilities, the kind of difference, GenEval's record, and a teacher's reason.
    """
    source = _generator(count, seed, split)
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
                extra={name: getattr(pair, name) for name in ("kind", "prob", "record", "reason")}
                | dict(zip(("utility_left", "utility_right"), pair.utility, strict=True)),
            )
        )
    return PreferenceSet(name="shapes-pairs", pairs=tuple(pairs))


def task_pairs(count: int | None = None, *, split: str = "heldout") -> PreferenceSet:
    """Pair the solutions of packaged text tasks with others; of the held-out ones all where no count is given."""
    tasks = heldout_tasks() if count is None else text_tasks(count, split=split)  # type: ignore[arg-type]
    pairs = wrong_solutions(tasks)
    rows = [refer_to_texts({**task, "category": task["task"], "rejected": wrong}) for task, wrong in pairs]
    return PreferenceSet(name="task-pairs", pairs=tuple(map(read_pair, rows)))


def shapes_images(count: int = 2000, *, seed: int = 0, split: str = "train") -> list[tuple[str, str]]:
    """Generate (reference, prompt) of images of the shapes world that satisfy their prompts."""
    source = _generator(count, seed, split)
    prompts = (source.image(number)[0]["prompt"] for number in range(count))
    return [(shapes_reference(split, seed, "image", number), prompt) for number, prompt in enumerate(prompts)]


def shapes_quality(count: int, *, seed: int = 0, split: str = "heldout") -> QualitySet:
    """Generate rated images of the shapes world, "train" or "heldout"."""
    source = _generator(count, seed, split)
    records = (
        QualityRecord(
            image=shapes_reference(split, seed, "quality", number),
            mos=rated.mos,
            std=rated.std,
            generator=rated.scene.style,
            category=rated.scene.distortion.kind,
            split=split,
        )
        for number, rated in enumerate(map(source.quality, range(count)))
    )
    return QualitySet(name="shapes-quality", records=tuple(records))
