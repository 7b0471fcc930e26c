# SPDX-License-Identifier: Apache-2.0
"""Whether two mathematical expressions are equal, by math-verify (optional) in a process of its own.

sympy can compute for ever on text that a policy wrote, and cannot be stopped from inside: the process is
ended after `SECONDS` and begun anew. math-verify takes some unequal answers for equal; those kinds are
refused first.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import re
import selectors
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

from visalign.rewards.base.contract import RewardError

CHILD = Path(__file__).with_name("symbolic_child.py")
SECONDS = 5.0
"""That one comparison may take."""
START_SECONDS = 60.0
LONGEST = 1000
"""Characters of an answer that is compared."""

_COMMAND = re.compile(r"\\[A-Za-z]+")
_PREFIX = re.compile(r"[A-Za-z]\\in(?![A-Za-z])")
_ASSIGNED = re.compile(r"([A-Za-z](?:_\w|_\{\w+\})?)=(?!=)")
_NAMED = re.compile(rf"(?:{_ASSIGNED.pattern}|{_PREFIX.pattern})")
_NUMBERS = re.compile(r"\\(?:frac|infty|pi|sqrt|cdot|times)(?![A-Za-z])")
_ALONE = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_PAIRS = {"(": ")", "[": "]", "{": "}"}


@cache
def is_installed() -> bool:
    """Whether math-verify can be asked."""
    return importlib.util.find_spec("math_verify") is not None


def symbolically_equal(answer: str, truth: str) -> bool:
    """Whether two expressions in LaTeX, normalised, are equal; False where that cannot be told in time."""
    if max(len(answer), len(truth)) > LONGEST or min(len(answer), len(truth)) == 0:
        return False
    if not _may_be_equal(answer, truth):
        return False
    return _asker().ask(answer, truth)


def _may_be_equal(answer: str, truth: str) -> bool:
    """Rules out what math-verify overlooks: a variable on one side alone, which it may take for a unit, case
    of letters, percent signs, kinds of brackets, names."""
    bare = [_COMMAND.sub(" ", text) for text in (answer, truth)]
    letters = [set(re.findall(r"[A-Za-z]", text)) for text in bare]
    if not any(map(_NAMED.match, (answer, truth))):
        variables = [set(_ALONE.findall(text)) - {"e", "i"} for text in bare]
        if any(not letters[k] - {"e", "i"} and variables[1 - k] for k in (0, 1)):
            return False
    for one, other in (letters, letters[::-1]):
        if any(letter not in other and letter.swapcase() in other for letter in one):
            return False
    if ("%" in answer) != ("%" in truth):
        return False
    names = [_ASSIGNED.match(text) for text in (answer, truth)]
    if names[0] and names[1] and names[0][1] != names[1][1]:
        return False
    kinds = [_brackets(text) for text in (answer, truth)]
    return None in kinds or kinds[0] == kinds[1]


def _brackets(text: str) -> str | None:
    """The brackets around a text with a comma in them, "" and {} being one; None where there is no comma."""
    text = _PREFIX.sub("", text, count=1).replace("\\{", "{").replace("\\}", "}")
    if "," not in text or "=" in text or _COMMAND.search(_NUMBERS.sub("", text)):
        return None
    depth, around = 0, True
    for place, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        around = around and (depth > 0 or place == len(text) - 1)
    return text[0] + text[-1] if around and text[0] in _PAIRS and text[:1] + text[-1:] != "{}" else ""


class _Asker:
    """The process and the turn to ask it."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, answer: str, truth: str) -> bool:
        """One comparison."""
        with self._turn:
            for _ in range(2):  # a process that somebody ended is begun anew
                fresh = self._process is None or self._process.poll() is not None
                if fresh:
                    self.end()
                    self._start()
                    if self._said("1", "1", START_SECONDS) is not True:
                        self.end()
                        raise RewardError("math-verify does not start. Try: python -c 'import math_verify'.")
                said = self._said(answer, truth, SECONDS)
                if said is not None:
                    return said
                gone = self._process is not None and self._process.poll() is not None
                self.end()
                if fresh or not gone:
                    break
        return False

    def _start(self) -> None:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        command = [sys.executable, str(CHILD)]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing)

    def _said(self, answer: str, truth: str, seconds: float) -> bool | None:
        """The reply; None where there was none in time."""
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
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _asker() -> _Asker:
    """Of this process: a fork must not read the other's replies."""
    return _asker_of(os.getpid())


@cache
def _asker_of(_process: int) -> _Asker:
    asker = _Asker()
    atexit.register(asker.end)
    return asker
