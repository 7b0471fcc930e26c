# SPDX-License-Identifier: Apache-2.0
"""Errors of rewards: the name of the one that raised, and a reason for each sample without a score.

Single failures are masked rows; a judge that fails too often stops the run.
"""

from __future__ import annotations

from collections import Counter, deque
from types import TracebackType

from visalign.errors import UserError, describe_error
from visalign.interfaces import Scores

from .contract import RewardError


def failure_reasons(scores: Scores) -> list[str | None]:
    """Return a reason per failed sample, None for the valid ones."""
    reasons = scores.reason or [None] * len(scores)
    return [
        None if ok else (reason or "no reason given")
        for ok, reason in zip(scores.valid.tolist(), reasons, strict=True)
    ]


class Naming:
    """Turns what a reward raises, sys.exit included, into a RewardError that names it and its line.

    Errors that are messages already pass as they are.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if isinstance(error, Exception | SystemExit) and not isinstance(error, RewardError | UserError):
            raise RewardError(
                f"Reward {self.name!r} raised {describe_error(error)}. For a sample that cannot be judged "
                "return None (a function) or valid=False (a class) instead of raising."
            ) from error


class Attempt:
    """Keeps the exception of a probed call, sys.exit included, so that the report can name it."""

    error: Exception | SystemExit | None = None

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception | SystemExit):
            self.error = error
        return self.error is not None


class FailureAlarm:
    """Watches the share of failures among the last answers.

    Args:
        name: of what fails, for the message.
        limit: largest share of failures, 0 to 1; 1 never stops.
        window: number of last answers.
        min_samples: answers before it may stop.

    Raises:
        RewardError: a number out of range.
    """

    def __init__(self, name: str, limit: float, *, window: int = 200, min_samples: int = 8) -> None:
        if not 0 <= limit <= 1 or not 1 <= min_samples <= window:
            raise RewardError(
                f"{name}: max_failure_rate is {limit}, min_samples {min_samples}, window {window}; allowed "
                "are a share of 0 to 1, and 1 ≤ min_samples ≤ window."
            )
        self.name, self.limit, self.min_samples = name, limit, min_samples
        self._last: deque[str | None] = deque(maxlen=window)

    @property
    def rate(self) -> float:
        """Share of failures among the last answers; 0 before the first."""
        return sum(reason is not None for reason in self._last) / max(1, len(self._last))

    def note(self, reason: str | None) -> None:
        """Count an answer; raise when too many failed."""
        self._last.append(reason)
        if reason is None or len(self._last) < self.min_samples or self.rate <= self.limit:
            return
        counts = Counter(entry for entry in self._last if entry is not None)
        listed = "; ".join(f"{count} × {entry}" for entry, count in counts.most_common(3))
        total = len(self._last)
        self._last.clear()
        raise RewardError(
            f"{self.name}: {counts.total()} of the last {total} answers failed, above max_failure_rate "
            f"{self.limit:g}. Reasons: {listed}. Fix the judge, or raise max_failure_rate."
        )
