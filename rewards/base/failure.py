# SPDX-License-Identifier: Apache-2.0
"""Failures of rewards: a reason for each sample without a score; a judge that fails too often stops the run."""

from __future__ import annotations

from collections import Counter, deque

from visalign.errors import RewardError
from visalign.interfaces import Preferences, Scores


def failure_reasons(scores: Scores | Preferences) -> list[str | None]:
    """Return a reason per failed sample, None for the valid ones."""
    reasons = scores.reason or [None] * len(scores)
    return [
        None if ok else (reason or "no reason given")
        for ok, reason in zip(scores.valid.tolist(), reasons, strict=True)
    ]


class FailureAlarm:
    """Stops a run whose judge fails too often.

    `limit` is the largest share of failures, 0 to 1, among the last `window` answers, after `min_samples` at least.
    """

    def __init__(self, name: str, limit: float, *, window: int = 200, min_samples: int = 8) -> None:
        if not 0 <= limit <= 1:
            raise RewardError(f"{name}: max_failure_rate is {limit}; allowed is a share of 0 to 1.")
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
            f"{self.name}: {counts.total()} of {total} answers failed, over max_failure_rate {self.limit:g}: {listed}."
        )
