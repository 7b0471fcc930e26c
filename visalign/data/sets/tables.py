# SPDX-License-Identifier: Apache-2.0
"""Rows of JSONL, JSON, CSV, TSV and Parquet files, one after another, each with its number in the file."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from visalign.errors import UserError, suggestion

Row = dict[str, Any]

_BLOCK = 1 << 20
"""Characters of a JSON list read at once."""
SEPARATORS = (",", ";", "\t", "|")
"""What may part the fields of a .csv or .tsv file whose first line has none of its own."""
_BLANKS = re.compile(r"\s*")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""A half of a pair of UTF-16; whole pairs begin with one too."""
_MANY = 5
"""How many lines or names a message lists before it only counts."""


def read_rows(
    path: str | Path, *, columns: Sequence[str] | None = None, ending: str | None = None
) -> Iterator[tuple[int, Row]]:
    """The rows of a table with their numbers, read as they are asked for: a huge file is never held whole.

    Args:     path: A `.jsonl`, `.json` (a list of objects), `.csv`, `.tsv` or `.parquet` file, text in UTF-8.
    columns: Of a Parquet file, the columns to read; None reads all. Other files ignore it.     ending: What
    the file is, where its own ending says something else.

    Returns:     (number, row) pairs. The number is the line in a text file (CSV: of the row's last line), and
    the 1-based row elsewhere. Values of CSV are strings, empty ones are left out.
    """
    place = Path(path)
    if not place.is_file():
        raise UserError(f"There is no file '{place}'. Give a file that ends in {', '.join(READERS)}.")
    reader = READERS.get(ending or place.suffix.lower())
    if reader is None:
        raise UserError(
            f"'{place}' ends in '{place.suffix}', which is no table we read. Allowed: {', '.join(READERS)}."
        )
    try:
        yield from reader(place, columns)
    except UnicodeDecodeError as error:
        raise UserError(f"'{place}' is not UTF-8 text ({error.reason}); save it as UTF-8.") from error


def require_columns(path: str | Path, row: Row, needed: Iterable[str], *, purpose: str) -> None:
    """Refuse a row without all columns needed for a purpose, e.g. "a preference set"; names what there is."""
    missing = [name for name in needed if name not in row]
    if missing:
        hint = suggestion(missing[0], row)
        if len(row) == 1 and Path(path).suffix.lower() in (".csv", ".tsv"):
            hint += "There is one column; those of a CSV are parted by , ; | or tabs. "
        raise UserError(
            f"'{path}' lacks {_names(missing)}, needed for {purpose}. {hint}Found: "
            f"{', '.join(row) or 'none'}."
        )


def check_characters(where: str, line: str, value: Any) -> None:
    """Refuse half a character, such as "\\ud83d" where an emoji was cut, which is no text to a tokenizer.

    Args:
        where: for the message.
        line: JSON, in which alone such a thing can be written.
        value: what it says.
    """
    if not _HALF.search(line):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("ascii", "backslashreplace").decode()
        raise UserError(f"{where} has half a character ({half}). Mend or remove it.") from error


def listed(items: Sequence[Any], *, limit: int = _MANY) -> str:
    """The first few of a list, and how many there are beyond them.

    >>> listed([3, 7]), listed([1, 2, 3, 4], limit=2)
    ('3, 7', '1, 2 and 2 more')
    """
    shown = ", ".join(str(item) for item in items[:limit])
    return f"{shown} and {len(items) - limit} more" if len(items) > limit else shown


def _names(names: Sequence[str]) -> str:
    return f"the column{'s' if len(names) > 1 else ''} {', '.join(repr(name) for name in names)}"


def _read_jsonl(path: Path, _: Sequence[str] | None) -> Iterator[tuple[int, Row]]:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"Line {number} of '{path}' is no JSON ({error.msg} at column {error.colno}). Mend or "
                    "remove it."
                ) from error
            check_characters(f"Line {number} of '{path}'", line, row)
            yield number, _record(path, number, row, "Line")


