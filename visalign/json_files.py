# SPDX-License-Identifier: Apache-2.0
"""Read JSON that other programs wrote: why it cannot be read, and the object of a model folder's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import UserError


def why_unreadable(error: ValueError | RecursionError) -> str:
    """Say why `json` read nothing: its syntax, a number of more than 4,300 digits, or nesting too deep for Python."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}" if error.lineno == 1 else f"{error.msg}, line {error.lineno}"
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text"
    return "it is nested too deeply" if isinstance(error, RecursionError) else "a number has too many digits"


def read_object(file: Path) -> dict[str, Any]:
    """Read the JSON object in a file, such as those of a model folder."""
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}). Correct the path.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({why_unreadable(error)}). Copy it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__}, needed is an object. Copy it again.")
    return content
