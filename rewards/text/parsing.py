# SPDX-License-Identifier: Apache-2.0
"""Parsing of answers: extraction, numbers, lists and fenced code, all linear in the text, which a policy writes."""

from __future__ import annotations

import contextlib
import json
import math
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

NUMBER_LIMIT = 400  # Characters of the longest number that is read, and its largest decimal exponent

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(rf"([+-]?)({_PLAIN})(?:[eE]([+-]?\d{{1,4}})|\*10(?:\^|\*\*)\(?([+-]?\d{{1,4}})\)?)?")
_POWER = re.compile(rf"([+-]?)({_PLAIN})(?:\^|\*\*)(?:\(([+-]?\d{{1,4}})\)|([+-]?\d{{1,4}}))")
_RATIO = re.compile(rf"([+-]?)(?:(\d+)\s+)?({_PLAIN})/([+-]?)({_PLAIN})")
_ROOT = re.compile(r"([+-]?)\\sqrt\s*(?:\{(\d+)\)|(\d))")
_BLANK = r"[\u00a0\u2009\u202f]"  # Blanks that group digits
_GROUPED = rf"\d{{1,3}}(?:(?:\{{,\}}|\\[,;: ]|{_BLANK})\d{{3}})+(?!\d)(?:\.\d*)?"
_TEN = r"\s*(?:\\times|\\cdot|[×·⋅*])\s*10(?:\^|\*\*)"
_BRACED = r"\{(?:[^{}]|\{[^{}]{0,80}\}){0,80}\}"
_LEADING_SIGN = r"(?:[\-−](?<!\d[\s$].)\\?[$€£¥]|[+\-−])"  # A minus between two amounts is no sign: 5 -$3
_LAST_NUMBER = re.compile(
    rf"(?<![\w.^])(?<!\^[{{+\-−])(?<!\^\{{[+\-−]){_LEADING_SIGN}?"
    rf"(?:(?:\d+\s*)?\\(?:[dtc]?frac\s*(?:{_BRACED}|\d)\s*(?:{_BRACED}|\d)"
    rf"|sqrt\s*+(?:\[[^\]]{{0,9}}\])?\s*+(?:{_BRACED}|\d))"
    rf"|(?:\d+[^\S\n]+(?=\d+/\d))?(?:{_GROUPED}|{_PLAIN})"
    rf"(?:[eE][+-]?\d{{1,4}}|[^\S\n]*/[^\S\n]*(?:{_PLAIN})|(?:{_TEN}|\^)(?:{_BRACED}|[+\-−]?\d+))?(?:\s*\\?%)?)"
    rf"(?:\s*\\pi)?"
)
_FRAC = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}\\]|[{}]")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox|operatorname)\s*\{([^{}]*)\}")
_ASSIGNED = re.compile(r"([A-Za-z](?:_?\w)?)\s*=\s*")
_FACTOR = (
    r"(?:\w+illion|thousand|hundred)(?:s|ths?)?|dozens?|(?:ten|four|fif|six|seven|eigh|nin)ths?|half|halves|thirds?"
    r"|percent|pi|sqrt|squared|cubed|factorial|base|times|plus|minus|or|and|to|[eiknxyz]"
)
_UNIT = re.compile(
    r"(?<=[\d}])(?:\\[ ,;!]|[~\s])*\\(?:text|mathrm|mbox)\s*\{\s*"
    rf"(?!(?i:{_FACTOR})\b)([A-Za-z](?:[^{{}}\d%,;=]|\^\d)*?)(?:(?<=\w\w)s)?\s*\}}(?:\^\{{?(\d)\}}?)?[.\s$]*$"
)
"""Words behind a number that are its unit: none that changes it (million, tenths, squared, i) or adds one (or 6)."""
_SPACING = re.compile(
    rf"(\\\\)(?:\s*\[[-.\d\s]+[a-z]{{2}}\])?|(\\ |~|{_BLANK})(?!\d{{3}}(?!\d))|\\(?:left|right)(?![A-Za-z])"
    rf"|\\[ !,;:()[\]]|~|{_BLANK}"
)
"""A row break with its length (1), a full blank that does not group three digits (2), and what prints little."""
_CURRENCY = ("\\$", "$", "€", "£", "¥")
_SIGNS = {"−": "-", "–": "-", "×": "*", "·": "*", "⋅": "*", "\\times": "*", "\\cdot": "*", "{,}": ","}
_FENCE = re.compile(r"^([ \t]*)(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_LANGUAGES = ("python", "py", "python3", "")
_QUOTES = "\"'`“”‘’"


def boxed_answers(text: str) -> list[str]:
    r"""Extract the contents of \boxed{…} and \fbox{…}, in order.

    Braces may nest; an inner box is part of its outer one; a box that is never closed does not count.

    >>> boxed_answers(r"so \boxed{\frac{1}{2}}")
    ['\\frac{1}{2}']
    """
    opened: list[tuple[bool, int]] = []
    boxes: list[tuple[int, int]] = []
    for token in _BRACE.finditer(text):
        if token[0] == "}" and opened:
            is_box, start = opened.pop()
            while is_box and boxes and boxes[-1][0] > start:  # an inner box closed before its outer one
                boxes.pop()
            boxes += [(start, token.start())] * is_box
        elif token[0].endswith("{") and token[0] != "\\{":
            opened.append((token[0] != "{", token.end()))
    return [text[start:end] for start, end in boxes]


def _tagged(text: str) -> list[str]:
    """Extract the contents of <answer>…</answer>, from the last opening tag before each closing one."""
    parts = text.split("</answer>")[:-1]
    return [part.rpartition("<answer>")[2] for part in parts if "<answer>" in part]


EXTRACTORS: dict[str, tuple[Callable[[str], list[str]], str]] = {
    "whole": (lambda text: [text], "no text"),
    "last_line": (lambda text: [line for line in text.splitlines() if line.strip()][-1:], "no text"),
    "boxed": (boxed_answers, "no box"),
    "answer_tag": (_tagged, "no <answer>…</answer>"),
    "last_number": (lambda text: [hit[0] for hit in _LAST_NUMBER.finditer(text)][-1:], "no number"),
}
"""name -> (function to all answers of a text in order, remark when there is none)."""


def normalise_text(text: str) -> str:
    """Drop case, runs of white space, surrounding quotes and one final period; NFC.

    >>> normalise_text(' "The  Answer."')
    'the answer'
    """
    words = " ".join(unicodedata.normalize("NFC", text).casefold().split())
    return words.strip(_QUOTES).strip().removesuffix(".").rstrip().strip(_QUOTES)


def normalise_latex(text: str) -> str:
    r"""Drop white space, $…$, \left, \right, thin spaces and \text{…}, keep case; \dfrac is \frac, "or" a comma.

    >>> normalise_latex(r"$\left( \dfrac{1}{2},\, x \right)$")
    '(\\frac{1}{2},x)'
    """
    answer = unicodedata.normalize("NFC", text).strip()
    answer = _TEXT.sub(r"\1", answer)
    answer = _without_spacing(answer, row_break="\1")
    for sign in ("−", "–"):
        answer = answer.replace(sign, "-")
    answer = re.sub(r"\\[dtc]frac", r"\\frac", answer.replace("{,}", ",").replace("°", r"^\circ"))
    answer = answer.replace(r"\varnothing", r"\emptyset")
    answer = re.sub(r"\s(?:or|and)\s", ",", answer)
    answer = re.sub(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])", "\\1\0", answer)  # \pi r is not \pir
    # blanks between digits stay unless they group three digits: "1 2" is not 12
    answer = re.sub(r"(?<=\d)\s+(?=\d)(?!\d{3}(?!\d))", "\0", answer.strip("$").strip())
    answer = "".join(answer.split()).replace("\0", " ").replace("\1", r"\\")
    return answer[:-1] if answer.endswith(".") else answer


