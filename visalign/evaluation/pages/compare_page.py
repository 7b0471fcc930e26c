# SPDX-License-Identifier: Apache-2.0
"""Page of two compared images: the images side by side, then every reward with its numbers and words."""

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
    """Render the result of `compare_images` for A and B, [3, H, W] in [0, 1], with their file names."""
    return render_page(
        "compare_page.html.j2",
        title="A or B",
        command="visalign compare",
        banners=[f"{judge['label']}: {judge['warning']}" for judge in result["judges"] if judge.get("warning")],
        prompt=result["prompt"],
        summary=result["summary"],
        rule=result["rule"],
        judges=[
            {**judge, "number": number, "in_words": in_words(judge), "margin": margin(judge)}
            for number, judge in enumerate(result["judges"], 1)
        ],
        shots=[
            {"side": side, "name": name} | embedded(image)
            for side, name, image in zip("AB", names, images, strict=True)
        ],
    )


def file_tables(result: Mapping[str, Any]) -> list[FileTable]:
    """Build a row per reward, for files; `sure` is yes, no, or empty without a winner."""
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
    """Write which image a reward prefers, and how sure it is."""
    verdict = WINNERS[judge["winner"]]
    if judge["sure"] is False:
        verdict = "A rather than B" if judge["winner"] == "A" else "B rather than A"
    if judge["prob"] is None:
        return f"{verdict}, unsure" if judge["sure"] is False else verdict
    if judge["winner"] in ("tie", "undecided"):
        return f"{verdict}, {100 * judge['prob']:.0f} % for A"
    return f"{verdict}, {100 * max(judge['prob'], 1 - judge['prob']):.0f} % sure"
