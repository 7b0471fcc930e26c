# SPDX-License-Identifier: Apache-2.0
"""Tables as files: CSV reads back as numbers, LaTeX is escaped and compiles in form."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from visalign.evaluation.pages.table_files import FileTable, csv_cell, to_csv, to_latex, write_tables

TABLE = FileTable(
    name="By kind & size",
    columns=("judge", "a_b"),
    rows=[["50 % of $x", (0.5, 0.25, 0.75)], ["=cmd()", (12.345, None, None)], ["−1", None]],
)


def test_csv_holds_plain_numbers_and_no_formula() -> None:
    head, *rows = list(csv.reader(io.StringIO(to_csv(TABLE))))
    assert head == ["judge", "a_b", "a_b_low", "a_b_high"]
    assert rows[0] == ["50 % of $x", "0.5", "0.25", "0.75"]
    assert rows[1] == ["'=cmd()", "12.345", "", ""] and rows[2] == ["−1", "", "", ""]
    assert [csv_cell(text) for text in ("@x", "-x", "\tx", "x=")] == ["'@x", "'-x", "'\tx", "x="]


def test_latex_is_escaped_and_has_a_cell_for_every_column() -> None:
    text = to_latex(TABLE)
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert [line.count(" & ") for line in body] == [1, 1, 1, 1]
    assert r"50 \% of \$x & 0.500 [0.250, 0.750] \\" in body and r"=cmd() & 12.3 \\" in body
    assert r"judge & a\_b \\" in body and r"$-$1 & -- \\" in body


def test_files_are_named_by_their_table(tmp_path: Path) -> None:
    files = [path.relative_to(tmp_path).as_posix() for path in write_tables(tmp_path / "tables", [TABLE])]
    assert files == ["tables/by_kind_size.csv", "tables/by_kind_size.tex"]