def _without_spacing(text: str, row_break: str = r"\\") -> str:
    """Drop spacing commands and delimiters of formulas; a full blank stays one."""
    return _SPACING.sub(lambda hit: row_break if hit[1] else " " * bool(hit[2]), text)


NORMALISERS: dict[str, Callable[[str], str]] = {"none": str, "text": normalise_text, "latex": normalise_latex}


def parse_number(value: object) -> Fraction | None:
    r"""Parse the exact value of a number, however it is written; None where it is no number.

    Accepted are 1234.5, 1,234.5 (groups of three), 3/4, 1 3/4, \frac{3}{4}, 1.5e3, 1.5×10^3, 2^{10},
    \sqrt{16} (of squares), 50% as 0.5, a leading currency sign or "x =", and a unit, 5\text{ cm}.

    >>> parse_number(r"\frac{3}{4}"), parse_number("1,234.5"), parse_number("nan")
    (Fraction(3, 4), Fraction(2469, 2), None)
    """
    if isinstance(value, bool) or value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    text = str(value).strip()
    if len(text) > NUMBER_LIMIT:
        return None
    text = _plain_notation(text)
    number = _fraction(text.removesuffix("%").rstrip())
    return number / 100 if number is not None and text.endswith("%") else number


def names_differ(left: object, right: object) -> bool:
    """True if two answers name different unknowns, x = 1 and y = 1, or units."""
    texts = [str(text).replace("$", "").strip() for text in (left, right)]
    pairs = map(_ASSIGNED.match, texts), map(_UNIT.search, texts)
    return any(first and second and first.groups() != second.groups() for first, second in pairs)


