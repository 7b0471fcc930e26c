# SPDX-License-Identifier: Apache-2.0
"""Stops a run when too many answers fail: single failures are masked rows, a broken judge is an error."""

from __future__ import annotations

from collections import Counter, deque

from .contract import RewardError


class FailureAlarm:
    """Watches the share of failures among the last answers.

    Args:
        name: of what fails, for the message.
        limit: largest share of failures, 0 to 1; 1 never stops.
        window: answers that are looked back on.
        least: answers before it may stop.

    Raises:
        RewardError: a number out of range.
    """

    def __init__(self, name: str, limit: float, *, window: int = 200, least: int = 8) -> None:
        if not 0 <= limit <= 1 or not 1 <= least <= window:
            raise RewardError(
                f"{name}: max_failure_rate is {limit}, least {least}, window {window}; allowed are a share "
                "of 0 to 1, and 1 ≤ least ≤ window."
            )
        self.name, self.limit, self.least = name, limit, least
        self._last: deque[str | None] = deque(maxlen=window)

    @property
    def rate(self) -> float:
        """Share of failures among the last answers; 0 before the first."""
        return sum(reason is not None for reason in self._last) / max(1, len(self._last))

    def note(self, reason: str | None) -> None:
        """Count one answer.

        Raises:
            RewardError: the share is above the limit.
        """
        self._last.append(reason)
        if reason is None or len(self._last) < self.least or self.rate <= self.limit:
            return
        counts = Counter(held for held in self._last if held is not None)
        listed = "; ".join(f"{count} × {held}" for held, count in counts.most_common(3))
        total = len(self._last)
        self._last.clear()
        raise RewardError(
            f"{self.name}: {counts.total()} of the last {total} answers failed, above max_failure_rate "
            f"{self.limit:g}. Reasons: {listed}. Mend the judge, or raise max_failure_rate."
        )
