# SPDX-License-Identifier: Apache-2.0
"""Rows of users' tables as records: renamed columns, words for labels, votes."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from visalign.errors import UserError, excerpt, suggestion

from .image_references import TEXT, refer_to_images
from .records import PreferencePair, QualityRecord
from .tables import NumberedRows, Row, column_names, listed, nearest_first, plain_name, read_cells
from .text_rows import PAIR, pair_answers, refer_to_texts

SIDES = {"left": 1.0, "right": 0.0, "tie": 0.5}  # Word for a label -> share for the left image
CODINGS = ("share", "margin")
"""Numeric label columns: the share for the left image, 0 to 1; or a number whose sign names the winner."""
WORDS = {**SIDES, "a": 1.0, "b": 0.0}  # Words that need no coding
IMAGES = ("image", "image_left", "image_right")
SHOWN_NAMES = {
    "prompt": ("caption", "text"),
    "image": ("image_path", "file_name", "filename", "path"),
    "image_left": ("left", "left_image", "image_a", "image1", "image_1"),
    "image_right": ("right", "right_image", "image_b", "image2", "image_2"),
}
"""Our name of a column -> names that are read as it where a table lacks ours."""
JUDGED_NAMES = {
    "label": ("choice", "winner", "preference", "preferred"),
    "mos": ("rating", "score"),
    "annotator": ("rater", "rater_id", "annotator_id", "worker_id", "voter"),
}
"""The same for tables of judgements."""
RATERS = {"annotator", *JUDGED_NAMES["annotator"]}  # Columns of which one tells that a table has a row per rater

_LONGEST_PATH = 4096  # Longest path of the usual systems; a longer text may be an image in base64
_VOTES = ("votes_left", "votes_right", "votes_tie")
_PAIR_COLUMNS = ("prompt", "image_left", "image_right", "label", "votes", "ballots", *_VOTES)
_QUALITY_COLUMNS = ("image", "mos", "std", "prompt", "higher_is_better")
_SCORES = ("", "_left", "_right", "_prob", "_prob_swapped", "_std", "_std_left", "_std_right")
"""Endings of the columns of a score."""
_REQUIRED = (*IMAGES, "prompt", "mos", "label")


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Options of reading a table's columns."""

    names: Mapping[str, str] = field(default_factory=dict)  # Our name -> the table's
    labels: str | None = None
    """One of `CODINGS`, or words with their sides, "1=left,2=right,0=tie"; None reads `WORDS` and shares."""
    has_images: bool = True  # False where scores are read from columns and no image is opened: rows may then name none
    needs_prompt: bool = True  # False where nothing reads the prompts: pairs may then have none

    def missing(self, row: Row, needed: Iterable[str]) -> list[str]:
        """List the needed columns that a renamed row lacks."""
        optional = (*IMAGES, "prompt") if not self.has_images else () if self.needs_prompt else ("prompt",)
        return [name for name in needed if name not in row and name not in optional]

    def coding(self) -> Mapping[str, float] | str | None:
        """Parse `labels`: one of `CODINGS`, word -> share for the left image, or None."""
        if self.labels is None or self.labels in CODINGS:
            return self.labels
        shares = {}
        for item in self.labels.split(","):
            word, _, side = item.partition("=")
            if side.strip().lower() not in SIDES:
                forms = f"{' or '.join(CODINGS)}, or words with their sides, such as 1=left,2=right,0=tie"
                raise UserError(f"--labels is {self.labels!r}; write {forms}.")
            shares[_word(word)] = SIDES[side.strip().lower()]
        return shares


def parse_map(items: Sequence[str]) -> dict[str, str]:
    """Parse `OURS=THEIRS` items into {ours: theirs}.

    >>> parse_map(["mos=score", "image=file name"])
    {'mos': 'score', 'image': 'file name'}
    """
    names: dict[str, str] = {}
    for item in items:
        ours, _, theirs = item.partition("=")
        if not ours or not theirs or ours in names:
            raise UserError(f"--map is {item!r}; write OURS=THEIRS, each column once, e.g. --map mos=score.")
        names[ours] = theirs
    return names


