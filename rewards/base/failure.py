# SPDX-License-Identifier: Apache-2.0
"""What went wrong in a reward: its name for what it raised, a reason for each sample it could not judge."""

from __future__ import annotations

from types import TracebackType

from visalign.errors import UserError
from visalign.interfaces import Scores

from .contract import RewardError


def failure_reasons(scores: Scores) -> list[str | None]:
    """One reason per failed sample, None for the judged; a failure that came without one says so."""
    given = scores.reason or [None] * len(scores)
    return [
        None if ok else (reason or "no reason given")
        for ok, reason in zip(scores.valid.tolist(), given, strict=True)
    ]


class Naming:
    """Turns what a reward raises into a RewardError that names the reward; the cause stays chained.

    Errors that are messages already pass as they are.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, RewardError | UserError):
            raise RewardError(
                f"Reward {self.name!r} raised {type(error).__name__}: {error}. See the cause above for the "
                "line; for a sample that cannot be judged return None (a function) or valid=False (a class) "
                "instead of raising."
            ) from error
