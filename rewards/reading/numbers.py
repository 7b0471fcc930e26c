# SPDX-License-Identifier: Apache-2.0
"""Parse a judge's text: its answer, and the number in it; what is unclear is an `AnswerError`, not a guess."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
"""A decimal number with a point; a comma is read neither as a decimal mark nor as a thousands mark."""

_TAGS = {name: re.compile(rf"<(/?){name}>", re.IGNORECASE) for name in ("answer", "think")}
_LONG_NUMBER = re.compile(r"\d{40}")  # Digits that no rating has; the patterns below would take quadratic time on them
_MOST_BRACES = 2000  # each may begin an object
_LIST = re.compile(r"\d\s*,\s*\d")
_SCALE = re.compile(
    r"\(\s*\d+(?:\.\d+)?\s*(?:-|–|—|to)\s*\d+(?:\.\d+)?\s*\)"
    r"|(?:on|from|using)\s+a\s+scale\s+(?:of|from)\s+\d+(?:\.\d+)?\s*(?:-|–|to)\s*\d+(?:\.\d+)?",
    re.IGNORECASE,
)
_OUT_OF = re.compile(rf"(?P<number>{NUMBER})\s*(?:/|out\s+of)\s*(?P<whole>\d+(?:\.\d+)?)(?![\d.]\d)", re.IGNORECASE)
_FREE = re.compile(rf"(?<![\w.]){NUMBER}(?!\w|\.\d)")
_STATED = re.compile(
    rf"(?:\b(?:score|rating|grade)\b[\s*_]*+(?:is|of|=|:|-(?=\s))?|\brated?\s++(?:(?:it|this)\s++)?(?:at|as|a)?)"
    rf"[\s*_]*+(?P<number>{NUMBER})(?!\w|\.\d)"
    r"(?!\s*(?:to|or|and|-|–)\s*\d)",
    re.IGNORECASE,
)


_EMPHASIS = re.compile(r"\*\*+|__+|`|(?<![\w*])[*_](?=[^\s*])|(?<=[^\s*])[*_](?![\w*])")
"""Markdown's marks around words; a list's bullet and a product keep theirs."""


class AnswerError(ValueError):
    """The judge's text lacks what it should say; the message, cut short, is the reason that its sample gets."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason if len(reason) <= 200 else f"{reason[:200]}…")


@dataclass(frozen=True)
class Statement:
    """The part of a judge's text that counts."""

    text: str  # Without thinking, tags and markdown's emphasis, stripped
    in_block: bool  # Whether it stood between <answer> and </answer>


def statement(text: str) -> Statement:
    """Find the last complete <answer> block, or without one the text outside <think>."""
    if not text.strip():
        raise AnswerError("the judge wrote nothing")
    blocks, is_open = _blocks(text, "answer")
    if blocks:
        body = without_emphasis(text[slice(*blocks[-1][1:3])]).strip()
        if not body:
            raise AnswerError("the judge's <answer> is empty")
        return Statement(body, True)
    if is_open:
        raise AnswerError("the judge's answer is cut off: <answer> is not closed")
    blocks, is_open = _blocks(text, "think")
    edges = [0, *(edge for start, _, _, end in blocks for edge in (start, end)), len(text)]
    rest = "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    # templates that open the thinking themselves leave only its end in the text
    closing = [tag.end() for tag in _TAGS["think"].finditer(rest) if tag[1]]
    rest = rest[closing[-1] if closing else 0 :]
    if is_open:
        raise AnswerError("the judge's text is cut off inside its thinking, before an answer")
    if not rest.strip():
        raise AnswerError("the judge thought and gave no answer")
    return Statement(without_emphasis(rest).strip(), False)


def without_emphasis(text: str) -> str:
    """Remove markdown's bold, italic and code marks: "**Image 2** is better" says what the plain words say."""
    return _EMPHASIS.sub("", text)


def _blocks(text: str, tag: str) -> tuple[list[tuple[int, int, int, int]], bool]:
    """Return where each block of a tag and its content begin and end, in linear time; True if one stays open."""
    blocks: list[tuple[int, int, int, int]] = []
    opened: re.Match[str] | None = None
    for match in _TAGS[tag].finditer(text):
        if not match[1]:
            opened = opened or match
        elif opened is not None:
            blocks.append((*opened.span(), *match.span()))
            opened = None
    return blocks, opened is not None


def json_object(text: str, key: str) -> dict[str, Any]:
    """The last complete JSON object in a text that has a key, words around it allowed."""
    decoder = json.JSONDecoder(parse_int=float)  # of an int, more digits than a float has are an error
    if text.count("{") > _MOST_BRACES:
        raise AnswerError(f"the judge's text has more than {_MOST_BRACES} braces")
    last, start = None, text.find("{")
    while start >= 0:
        try:
            read, end = decoder.raw_decode(text, start)
        except RecursionError as error:
            raise AnswerError("the judge's JSON is nested too deep") from error
        except ValueError:
            start = text.find("{", start + 1)
            continue
        last = read if isinstance(read, dict) and key in read else last
        start = text.find("{", end)
    if last is None:
        raise AnswerError(f"the judge's text holds no complete JSON object with a {key}")
    return last


def check_range(value: float, low: float, high: float) -> float:
    """Return `value` if it is in [low, high]; else raise AnswerError."""
    if not low <= value <= high or math.isinf(value):
        raise AnswerError(f"the judge's number {value:g} is outside [{low:g}, {high:g}]")
    return value


def single_number(answer: Statement, low: float, high: float) -> float:
    """The one number that a statement gives on a scale.

    "4", "Score: 4.1 / 5", "3.2 out of 5" and "(1-5): 4" are clear. "3,5", "3 or 4", "4/10" on a scale to 5,
    and text without an <answer> block that holds a number no word calls the score, are not.
    """
    if _LONG_NUMBER.search(answer.text):
        raise AnswerError("the judge's answer holds a number of 40 digits or more")
    body = _SCALE.sub(" ", answer.text)
    if match := _LIST.search(body):
        raise AnswerError(f"{match[0]!r} may be a decimal comma or a list of numbers")
    for match in _OUT_OF.finditer(body):
        if float(match["whole"]) != high:
            raise AnswerError(f"{match[0]!r} is not on the scale that ends at {high:g}")
    body = _OUT_OF.sub(lambda match: match["number"], body)
    stated = {float(match["number"]) for match in _STATED.finditer(body)}
    numbers = [float(match[0]) for match in _FREE.finditer(body)]
    if len(stated) == 1:
        return check_range(stated.pop(), low, high)
    if not numbers:
        raise AnswerError("the judge's answer holds no number")
    if len(set(numbers)) > 1:
        listed = ", ".join(f"{number:g}" for number in numbers)
        raise AnswerError(f"the judge's answer holds several numbers ({listed})")
    if not answer.in_block and _FREE.fullmatch(body.strip(" \t\r\n*_.`'\"")) is None:
        raise AnswerError(f"the judge wrote {numbers[0]:g} without <answer> and without calling it the score")
    return check_range(numbers[0], low, high)
