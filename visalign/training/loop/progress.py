# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: a line per iteration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

POLICY_COLUMNS = (
    ("reward", "reward_mean", "{:.3f}"),
    ("held-out", "heldout/accuracy", "{:.3f}"),
    ("no signal", "frac_reward_zero_std", "{:.0%}"),
    ("ratio spread", "ratio_std", "{:.1e}"),
    ("floor", "ratio_floor", "{:.0e}"),
    ("clipped", "clip", "{:.1%}"),
    ("KL", "kl", "{:.1e}"),
    ("grad", "grad_norm", "{:.2g}"),
    ("samples/s", "samples_per_second", "{:.1f}"),
)
"""Title, metric, format. A metric that an iteration lacks shows its last value; held-out metrics are printed
in the line of their evaluation only."""

SUPERVISED_COLUMNS = (
    ("loss", "loss", "{:.4f}"),
    ("held-out", "heldout/accuracy", "{:.3f}"),
    ("ECE", "heldout/ece", "{:.3f}"),
    ("SRCC", "heldout/srcc", "{:.3f}"),
    ("MAE", "heldout/mae", "{:.3f}"),
    ("grad", "grad_norm", "{:.2g}"),
    ("lr", "lr", "{:.1e}"),
    ("samples/s", "samples_per_second", "{:.1f}"),
)
"""Columns of supervised trainings."""


def clock_text(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03.

    >>> clock_text(123.4)
    '2:03'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def heldout_means(record: Mapping[str, Any]) -> list[str]:
    """Describe the held-out means that a record has an interval of.

    >>> heldout_means({"heldout/mine": 0.5, "heldout/mine.low": 0.25, "heldout/mine.high": 0.75})
    ['held-out mine 0.500 (0.250 to 0.750)']
    """
    names = [key.removesuffix(".low") for key in record if key.startswith("heldout/") and key.endswith(".low")]
    return [
        f"held-out {name.removeprefix('heldout/')} {_cell('{:.3f}', record[name])}{_ends(record, name, '.')}"
        for name in names
        if name != "heldout/accuracy"  # that of the tag "low" is no end
    ]


def _ends(record: Mapping[str, Any], key: str, sign: str = "_") -> str:
    """Format the ends of a metric's interval in parentheses; empty where the record has none."""
    ends = [_cell("{:.3f}", record[name]) for end in ("low", "high") if (name := f"{key}{sign}{end}") in record]
    return f" ({' to '.join(ends)})" if len(ends) == 2 else ""


def _cell(form: str, value: float) -> str:
    """Format a number; a dash for NaN and infinities, such as the gradient norm of skipped updates."""
    return form.format(value) if math.isfinite(value) else "–"


class TrainingProgress:
    """Prints a line for each record of the metrics, where `enabled` (in the first process)."""

    def __init__(
        self,
        total: int,
        *,
        max_seconds: float | None = None,
        console: Console | None = None,
        enabled: bool = True,
        columns: Sequence[tuple[str, str, str]] = POLICY_COLUMNS,
    ) -> None:
        self.console, self.enabled, self._columns = console or Console(), enabled, columns
        self._total, self._done, self._start = total, 0, 0
        self._seconds, self._seconds_left = 0.0, math.inf if max_seconds is None else max_seconds
        self._last: dict[str, Any] = {}

    def go_on(self, done: int, seconds: float) -> None:
        """Continue a run of which `done` iterations took `seconds`."""
        self._done = self._start = done
        self._seconds_left -= seconds

    def note(self, text: str) -> None:
        """Print a line, such as a warning."""
        if self.enabled:
            self.console.print(text, highlight=False, markup=False)

    def update(self, record: Mapping[str, Any]) -> None:
        """Print the record of a finished iteration."""
        self._done = int(record["iteration"])
        seconds = float(record.get("seconds") or 0.0)
        self._seconds, self._seconds_left = self._seconds + seconds, self._seconds_left - seconds
        values = {key: value for key, value in record.items() if value is not None}
        if "clip_low" in record or "clip_high" in record:
            values["clip"] = values.get("clip_low", 0.0) + values.get("clip_high", 0.0)
        self._last |= values
        fresh = {k: v for k, v in self._last.items() if k in values or not k.startswith("heldout/")}
        known = [
            f"{title} {_cell(form, fresh[key])}{_ends(values, key)}"
            for title, key, form in self._columns
            if key in fresh
        ]
        cells = ", ".join([*known, *heldout_means(values)])
        if self.enabled:
            line = f"iteration {self._done}/{self._total}: {cells}, {clock_text(self.seconds_left())} left"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def seconds_left(self) -> float:
        """Estimate the seconds to the end from the mean iteration and `max_seconds`; 0 before the first."""
        count = self._done - self._start
        left = self._seconds / count * (self._total - self._done) if count else 0.0
        return max(min(left, self._seconds_left), 0.0)
