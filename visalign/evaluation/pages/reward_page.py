# SPDX-License-Identifier: Apache-2.0
"""The page of a reward's evaluation: one file, no network, no script, light or dark, any width."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from visalign.evaluation.statistics.agreement import HEADLINE

from .plots import reliability_plot, risk_plot, scatter_plot
from .report import environment

CONTROL = (
    ("identity_alone", "Between generators, predicted by their names alone"),
    ("judge_between", "Between generators, the judge"),
    ("judge_within", "Within one generator, the judge"),
    ("judge_against", "Against the usual order of the generators, the judge"),
)
"""Rows of the control, in the order in which they are read."""

SIGNALS = {"margin": "the size of its margin", "std": "the std it gives"}

CORRELATIONS = {
    "srcc": "SRCC (Spearman)",
    "plcc": "PLCC (Pearson), no fit",
    "plcc_logistic4": "PLCC after the 4-parameter logistic fit",
    "plcc_logistic5": "PLCC after the 5-parameter logistic fit",
    "kendall_b": "Kendall's τ-b",
    "kendall_c": "Kendall's τ-c",
}


def evaluation_page(result: Mapping[str, Any], *, title: str | None = None) -> str:
    """The whole page.

    Args:
        result: What `visalign evaluate` wrote as JSON.
        title: Of the page; else made from the set's name.

    Returns:
        HTML.
    """
    template = environment()
    template.filters |= {
        "share": _share,
        "share_span": _share_span,
        "plain": _plain,
        "plain_span": _plain_span,
    }
    template.globals |= {"rail": _rail}
    about = result["set"]
    is_pairs = about["kind"] == "preferences"
    judges = [dict(judge) | {"name": judge["judge"]["name"]} for judge in result["judges"]]
    for judge in judges:
        judge["plots"] = (
            _preference_plots(judge)
            if is_pairs
            else [("Scores and opinions", scatter_plot(judge["points"], judge["judge"]["unit"]))]
        )
    return template.get_template("reward_page.html.j2").render(
        title=title or f"{', '.join(judge['name'] for judge in judges)} on {about['name']}",
        about=about,
        judges=judges,
        comparisons=result["comparisons"],
        is_pairs=is_pairs,
        headline=HEADLINE,
        control=CONTROL,
        signals=SIGNALS,
        correlations=CORRELATIONS,
        seconds=result.get("seconds"),
    )


def _preference_plots(judge: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    plots = [("Reliability", reliability_plot(judge["calibration"]))]
    for signal, name in SIGNALS.items():
        if judge["selective"] and signal in judge["selective"]:
            plots.append((f"Risk and coverage by {name}", risk_plot(judge["selective"][signal], name)))
    return plots


def _rail(number: Mapping[str, Any] | None, side: str, low: float, high: float) -> Markup:
    """An interval on a track from `low` to `high`, placed in percent of its width."""
    if number is None or number["estimate"] is None:
        return Markup("")

    def place(value: float) -> float:
        return min(max(100 * (value - low) / (high - low), 0.0), 100.0)

    parts = Markup('<span class="dot {0}" style="left:{1:.2f}%"></span>').format(
        side, place(number["estimate"])
    )
    if number["low"] is None:
        return parts
    start, end = place(number["low"]), place(number["high"])
    return (
        Markup('<span class="ci {0}" style="left:{1:.2f}%;width:{2:.2f}%"></span>').format(
            side, start, end - start
        )
        + parts
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _share_span(number: Mapping[str, Any] | None) -> str:
    if number is None or number["low"] is None:
        return "no interval"
    return f"{100 * number['low']:.1f} to {100 * number['high']:.1f}"


def _plain(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}".replace("-", "−")


def _plain_span(number: Mapping[str, Any] | None) -> str:
    if number is None or number["low"] is None:
        return "no interval"
    return f"{number['low']:.3f} to {number['high']:.3f}".replace("-", "−")
