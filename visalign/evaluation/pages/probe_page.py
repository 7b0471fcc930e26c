# SPDX-License-Identifier: Apache-2.0
"""Page of a probed reward: failures first, then every probe with its responses and images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from visalign.evaluation.probes.catalogue import WANTED, WANTED_OF_PAIRS
from visalign.evaluation.probes.response import ORDER

from .base import model_name, plain, render_page, share, signed, span
from .plots import response_plot
from .table_files import FileTable

VERDICTS = {
    "fails": ("bad", "fails"),
    "unclear": ("flat", "unclear"),
    "not judged": ("flat", "too few scored"),
    "holds": ("good", "holds"),
    "shown": ("flat", "for information"),
}
"""Verdict -> (colour, words)."""


def probe_page(
    result: Mapping[str, Any], original: Mapping[str, Any], images: Mapping[str, Sequence[Mapping[str, Any]]]
) -> str:
    """Render the result of `probe_reward`; `original` is an example image, `images` its changes by probe."""
    probes = sorted(result["probes"], key=lambda probe: ORDER.index(probe["verdict"]))
    means = [abs(level["mean"]) for probe in probes for level in probe["levels"] if level["mean"] is not None]
    judge, reference = result["judge"], result["reference"]
    return render_page(
        "probe_page.html.j2",
        title=f"What moves {judge['name']}",
        command="visalign probe-reward",
        models=[(result["judge"]["name"], model_name({**result["judge"]["identity"], **result["judge"]}))],
        judge=judge,
        reference=reference,
        level=result["level"],
        headlines=[
            (VERDICTS[verdict][1], count, "probe" if count == 1 else "probes")
            for verdict, count in result["summary"].items()
        ],
        probes=[{**probe, "plot": response_plot(probe), "worst": worst_level(probe)} for probe in probes],
        original=original,
        images=images,
        verdicts=VERDICTS,
        wanted=WANTED_OF_PAIRS if judge["kind"] == "comparisons" else WANTED,
        in_words=in_words,
        unit=unit_in_words(result),
        limit=min(max([1.0, *means]), 4.0),
        facts_of_reference=list(_facts(result)),
        headline=headline(result),
        best=best_paid(result),
    )


def _facts(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    judge, reference, limits = result["judge"], result["reference"], result["limits"]
    compares = judge["kind"] == "comparisons"
    yield "reference", reference["source"]
    yield f"{'pairs' if compares else 'images'} scored", f"{reference['judged']} of {reference['size']}"
    yield "mean log-odds" if compares else "mean score", plain(reference["mean"])
    yield "spread", f"{plain(reference['spread'])} {judge['unit']}"
    yield "no gain: mean at most", signed(limits["gain"])
    yield "no change: mean size at most", plain(limits["move"])
    yield "the very same: each at most", plain(limits["same"])
    yield "clear loss: mean at most", f"−{plain(limits['loss'])}"
    if compares:
        yield "the same winner: at least", share(limits["consistent"])
        yield "circles: at most, of chance", share(limits["circles"])
    yield "seconds", plain(result["seconds"])
    yield "identity", judge["digest"][:16]


def file_tables(result: Mapping[str, Any]) -> list[FileTable]:
    rows = []
    for probe in result["probes"]:
        for level in probe["levels"]:
            ends = ("share", "share_low", "share_high") if "share" in level else ("mean", "low", "high")
            number = tuple(level.get(key) for key in ends)
            what = "share" if "share" in level else "mean response"
            rows.append([probe["title"], level["label"], what, number, level["verdict"]])
    columns = ("probe", "level", "what", "value", "verdict")
    return [FileTable(name="probes", columns=columns, rows=rows)]


def headline(result: Mapping[str, Any]) -> str:
    """Count the probes that move the reward although they should not, and those without a decision."""
    tried = [probe for probe in result["probes"] if probe["verdict"] != "shown"]
    failed = [probe["title"].lower() for probe in tried if probe["verdict"] == "fails"]
    unclear = sum(probe["verdict"] == "unclear" for probe in tried)
    silent = sum(probe["verdict"] == "not judged" for probe in tried)
    text = f"{len(failed)} of {len(tried)} probes move it: {', '.join(failed)}."
    text = text if failed else f"None of {len(tried)} probes moves it beyond its limit."
    text += f" Not decided by so few images: {unclear}." if unclear else ""
    return text + (f" Too few answers to say anything: {silent}." if silent else "")


def unit_in_words(result: Mapping[str, Any]) -> str:
    reference, judge = result["reference"], result["judge"]
    size = f"{plain(reference['spread'])} {judge['unit']}"
    if judge["kind"] == "comparisons":
        return (
            f"A response of 1 is {size} for the changed image: one standard deviation of the strengths "
            f"that would explain its answers to {reference['judged']} of {reference['size']} pairs of "
            f"reference samples ({reference['source']})."
        )
    return (
        f"A response of 1 is {size}: one standard deviation of its scores of {reference['judged']} of "
        f"{reference['size']} reference samples ({reference['source']})."
    )


def in_words(level: Mapping[str, Any], expectation: str) -> tuple[str, ...]:
    """Write the response to one level: the number with its interval, and what the verdict uses."""
    if "share" in level:
        if level["share"] is None:
            return ("–",)
        ends = f"{share(level['share_low'])} to {share(level['share_high'])}"
        return f"{share(level['share'])} ({ends})", f"by chance {share(level['chance'])}"
    parts = [f"{signed(level['mean'])} ({span(level)})"]
    if expectation == "steady" and level["size"] is not None:
        parts.append(f"mean size {plain(level['size'])}")
    if expectation == "same" and level["largest"] is not None:
        parts.append(f"largest {plain(level['largest'])}")
    if level.get("win") is not None:
        ends = f"{share(level['win_low'])} to {share(level['win_high'])}"
        parts.append(f"wins {share(level['win'])}" + ("" if level["win_low"] is None else f" ({ends})"))
    if level.get("win_before") is not None:
        parts.append(f"unchanged {share(level['win_before'])}")
    if level.get("turned") is not None:
        parts.append(f"another winner in {share(level['turned'])}")
    return tuple(parts)


def worst_level(probe: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the level of the probe's verdict that is furthest on the wrong side."""
    by = {"steady": "size", "same": "largest", "consistent": "share", "acyclic": "share"}.get(probe["wanted"], "mean")
    scored = [level for level in probe["levels"] if level.get(by) is not None]
    decisive = [level for level in scored if level["verdict"] == probe["verdict"]]
    return max(decisive or scored, key=lambda level: level[by]) if scored else probe["levels"][0]


def best_paid(result: Mapping[str, Any]) -> str | None:
    """Name the change that pays an optimizer most; None where no change is paid beyond the limit."""
    paid = [
        (level["mean"], probe["title"], level["label"], level.get("win"))
        for probe in result["probes"]
        if probe["wanted"] in ("no gain", "falling", "loss")
        for level in probe["levels"]
        if level["mean"] is not None and level["verdict"] == "fails"
    ]
    mean, title, label, win = max(paid, key=lambda entry: entry[0], default=(-math.inf, "", "", None))
    if mean <= result["limits"]["gain"]:
        return None
    wins = "" if win is None else f" It wins {share(win)} of its comparisons."
    return f"The best paid change is {title.lower()}, {label}: {signed(mean)} spreads on average.{wins}"
