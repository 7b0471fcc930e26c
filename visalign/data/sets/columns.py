# SPDX-License-Identifier: Apache-2.0
"""Rows of users' tables as records: renamed columns, words and codes for labels, votes, margins."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from visalign.errors import UserError, suggestion

from .records import PreferencePair, QualityRecord
from .tables import Row

SIDES = {"left": 1.0, "right": 0.0, "tie": 0.5}
"""Words for a label."""
CODINGS = ("share", "margin")
"""Numeric label columns: the share for the left image, 0 to 1; or a number whose sign names the winner."""
MORE_SIDES = {
    **SIDES,
    **{"a": 1.0, "b": 0.0, "first": 1.0, "second": 0.0, "image_left": 1.0, "image_right": 0.0},
    **{"l": 1.0, "r": 0.0, "draw": 0.5, "equal": 0.5, "same": 0.5, "neither": 0.5, "both": 0.5, "none": 0.5},
}
"""Words that need no coding."""
NUMBER_CODES = ({"1": 1.0, "2": 0.0}, {"1": 1.0, "0": 0.5, "-1": 0.0})
"""Codes recognised from a whole column of numbers that are not all shares; a warning reports the reading."""
IMAGES = ("image", "image_left", "image_right")

Coding = Mapping[str, float] | str | None
"""Word -> share for the left image, one of `CODINGS`, or None for words and shares."""

_VOTES = ("votes_left", "votes_right", "votes_tie")
_PAIR_COLUMNS = ("prompt", "image_left", "image_right", "label", "votes", "ballots", *_VOTES)
_QUALITY_COLUMNS = ("image", "mos", "std", "prompt", "higher_is_better")
_REQUIRED = (*IMAGES, "prompt", "mos", "label")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Options of reading a table's columns."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Our name -> the table's."""
    labels: str | None = None
    """One of `CODINGS`, or words with their sides, "1=left,2=right,0=tie"; None recognises common codes."""
    has_images: bool = True
    """False where scores are read from columns and no image is opened: rows may then name none."""

    def missing(self, row: Row, needed: Iterable[str]) -> list[str]:
        """List the needed columns that a renamed row lacks."""
        optional = () if self.has_images else (*IMAGES, "prompt")
        return [name for name in needed if name not in row and name not in optional]


def parse_map(items: Sequence[str]) -> dict[str, str]:
    """Parse `OURS=THEIRS` items into {ours: theirs}.

    >>> parse_map(["mos=score", "image=file name"])
    {'mos': 'score', 'image': 'file name'}
    """
    names: dict[str, str] = {}
    for item in items:
        ours, sign, theirs = item.partition("=")
        if not sign or not ours or not theirs:
            raise UserError(f"--map is {item!r}; write OURS=THEIRS, e.g. --map mos=score.")
        if ours in names:
            raise UserError(f"--map names {ours!r} twice: {names[ours]!r} and {theirs!r}. Name it once.")
        names[ours] = theirs
    return names


def rename_columns(path: Any, row: Row, names: Mapping[str, str]) -> Row:
    """Rename a row's columns to ours; other columns stay."""
    for ours, theirs in names.items():
        if theirs not in row and ours in _REQUIRED:
            raise UserError(
                f"'{path}' has no column {theirs!r}, which --map {ours}={theirs} names. "
                f"{suggestion(theirs, row)}Found: {', '.join(row) or 'none'}."
            )
    unnamed = {name: value for name, value in row.items() if name not in names.values()}
    return unnamed | {ours: row[theirs] for ours, theirs in names.items() if theirs in row}


