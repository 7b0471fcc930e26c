# SPDX-License-Identifier: Apache-2.0
"""Readers of JSONL, JSON, CSV, TSV and Parquet tables: one row after another with its number in the file."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from visalign.errors import UserError, suggestion

Row = dict[str, Any]
NumberedRows = Iterator[tuple[int, Row]]

_BLOCK = 1 << 20
"""Characters of a JSON list read at once."""
SEPARATORS = (",", ";", "\t", "|")
"""Separators tried when the first line of a .csv or .tsv file does not contain its own."""
_BETWEEN_ENTRIES = re.compile(r"[\s,]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_COLUMNS = {"prompt", "image", "image_left", "image_right", "mos", "label"}
"""Keys of a JSON object that are columns, never names of records."""


def read_rows(
    path: str | Path, *, columns: Sequence[str] | None = None, ending: str | None = None
) -> NumberedRows:
    """Read the rows of a table lazily, so that a file larger than the memory can be read.

    Args:
        path: A `.jsonl`, `.json` (a list of objects), `.csv`, `.tsv` or `.parquet` file, text in UTF-8.
        columns: Columns to read of a Parquet file; None reads all. Other files ignore it.
        ending: Format of the file where its own ending says something else.

    Returns:
        (number, row) pairs. The number is the line in a text file (CSV: the row's last line), and the 1-based
        row elsewhere. Values of CSV are strings; empty ones are left out.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"There is no file '{path}'. Give a file that ends in {', '.join(READERS)}.")
    reader = READERS.get(ending or path.suffix.lower())
    if reader is None:
        raise UserError(
            f"'{path}' ends in '{path.suffix}', which is not a table format. Allowed: {', '.join(READERS)}."
        )
    try:
        yield from reader(path, columns)
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not UTF-8 text ({error.reason}); save it as UTF-8.") from error


def require_columns(path: str | Path, row: Row, needed: Iterable[str], *, purpose: str) -> None:
    """Refuse a row that lacks a column needed for a purpose, e.g. "a preference set"."""
    missing = [name for name in needed if name not in row]
    if not missing:
        return
    hint = suggestion(missing[0], row)
    if len(row) == 1 and Path(path).suffix.lower() in (".csv", ".tsv"):
        hint += "There is one column; those of a CSV are separated by , ; | or tabs. "
    raise UserError(
        f"'{path}' lacks the column{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}, needed "
        f"for {purpose}. {hint}Found: {', '.join(row) or 'none'}."
    )


def check_characters(where: str, line: str, value: Any) -> None:
    """Refuse a lone surrogate, such as "\\ud83d" where an emoji was cut: no tokenizer reads it.

    Args:
        where: Start of the message.
        line: JSON text, the only place where a surrogate can be written.
        value: The decoded line.
    """
    if not _SURROGATE.search(line):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start].encode("ascii", "backslashreplace").decode()
        raise UserError(f"{where} has half a character ({surrogate}). Fix or remove it.") from error


def listed(items: Sequence[Any], *, limit: int = 5) -> str:
    """Join the first few items of a list and count the rest.

    >>> listed([3, 7]), listed([1, 2, 3, 4], limit=2)
    ('3, 7', '1, 2 and 2 more')
    """
    text = ", ".join(str(item) for item in items[:limit])
    return f"{text} and {len(items) - limit} more" if len(items) > limit else text


def _require_object(path: Path, number: int, row: Any, kind: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{kind} {number} of '{path}' is a {type(row).__name__}, needed is an object.")
    return row


def _read_jsonl(path: Path, _: Sequence[str] | None) -> NumberedRows:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    f"Line {number} of '{path}' is not JSON ({error.msg} at column {error.colno}). Fix or "
                    "remove it."
                ) from error
            check_characters(f"Line {number} of '{path}'", line, row)
            yield number, _require_object(path, number, row, "Line")


