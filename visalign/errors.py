# SPDX-License-Identifier: Apache-2.0
"""The errors that speak to the user: the command line prints their message alone, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user gave cannot be used; the message says what was given and what is allowed."""


class ConfigError(UserError):
    """A configuration file or an override that cannot be used."""


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
