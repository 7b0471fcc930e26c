# SPDX-License-Identifier: Apache-2.0
"""One row of a table as a preference pair or a scored image: what each column may hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from visalign.errors import UserError

from .records import PAIR_FIELDS, QUALITY_FIELDS, PreferencePair, QualityRecord
from .tables import Row

SIDES = {"left": 1.0, "right": 0.0, "tie": 0.5}
"""Words for a label."""

_VOTE_COLUMNS = ("votes_left", "votes_right", "votes_tie")


def pair_from_row(row: Row, *, folder: Path | None = None) -> PreferencePair:
    """One pair from the columns that `load_preferences` names.

    Args:
        row: Column -> value; numbers may be strings, as CSV has them.
        folder: Where relative image paths start; None leaves them as they are.

    Raises:
        UserError: A column is missing or cannot be read, or label and votes contradict one another.
    """
    votes = _votes(row)
    if "label" not in row and votes is None:
        raise UserError(
            f"neither 'label' nor votes ({', '.join(_VOTE_COLUMNS)}) in it. Found: {', '.join(row)}."
        )
    from_votes = None if votes is None else (votes[0] + votes[2] / 2) / max(sum(votes), 1)
    label = from_votes if "label" not in row else _label(row["label"])
    assert label is not None
    if from_votes is not None and (label - 0.5) * (from_votes - 0.5) < 0:
        raise UserError(
            f"the label {label:g} contradicts the votes {votes} (left, right, tie), whose share for the left "
            f"image is {from_votes:.3g}."
        )
    known = {*PAIR_FIELDS, *_VOTE_COLUMNS, "votes"}
    return PreferencePair(
        prompt=_text(row, "prompt"),
        image_left=_place(_text(row, "image_left"), folder),
        image_right=_place(_text(row, "image_right"), folder),
        label=label,
        votes=votes,
        extra={name: value for name, value in row.items() if name not in known},
        **{name: None if row.get(name) is None else str(row[name]) for name in PAIR_FIELDS[4:]},
    )


def quality_from_row(row: Row, *, folder: Path | None = None) -> QualityRecord:
    """One scored image from the columns that `load_quality` names.

    Args:
        row: Column -> value; numbers may be strings.
        folder: Where relative image paths start; None leaves them as they are.

    Raises:
        UserError: A column is missing or cannot be read.
    """
    known = {*QUALITY_FIELDS, "higher_is_better"}
    return QualityRecord(
        image=_place(_text(row, "image"), folder),
        mos=_number(row, "mos"),
        std=None if row.get("std") is None else _number(row, "std"),
        prompt=str(row.get("prompt", "")),
        extra={name: value for name, value in row.items() if name not in known},
        **{name: None if row.get(name) is None else str(row[name]) for name in QUALITY_FIELDS[4:]},
    )


def _label(value: Any) -> float:
    if isinstance(value, str) and value.strip().lower() in SIDES:
        return SIDES[value.strip().lower()]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(
            f"the label {value!r} is neither {', '.join(SIDES)} nor a number 0 to 1 (the share for the left "
            "image)."
        ) from None


def _votes(row: Row) -> tuple[int, int, int] | None:
    given: Any = row.get("votes")
    if given is None and ("votes_left" in row or "votes_right" in row):
        given = [row.get(name, 0) for name in _VOTE_COLUMNS]
    if given is None:
        return None
    try:
        counts = json.loads(given) if isinstance(given, str) else list(given)
        numbers = [float(count) for count in counts]
        if len(numbers) not in (2, 3) or any(n != int(n) for n in numbers):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"votes must be whole counts [left, right] or [left, right, tie]; got {given!r}."
        ) from None
    left, right, tie = (int(n) for n in [*numbers, 0.0][:3])
    if min(left, right, tie) < 0 or left + right + tie == 0:
        raise UserError(f"votes must be counts, at least one of them positive; got {given!r}.")
    return left, right, tie


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value:
        raise UserError(f"'{name}' is {'missing' if value is None else repr(value)}, needed is a text.")
    return value


def _number(row: Row, name: str) -> float:
    try:
        value = float(row[name])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"'{name}' is {row.get(name)!r}, needed is a number.") from None
    if not math.isfinite(value):
        raise UserError(f"'{name}' is {value}, needed is a finite number.")
    return value


def truth(value: Any) -> bool:
    """A truth value as files write it: true, false, 1, 0."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, bool):
        return value
    if str(value).strip().lower() in words:
        return words[str(value).strip().lower()]
    raise UserError(f"higher_is_better is {value!r}, needed is true or false.")


def _place(reference: str, folder: Path | None) -> str:
    if folder is None or Path(reference).is_absolute() or "://" in reference:
        return reference
    return str(folder / reference)
