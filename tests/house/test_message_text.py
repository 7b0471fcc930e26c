# SPDX-License-Identifier: Apache-2.0
"""Docstrings and messages are typed as sentences, not chopped by a line wrapper."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for top in ("visalign", "rewards", "pipelines") for path in sorted((ROOT / top).rglob("*.py"))]
SHORT = 24
"""Characters below which a middle line of a message is a chopped one."""


def _docstrings(path: Path) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]
    return [ast.get_docstring(node, clean=False) or "" for node in nodes]


def _joined(path: Path) -> list[list[tokenize.TokenInfo]]:
    """Runs of string literals that Python joins."""
    runs: list[list[tokenize.TokenInfo]] = [[]]
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.STRING:
            runs[-1].append(token)
        elif token.type not in (tokenize.NL, tokenize.COMMENT) and runs[-1]:
            runs.append([])
    return runs


def test_no_docstring_holds_the_quotes_of_a_wrapped_string() -> None:
    stray = re.compile(r'"[ \t]*\n[ \t]*"')
    bad = [path.name for path in SOURCES for text in _docstrings(path) if stray.search(text)]
    assert bad == []


def test_no_message_is_chopped() -> None:
    bad = [
        f"{path.name}:{token.start[0]}: {token.string}"
        for path in SOURCES
        for run in _joined(path)
        for token in run[1:-1]
        if len(token.string) < SHORT
    ]
    assert bad == []
