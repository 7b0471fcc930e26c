# SPDX-License-Identifier: Apache-2.0
"""Readers of JSONL, JSON, CSV, TSV, Parquet and Excel tables: row after row with its number in the file."""

from __future__ import annotations

import csv
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from visalign.errors import UserError, nearest, suggestion
from visalign.model_files import why_unreadable

from .annotation_tools import split_annotations

Row = dict[str, Any]
NumberedRows = Iterator[tuple[int, Row]]

SEPARATORS = (",", ";", "\t", "|")
"""Separators tried when the first line of a .csv or .tsv file does not contain its own."""
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_CELL = re.compile(
    r"(?P<either>[+-]?[1-9]\d{0,2},\d{3})|(?P<decimal>[+-]?\d*,\d+(?:e[+-]?\d+)?)"
    r"|(?P<point>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|[+-]?inf)",
    re.IGNORECASE,
)
"""Number with a comma before thousands or decimals (either) or before decimals, or without a comma."""
_ESCAPED = ("'=", "'+", "'-", "'@")  # Texts as spreadsheets and `visalign score` keep them from being formulas
_SCORES = ("mos", "std", "label", "reward", "score", "rating", "margin")  # columns whose commas separate decimals
_MISSING = ("", "na", "n/a", "null", "none", "-")
_TEXTS = (
    *("prompt", "question", "problem", "instruction", "caption", "text", "messages", "conversations"),
    *("answer", "solution", "completion", "response", "output", "chosen", "rejected"),
)
"""Columns that stay as they are, such as the answer 1,234."""


def read_rows(path: str | Path, *, columns: Sequence[str] | None = None) -> NumberedRows:
    """Read the numbered rows of a table, lazily but for .json and .xlsx.

    Endings are those of `READERS`, forms of JSON those of `_table_rows`; `columns` may select some; text is UTF-8.
    The number is the line in a text file (CSV: the row's last line), and the 1-based row elsewhere. Values of CSV are
    strings; empty ones are left out. Exports of Label Studio and Argilla give a row per annotator.
    """
    path = Path(path)
    reader = READERS.get(path.suffix.lower())
    if reader is None or not path.is_file():
        raise UserError(f"There is no table '{path}'. Give an existing file that ends in {', '.join(READERS)}.")
    try:
        yield from split_annotations(path, _objects(path, reader(path, columns)))
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not UTF-8 text ({error.reason}); save it as UTF-8.") from error


def _objects(path: Path, rows: NumberedRows) -> NumberedRows:
    for number, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"Row {number} of '{path}' is a {type(row).__name__}, needed is an object.")
        yield number, row


def read_cells(path: str | Path) -> NumberedRows:
    """Read the rows of `read_rows`, with None for each empty cell of a table with a header."""
    empty: Row | None = None
    for number, row in read_rows(path):
        empty = dict.fromkeys(table_header(path)) if empty is None else empty
        yield number, empty | row


def first_row(path: Path) -> Row:
    """Read the first row of a table; empty for a table without rows and for anything else."""
    return next(read_rows(path), (0, {}))[1] if path.suffix.lower() in READERS and path.is_file() else {}


def column_names(path: str | Path, row: Row) -> list[str]:
    """List a table's own columns, also those whose first cell is empty; of what is no table, those of the row."""
    return table_header(path) or list(first_row(Path(path)) or row)


def table_header(path: str | Path) -> list[str]:
    """Read the columns of a CSV, TSV, Parquet or Excel file; [] of others, where each row names its own."""
    path, ending = Path(path), Path(path).suffix.lower()
    if not path.is_file() or ending not in (".csv", ".tsv", ".parquet", ".xlsx"):
        return []
    if ending == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_schema(path).names
    if ending == ".xlsx":
        import pandas

        return [str(name) for name in pandas.read_excel(path, nrows=0)]
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:  # `read_rows` refuses other encodings
        return next(csv.reader(file, delimiter=_delimiter(file, path)), [])


def select_split(
    source: str, rows: Iterable[tuple[int, Row]], split: str | None, limit: int | None
) -> list[tuple[int, Row]]:
    """Collect at most `limit` rows of a split (None: of all); `source` starts the messages."""
    splits: set[str] = set()
    matching = (
        item
        for item in rows
        if splits.add(str(item[1].get("split"))) or split is None or item[1].get("split") == split
    )
    if selected := list(islice(matching, limit)):
        return selected
    splits_line = f" of the split '{split}'. Splits: {listed(sorted(splits))}" if splits else ""
    raise UserError(f"{source} holds no row{splits_line}.")


