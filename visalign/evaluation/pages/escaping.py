# SPDX-License-Identifier: Apache-2.0
"""Escape untrusted text (file names, prompts, model output) before it is shown or written."""

from __future__ import annotations

import re
from typing import Any

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def escape_control(text: str) -> str:
    r"""Replace control and bidirectional characters by their escapes, so that they cannot steer a terminal.

    >>> escape_control("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _CONTROL.sub(lambda hit: ascii(hit[0])[1:-1], text)


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
