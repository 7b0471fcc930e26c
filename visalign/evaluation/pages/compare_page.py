# SPDX-License-Identifier: Apache-2.0
"""The page of two compared images: the images side by side, then every judge with its numbers and words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .base import embedded, plain, render_page, signed
from .table_files import FileTable

WINNERS = {
    "A": "A is better",
    "B": "B is better",
    "tie": "a tie",
    "undecided": "undecided",
    "failed": "could not judge",
}


def compare_page(result: Mapping[str, Any], images: Sequence[Tensor], names: Sequence[str]) -> str:
    """The page of what `compare_images` found of A and B, [3, H, W] in [0, 1], named by their files."""
    return render_page(
        "compare_page.html.j2",
        title="A or B",
        command="visalign compare",
        prompt=result["prompt"],
        summary=result["summary"],
        rule=result["rule"],
        judges=[
            {**judge, "number": place, "in_words": in_words(judge), "margin": margin(judge)}
            for place, judge in enumerate(result["judges"], 1)
        ],
        shots=[
            {"side": side, "name": name} | embedded(image)
            for side, name, image in zip("AB", names, images, strict=True)
        ],
    )


def file_tables(result: Mapping[str, Any]) -> list[FileTable]:
    """A row for each judge, for files; `sure` is yes, no, or empty where there is no winner."""
    rows = []
    for judge in result["judges"]:
        sides = judge.get("sides") or {}
        sure = {True: "yes", False: "no"}.get(judge["sure"])
        rows.append(
            [judge["label"], judge["winner"], sure, judge["prob"]]
            + [sides[side]["value"] if sides else None for side in "AB"]
            + [judge["difference"], judge["difference_std"], judge["unit"]]
        )
    columns = ("judge", "winner", "sure", "prob_A", "A", "B", "difference", "difference_std", "unit")
    return [FileTable(name="comparison", columns=columns, rows=rows)]


def margin(judge: Mapping[str, Any]) -> str:
    """By how much one of the result's judges prefers A."""
    if judge["difference"] is None:
        return "–"
    number = plain(judge["difference"])
    number = number if number.startswith("−") or judge["difference"] == 0 else f"+{number}"
    unit = judge["unit"]
    if judge["difference_std"]:
        in_stds = signed(judge["difference"] / judge["difference_std"], 1)
        return f"{number} ({unit}), {in_stds} standard deviations"
    return f"{number} ({unit})"


def in_words(judge: Mapping[str, Any]) -> str:
    """Which one of the result's judges prefers, and how sure it is."""
    said = WINNERS[judge["winner"]]
    if judge["sure"] is False:
        said = "A rather than B" if judge["winner"] == "A" else "B rather than A"
    if judge["prob"] is None:
        return f"{said}, unsure" if judge["sure"] is False else said
    if judge["winner"] in ("tie", "undecided"):
        return f"{said}, {100 * judge['prob']:.0f} % for A"
    return f"{said}, {100 * max(judge['prob'], 1 - judge['prob']):.0f} % sure"