def require_columns(path: str | Path, row: Row, needed: Iterable[str], *, purpose: str) -> None:
    """Refuse a row that lacks a column needed for a purpose, e.g. "a preference set"."""
    if missing := [name for name in needed if name not in row]:
        columns = column_names(path, row)
        is_empty = set(missing) <= set(columns)
        lacks, hint = ("has an empty cell in", "") if is_empty else ("lacks", suggestion(missing[0], columns))
        if len(columns) == 1 and Path(path).suffix.lower() in (".csv", ".tsv"):
            hint += "There is one column; those of a CSV are separated by , ; | or tabs. "
        raise UserError(
            f"'{path}' {lacks} the column{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}, needed "
            f"for {purpose}. {hint}Found: {listed(nearest_first(missing[0], columns), limit=20) or 'none'}."
        )


def plain_name(column: str) -> str:
    """Write a column's name in our way, such as "image_left" for "Image Left"."""
    return column.strip().lower().replace(" ", "_")


def nearest_first(name: str, columns: Iterable[str]) -> list[str]:
    """Order columns for a message: those most similar to a missing one first."""
    columns = list(columns)
    return list(dict.fromkeys([*nearest(name, columns, limit=len(columns) or 1, cutoff=0.5), *columns]))


def parse_json(text: str, where: str) -> Any:
    """Parse JSON text; `where` starts the messages."""
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):  # no tokenizer reads half an emoji
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start].encode("ascii", "backslashreplace").decode()
        raise UserError(f"{where} has half a character ({surrogate}). Fix or remove it.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({why_unreadable(error)}). Fix or remove it.") from error
    return value


def listed(items: Sequence[Any], *, limit: int = 5) -> str:
    """Join the first few items of a list, each cut to 200 characters, and count the rest.

    >>> listed([3, 7]), listed([1, 2, 3, 4], limit=2)
    ('3, 7', '1, 2 and 2 more')
    """
    text = ", ".join(f"{item!s:.200}" for item in items[:limit])
    return f"{text} and {len(items) - limit} more" if len(items) > limit else text


def _read_jsonl(path: Path, _: Sequence[str] | None) -> NumberedRows:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, 1):
            line = line.lstrip("\ufeff")  # joined files have marks inside
            if line.strip():
                yield number, parse_json(line, f"Line {number} of '{path}'")


def _read_json(path: Path, columns: Sequence[str] | None) -> NumberedRows:
    text = path.read_text(encoding="utf-8-sig")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("["):
            raise UserError(f"'{path}' is not JSON ({why_unreadable(error)}); it may be cut short.") from error
        yield from _read_jsonl(path, columns)  # many tools write one object per line to .json as well
        return
    yield from enumerate(value if isinstance(value, list) else _table_rows(path, value), 1)


def _table_rows(path: Path, value: Any) -> list[Row]:
    """List the rows of an object that holds a table: {"data": [rows]}, {"prompt": [cells], ...}, {id: row, ...}, or
    as pandas writes it, {"prompt": {"0": cell}, ...} and {"columns": [names], "data": [[cells]]}."""
    entries = value if isinstance(value, dict) else {}
    lists = [entry for entry in entries.values() if isinstance(entry, list)]
    objects = [entry for entry in entries.values() if isinstance(entry, dict)]
    # a column has a cell that is no object, unlike the lists of {"train": [...], "test": [...]}, which stay apart
    has_column = any(not isinstance(cell, dict) for column in lists for cell in column)
    rows: list[Row]
    if {"columns", "data"} <= entries.keys() and all(isinstance(row, list) for row in entries["data"]):
        rows = [dict(zip(entries["columns"], row, strict=False)) for row in entries["data"]]
    elif len(lists) == 1 and all(isinstance(row, dict) for row in lists[0]):
        rows = lists[0]
    elif has_column and len(lists) == len(entries) and len({len(column) for column in lists}) == 1:
        rows = [dict(zip(entries, cells, strict=True)) for cells in zip(*lists, strict=True)]
    elif objects and len(objects) == len(entries):
        is_frame = all(key.isdigit() for column in objects for key in column)
        frame = [{name: cells.get(key) for name, cells in entries.items()} for key in objects[0]]
        rows = frame if is_frame else [{"id": key, **row} for key, row in entries.items()]
    else:
        sizes = ", ".join(f"{name!r} has {len(entry)}" for name, entry in entries.items() if isinstance(entry, list))
        raise UserError(
            f"'{path}' is no list; needed is a list of objects, an object with such a list under one key, or columns "
            f'of equal length, {{"prompt": ["a", "b"]}}{f" ({sizes})" if sizes else ""}. A file with one '
            "object per line must end in .jsonl."
        )
    return [{name: cell for name, cell in row.items() if cell is not None} for row in rows]