def _read_json(path: Path, _: Sequence[str] | None) -> NumberedRows:
    """Decode the entries of one list from a buffer, since annotation files of gigabytes are common."""
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8-sig") as file:
        text, position, number = file.read(_BLOCK).lstrip(), 1, 0
        if text.startswith("{"):
            yield from _read_object(path, text + file.read())
            return
        if not text.startswith("["):
            raise UserError(
                f"'{path}' starts neither with a list nor with an object. Needed is a list of objects; a "
                "file with one object per line must end in .jsonl."
            )
        while True:
            separator = _BETWEEN_ENTRIES.match(text, position)
            start = separator.end() if separator else position
            if text.startswith("]", start):
                return
            try:
                row, position = decoder.raw_decode(text, start)
            except json.JSONDecodeError as error:
                more = file.read(max(_BLOCK, len(text) - start))
                if not more:
                    raise UserError(
                        f"Entry {number + 1} of '{path}' is not JSON ({error.msg}), or the file is cut short."
                    ) from error
                text, position = text[start:] + more, 0
                continue
            number += 1
            yield number, _require_object(path, number, row, "Entry")


def _read_object(path: Path, text: str) -> NumberedRows:
    """Read one JSON object as a table.

    It holds columns (lists, or dicts as `pandas.DataFrame.to_json` writes them), records by their key, which
    becomes the column `key`, or a single list of records under some name.
    """
    try:
        table = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"'{path}' is not JSON ({error.msg} in line {error.lineno}). A file with one object per line "
            "must end in .jsonl."
        ) from error
    columns = {name: list(c.values()) if isinstance(c, dict) else c for name, c in table.items()}
    lists = [column for column in columns.values() if isinstance(column, list)]
    record_lists = [column for column in table.values() if isinstance(column, list) and _all_objects(column)]
    if len(record_lists) == 1:
        rows: list[Any] = record_lists[0]
    elif _all_objects(list(table.values())) and not _COLUMNS & set(table):
        rows = [{"key": key} | record for key, record in table.items()]
    elif len(lists) == len(table) and len({len(column) for column in lists}) == 1:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*lists, strict=True)]
    else:
        raise UserError(
            f"'{path}' is one object, and neither records by key, nor columns of one length, nor a list of "
            f"records under a name. It has {listed(list(table))}."
        )
    for number, row in enumerate(rows, 1):
        record = _require_object(path, number, row, "Entry")
        yield number, {name: value for name, value in record.items() if value is not None}


def _all_objects(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def _read_delimited(path: Path, _: Sequence[str] | None, *, delimiter: str) -> NumberedRows:
    with path.open(encoding="utf-8-sig", newline="") as file:
        first_line = file.readline()
        file.seek(0)
        present = [sign for sign in SEPARATORS if sign in first_line]
        if delimiter not in first_line and len(present) == 1:
            delimiter = present[0]
        lines = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            names = next(lines, None)
            if not names:
                raise UserError(f"'{path}' is empty; its first line must name the columns.")
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise UserError(f"'{path}' names the column '{repeated[0]}' twice in its first line.")
            for values in filter(None, lines):
                if len(values) != len(names):
                    raise UserError(
                        f"Line {lines.line_num} of '{path}' has {len(values)} fields, the first line names "
                        f"{len(names)} columns. Quote fields that hold '{delimiter}'."
                    )
                row = {name: value for name, value in zip(names, values, strict=True) if value}
                yield lines.line_num, row
        except csv.Error as error:
            raise UserError(f"Line {lines.line_num} of '{path}' cannot be read as CSV: {error}.") from error


def _read_parquet(path: Path, columns: Sequence[str] | None) -> NumberedRows:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:  # a damaged page shows only when it is read
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            selected = None if columns is None else [name for name in columns if name in names]
            for batch in file.iter_batches(batch_size=1024, columns=selected):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: value for name, value in row.items() if value is not None}
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"'{path}' cannot be read as Parquet: {message}. It may be cut short.") from error


READERS: dict[str, Callable[[Path, Sequence[str] | None], NumberedRows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": partial(_read_delimited, delimiter=","),
    ".tsv": partial(_read_delimited, delimiter="\t"),
    ".parquet": _read_parquet,
}
"""File ending -> reader."""