def _read_json(path: Path, _: Sequence[str] | None) -> Iterator[tuple[int, Row]]:
    """The entries of one list, decoded one after another from a buffer: lists of gigabytes are common."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig") as file:
        text = file.read(_BLOCK)
        place, number = _blank(text, 0), 0
        if text[place : place + 1] == "{":
            yield from _read_object(path, text + file.read())
            return
        if text[place : place + 1] != "[":
            raise UserError(
                f"'{path}' starts neither with a list nor with an object. Needed is a list of objects; a "
                "file with one object per line must end in .jsonl."
            )
        place += 1
        while True:
            start = _blank(text, place)
            if number and text[start : start + 1] == ",":
                start = _blank(text, start + 1)
            if text[start : start + 1] == "]":
                return
            try:
                row, end = decoder.raw_decode(text, start)
            except json.JSONDecodeError as error:
                more = file.read(max(_BLOCK, len(text) - place))
                if not more:
                    raise UserError(
                        f"Entry {number + 1} of '{path}' is no JSON ({error.msg}), or the file is cut short."
                    ) from error
                text, place = text[place:] + more, 0
                continue
            number, place = number + 1, end
            yield number, _record(path, number, row, "Entry")


def _read_object(path: Path, text: str) -> Iterator[tuple[int, Row]]:
    """One object: columns (lists, or as `pandas.DataFrame.to_json` writes them), records by their key, which
    becomes the column `key`, or a single list of records under some name.
    """
    try:
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"'{path}' is no JSON ({error.msg} in line {error.lineno}). A file with one object per line must "
            "end in .jsonl."
        ) from error
    columns = {name: list(c.values()) if isinstance(c, dict) else c for name, c in whole.items()}
    lists = [name for name, column in columns.items() if isinstance(column, list)]
    whole_rows = [name for name in lists if isinstance(whole[name], list) and _all_objects(whole[name])]
    if len(whole_rows) == 1:
        rows: list[Any] = whole[whole_rows[0]]
    elif _all_objects(list(whole.values())) and not _COLUMNS & set(whole):
        rows = [{"key": key} | record for key, record in whole.items()]
    elif len(lists) == len(whole) and len({len(columns[name]) for name in lists}) == 1:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    else:
        raise UserError(
            f"'{path}' is one object, and neither records by key, nor columns of one length, nor a list of "
            f"records under a name. It has {listed(list(whole))}."
        )
    for number, row in enumerate(rows, 1):
        yield number, {n: v for n, v in _record(path, number, row, "Entry").items() if v is not None}


_COLUMNS = {"prompt", "image", "image_left", "image_right", "mos", "label"}
"""Names that are columns and no records."""


def _all_objects(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def _blank(text: str, place: int) -> int:
    """Where the blanks that start at a place end."""
    found = _BLANKS.match(text, place)
    return place if found is None else found.end()


def _record(path: Path, number: int, row: Any, what: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{what} {number} of '{path}' is a {type(row).__name__}, needed is an object.")
    return row


def _read_delimited(delimiter: str) -> Callable[[Path, Sequence[str] | None], Iterator[tuple[int, Row]]]:
    def read(path: Path, _: Sequence[str] | None) -> Iterator[tuple[int, Row]]:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = file.readline()
            file.seek(0)
            others = [sign for sign in SEPARATORS if sign in first]
            found = delimiter if delimiter in first or len(others) != 1 else others[0]
            yield from _delimited_rows(path, file, found)

    return read


def _delimited_rows(path: Path, file: TextIO, delimiter: str) -> Iterator[tuple[int, Row]]:
    lines = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        names = next(lines, None)
        if not names:
            raise UserError(f"'{path}' is empty; its first line must name the columns.")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"'{path}' names the column '{twice[0]}' twice in its first line.")
        for values in filter(None, lines):
            if len(values) != len(names):
                raise UserError(
                    f"Line {lines.line_num} of '{path}' has {len(values)} fields, the first line names "
                    f"{len(names)} columns. Quote fields that hold '{delimiter}'."
                )
            yield lines.line_num, {name: value for name, value in zip(names, values, strict=True) if value}
    except csv.Error as error:
        raise UserError(f"Line {lines.line_num} of '{path}' cannot be read as CSV: {error}.") from error


def _read_parquet(path: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:  # a page that is damaged shows when it is read
        with pyarrow.parquet.ParquetFile(path) as file:
            wanted = (
                None if columns is None else [name for name in columns if name in file.schema_arrow.names]
            )
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: value for name, value in row.items() if value is not None}
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"'{path}' cannot be read as Parquet: {said}. It may be cut short.") from error


READERS: dict[str, Callable[[Path, Sequence[str] | None], Iterator[tuple[int, Row]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_delimited(","),
    ".tsv": _read_delimited("\t"),
    ".parquet": _read_parquet,
}
"""Ending -> reader."""
