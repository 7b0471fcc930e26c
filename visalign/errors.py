# SPDX-License-Identifier: Apache-2.0
"""Errors that the command line prints without a traceback, and helpers that word messages or make text printable."""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from typing import Any

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class UserError(ValueError):
    """Invalid user input; the message says what was given, what is allowed and what to do."""


class ConfigError(UserError):
    """Invalid configuration file or override."""


class RewardError(RuntimeError):
    """A reward cannot be loaded, broke while judging, or failed too often."""


class CaughtError:
    """Context manager that catches whatever user code raises, sys.exit included, and keeps it in `error`."""

    error: Exception | SystemExit | None = None

    def __enter__(self) -> CaughtError:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, Exception | SystemExit):
            self.error = error
        return self.error is not None


def describe_error(error: BaseException) -> str:
    """Describe an error of user code: its type, message, and the last line of that code it passed through.

    >>> describe_error(KeyError("seed"))
    "KeyError: 'seed'"
    """
    text = "sys.exit(...)" if isinstance(error, SystemExit) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text}: {error.msg} ({error.filename}, line {error.lineno})"
    if message := str(error):
        text += f": {message}"
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if module.split(".")[0] != "visalign" and not file.startswith((*libraries, "<")):
            return f"{text} ({file}, line {line})"
    return text


class Naming:
    """Turns what a reward raises, sys.exit included, into a RewardError that names it, its line and the sample.

    Errors that are messages already pass as they are. `score_rows` scores samples from one row up to another: the
    sample of `rows` that raises is searched by it.
    """

    def __init__(self, name: str, score_rows: Callable[[int, int], Any] | None = None, rows: int = 0) -> None:
        self.name, self._score_rows, self._rows = name, score_rows, rows

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, RewardError | UserError):
            raise RewardError(
                f"Reward {self.name!r} raised {describe_error(error)}{self._sample()}. For a sample that cannot be "
                "judged return NaN (a function) or valid=False (a class)."
            ) from error

    def _sample(self) -> str:
        """Search the first sample that raises by halves; "" where none raises by itself."""
        start, stop = 0, self._rows
        while stop - start > 1:
            middle = (start + stop) // 2
            start, stop = (start, middle) if self._raises(start, middle) else (middle, stop)
        return f" on sample {start} of {self._rows} (the first is 0)" if self._raises(start, stop) else ""

    def _raises(self, start: int, stop: int) -> bool:
        with CaughtError() as caught:
            if self._score_rows is not None:
                self._score_rows(start, stop)
        return caught.error is not None


def excerpt(value: object, limit: int = 100) -> str:
    """Write a value for a message, cut to `limit` characters: a cell may hold megabytes."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def nearest(name: str, allowed: Iterable[str], *, limit: int = 3, cutoff: float = 0.55) -> list[str]:
    """Return up to `limit` allowed names similar to `name`, best first.

    >>> nearest("grup_size", ["group_size", "steps", "seed"])
    ['group_size']
    """
    return difflib.get_close_matches(name, list(allowed), n=limit, cutoff=cutoff)


def did_you_mean(names: Iterable[str]) -> str:
    """Ask "Did you mean 'steps' or 'step_weights'? " with a trailing blank; empty without names."""
    choices = " or ".join(repr(name) for name in names)
    return f"Did you mean {choices}? " if choices else ""


def suggestion(name: str, allowed: Iterable[str]) -> str:
    """Ask whether a similar allowed name was meant; empty when none is similar.

    >>> suggestion("qickstart", ["quickstart", "score"])
    "Did you mean 'quickstart'? "
    """
    return did_you_mean(nearest(name, allowed))


def escape_control(text: str) -> str:
    r"""Replace control and bidirectional characters by their escapes, so that they cannot steer a terminal.

    >>> escape_control("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _CONTROL.sub(lambda hit: ascii(hit[0])[1:-1], text)
