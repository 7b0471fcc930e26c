# SPDX-License-Identifier: Apache-2.0
"""Symbolic equality of two mathematical expressions, by math-verify (optional) in a process of its own.

sympy can compute for ever on text that a policy wrote: the process is killed after `SECONDS` and started again.
math-verify takes some unequal answers for equal; those are refused first.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import selectors
import sys
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from visalign.rewards.base.contract import RewardError

from .parsing import bracket_depths, parse_list, parse_number

CHILD = Path(__file__).with_name("symbolic_child.py")
SECONDS = 5.0  # Time limit of one comparison
START_SECONDS = 60.0
LONGEST, DEEPEST, MOST_LETTERS, MOST_TERMS = 400, 12, 60, 60
"""Most characters, nested brackets, letters outside commands, and terms or items of an answer that is compared."""

_COMMAND = re.compile(r"\\[A-Za-z]+")
_PREFIX = re.compile(r"[A-Za-z]\\in(?![A-Za-z])")
_ASSIGNED = re.compile(r"([A-Za-z](?:_\w|_\{\w+\})?)=(?!=)")
_NAMED = re.compile(rf"(?:{_ASSIGNED.pattern}|{_PREFIX.pattern}|\([A-Za-z](?:,[A-Za-z])+\)=)")
_NUMBERS = re.compile(r"\\(?:frac|infty|pi|sqrt|cdot|times)(?![A-Za-z])")
_UNIT = re.compile(r"[^A-Za-z]*\d[^A-Za-z]*([A-Za-z]+)")
_IN_BASE = re.compile(r"[-+]?[\dA-Z.,]+_\{?(\d+)\}?")
_ALONE = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_HUGE = re.compile(
    r"\^\{?[-+]?\d{5}|\^\w\^|\^\{[^{}]*\^\{[^{}]*\^|\d{5}\)?!|!\)?!|binom\{?\d{5}|\([^()]*[A-Za-z][^()]*\)\^\{?\d{3}"
)
"""Powers, towers, factorials and expansions whose digits or terms fill the memory."""


@cache
def is_installed() -> bool:
    return importlib.util.find_spec("math_verify") is not None


def symbolically_equal(answer: str, truth: str) -> bool:
    """Compare two expressions in LaTeX, normalised; False where that cannot be decided in time."""
    if not answer or not truth or _is_costly(answer) or _is_costly(truth):
        return False
    # keyed by process: after a fork the child must not read the parent's replies
    return _may_be_equal(answer, truth) and _worker(os.getpid()).compare(answer, truth)


def _is_costly(text: str) -> bool:
    """Check for what no solution writes and sympy reads for seconds: a policy that learns it would stall the run."""
    bare = _COMMAND.sub(" ", text[: LONGEST + 1])
    return (
        len(text) > LONGEST
        or sum(map(str.isalpha, bare)) > MOST_LETTERS
        or max(bracket_depths(bare)) > DEEPEST
        or sum(map(bare.count, ",+-&=")) > MOST_TERMS
        or _HUGE.search(text) is not None
    )


def _may_be_equal(answer: str, truth: str) -> bool:
    """Rule out differences that math-verify overlooks.

    These are a variable on one side only, other units, the case of letters, percent signs, brackets, names, bases of
    numbers, and how often an item is listed.
    """
    bare = [_COMMAND.sub(" ", text) for text in (answer, truth)]
    letters = [set(re.findall(r"[A-Za-z]", text)) for text in bare]
    if not any(map(_NAMED.match, (answer, truth))):
        variables = [set(_ALONE.findall(text)) - {"e", "i"} for text in bare]
        if any(not letters[k] - {"e", "i"} and variables[1 - k] for k in (0, 1)):
            return False
    if any(letters[k] - {"e", "i"} and bare[k].isalpha() and not letters[1 - k] for k in (0, 1)):
        return False
    for left, right in (letters, letters[::-1]):
        if any(letter not in right and letter.swapcase() in right for letter in left):
            return False
    units = [_UNIT.fullmatch(text) for text in bare]
    if units[0] and units[1] and not _same_unit(units[0][1], units[1][1]):
        return False
    bases = [_IN_BASE.fullmatch(text) for text in (answer, truth)]
    if bases[0] and bases[1] and bases[0][1] != bases[1][1]:
        return False
    if ("%" in answer) != ("%" in truth):
        return False
    items = [[*map(str, parse_list(text) or [])] for text in (answer, truth)]
    if any(len(set(listed)) < len(listed) for listed in items):
        counts = [Counter(str(parse_number(item) or item) for item in listed) for listed in items]
        if len(items[0]) != len(items[1]) or (answer[0] not in "([" and counts[0] != counts[1]):
            return False
    left, right = (_ASSIGNED.match(text) for text in (answer, truth))
    kinds = [_brackets(text) for text in (answer, truth)]
    same_name = not (left and right) or left[1] == right[1]
    return same_name and (None in kinds or kinds[0] == kinds[1])


def _same_unit(left: str, right: str) -> bool:
    """Compare two words behind a number: m is metres, but not km; ab, a product of unknowns, is ba."""
    short, long = sorted((left, right), key=len)
    letters = iter(long)  # an abbreviation's follow each other in the word: hr, hours
    is_short = len(long) > 3 and long[0] == short[0] and all(letter in letters for letter in short)
    return is_short or sorted(left) == sorted(right) or (len(short) > 1 and long == f"{short}s")


def _brackets(text: str) -> str | None:
    """Brackets around a text with a comma ("" for none and for {}); None where there is no comma."""
    text = _PREFIX.sub("", text, count=1).replace("\\{", "{").replace("\\}", "}")
    if "," not in text or "=" in text or _COMMAND.search(_NUMBERS.sub("", text)):
        return None
    around = text[0] in "([{" and min(bracket_depths(text)[:-1]) > 0
    return text[0] + text[-1] if around and text[0] + text[-1] != "{}" else ""


class _Worker:
    """Process that compares expressions, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None

    def compare(self, answer: str, truth: str) -> bool:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            equal = self._reply(answer, truth, SECONDS)
            if equal is None:  # too slow, or it died of this comparison
                self.end()
            return equal is True

    def _start(self) -> None:
        self.end()  # collects a process that died
        self._process = Popen([sys.executable, str(CHILD)], stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        if self._reply("1", "1", START_SECONDS) is not True:
            self.end()
            raise RewardError("math-verify does not start. Try: python -c 'import math_verify'.")

    def _reply(self, answer: str, truth: str, seconds: float) -> bool | None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps([answer, truth]).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            line = process.stdout.readline() if selector.select(seconds) else b""
        return {b"true\n": True, b"false\n": False}.get(line)

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@cache
def _worker(_process: int) -> _Worker:
    worker = _Worker()
    atexit.register(worker.end)
    return worker
