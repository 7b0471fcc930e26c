# SPDX-License-Identifier: Apache-2.0
"""Fenced code blocks of a text."""

from __future__ import annotations

import re

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)


_LANGUAGES = ("python", "py", "python3", "")


def has_fence(text: str) -> bool:
    """Whether a fence opens or closes a block somewhere."""
    return _FENCE.search(text) is not None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of the closed fenced blocks, in order; "" for a block without a language.

    A block that is not closed (the text was cut off) is none.
    """
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for line in _FENCE.finditer(text):
        if opened is None:
            opened = line
        elif line[1][0] == opened[1][0] and len(line[1]) >= len(opened[1]) and not line[2]:
            blocks.append((opened[2].lower(), text[opened.end() + 1 : line.start()]))
            opened = None
    return blocks


def extract_code(text: str) -> str | None:
    """The last fenced block that is marked as Python, else the last without a mark.

    >>> extract_code("Try\\n```python\\nx = 1\\n```\\nDone")
    'x = 1\\n'
    """
    found = {bool(language): code for language, code in fenced_blocks(text) if language in _LANGUAGES}
    return found.get(True, found.get(False))
