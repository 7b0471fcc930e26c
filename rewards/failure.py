# SPDX-License-Identifier: Apache-2.0
"""Counting what could not be judged, and stopping a run in which that is too much."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from visalign.interfaces import Scores

from .contract import RewardError


def failure_reasons(scores: Scores) -> list[str | None]:
    """One reason per failed sample, None for the judged; a failure that came without one says so."""
    given = scores.reason or [None] * len(scores)
    return [
        None if ok else (reason or "no reason given")
        for ok, reason in zip(scores.valid.tolist(), given, strict=True)
    ]


class FailureGuard:
    """Stops a run in which too many images cannot be judged; until then failures cost their own sample only.

    The rate is taken over the last `window` samples, so that a judge that dies late is noticed as fast as one
    that dies early. Call it with the scores of every batch; `state_dict` belongs into the checkpoint.
    """

    def __init__(self, max_rate: float = 0.1, *, window: int = 256, min_samples: int = 16) -> None:
        """Set the limit.

        Args:
            max_rate: highest tolerated share of failures, in [0, 1].
            window: samples over which the share is taken.
            min_samples: no verdict before that many samples.

        Raises:
            ValueError: a number is out of bounds.
        """
        if not 0 <= max_rate <= 1:
            raise ValueError(f"FailureGuard: max_rate is {max_rate}; allowed is a share in [0, 1].")
        if not 1 <= min_samples <= window:
            raise ValueError(
                f"FailureGuard: min_samples is {min_samples} and window {window}; needed is 1 <= min_samples "
                "<= window."
            )
        self.max_rate = max_rate
        self.min_samples = min_samples
        self.total = 0
        self.failed = 0
        self._recent: deque[str | None] = deque(maxlen=window)

    @property
    def rate(self) -> float:
        """Share of failures in the window; 0 before the first sample."""
        return sum(reason is not None for reason in self._recent) / max(1, len(self._recent))

    def __call__(self, scores: Scores, name: str = "the reward") -> None:
        """Count one batch.

        Raises:
            RewardError: the share of failures in the window is above the limit; the message names the
                reasons.
        """
        reasons = failure_reasons(scores)
        self.total += len(reasons)
        self.failed += sum(reason is not None for reason in reasons)
        self._recent.extend(reasons)
        if len(self._recent) < self.min_samples or self.rate <= self.max_rate:
            return
        counted = Counter(reason for reason in self._recent if reason is not None).most_common(3)
        raise RewardError(
            f"{name} could not judge {self.rate:.1%} of the last {len(self._recent)} images; the limit is "
            f"{self.max_rate:.1%}. Most frequent: "
            + "; ".join(f"{count}× {reason}" for reason, count in counted)
            + ". "
            "Mend the cause, or raise the failure limit if losing these samples is acceptable."
        )

    def state_dict(self) -> dict[str, Any]:
        """Counts and window, as plain data."""
        return {"total": self.total, "failed": self.failed, "recent": list(self._recent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.total, self.failed = state["total"], state["failed"]
        self._recent.clear()
        self._recent.extend(state["recent"])