def parse_scores(items: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Parse NAME, NAME=COLUMN and NAME=LEFT,RIGHT items into the names and {our column: the table's}.

    >>> parse_scores(["clip", "judge=score_left_img,score_right_img"])[1]
    {'judge_left': 'score_left_img', 'judge_right': 'score_right_img'}
    """
    names: list[str] = []
    columns: dict[str, str] = {}
    for item in items:
        name, equals, theirs = item.partition("=")
        parts = theirs.split(",")
        if not name or (equals and not all(parts)) or len(parts) > 2:
            raise UserError(f"--scores is {item!r}; write NAME, NAME=COLUMN or, of pairs, NAME=LEFT,RIGHT.")
        names.append(name)
        if len(parts) == 2:
            columns |= {f"{name}_left": parts[0], f"{name}_right": parts[1]}
        elif theirs:
            columns |= {f"{name}{ending}": f"{theirs}{ending}" for ending in _SCORES}
    return list(dict.fromkeys(names)), columns


def rename_columns(path: Any, row: Row, names: Mapping[str, str]) -> Row:
    """Rename the columns of a row of `read_cells` to ours; other columns stay."""
    for ours, theirs in names.items():
        if theirs not in row and ours in _REQUIRED and theirs not in (columns := column_names(path, row)):
            raise UserError(
                f"'{path}' has no column {theirs!r}, which --map {ours}={theirs} names. "
                f"{suggestion(theirs, columns)}Found: {listed(nearest_first(theirs, columns), limit=20)}."
            )
    renamed = {ours: row[theirs] for ours, theirs in names.items() if theirs in row}
    return {name: value for name, value in row.items() if name not in names.values()} | renamed


def usual_names(row: Row, names: Mapping[str, str], *, is_judged: bool) -> dict[str, str]:
    """Add to names (ours -> the table's) those of `SHOWN_NAMES`, and of `JUDGED_NAMES` if the table `is_judged`."""
    usual = {**SHOWN_NAMES, **JUDGED_NAMES} if is_judged else SHOWN_NAMES
    free = {plain_name(name): name for name in row if name not in names.values()}
    matches = {
        ours: [free[name] for name in (ours, *aliases) if name in free]
        for ours, aliases in usual.items()
        if ours not in row or ours in names.values()
    }
    return {ours: aliases[0] for ours, aliases in matches.items() if aliases} | {**names}


def names_of_rows(
    rows: NumberedRows, names: Mapping[str, str], *, is_judged: bool
) -> Iterator[tuple[int, Row, dict[str, str]]]:
    """Find the `usual_names` of each numbered row; a judgement stands in one column of all rows.

    A row that lacks it is therefore not filled from another column.
    """
    header, judgements = Row(), dict[str, str]()
    for number, row in rows:
        if is_judged and (not judgements or row.keys() - header.keys()):
            header |= dict.fromkeys(row)
            usual = usual_names(header, names, is_judged=True)
            judgements = {
                ours: usual.get(ours, ours) for ours in JUDGED_NAMES if ours in {*usual, *header}
            } | judgements
        aliases = {ours: theirs for ours, theirs in judgements.items() if theirs in row and ours not in row}
        yield number, row, aliases | usual_names(row, names, is_judged=False)


def read_table(path: str | Path, names: Mapping[str, str], *, is_judged: bool = False) -> NumberedRows:
    """Read the numbered rows of a table with our column names, and with references for images inside it."""
    has_text_cells = Path(path).suffix.lower() in (".csv", ".tsv", ".xlsx")  # where no text is an empty one
    for number, row, columns in names_of_rows(read_cells(path), names, is_judged=is_judged):
        renamed = rename_columns(path, row, columns)
        filled = {name: value for name, value in renamed.items() if value is not None}
        texts = PAIR if filled.keys() & {*PAIR} else () if filled.keys() & {*IMAGES} else ("completion",)
        if has_text_cells:
            filled = dict.fromkeys((name for name in texts if name in renamed), "") | filled
        for pair in pair_answers(number, filled):
            yield number, refer_to_texts(refer_to_images(path, number, pair, columns), f"Row {number} of '{path}'")


def fill_images(number: int, row: Row) -> Row:
    """Name the images of a row by its number, where no image is opened and the table names none."""
    if "mos" in row:
        return {"image": f"row {number}"} | row
    prompt = str(row.get("prompt_id", f"row {number}"))
    return {"prompt": prompt} | {f"image_{s}": f"row {number}, {s}" for s in ("left", "right")} | row


def read_pair(
    row: Row, coding: Mapping[str, float] | str | None = None, folder: Path | None = None, *, needs_prompt: bool = True
) -> PreferencePair:
    """Read a pair from the columns that `load_preferences` names; relative image paths start at the folder."""
    votes = _read_votes(row)
    if "label" in row:
        label = _read_label(_named_side(row), coding)
    elif votes is not None:
        label = (votes[0] + votes[2] / 2) / sum(votes)
    else:
        raise UserError(f"neither 'label' nor votes ({', '.join(_VOTES)}) in it.")
    return PreferencePair(
        prompt=_read_text(row, "prompt") if needs_prompt or "prompt" in row else "",
        image_left=image_path(row, "image_left", folder),
        image_right=image_path(row, "image_right", folder),
        label=label,
        votes=votes,
        ballots=_read_ballots(row.get("ballots")),
        **_other_fields(PreferencePair, row, _PAIR_COLUMNS),
    )


def read_quality(row: Row, folder: Path | None = None) -> QualityRecord:
    """Read a scored image from the columns that `load_quality` names, as `read_pair` reads a pair."""
    if row.get("mos") is None and row.get("reason"):  # as `visalign score` writes
        raise UserError(f"its score failed ({row['reason']}). Take it out.")
    std = _read_number(row, "std") if row.get("std") is not None else None
    if std is not None and std < 0:
        raise UserError(f"'std' is {std:g}, needed is a number of at least 0.")
    return QualityRecord(
        image=image_path(row, "image", folder),
        mos=_read_number(row, "mos"),
        std=std,
        prompt=str(row.get("prompt", "")),
        **_other_fields(QualityRecord, row, _QUALITY_COLUMNS),
    )


def parse_bool(value: Any) -> bool | None:
    """Read a truth value as files write it: true, false, 1, 0; None for anything else."""
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).strip().lower())


def _word(value: Any) -> str:
    """Write a label as a lower-case word; whole numbers lose their decimals."""
    text = str(value).strip().lower()
    return str(int(float(text))) if is_number(text) and float(text).is_integer() else text


def is_number(text: Any) -> bool:
    """Check for a finite number, or its text."""
    try:
        return math.isfinite(float(text))
    except (TypeError, ValueError, OverflowError):
        return False


def _read_label(value: Any, coding: Mapping[str, float] | str | None) -> float:
    words = coding if isinstance(coding, Mapping) else WORDS
    number = float(value) if is_number(value) and not isinstance(coding, Mapping) else math.nan
    if coding == "margin" and not math.isnan(number):
        return 0.5 if number == 0 else float(number > 0)
    if coding != "margin" and (word := _word(value)) in words:
        return words[word]
    if 0 <= number <= 1:
        return number
    if isinstance(coding, Mapping):
        allowed = f"--labels names {', '.join(coding)}"
    elif coding == "margin":
        allowed = "--labels margin needs a number, above 0 for the left image"
    else:
        allowed = f"needed is {', '.join(SIDES)}, or the share for the left image, 0 to 1. Say what others mean: "
        allowed += "--labels margin (above 0 for left), or each with its side, --labels 1=left,2=right,0=tie"
    raise UserError(f"the label is {excerpt(value)}; {allowed}.")


def _named_side(row: Row) -> Any:
    """Return the label; where it names an image or a generator of the pair, that one's side."""
    for kind in ("image", "generator"):
        sides = {str(row.get(f"{kind}_{side}")): side for side in ("left", "right")}
        if len(sides) == 2 and isinstance(row["label"], str) and row["label"] in sides:
            return sides[row["label"]]
    return row["label"]


def _read_votes(row: Row) -> tuple[int, int, int] | None:
    votes: Any = row.get("votes")
    if votes is None and ("votes_left" in row or "votes_right" in row):
        votes = [row.get(name, 0) for name in _VOTES]
    if votes is None:
        return None
    try:
        counts = [float(count) for count in (json.loads(votes) if isinstance(votes, str) else votes)]
        left, right, tie = (int(count) for count in (counts if len(counts) == 3 else (*counts, 0.0)))
        if min(counts) >= 0 < sum(counts) and sum(counts) == left + right + tie:
            return left, right, tie
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    raise UserError(f"votes are whole counts [left, right] or [left, right, tie], not all 0; got {excerpt(votes)}.")


def _read_ballots(value: Any) -> tuple[tuple[str, float], ...]:
    """Read the ballots that `PreferencePair.to_row` writes, also as JSON text."""
    try:
        entries = json.loads(value) if isinstance(value, str) else value or ()
        ballots = tuple((str(name), float(label)) for name, label in entries)
        if all(0 <= label <= 1 for _, label in ballots):
            return ballots
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    raise UserError(f"ballots must be pairs [annotator, share for the left, 0 to 1]; got {excerpt(value)}.")


def _other_fields(record: type, row: Row, columns: Collection[str]) -> dict[str, Any]:
    """Read the remaining fields of a record as texts, and all unknown columns as `extra`."""
    texts = [field.name for field in fields(record) if field.name not in (*columns, "extra")]
    extra = {name: value for name, value in row.items() if name not in (*columns, *texts)}
    return {"extra": extra, **{name: str(row[name]) for name in texts if row.get(name) is not None}}


def _read_text(row: Row, name: str, kind: str = "text") -> str:
    value = row.get(name)
    if kind == "path" and isinstance(value, str) and value.startswith(TEXT):
        return value
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str) or not value or (kind == "path" and len(value) > _LONGEST_PATH):
        raise UserError(f"'{name}' is {'missing' if value is None else excerpt(value)}, needed is a {kind}.")
    return value


def _read_number(row: Row, name: str) -> float:
    if not is_number(row.get(name)):
        comma = " with a point, not a comma" if is_number(str(row.get(name)).replace(",", ".")) else ""
        raise UserError(f"'{name}' is {excerpt(row.get(name))}, needed is a finite number{comma}.")
    return float(row[name])


def image_path(row: Row, name: str, folder: Path | None) -> str:
    """Read the reference of an image; a relative path starts at the folder, if there is one."""
    reference = _read_text(row, name, "path")
    if folder is None or Path(reference).is_absolute() or "://" in reference:
        return reference
    return str(folder / reference)