def _plain_notation(text: str) -> str:
    """Replace LaTeX and typography by the signs of a plain number."""
    text = _without_spacing(_TEXT.sub(r"\1", _UNIT.sub("", text)))
    for sign, plain in _SIGNS.items():
        text = text.replace(sign, plain)
    text = text.strip("$").strip()
    text = _FRAC.sub(lambda hit: f" {hit[1] or hit[2]}/{hit[3] or hit[4]}", text).replace("\\%", "%")
    text = _ASSIGNED.sub("", text, count=1) if _ASSIGNED.match(text) else text
    text = re.sub(r"^([+-]?)\s+", r"\1", text.strip())
    for sign in _CURRENCY:
        text = text.removeprefix(sign).replace("-" + sign, "-")
    text = re.sub(r"\s*([*^/])\s*", r"\1", text).replace("^{", "^(").replace("}", ")")
    return text.rstrip(".").strip()


def _fraction(text: str) -> Fraction | None:
    if hit := _RATIO.fullmatch(text):
        below = _plain(hit[5])
        if below == 0:
            return None
        value = _plain(hit[3]) / below + int(hit[2] or 0)
        return -value if (hit[1] == "-") != (hit[4] == "-") else value
    if hit := _POWER.fullmatch(text):
        base, power = _plain(hit[2]), int(hit[3] or hit[4])
        if abs(power) > NUMBER_LIMIT or (base == 0 and power <= 0):
            return None
        return -(base**power) if hit[1] == "-" else base**power
    if hit := _ROOT.fullmatch(text):
        squared = int(hit[2] or hit[3])
        root = math.isqrt(squared)
        return None if root * root != squared else Fraction(-root if hit[1] == "-" else root)
    hit = _NUMBER.fullmatch(text)
    if hit is None or abs(exponent := int(hit[3] or hit[4] or 0)) > NUMBER_LIMIT:
        return None
    value = _plain(hit[2]) * Fraction(10) ** exponent
    return -value if hit[1] == "-" else value


def _plain(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def parse_list(value: object) -> list[Any] | None:
    """Parse a list: JSON, or items between commas or semicolons, with or without brackets around.

    Commas inside brackets do not separate. "[]" is the empty list, "" is none.

    >>> parse_list("(1, 2, [3, 4])")
    ['1', '2', '[3, 4]']
    """
    if isinstance(value, list | tuple):
        return list(value)
    text = str(value).strip().strip("$").replace("\\{", "{").replace("\\}", "}").strip()
    if not text:
        return None
    if text[0] == "[" and text[-1] == "]":
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    items, depths = _split(text), bracket_depths(text)
    pair = text[0] + text[-1]  # "[1, 2)" is an interval, not a list
    if len(items) == 1 and pair in ("[]", "()", "{}") and depths[-1] == 0 < min(depths[:-1]):
        inner = text[1:-1].strip()
        return _split(inner) if inner else []
    return items


def bracket_depths(text: str) -> list[int]:
    """Number of open brackets behind each character."""
    return list(accumulate((sign in "[({") - (sign in "])}") for sign in text))


def _split(text: str) -> list[str]:
    depths = bracket_depths(text)
    cuts = [position for position, sign in enumerate(text) if sign in ",;" and depths[position] == 0]
    return [text[start + 1 : end].strip() for start, end in pairwise([-1, *cuts, len(text)])]


def has_fence(text: str) -> bool:
    """True if a fence opens or closes a block somewhere."""
    return _FENCE.search(text) is not None


def fenced_blocks(text: str) -> list[tuple[str, str]]:
    """List (language or "", content) of the closed fenced blocks in order, without the indentation of their fence."""
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for line in _FENCE.finditer(text):
        if opened is None:
            opened = line
        elif line[2][0] == opened[2][0] and len(line[2]) >= len(opened[2]) and not line[3]:
            content = text[opened.end() + 1 : line.start()]
            if content.lstrip("\n").startswith(opened[1]):
                content = re.sub(rf"(?m)^ {{0,{len(opened[1])}}}", "", content)
            blocks.append((opened[3].lower(), content))
            opened = None
    return blocks


def extract_code(text: str) -> str | None:
    """Extract the last fenced block that is marked as Python, else the last without a mark.

    >>> extract_code("Try\\n```python\\nx = 1\\n```\\nDone")
    'x = 1\\n'
    """
    blocks = {bool(language): code for language, code in fenced_blocks(text) if language in _LANGUAGES}
    return blocks.get(True, blocks.get(False))
