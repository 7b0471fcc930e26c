# SPDX-License-Identifier: Apache-2.0
"""Page of several rewards on one set: correlations, and the images on which they disagree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from visalign.evaluation.rewards.agreement import FEWEST_PROMPTS

from .base import model_name, plain, render_page, signed
from .plots import heatmap_plot
from .table_files import FileTable

KINDS = {"overall": "over all images", "within": "within prompts"}
REDUNDANT = 0.9
"""Rank correlation from which two rewards are called redundant."""


def agree_page(result: Mapping[str, Any], images: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Render the result of `agree_rewards`; images as returned by `embedded`, None where unreadable."""
    labels = [reward["label"] for reward in result["rewards"]]
    squares: dict[str, list[list[Any]]] = {kind: matrix(result, kind) for kind in KINDS}
    return render_page(
        "agree_page.html.j2",
        title="Where rewards part company",
        command="visalign agree",
        models=[(reward["label"], model_name(reward)) for reward in result["rewards"]],
        about=result["set"],
        fewest=FEWEST_PROMPTS,
        rewards=result["rewards"],
        pairs=[{**pair, "number": number} for number, pair in enumerate(result["pairs"], 1)],
        headlines=[
            (
                f"{pair['first']} · {pair['second']}",
                signed(pair["overall"]["estimate"]),
                f"within prompts {signed(pair['within']['estimate'])}",
            )
            for pair in result["pairs"][:6]
        ],
        labels=labels,
        squares=squares,
        heatmaps={
            kind: heatmap_plot(
                labels,
                [[cell and cell["estimate"] for cell in row] for row in squares[kind]],
                f"Heatmap of the rank correlations {where}.",
            )
            for kind, where in KINDS.items()
        },
        images=images,
        sentences=sentences(result),
        facts_of_set=list(_facts(result)),
    )


def _facts(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    about = result["set"]
    yield "source", about["source"]
    yield "images, prompts", f"{about['images']}, {about['prompts']}"
    for reward in result["rewards"]:
        label, better = reward["label"], "" if reward["higher_is_better"] else " (lower is better)"
        yield f"{label}, unit", f"{reward['unit']}{better}"
        if reward.get("provenance"):
            yield f"{label} is", reward["provenance"]
        yield f"{label}, mean ± spread", f"{plain(reward['mean'])} ± {plain(reward['spread'])}"
        yield f"{label}, judged / failed", f"{reward['judged']} / {reward['failed']}"
    yield "seconds", plain(result["seconds"])


def file_tables(result: Mapping[str, Any]) -> list[FileTable]:
    rows = []
    for pair in result["pairs"]:
        numbers = [tuple(pair[kind][end] for end in ("estimate", "low", "high")) for kind in KINDS]
        rows.append([f"{pair['first']} and {pair['second']}", *numbers, pair["same_choice"], pair["images"]])
    columns = ("rewards", "overall", "within_prompts", "same_order", "images")
    return [FileTable(name="agreement", columns=columns, rows=rows)]


def matrix(result: Mapping[str, Any], kind: str) -> list[list[Mapping[str, Any] | None]]:
    """Arrange the correlations ("overall" or "within") as a square table; None on the diagonal."""
    labels = [reward["label"] for reward in result["rewards"]]
    correlations = {frozenset((pair["first"], pair["second"])): pair[kind] for pair in result["pairs"]}
    return [[None if a == b else correlations[frozenset((a, b))] for b in labels] for a in labels]


def sentences(result: Mapping[str, Any]) -> list[str]:
    """Say in words what the correlations mean for a mixture of the rewards."""
    lines = []
    for pair in result["pairs"]:
        names = f"{pair['first']} and {pair['second']}"
        kind = "overall" if pair["within"]["estimate"] is None else "within"
        number, where = pair[kind], KINDS[kind]
        if pair["note"]:
            lines.append(f"{names}: {pair['note']}.")
        if number["low"] is None:
            continue
        if number["low"] > REDUNDANT:
            lines.append(f"{names} measure much the same {where}: one of them adds little to a mixture.")
        elif number["high"] < 0:
            lines.append(f"{names} pull in opposite directions {where}: a mixture pays for their compromise.")
        elif number["low"] <= 0 <= number["high"]:
            lines.append(f"{names} show no clear agreement {where}.")
    return lines
