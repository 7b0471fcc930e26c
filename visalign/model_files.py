# SPDX-License-Identifier: Apache-2.0
"""Read the JSON and the tensors of model folders, and name what is damaged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .errors import UserError

LOADING_ERRORS = Exception
"""Errors that libraries raise for damaged model folders: tokenizers raises `Exception` itself."""
OTHER_FILES = {
    b"GGUF": "a GGUF file, whose rounded weights are not trained. Take the model's .safetensors",
    b"PK": "a pickle file (.ckpt, .pt), which may run code when it is read. Take the model's .safetensors",
    b"\x80": "a pickle file (.ckpt, .pt), which may run code when it is read. Take the model's .safetensors",
    b"version https://git-lfs": "a pointer of Git LFS without weights. Run `git lfs pull` in its folder",
    b"<": "a web page without weights. Log in where the file is, and download it again",
    b"{": "JSON text without weights. Log in where the file is, and download it again",
}
"""Start of a file that is no safetensors file -> its kind."""


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


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file to read its tensors; a damaged one, or another kind of file, is refused by name."""
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except SafetensorError as error:
        with file.open("rb") as stream:
            start = stream.read(64)
        cut = f": it was cut off at {file.stat().st_size:,} bytes" if start[8:9] == b"{" else ""
        problem = f"no whole safetensors file ({error}){cut}. Copy it again"
        for mark, other in OTHER_FILES.items():
            problem = other if not cut and start.lstrip().startswith(mark) else problem  # a length may begin with \x80
        raise UserError(f"{file} is {problem}.") from error


def read_tensors(file: Path) -> dict[str, Any]:
    """Read all tensors of a safetensors file on the CPU."""
    with open_tensors(file) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # no mapping
