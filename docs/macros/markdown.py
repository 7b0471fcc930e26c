# SPDX-License-Identifier: Apache-2.0
"""Building blocks of Markdown for the macros."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table; cells are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("\n", " ") for cell in line) + " |" for line in lines)


def code(value: Any) -> str:
    """Format a value as inline code that survives a table cell."""
    return f"`{value}`".replace("|", "\\|")


def prose(text: str) -> str:
    """Format a docstring as the text of a table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def first_sentence(target: Any) -> str:
    """Return the first sentence of a docstring."""
    text = prose(inspect.getdoc(target) or "")
    return re.split(r"(?<=[.;])\s", text, maxsplit=1)[0].rstrip(";") if text else ""
