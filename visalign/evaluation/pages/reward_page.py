# SPDX-License-Identifier: Apache-2.0
"""The evaluation of rewards in words and tables, a column per judge: for its page, and for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from visalign.evaluation.statistics.agreement import HEADLINE

from .base import MISSING, fixed, points, rail, render_page, share, signed, span, words
from .plots import reliability_plot, risk_plot, scatter_plot

Judge = Mapping[str, Any]

CONTROL = {
    "identity_alone": "Between generators, predicted by their names alone",
    "judge_between": "Between generators, the judge",
    "judge_within": "Within one generator, the judge",
    "judge_against": "Against the usual order of the generators, the judge",
}
"""Rows of the control, in the order in which they are read."""
SIGNALS = {"margin": "the size of its margin", "std": "the std it gives", "both": "margin and std together"}
STD = {
    "srcc_votes": "Rank correlation of its std with the noise of the votes",
    "srcc_votes_given_margin": "– the size of its margin held fixed",
    "nll_gain": "What its std adds to its margin, nats after scaling",
}
"""Rows of what a judge's std is worth."""
CORRELATIONS = {
    "srcc": "SRCC (Spearman)",
    "srcc_within": "– within prompts or references, pooled",
    "plcc": "PLCC (Pearson), no fit",
    "plcc_logistic4": "PLCC after the 4-parameter logistic fit",
    "plcc_logistic5": "PLCC after the 5-parameter logistic fit",
    "kendall_b": "Kendall's τ-b",
    "kendall_c": "Kendall's τ-c",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one judge got in one row."""

    value: str
    ends: str = ""
    """Of its interval, "low to high"; empty where there can be none."""
    more: str = ""

    def __str__(self) -> str:
        """As a terminal shows it."""
        interval = "" if self.ends in ("", "no interval") else f" [{self.ends.replace(' to ', ', ')}]"
        return f"{self.value}{interval}{self.more}"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measure of every judge."""

    what: str
    cells: list[Cell]
    detail: str = ""
    rails: tuple[Markup, ...] = ()
    """Intervals of the first two judges on one track."""


@dataclass(frozen=True, kw_only=True)
class JudgeTable:
    """One table."""

    title: str
    """Of the table in a terminal, and of its first column on the page."""
    heading: str
    """Above the table on the page; may be empty."""
    rows: list[Row]
    scale: tuple[str, ...] = ()
    """Marks of the tracks."""


def evaluation_page(result: Mapping[str, Any], *, title: str | None = None) -> str:
    """The page of what `visalign evaluate` wrote as JSON; without a title it gets one from the set's name."""
    about, judges = result["set"], result["judges"]
    is_pairs = about["kind"] == "preferences"
    names = [judge["judge"]["name"] for judge in judges]
    form = share if is_pairs else fixed
    numbers = [j["agreement"][HEADLINE]["micro"] if is_pairs else j["correlations"]["srcc"] for j in judges]
    return render_page(
        "reward_page.html.j2",
        title=title or f"{', '.join(names)} on {about['name']}",
        command="visalign evaluate",
        about=about,
        judges=judges,
        names=names,
        columns=[f"#{name}" for name in names],
        results=[
            (name, form(n["estimate"]), f"{round(100 * n['level'])}\u00a0% interval {span(n, form)}")
            for name, n in zip(names, numbers, strict=True)
        ],
        sections=evaluation_tables(result),
        plots=[list(_plots(judge)) for judge in judges],
        comparisons=[{**entry, "said": comparison_line(entry)} for entry in result["comparisons"]],
        is_pairs=is_pairs,
        facts=list(_facts(result)),
    )


def evaluation_tables(result: Mapping[str, Any]) -> dict[str, list[JudgeTable]]:
    """Section of the page -> its tables."""
    judges = result["judges"]
    if result["set"]["kind"] != "preferences":
        return {"correlation": [_correlation(judges)], "slices": _slices(judges, "srcc", "images")}
    found = {"agreement": [_agreement(judges), *_both_orders(judges)]}
    if any(judge["people"]["single_vote"]["estimate"] is not None for judge in judges):
        found["people"] = [_people(judges)]
    found["calibration"] = [_calibration(judges)]
    found["slices"] = _slices(judges, "accuracy", "pairs")
    return found | ({"generators": [_control(judges)]} if any(j["generators"] for j in judges) else {})


def comparison_line(comparison: Mapping[str, Any]) -> str:
    """Two judges in one sentence."""
    is_pairs, number = "pairs" in comparison, comparison["difference"]
    form: Callable[[float | None], str] = points if is_pairs else lambda value: signed(value, 3)
    line = f"{comparison['first']} − {comparison['second']}: {form(number['estimate'])} "
    line += "points of accuracy" if is_pairs else "of SRCC"
    if number["low"] is not None:
        line += f" ({number['level']:.0%} interval {span(number, form)}"
        line += ", no clear difference)" if number["low"] <= 0 <= number["high"] else ")"
    if is_pairs:
        test = comparison["mcnemar"]
        line += f"; McNemar p = {test['p_value']:.2g} on the {test['pairs']} pairs that both decided"
    return f"{line}."


Spec = tuple[str, Callable[[Judge], Any], Callable[[Any], str]]
"""What a row is called; what a judge has there (a number, one with its interval, None); how it is written."""


def _rows(judges: Sequence[Judge], *specs: Spec) -> list[Row]:
    """A row each; what stands in a name behind two spaces is its detail."""
    rows = []
    for name, pick, form in specs:
        what, _, detail = name.partition("  ")
        rows.append(Row(what=what, detail=detail, cells=[_cell(pick(judge), form) for judge in judges]))
    return rows


def _cell(number: Any, form: Callable[[Any], str], more: str = "") -> Cell:
    if number is None:
        return Cell(value=MISSING)
    if isinstance(number, Mapping):
        return Cell(value=form(number["estimate"]), ends=span(number, form), more=more)
    return Cell(value=form(number), more=more)


def _agreement(judges: Sequence[Judge]) -> JudgeTable:
    rows = []
    for policy in judges[0]["agreement"]:
        entries = [judge["agreement"][policy] for judge in judges]
        cells = []
        for entry in entries:
            tuned = " · tuned here" if entry["threshold"] else ""
            cells.append(_cell(entry["micro"], share, f" · macro {share(entry['macro']['estimate'])}{tuned}"))
        what = f"{policy} (headline)" if policy == HEADLINE else policy
        rows.append(Row(what=what, detail=entries[0]["meaning"], cells=cells))
    return JudgeTable(title="Agreement with people, micro", heading="", rows=rows)


def _both_orders(judges: Sequence[Judge]) -> Iterator[JudgeTable]:
    if any(judge["swap"] for judge in judges):
        rows = _rows(
            judges,
            ("Same winner in both orders", lambda j: (j["swap"] or {}).get("same_winner"), share),
            ("How often the left side wins", lambda j: (j["swap"] or {}).get("left_share"), share),
            (
                "Position bias, log-odds for the left side",
                lambda j: (j["swap"] or {}).get("position_bias"),
                fixed,
            ),
        )
        yield JudgeTable(title="Pairwise judges", heading="Asked in both orders", rows=rows)


def _calibration(judges: Sequence[Judge]) -> JudgeTable:
    specs: list[Spec] = [("Judged / failed", _judged, str)]
    for key, what in (
        ("nll", "NLL, nats (0.693 = a coin)"),
        ("brier", "Brier score (0.25 = a coin)"),
        ("ece", "Expected calibration error"),
    ):
        specs.append((what, lambda j, k=key: j["calibration"][k], fixed))
        specs.append(("– after scaling", lambda j, k=key: (j["calibration"]["scaled"] or {}).get(k), fixed))
    noise = "– of a calibrated judge, from noise alone"
    specs.insert(-1, (noise, lambda j: j["calibration"]["ece_noise"], fixed))
    specs.append(("Largest gap of a bin (MCE)", lambda j: j["calibration"]["mce"], fixed))
    specs.append(("Temperature  above 1: too sure", lambda j: j["calibration"]["temperature"], fixed))
    for signal, what in SIGNALS.items():
        if any(signal in (judge["selective"] or {}) for judge in judges):
            name = f"AUROC of its errors by {what}  0.5: does not know"
            specs.append((name, lambda j, s=signal: (j["selective"] or {}).get(s, {}).get("auroc"), fixed))
    if any(judge["std"] for judge in judges):
        specs += [(what, lambda j, k=key: (j["std"] or {}).get(k), fixed) for key, what in STD.items()]
    return JudgeTable(title="Calibration", heading="", rows=_rows(judges, *specs))


def _people(judges: Sequence[Judge]) -> JudgeTable:
    """Each judge's column counts the pairs that it judged."""
    rows = _rows(
        judges,
        ("One vote, predicted by the judge", lambda j: j["people"]["judge_single_vote"], share),
        ("– by the majority of the other votes", lambda j: j["people"]["single_vote"], share),
        ("Krippendorff's alpha", lambda j: j["people"]["alpha"], fixed),
    )
    for person in judges[0]["people"]["annotators"]:
        for who, what in (
            ("judge", f"Votes of {person['name']}, predicted by the judge"),
            ("rest", "– by the rest"),
        ):
            cells = []
            for judge in judges:
                theirs = {entry["name"]: entry for entry in judge["people"]["annotators"]}
                cells.append(_cell(theirs.get(person["name"], {}).get(who), share))
            rows.append(
                Row(what=what, detail=f"{person['votes']} votes" if who == "judge" else "", cells=cells)
            )
    return JudgeTable(title="People", heading="", rows=rows)


def _correlation(judges: Sequence[Judge]) -> JudgeTable:
    std = "Rank correlation of its std with its error"
    rows = _rows(
        judges,
        *((what, lambda j, k=key: j["correlations"].get(k), fixed) for key, what in CORRELATIONS.items()),
        ("RMSE after the 5-parameter fit", lambda j: j["fit"]["5"]["rmse"], fixed),
        (std, lambda j: (j["certainty"] or {}).get("srcc_std_error"), fixed),
        ("Judged / failed", _judged, str),
    )
    return JudgeTable(title="Correlation with opinions", heading="", rows=rows)


def _judged(judge: Judge) -> str:
    return f"{judge['counts']['judged']} / {judge['counts']['failed']}"


def _slices(judges: Sequence[Judge], key: str, size: str) -> list[JudgeTable]:
    form, low, scale = (
        (share, 0, ("0", "50", "100\u00a0%")) if key == "accuracy" else (fixed, -1, ("−1", "0", "1"))
    )
    tables = []
    for kind, slices in judges[0]["slices"].items():
        rows = []
        for place, part in enumerate(slices):
            numbers = [judge["slices"][kind][place][key] for judge in judges]
            sides = zip(numbers[:2], ("after", "before"), strict=False)
            rows.append(
                Row(
                    what=part["name"],
                    detail=f"{part[size]} {size}",
                    cells=[_cell(number, form) for number in numbers],
                    rails=tuple(rail(number, low, 1, side=side) for number, side in sides),
                )
            )
        kind = words(kind)
        tables.append(JudgeTable(title=f"{key} by {kind}", heading=f"By {kind}", rows=rows, scale=scale))
    return tables


def _control(judges: Sequence[Judge]) -> JudgeTable:
    rows = []
    for key, what in CONTROL.items():
        parts = [(judge["generators"] or {}).get(key) for judge in judges]
        cells = [_cell(part, share, f" · {part['pairs']} pairs" if part else "") for part in parts]
        rows.append(Row(what=what, cells=cells))
    follows = "How often the judge prefers the usually better generator"
    rows += _rows(judges, (follows, lambda j: (j["generators"] or {}).get("judge_follows"), share))
    return JudgeTable(title="Which generator? Accuracy", heading="", rows=rows)


def _plots(judge: Judge) -> Iterator[tuple[str, Markup]]:
    if "points" in judge:
        yield "", scatter_plot(judge["points"], judge["judge"]["unit"])
        return
    yield "Reliability", reliability_plot(judge["calibration"])
    for signal, name in SIGNALS.items():
        if signal in (judge["selective"] or {}):
            yield f"Risk and coverage by {name}", risk_plot(judge["selective"][signal], name)


def _facts(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    about = result["set"]
    yield "source", about["source"]
    if about["split"]:
        yield "split", about["split"]
    for judge in result["judges"]:
        name = judge["judge"]["name"]
        yield f"{name}, unit", judge["judge"]["unit"]
        if name in (result.get("whose") or {}):
            yield f"{name} is", result["whose"][name]
        for reason, count in judge["counts"]["failures"].items():
            yield f"{name}, {count} failed", reason
    yield "bootstrap draws, seed", f"{about['resamples']}, {about['seed']}"
    if result.get("seconds") is not None:
        yield "seconds", fixed(result["seconds"])
