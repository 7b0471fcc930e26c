# SPDX-License-Identifier: Apache-2.0
"""Before and after as a table for the terminal."""

from __future__ import annotations

import math

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .comparison import AccuracyRow, RewardRow, compare
from .intervals import Interval
from .result import HeldoutResult
from .wording import change, number, percent, percent_span, points, words


def render_table(before: HeldoutResult, after: HeldoutResult) -> Table:
    """Accuracy in all and per category, and every reward, each with 95 % intervals (`rich.print` shows it).

    Raises:
        UserError: If before and after are not of the same samples.
    """
    comparison = compare(before, after)
    table = Table(title="Held-out, before and after", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.caption_justify = "left"
    table.caption = Text("In brackets 95 % intervals: Wilson; of a change paired, resampled over prompts.")
    table.add_column("")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*_accuracy("accuracy", comparison.overall), style="bold", end_section=True)
    for row in comparison.categories:
        last = row is comparison.categories[-1]
        table.add_row(*_accuracy(words(row.name), row), end_section=last)
    for row in comparison.rewards:
        if not row.repeats_accuracy:
            table.add_row(*_reward(row))
    return table


def _accuracy(name: str, row: AccuracyRow) -> list[Text]:
    span = f"{points(row.change.low)}, {points(row.change.high)}"
    return [
        Text(name),
        Text(_with(percent(row.before.estimate, 1), percent_span(row.before), row.before)),
        Text(_with(percent(row.after.estimate, 1), percent_span(row.after), row.after)),
        _colored(_with(points(row.change.estimate), span, row.change), row.change, 1),
    ]


def _reward(row: RewardRow) -> list[Text]:
    span = f"{change(row.change.low)}, {change(row.change.high)}"
    missing = f" ({row.invalid[0]}/{row.invalid[1]} invalid)" if any(row.invalid) else ""
    return [
        Text(f"{words(row.name)}, {row.unit}{missing}"),
        Text(number(row.before)),
        Text(number(row.after)),
        _colored(
            _with(change(row.change.estimate), span, row.change),
            row.change,
            1 if row.higher_is_better else -1,
        ),
    ]


def _with(value: str, span: str, interval: Interval) -> str:
    return f"{value} [{span}]" if math.isfinite(interval.low) else value


def _colored(text: str, interval: Interval, good: int) -> Text:
    if not interval.excludes_zero:
        return Text(text)
    return Text(text, style="green" if interval.estimate * good > 0 else "red")
