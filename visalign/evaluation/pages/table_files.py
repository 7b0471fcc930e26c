# SPDX-License-Identifier: Apache-2.0
"""Tables of a result as files: CSV with plain numbers, LaTeX (booktabs) with intervals."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visalign.atomic import write_atomic

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # First characters of text that a spreadsheet would run

FOLDER = "tables"
"""Name of the folder for tables, inside a result's folder."""

_LATEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "−": "$-$",
    "±": "$\\pm$",
    "×": "$\\times$",
    "·": "$\\cdot$",
    "τ": "$\\tau$",
    "≤": "$\\leq$",
    "≥": "$\\geq$",
    "½": "$\\frac{1}{2}$",
    "–": "--",
    "\u00a0": "~",
}


@dataclass(frozen=True, kw_only=True)
class FileTable:
    """Table for a file; a cell is a value, or (estimate, low, high). `columns` includes the first column."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


def write_tables(folder: Path, tables: Iterable[FileTable]) -> list[Path]:
    """Write NAME.csv and NAME.tex of each table into a folder, created if missing; return their paths."""
    paths = []
    for table in tables:
        name = re.sub(r"[^\w-]+", "_", table.name.lower()).strip("_")
        for ending, make in ((".csv", to_csv), (".tex", to_latex)):
            paths.append(write_atomic(folder / f"{name}{ending}", make(table).encode()))
    return paths


def to_csv(table: FileTable) -> str:
    """Format as RFC 4180; a column with intervals becomes NAME, NAME_low, NAME_high; None is empty."""
    wide = [any(isinstance(row[column], tuple) for row in table.rows) for column in range(len(table.columns))]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    heads = [(name, f"{name}_low", f"{name}_high") for name in table.columns]
    for row in (heads, *table.rows):
        values: list[Any] = []
        for cell, has_ends in zip(row, wide, strict=True):
            three = cell if isinstance(cell, tuple) else (cell, None, None)
            values += three if has_ends else three[:1]
        writer.writerow(map(csv_cell, values))
    return buffer.getvalue()


def to_latex(table: FileTable) -> str:
    """Format as a `tabular` with booktabs' rules; numbers get three significant digits and their interval."""
    lines = [
        f"% {table.name}; needs \\usepackage{{booktabs}}",
        f"\\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        "\\toprule",
        " & ".join(map(latex_text, table.columns)) + r" \\",
        "\\midrule",
        *(" & ".join(map(_latex_cell, row)) + r" \\" for row in table.rows),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def latex_text(text: Any) -> str:
    """Escape LaTeX's special characters.

    >>> latex_text("50 % of a_b")
    '50 \\\\% of a\\\\_b'
    """
    return "".join(_LATEX.get(sign, sign) for sign in str(text))


def _latex_cell(cell: Any) -> str:
    if isinstance(cell, tuple):
        estimate, low, high = cell
        return _number(estimate) + ("" if low is None else f" [{_number(low)}, {_number(high)}]")
    return _number(cell) if cell is None or isinstance(cell, float) else latex_text(cell)


def _number(value: float | None) -> str:
    return "--" if value is None else f"{value:.3g}" if abs(value) >= 1 else f"{value:.3f}"


def csv_cell(value: Any) -> Any:
    """Format one CSV cell: None becomes empty, and an apostrophe precedes text that a spreadsheet would run.

    >>> csv_cell("=1+1"), csv_cell(-0.5), csv_cell(None), csv_cell("-0.5"), csv_cell("a = b")
    ("'=1+1", -0.5, '', '-0.5', 'a = b')
    """
    if value is None:
        return ""
    if isinstance(value, str) and value.startswith(_FORMULA):
        try:
            float(value)
        except ValueError:
            return f"'{value}"
    return value
