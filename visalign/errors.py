# SPDX-License-Identifier: Apache-2.0
"""Errors whose message the command line prints without a traceback, and helpers that word them."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable


class UserError(ValueError):
    """Invalid user input; the message says what was given, what is allowed and what to do."""


class ConfigError(UserError):
    """Invalid configuration file or override."""


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
