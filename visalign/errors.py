# SPDX-License-Identifier: Apache-2.0
"""The errors that speak to the user: the command line prints their message alone, without a traceback."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave cannot be used; the message says what was given and what is allowed."""


class ConfigError(UserError):
    """A configuration file or an override that cannot be used."""


class Caught:
    """Keeps what a user's own code raises, sys.exit included."""

    error: Exception | SystemExit | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if isinstance(error, Exception | SystemExit):
            self.error = error
        return self.error is not None


def said_by(error: BaseException) -> str:
    """An error of a user's own code: its kind, its words, and the last line of theirs that it went through.

    >>> said_by(KeyError("seed"))
    "KeyError: 'seed'"
    """
    words = "sys.exit(...)" if isinstance(error, SystemExit) else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{words}: {error.msg} ({error.filename}, line {error.lineno})"
    if said := str(error):
        words += f": {said}"
    libraries = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        module, file = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        if module.split(".")[0] != "visalign" and not file.startswith((*libraries, "<")):
            return f"{words} ({file}, line {line})"
    return words


def nearest(given: str, allowed: Iterable[str], *, limit: int = 3) -> list[str]:
    """The allowed names most like the given one, best first, at most `limit`; empty when nothing is alike.

    >>> nearest("grup_size", ["group_size", "steps", "seed"])
    ['group_size']
    """
    return difflib.get_close_matches(given, list(allowed), n=limit, cutoff=0.55)


def did_you_mean(names: Iterable[str]) -> str:
    """A question that offers these names and ends in a blank, or nothing when there are none.

    >>> did_you_mean(["steps", "step_weights"])
    "Did you mean 'steps' or 'step_weights'? "
    """
    offered = " or ".join(repr(name) for name in names)
    return f"Did you mean {offered}? " if offered else ""


def suggestion(given: str, allowed: Iterable[str]) -> str:
    """`did_you_mean` for the allowed names most like the given one, or nothing.

    >>> suggestion("qickstart", ["quickstart", "score"])
    "Did you mean 'quickstart'? "
    """
    return did_you_mean(nearest(given, allowed))