def label_coding(rows: Sequence[tuple[int, Row]], columns: Columns, path: Any) -> Coding:
    """Find out what the labels of a whole column mean, where single labels do not show it."""
    if columns.labels in CODINGS:
        return columns.labels
    if columns.labels is not None:
        return _parse_coding(columns.labels)
    labels = {number: _word(row["label"]) for number, row in rows if "label" in row}
    words = set(labels.values())
    for codes in NUMBER_CODES:
        if len(words) > 1 and words <= set(codes) and words & {"2", "-1"}:
            sides = {value: name for name, value in SIDES.items()}
            reading = ", ".join(f"{word} = {sides[share]}" for word, share in codes.items())
            warnings.warn(
                f"The labels of '{path}' are {', '.join(sorted(words))} and are read as {reading}. Use "
                "--labels if they mean something else.",
                stacklevel=2,
            )
            return codes
    if not all(_is_number(word) for word in words):
        return None
    for number, row in rows:
        if number in labels and not 0 <= float(labels[number]) <= 1:
            raise UserError(
                f"Row {number} of '{path}': a label is the share in favour of the left image, 0 to 1 (or "
                f"left, right, tie); got {row['label']}. Say what the labels mean: --labels margin (above 0 "
                "for left), or each with its side, --labels 0=left,1=right,2=tie."
            )
    return None


def fill_images(number: int, row: Row) -> Row:
    """Name the images of a row by its number, where no image is opened and the table names none."""
    if "mos" in row:
        return {"image": f"row {number}"} | row
    prompt = str(row.get("prompt_id", f"row {number}"))
    return {"prompt": prompt} | {f"image_{s}": f"row {number}, {s}" for s in ("left", "right")} | row


def read_pair(row: Row, coding: Coding = None, folder: Path | None = None) -> PreferencePair:
    """Read one pair from the columns that `load_preferences` names; numbers may be strings, as CSV has them.

    Relative image paths start at the folder; None leaves them as they are.
    """
    votes, share = _read_votes(row)
    label = share
    if "label" in row:
        label = _read_label(row["label"], coding)
    elif share is None and "margin" in row:
        label = _sign(row["margin"])
    if label is None:
        raise UserError(f"neither 'label' nor votes ({', '.join(_VOTES)}) in it. Found: {', '.join(row)}.")
    if votes is not None and share is not None and (label - 0.5) * (share - 0.5) < 0:
        raise UserError(
            f"the label {label:g} contradicts the votes {votes} (left, right, tie), whose share for the left "
            f"image is {share:.3g}."
        )
    return PreferencePair(
        prompt=_read_text(row, "prompt"),
        image_left=_image_path(row, "image_left", folder),
        image_right=_image_path(row, "image_right", folder),
        label=label,
        votes=votes,
        ballots=_read_ballots(row.get("ballots")),
        **_other_fields(PreferencePair, _with_generators(row), _PAIR_COLUMNS),
    )


def read_quality(row: Row, folder: Path | None = None) -> QualityRecord:
    """Read one scored image from the columns that `load_quality` names, as `read_pair` reads a pair."""
    return QualityRecord(
        image=_image_path(row, "image", folder),
        mos=_read_number(row, "mos"),
        std=None if row.get("std") is None else _read_number(row, "std"),
        prompt=str(row.get("prompt", "")),
        **_other_fields(QualityRecord, row, _QUALITY_COLUMNS),
    )


def parse_bool(value: Any) -> bool | None:
    """Read a truth value as files write it: true, false, 1, 0; None for anything else."""
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())


def _parse_coding(text: str) -> dict[str, float]:
    shares = {}
    for item in text.split(","):
        word, sign, side = item.partition("=")
        if not sign or side.strip().lower() not in SIDES:
            raise UserError(
                f"--labels is {text!r}; write {' or '.join(CODINGS)}, or words with their sides "
                f"({', '.join(SIDES)}), such as 1=left,2=right,0=tie."
            )
        shares[_word(word)] = SIDES[side.strip().lower()]
    return shares


def _word(value: Any) -> str:
    """Write a label as a lower-case word; whole numbers lose their decimals."""
    text = str(value).strip().lower()
    return str(int(float(text))) if _is_number(text) and float(text).is_integer() else text


