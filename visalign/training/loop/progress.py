# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: a live table in a terminal, a line per iteration anywhere else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

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
"""Column title, metric, format. A metric that an iteration lacks shows its last value; in a log, held-out
metrics are printed in the line of their evaluation only."""

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
"""Columns of supervised trainings; a metric that no iteration had has no column."""


def clock_text(seconds: float) -> str:
    """Format seconds as 1:02:03 or 2:03.

    Example:
        >>> clock_text(123.4)
        '2:03'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _cell(form: str, value: float) -> str:
    """Format a number; a dash for NaN and infinities, such as the gradient norm of skipped updates."""
    return form.format(value) if math.isfinite(value) else "–"


class TrainingProgress:
    """Prints records of `visalign.training.loop.metrics`.

    Args:
        total: iterations of the run.
        max_seconds: training stops after this time even if iterations are left.
        console: where to write; None for the standard output.
        enabled: False shows nothing (all processes but the first).
        rows: iterations kept in the live table.
        columns: as `POLICY_COLUMNS`.
    """

    def __init__(
        self,
        total: int,
        *,
        max_seconds: float | None = None,
        console: Console | None = None,
        enabled: bool = True,
        rows: int = 8,
        columns: Sequence[tuple[str, str, str]] = POLICY_COLUMNS,
    ) -> None:
        self.console, self._columns = console or Console(), columns
        self.enabled, self.rows = enabled, rows
        self._total, self._done, self._start = total, 0, 0
        self._seconds, self._seconds_left = 0.0, math.inf if max_seconds is None else max_seconds
        self._recent: list[dict[str, Any]] = []
        self._last: dict[str, Any] = {}
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
        )
        self._task = self._bar.add_task("training", total=total, left="")
        self._live: Live | None = None

    def __enter__(self) -> TrainingProgress:
        if self.enabled and self.console.is_terminal:
            self._live = Live(self._view(), console=self.console, refresh_per_second=4, transient=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._view())
            self._live.stop()
            self._live = None

    def go_on(self, done: int, seconds: float) -> None:
        """Continue a run of which `done` iterations took `seconds`."""
        self._done = self._start = done
        self._seconds_left -= seconds
        self._bar.update(self._task, completed=done)

    def note(self, text: str) -> None:
        """Print a line that stays, such as a warning."""
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
        self._last = {**self._last, **values}
        self._recent = [*self._recent, dict(self._last)][-self.rows :]
        self._bar.update(self._task, completed=self._done, left=f"{clock_text(self.seconds_left())} left")
        if self._live is not None:
            self._live.update(self._view())
        elif self.enabled:
            fresh = {k: v for k, v in self._last.items() if k in values or not k.startswith("heldout/")}
            cells = ", ".join(f"{title} {text}" for title, text in self._cells(fresh) if text)
            left = clock_text(self.seconds_left())
            self.console.print(
                f"iteration {self._done}/{self._total}: {cells}, {left} left",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def seconds_left(self) -> float:
        """Estimate the seconds to the end from the mean iteration and `max_seconds`; 0 before the first."""
        count = self._done - self._start
        left = self._seconds / count * (self._total - self._done) if count else 0.0
        return max(min(left, self._seconds_left), 0.0)

    def _cells(self, record: Mapping[str, Any]) -> list[tuple[str, str]]:
        return [
            (title, _cell(form, record[key]) if key in record else "") for title, key, form in self._columns
        ]

    def _view(self) -> Group:
        table = Table(expand=True, box=None, pad_edge=False)
        table.add_column("iteration", justify="right")
        shows_all = self._columns is POLICY_COLUMNS or not self._recent
        numbers = [n for n, (_, key, _) in enumerate(self._columns) if shows_all or key in self._last]
        for number in numbers:
            table.add_column(self._columns[number][0], justify="right")
        for record in self._recent:
            cells = self._cells(record)
            table.add_row(str(record["iteration"]), *(cells[number][1] for number in numbers))
        return Group(table, self._bar)