def _delimiter(file: TextIO, path: Path) -> str:
    """Return what separates the columns: that of the ending, or the only separator of the first line."""
    first_line = file.readline()
    file.seek(0)
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    present = [sign for sign in SEPARATORS if sign in first_line]
    return present[0] if usual not in first_line and len(present) == 1 else usual


def _decimal_columns(lines: Iterator[list[str]]) -> set[str]:
    """Name the columns whose commas separate decimals: those of scores, and others of numbers alone."""
    names = next(lines, [])
    kinds: list[set[str | None]] = [set() for _ in names]
    for values in lines:
        for column, value in zip(kinds, values, strict=False):
            if value.strip().lower() not in _MISSING:
                column.add(cell.lastgroup if (cell := _CELL.fullmatch(value)) else "text")
    numbers = {name for name, column in zip(names, kinds, strict=True) if "decimal" in column and "text" not in column}
    return {name for name in names if plain_name(name) in _SCORES} | {
        n for n in numbers if plain_name(n) not in _TEXTS
    }


def _with_point(value: str) -> str:
    return value.replace(",", ".") if _CELL.fullmatch(value) else value


def _read_delimited(path: Path, _: Sequence[str] | None) -> NumberedRows:
    with path.open(encoding="utf-8-sig", newline="") as file:
        delimiter = _delimiter(file, path)
        lines = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            decimals = set[str]() if delimiter == "," else _decimal_columns(lines)
            file.seek(0)
            lines = csv.reader(file, delimiter=delimiter, strict=True)
            names = next(lines, [])
            if not names or len(set(names)) < len(names):
                raise UserError(f"'{path}' needs a first line that names the columns, each once.")
            for values in filter(None, lines):
                if len(values) != len(names):
                    fault = f"has {len(values)} fields, the first line names {len(names)} columns"
                    raise UserError(
                        f"Line {lines.line_num} of '{path}' {fault}. Quote fields that hold '{delimiter}'."
                    )
                values = [v[1:] if v.startswith(_ESCAPED) else v for v in values]
                row = {name: value for name, value in zip(names, values, strict=True) if value}
                yield lines.line_num, row | {name: _with_point(row[name]) for name in decimals & row.keys()}
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
            for batch in file.iter_batches(batch_size=64, columns=selected):  # few: cells may hold images
                for row in batch.to_pylist():
                    number += 1
                    yield number, {name: value for name, value in row.items() if value is not None}
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"'{path}' cannot be read as Parquet: {message}. It may be cut short.") from error


def _read_excel(path: Path, _: Sequence[str] | None) -> NumberedRows:
    """Read the first sheet; numbers are numbers there, whatever their decimals look like."""
    try:
        import openpyxl  # noqa: F401  # pandas' reader of .xlsx
        import pandas
    except ModuleNotFoundError as error:
        raise UserError(f"'{path}' needs pandas and openpyxl: python -m pip install 'visalign[dataframe]'.") from error
    try:
        frame = pandas.read_excel(path, dtype=object, keep_default_na=False, na_values=[""])  # None and NA are words
    except (ValueError, OSError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"'{path}' cannot be read as an Excel sheet: {error}. Save it again, or as CSV.") from error
    for number, row in enumerate(frame.to_dict("records"), 2):  # the first row has the names, as Excel counts
        if cells := {str(name): cell for name, cell in row.items() if not pandas.isna(cell)}:
            yield number, cells


READERS: dict[str, Callable[[Path, Sequence[str] | None], NumberedRows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_delimited,
    ".tsv": _read_delimited,
    ".parquet": _read_parquet,
    ".xlsx": _read_excel,
}
"""File ending -> reader."""
