# SPDX-License-Identifier: Apache-2.0
"""Parse a judge's text: the part that is its answer, and the single number that it states.

What a careful reader would call unclear is an `AnswerError` with its reason; nothing is guessed.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
"""A decimal number with a point; a comma is read neither as a decimal mark nor as a thousands mark."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_THINK = re.compile(r"<think>.*?</think>", re.IGNORECASE | re.DOTALL)
_OPEN_ANSWER = re.compile(r"<answer>(?!.*</answer>)", re.IGNORECASE | re.DOTALL)
_LIST = re.compile(r"\d\s*,\s*\d")
_SCALE = re.compile(
    r"\(\s*\d+(?:\.\d+)?\s*(?:-|–|—|to)\s*\d+(?:\.\d+)?\s*\)"
    r"|(?:on|from|using)\s+a\s+scale\s+(?:of|from)\s+\d+(?:\.\d+)?\s*(?:-|–|to)\s*\d+(?:\.\d+)?",
    re.IGNORECASE,
)
_OUT_OF = re.compile(rf"(?P<number>{NUMBER})\s*(?:/|out\s+of)\s*(?P<whole>\d+(?:\.\d+)?)(?![\d.]\d)", re.IGNORECASE)
_FREE = re.compile(rf"(?<![\w.]){NUMBER}(?!\w|\.\d)")
_STATED = re.compile(
    rf"(?:\b(?:score|rating|grade)\b[\s*_]*(?:is|of|=|:|-(?=\s))?|\brated?\s+(?:(?:it|this)\s+)?(?:at|as|a)?)"
    rf"[\s*_]*(?P<number>{NUMBER})(?!\w|\.\d)"
    r"(?!\s*(?:to|or|and|-|–)\s*\d)",
    re.IGNORECASE,
)


class AnswerError(ValueError):
    """The judge's text lacks what it should say; the message is the reason that its sample gets."""


@dataclass(frozen=True)
class Statement:
    """The part of a judge's text that counts."""

    text: str
    """Without thinking and tags, stripped."""
    in_block: bool
    """Whether it stood between <answer> and </answer>."""


def statement(text: str) -> Statement:
    """Find the last complete <answer> block, or without one the text outside <think>."""
    if not text.strip():
        raise AnswerError("the judge wrote nothing")
    blocks = _ANSWER.findall(text)
    if blocks:
        body = blocks[-1].strip()
        if not body:
            raise AnswerError("the judge's <answer> is empty")
        return Statement(body, True)
    if _OPEN_ANSWER.search(text):
        raise AnswerError("the judge's answer is cut off: <answer> is not closed")
    rest = _THINK.sub("", text)
    closing = rest.lower().rfind("</think>")
    if closing >= 0:  # templates that open the thinking themselves leave only its end in the text
        rest = rest[closing + len("</think>") :]
    if "<think>" in rest.lower():
        raise AnswerError("the judge's text is cut off inside its thinking, before an answer")
    if not rest.strip():
        raise AnswerError("the judge thought and gave no answer")
    return Statement(rest.strip(), False)


def json_object(text: str, key: str) -> dict[str, Any]:
    """The last complete JSON object in a text that has a key, words around it allowed."""
    decoder = json.JSONDecoder()
    last, start = None, text.find("{")
    while start >= 0:
        try:
            read, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
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
