# SPDX-License-Identifier: Apache-2.0
"""Tables as people keep them, read as ours: other names of columns, other labels, scores in other files."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from visalign.errors import UserError, suggestion

from .records import SIDES, PreferencePair, PreferenceSet, QualitySet
from .tables import Row, listed, read_rows

CODINGS = ("share", "margin")
"""Whole columns of numbers: the share for the left image, 0 to 1; or a number whose sign says who won."""
MORE_SIDES = {
    **SIDES,
    **{"a": 1.0, "b": 0.0, "first": 1.0, "second": 0.0, "image_left": 1.0, "image_right": 0.0},
    **{"l": 1.0, "r": 0.0, "draw": 0.5, "equal": 0.5, "same": 0.5, "neither": 0.5, "both": 0.5, "none": 0.5},
}
"""Words that need no coding."""
ONE_TWO = {"1": 1.0, "2": 0.0}
SIGNS = {"1": 1.0, "0": 0.5, "-1": 0.0}
"""Numbers that are no shares and yet plain from a whole column; a warning says so."""
_SIDE = {value: name for name, value in SIDES.items()}
IMAGES = ("image", "image_left", "image_right")

_VOTES = ("votes_left", "votes_right", "votes_tie")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How a table's columns are read."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Our name -> the table's."""
    labels: str | None = None
    """A key of `CODINGS`, or words with their sides, "1=left,2=right,0=tie"; None reads what is plain by
    itself."""
    has_images: bool = True
    """False where scores are read from columns and no image is opened: rows may then name none."""

    def missing(self, row: Row, needed: Iterable[str]) -> list[str]:
        """Those of the needed columns that a row with our names lacks."""
        free = () if self.has_images else (*IMAGES, "prompt")
        return [name for name in needed if name not in row and name not in free]


def parse_map(items: Sequence[str]) -> dict[str, str]:
    """`OURS=THEIRS` items as {ours: theirs}.

    >>> parse_map(["mos=score", "image=file name"])
    {'mos': 'score', 'image': 'file name'}
    """
    found: dict[str, str] = {}
    for item in items:
        ours, sign, theirs = item.partition("=")
        if not sign or not ours or not theirs:
            raise UserError(f"--map is {item!r}; write OURS=THEIRS, e.g. --map mos=score.")
        if ours in found:
            raise UserError(f"--map names {ours!r} twice: {found[ours]!r} and {theirs!r}. Name it once.")
        found[ours] = theirs
    return found


def renamed(path: Any, row: Row, names: Mapping[str, str]) -> Row:
    """A row under our names; columns that are not named stay."""
    for ours, theirs in names.items():
        if theirs not in row and ours in _REQUIRED:
            raise UserError(
                f"'{path}' has no column {theirs!r}, which --map {ours}={theirs} names. "
                f"{suggestion(theirs, row)}Found: {', '.join(row) or 'none'}."
            )
    rest = {name: value for name, value in row.items() if name not in names.values()}
    return rest | {ours: row[theirs] for ours, theirs in names.items() if theirs in row}


_REQUIRED = ("image", "image_left", "image_right", "prompt", "mos", "label")


Coding = Mapping[str, float] | str | None
"""Word -> share for the left image, a key of `CODINGS`, or what is plain by itself."""


def plain_row(number: int, row: Row, coding: Coding, columns: Columns) -> Row:
    """A row whose label is a side or a share, whatever it was: a word, 1 or 2, ±1, a margin; whose votes are
    counts or a share; and whose images have names.
    """
    found = {
        name: str(value) if name in IMAGES and isinstance(value, int) else value
        for name, value in row.items()
    }
    if isinstance(found.get("prompt"), int):
        found["prompt"] = str(found["prompt"])
    if not columns.has_images and "mos" in row:
        found = {"image": f"row {number}"} | found
    elif not columns.has_images:
        group = str(row.get("prompt_id", f"row {number}"))
        sides = {f"image_{side}": f"row {number}, {side}" for side in ("left", "right")}
        found = {"prompt": group} | sides | found
    if "margin" in row and not {"label", "votes", *_VOTES} & set(row):
        found["label"] = _sign(row["margin"])
    if "label" in row:
        found["label"] = _label(row["label"], coding)
    return _without_fractions(found)


def _label(value: Any, said: Coding) -> Any:
    if isinstance(said, Mapping):
        key = _word(value)
        if key not in said:
            raise UserError(f"the label {value!r} has no side; --labels names {', '.join(said)}.")
        return said[key]
    if said == "margin":
        return _sign(value)
    return MORE_SIDES.get(_word(value), value)


