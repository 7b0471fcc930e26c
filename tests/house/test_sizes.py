# SPDX-License-Identifier: Apache-2.0
"""Ratchets: lines per folder, vague variable names and vague docstring openings never grow.

`python tests/house/test_sizes.py` lowers the numbers of `sizes.toml` to today's. A number is raised by hand,
with the reason in the commit.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("sizes.toml")
WINGS = ("visalign", "rewards", "pipelines")
VAGUE_NAMES = frozenset(
    "found one own said made shown looks known whole asked given others place places seen named judged "
    "wanted kept told held apart alone here those least most each".split()
)
"""Words that do not say what a variable or an argument holds."""
VAGUE_OPENERS = frozenset("What Of Whether How Those That Inside Where Which As One".split())
"""First words of a docstring that are neither a verb nor a noun."""


def measure(root: Path = ROOT) -> tuple[Counter[str], Counter[str]]:
    """Count the product's lines per folder, and its vague words."""
    lines, words = Counter[str](), Counter(names=0, openers=0)
    for path in sorted(path for wing in WINGS for path in (root / wing).rglob("*.py")):
        folder = path.parent.relative_to(root)
        if any((root / part).is_symlink() for part in (folder, *folder.parents)):
            continue
        text = path.read_text(encoding="utf-8")
        lines[folder.as_posix()] += len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) if name in VAGUE_NAMES:
                    words["names"] += 1
                case ast.FunctionDef() | ast.ClassDef() | ast.Module():
                    opener = re.match(r"\w+", ast.get_docstring(node) or "")
                    words["openers"] += opener is not None and opener[0] in VAGUE_OPENERS
    return lines, words


@pytest.fixture(scope="module")
def measured() -> tuple[Counter[str], Counter[str]]:
    return measure()


def test_no_folder_grows(measured: tuple[Counter[str], Counter[str]]) -> None:
    allowed, lines = tomllib.loads(TABLE.read_text(encoding="utf-8"))["lines"], measured[0]
    assert lines.keys() == allowed.keys(), "sizes.toml lists every folder of the product and no other"
    grown = {folder: f"{n} lines, at most {allowed[folder]}" for folder, n in lines.items() if n > allowed[folder]}
    assert grown == {}, "remove lines in the folder, or raise its number in sizes.toml and say why in the commit"


def test_no_vague_word_is_added(measured: tuple[Counter[str], Counter[str]]) -> None:
    allowed = tomllib.loads(TABLE.read_text(encoding="utf-8"))["words"]
    assert measured[1]["names"] <= allowed["names"], f"name a variable after what it holds, not {sorted(VAGUE_NAMES)}"
    assert measured[1]["openers"] <= allowed["openers"], (
        f"open a docstring with a verb or a noun, not with {sorted(VAGUE_OPENERS)}"
    )


def test_the_counts_see_what_they_count(tmp_path: Path) -> None:
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards/a.py").write_text(
        '"""What it is."""\n\n\ndef f(given):\n    """Return it."""\n    found = given\n'
    )
    assert measure(tmp_path) == (Counter({"rewards": 6}), Counter(names=2, openers=1))


def lower() -> None:
    """Write the table with today's numbers where they are below its own."""
    old = tomllib.loads(TABLE.read_text(encoding="utf-8")) if TABLE.is_file() else {"lines": {}, "words": {}}
    sections = []
    for name, counts in zip(("lines", "words"), measure(), strict=True):
        rows = [f'"{key}" = {min(n, old[name].get(key, n))}' for key, n in sorted(counts.items())]
        sections.append("\n".join([f"[{name}]", *rows]))
    TABLE.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


if __name__ == "__main__":
    lower()