def _is_number(text: Any) -> bool:
    try:
        return math.isfinite(float(text))
    except (TypeError, ValueError):
        return False


def _read_label(value: Any, coding: Coding) -> float:
    if coding == "margin":
        return _sign(value)
    shares = coding if isinstance(coding, Mapping) else MORE_SIDES
    if (word := _word(value)) in shares:
        return shares[word]
    if isinstance(coding, Mapping):
        raise UserError(f"the label {value!r} has no side; --labels names {', '.join(coding)}.")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(
            f"the label {value!r} is neither {', '.join(SIDES)} nor a number 0 to 1 (the share for the left "
            "image)."
        ) from None


def _sign(value: Any) -> float:
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if math.isnan(margin):
        raise UserError(f"the margin is {value!r}, needed is a number: above 0 for the left image.")
    return 0.5 if margin == 0 else float(margin > 0)


def _read_votes(row: Row) -> tuple[tuple[int, int, int] | None, float | None]:
    """Read (counts, share for the left image); shares or weights of votes give no counts."""
    votes: Any = row.get("votes")
    if in_columns := votes is None and ("votes_left" in row or "votes_right" in row):
        votes = [row.get(name, 0) for name in _VOTES]
    if votes is None:
        return None, None
    try:
        numbers = [float(count) for count in (json.loads(votes) if isinstance(votes, str) else votes)]
        left, right, tie = numbers if len(numbers) == 3 else (*numbers, 0.0)
        total = left + right + tie
        share = (left + tie / 2) / total if total > 0 else 0.5
        if all(count.is_integer() for count in numbers):
            return (int(left), int(right), int(tie)), share
        if not in_columns or min(numbers) < 0 or not total < math.inf:
            raise ValueError
    except (TypeError, ValueError):
        raise UserError(
            f"votes must be whole counts [left, right] or [left, right, tie]; got {votes!r}."
        ) from None
    return None, share


def _read_ballots(value: Any) -> tuple[tuple[str, float], ...]:
    """Read the ballots that `PreferencePair.to_row` writes, also as JSON text."""
    try:
        entries = json.loads(value) if isinstance(value, str) else value or ()
        ballots = tuple((str(name), float(label)) for name, label in entries)
        if all(0 <= label <= 1 for _, label in ballots):
            return ballots
    except (TypeError, ValueError):
        pass
    raise UserError(f"ballots must be pairs [annotator, share for the left, 0 to 1]; got {value!r}.")


def _with_generators(row: Row) -> Row:
    """Take model_left and model_right as generators, unless they are numbers: scores of a reward "model"."""
    names = {f"model_{side}": f"generator_{side}" for side in ("left", "right")}
    models = [row[name] for name in names if row.get(name) is not None]
    if set(names.values()) & set(row) or all(_is_number(model) for model in models):
        return row
    return {names.get(name, name): value for name, value in row.items()}


def _other_fields(record: type, row: Row, read: Collection[str]) -> dict[str, Any]:
    """Read the remaining fields of a record as texts, and all unknown columns as `extra`."""
    texts = [field.name for field in fields(record) if field.name not in (*read, "extra")]
    extra = {name: value for name, value in row.items() if name not in (*read, *texts)}
    return {"extra": extra, **{name: str(row[name]) for name in texts if row.get(name) is not None}}


def _read_text(row: Row, name: str) -> str:
    value = row.get(name)
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str) or not value:
        raise UserError(f"'{name}' is {'missing' if value is None else repr(value)}, needed is a text.")
    return value


def _read_number(row: Row, name: str) -> float:
    if not _is_number(row.get(name)):
        raise UserError(f"'{name}' is {row.get(name)!r}, needed is a finite number.")
    return float(row[name])


def _image_path(row: Row, name: str, folder: Path | None) -> str:
    reference = _read_text(row, name)
    if folder is None or Path(reference).is_absolute() or "://" in reference:
        return reference
    return str(folder / reference)