def _sign(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise UserError(f"the margin is {value!r}, needed is a number: above 0 for the left image.")
    return 0.5 if number == 0 else float(number > 0)


def _word(value: Any) -> str:
    """A label as a word; whole numbers are written as such, however the file has them."""
    text = str(value).strip().lower()
    try:
        number = float(text)
    except ValueError:
        return text
    return str(int(number)) if number.is_integer() else text


def coding_of(rows: Sequence[tuple[int, Row]], columns: Columns, path: Any) -> Coding:
    """What the labels of a whole column mean, where that is not plain from each of them."""
    given = columns.labels
    if given in CODINGS:
        return given
    if given is not None:
        return _named_sides(given)
    labels = [row["label"] for _, row in rows if "label" in row]
    words = {_word(value) for value in labels}
    for meaning in ONE_TWO, SIGNS:
        if len(words) > 1 and words <= set(meaning) and words & {"2", "-1"}:
            said = ", ".join(f"{word} = {_SIDE[side]}" for word, side in meaning.items())
            warnings.warn(
                f"The labels of '{path}' are {', '.join(sorted(words))} and are read as {said}. Say --labels "
                "if they mean something else.",
                stacklevel=2,
            )
            return meaning
    numbers = {word: float(word) for word in words if _is_number(word)}
    for number, row in rows if len(numbers) == len(words) else ():
        if "label" in row and not 0 <= numbers[_word(row["label"])] <= 1:
            raise UserError(
                f"Row {number} of '{path}': a label is the share in favour of the left image, 0 to 1 (or "
                f"left, right, tie); got {row['label']}. Say what the labels mean: --labels margin (above 0 "
                "for left), or each with its side, --labels 0=left,1=right,2=tie."
            )
    return None


def _named_sides(given: str) -> dict[str, float]:
    found = {}
    for item in given.split(","):
        word, sign, side = item.partition("=")
        if not sign or side.strip().lower() not in SIDES:
            raise UserError(
                f"--labels is {given!r}; write {' or '.join(CODINGS)}, or words with their sides "
                f"({', '.join(SIDES)}), such as 1=left,2=right,0=tie."
            )
        found[_word(word)] = SIDES[side.strip().lower()]
    return found


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def _without_fractions(row: Row) -> Row:
    """Votes that are shares, or weighted, as a label: nobody counted them."""
    if not any(name in row for name in _VOTES[:2]):
        return row
    try:
        left, right, tie = (float(row.get(name, 0)) for name in _VOTES)
    except (TypeError, ValueError):
        return row
    whole = left.is_integer() and right.is_integer() and tie.is_integer()
    total = left + right + tie
    if whole or min(left, right, tie) < 0 or not total > 0:
        return row
    rest = {name: value for name, value in row.items() if name not in _VOTES}
    return {"label": (left + tie / 2) / total} | rest


def joined(source: PreferenceSet | QualitySet, path: str | Path) -> PreferenceSet | QualitySet:
    """A set with the scores of another table, image by image.

    The table names images in `image`, and scores in columns of their own; or it is what `visalign score`
    writes (image, reward, value). An image is the one of that path, or the only one of that file name. Pairs
    get NAME_left and NAME_right, images NAME; nothing that the set has is replaced.

    Raises:
        UserError: No column `image`, no score, or no image of the set in it.
    """
    table, given = _scores_by_image(Path(path))
    by_name: dict[str, list[str]] = {}
    for place in table:
        by_name.setdefault(Path(place).name, []).append(place)

    def scores(image: str) -> Row:
        alike = by_name.get(Path(image).name, [])
        places = [given.get(image, ""), str(Path(image).resolve()), *(alike if len(alike) == 1 else ())]
        return next((table[place] for place in places if place in table), {})

    found = 0
    if isinstance(source, QualitySet):
        records = []
        for record in source.records:
            more = scores(record.image)
            found += bool(more)
            records.append(replace(record, extra=more | dict(record.extra)))
        result: PreferenceSet | QualitySet = replace(source, records=tuple(records))
    else:
        pairs = []
        for pair in source.pairs:
            pairs.append(replace(pair, extra=_sides(pair, scores) | dict(pair.extra)))
            found += len(pairs[-1].extra) > len(pair.extra)
        result = replace(source, pairs=tuple(pairs))
    if not found:
        raise UserError(
            f"None of the images of '{source.name}' stands in '{path}', which names "
            f"{listed(list(given), limit=2)}. Images are matched by path, or by file name where that is "
            "unique."
        )
    if found < len(source):
        warnings.warn(
            f"'{path}' has scores for {found} of {len(source)} records of '{source.name}'; the others count "
            "as failed.",
            stacklevel=2,
        )
    return result


def _sides(pair: PreferencePair, scores: Any) -> Row:
    left, right = scores(pair.image_left), scores(pair.image_right)
    if not left or not right:
        return {}
    return {f"{n}_left": v for n, v in left.items()} | {f"{n}_right": v for n, v in right.items()}


def _scores_by_image(path: Path) -> tuple[dict[str, Row], dict[str, str]]:
    """(whole path of an image -> its scores, path as the table has it -> whole path)."""
    found: dict[str, Row] = {}
    given: dict[str, str] = {}
    for number, row in read_rows(path):
        image = row.get("image")
        if not isinstance(image, str):
            raise UserError(
                f"Row {number} of '{path}' names no image: a table of scores has the column 'image'. "
                f"Found: {', '.join(row)}."
            )
        given[image] = str((path.parent / image).resolve())
        own = found.setdefault(given[image], {})
        if "reward" in row and ("value" in row or "reason" in row):
            own |= {str(row["reward"]): row.get("value")}
            own |= {f"{row['reward']}_std": row["std"]} if row.get("std") is not None else {}
        else:
            own |= {name: value for name, value in row.items() if name not in ("image", "prompt")}
    return found, given
