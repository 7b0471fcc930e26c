# SPDX-License-Identifier: Apache-2.0
"""Sentences of the pages are short: at most 40 words, and 18 in the median of a page."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = (
    "README.md",
    "assets/*/README.md",
    "docs/*.md",
    "docs/help/index.md",
    *(f"docs/{folder}/*.md" for folder in ("concepts", "evidence", "judges", "start", "trainers")),
)
PAGES = sorted(str(page.relative_to(ROOT)) for pattern in PATTERNS for page in ROOT.glob(pattern))
LONGEST, MEDIAN = 40, 18
NO_PROSE = re.compile(
    r"\A---\n.*?^---\n"  # front matter
    r"|^```.*?^```"
    r"|^\\\[.*?\\\]"
    r"|<!--.*?-->|</?[a-z][^>]*>"
    r"|^(?:\||#|\{\{|!\[).*?$",  # tables, headings, generated tables, images
    re.MULTILINE | re.DOTALL,
)
INLINE = re.compile(r"`+[^`]+`+|\\\(.*?\\\)|https?://\S+")
END = re.compile(r"(?<=[.!?])[)\"*_]*\s+(?=[\"*_(\[]*[A-ZX0-9])")


def sentences(markdown: str) -> list[str]:
    """Return the sentences of a page without code, tables, headings and formulas; inline code is a word, X."""
    text = INLINE.sub("X", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", NO_PROSE.sub("\n", markdown)))
    paragraphs = re.split(r"\n\s*\n|^\s*(?:[-*]|\d+\.)\s+", text, flags=re.MULTILINE)
    parts = (part for paragraph in paragraphs for part in END.split(" ".join(paragraph.split())))
    return [part for part in parts if re.search(r"\w", part)]


@pytest.mark.parametrize("page", PAGES)
def test_the_sentences_of_a_page_are_short(page: str) -> None:
    lengths = {sentence: len(sentence.split()) for sentence in sentences((ROOT / page).read_text(encoding="utf-8"))}
    assert [sentence for sentence, length in lengths.items() if length > LONGEST] == []
    assert median(lengths.values()) <= MEDIAN


def test_what_counts_as_a_sentence() -> None:
    page = (
        "---\nhide: [toc]\n---\n# A title\nOne `a b. C` two. Three [four five](six.md)!\n\n```bash\nnot this\n```\n"
        "- an item\n- another (of 1.5 GB). End\n\n| a | table |\n\n\\[x\\]\n{{ curves a }}\n"
    )
    assert sentences(page) == ["One X two.", "Three four five!", "an item", "another (of 1.5 GB).", "End"]
