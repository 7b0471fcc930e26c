# SPDX-License-Identifier: Apache-2.0
"""Page of collected votes: reliability of each voter, agreement of people, disputed pairs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from .base import fixed, render_page, share, whole_percent, with_span
from .table_files import FileTable

UNRELIABLE = 0.7
"""Reliability below which, by two standard deviations, a voter is named: .63 of typical pairs right."""


def votes_page(result: Mapping[str, Any], disputed: Sequence[Mapping[str, Any]]) -> str:
    """Render the `report` of votes, with its disputed pairs and their prompt and images, as from `embedded`."""
    return render_page(
        "votes_page.html.j2",
        title="Votes",
        command="visalign collect",
        result=result,
        headlines=headlines(result),
        sentences=sentences(result),
        disputed=disputed,
    )


def headlines(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, number, detail) of the headlines."""
    lines = [
        ("Votes", str(result["votes"]), f"on {result['voted']} of {result['tasks']} tasks"),
        ("Voters", str(result["people"]), f"and {result['judges']} judges" if result["judges"] else ""),
    ]
    choices = {"of all votes": result["alpha"]} if result["pairs"] else {}
    for what, alpha in (choices | result["alphas"]).items():
        ends = "" if alpha["low"] is None else f", {fixed(alpha['low'])} to {fixed(alpha['high'])}"
        lines.append(("Krippendorff's alpha", fixed(alpha["estimate"]), f"{what}{ends}"))
    return lines


def sentences(result: Mapping[str, Any]) -> list[str]:
    lines = [*models_line(result), "Alpha is 1 where all agree and 0 where they agree as often as by chance."]
    for entry in result["annotators"]:
        value, std = entry.get("reliability"), entry.get("reliability_std")
        if value is not None and value + 2 * std < UNRELIABLE:
            lines.append(f"{entry['name']} may vote without looking: a reliability of {value:.2f} ± {std:.2f}.")
        bias = entry.get("left_of_screen")
        if bias and bias["low"] is not None and not bias["low"] <= 0.5 <= bias["high"]:
            lines.append(
                f"{entry['name']} took the left of the screen {bias['estimate']:.0%} of the time "
                f"({bias['low']:.0%} to {bias['high']:.0%}), where sides were drawn by lot."
            )
    return lines


def models_line(result: Mapping[str, Any]) -> list[str]:
    """Say which of two models voters prefer, or the order of several; nothing without models."""
    rows = result["models"]
    if len(rows) > 2:
        shares = [f"{row['name']} {with_span(row, share, whole_percent)}" for row in rows]
        return [f"Share of votes: {', '.join(shares)}."]
    if not rows:
        return []
    first, second = rows
    is_open = first["low"] is None or first["low"] <= 0.5
    verdict = "The interval holds 50 %: not settled." if is_open else f"{first['name']} is preferred."
    ends = with_span(first, share, whole_percent)
    return [f"{first['name']} against {second['name']}: {ends} of the votes on {first['pairs']} pairs. {verdict}"]


def progress_page(progress: Mapping[str, Any], *, vote_url: str, file: str) -> str:
    """Render the `progress` of a collection, which reloads, for whoever runs it."""
    voters = [row | {"ago": None if row["last"] is None else time.time() - row["last"]} for row in progress["voters"]]
    return render_page(
        "progress_page.html.j2",
        title="Progress",
        command="visalign collect",
        progress=progress,
        voters=voters,
        vote_url=vote_url,
        file=file,
    )


def file_tables(result: Mapping[str, Any]) -> list[FileTable]:
    plain = ("name", "is_judge", "votes", "seconds")
    measured = ("rest", "repeats", "gold", "left_of_screen")
    numbers = ("ties", "reliability", "reliability_std", "side_bias", "agreement")
    numbers += ("above_the_rest", "apart_from_the_rest")
    rows = []
    for entry in result["annotators"]:
        intervals = [entry.get(name) or {} for name in measured]
        ends = [tuple(interval.get(end) for end in ("estimate", "low", "high")) for interval in intervals]
        rows.append([entry[name] for name in plain] + ends + [entry.get(name) for name in numbers])
    tables = [FileTable(name="voters", columns=(*plain, *measured, *numbers), rows=rows)]
    if models := result["models"]:
        shares = [[row["name"], row["pairs"], (row["estimate"], row["low"], row["high"])] for row in models]
        tables.append(FileTable(name="models", columns=("name", "pairs", "share"), rows=shares))
    return tables
