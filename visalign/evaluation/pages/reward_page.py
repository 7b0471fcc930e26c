# SPDX-License-Identifier: Apache-2.0
"""Evaluation of rewards in words and tables, a column per reward: for its page and the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

from markupsafe import Markup

from visalign.data.sets.checks import PACKAGED_JUDGE
from visalign.evaluation.rewards.comparison import headline
from visalign.evaluation.statistics.agreement import HEADLINE

from .base import MISSING, fixed, model_name, plain, points, render_page, share, signed, span, whole_percent, words
from .plots import reliability_plot, risk_plot, scatter_plot
from .table_files import FileTable

Judge = Mapping[str, Any]

SIGNALS = {"margin": "the size of its margin", "std": "the std it gives", "both": "margin and std together"}
STD = {
    "srcc_votes": "Rank correlation of its std with the noise of the votes",
    "srcc_votes_given_margin": "– the size of its margin held fixed",
    "nll_gain": "What its std adds to its margin, nats after scaling",
}
"""Rows on the value of a reward's std."""
CORRELATIONS = {
    "srcc": "SRCC (Spearman)",
    "srcc_within": "– within prompts or references, pooled",
    "plcc": "PLCC (Pearson), no fit",
    "plcc_logistic4": "PLCC after the 4-parameter logistic fit",
    "plcc_logistic5": "PLCC after the 5-parameter logistic fit",
    "kendall_b": "Kendall's τ-b",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    value: str
    ends: str = ""  # Ends of its interval, "low to high"; may be empty
    more: str = ""
    plain: Any = None  # Number, or (estimate, low, high), for a file; None where the value is a text

    @property
    def interval(self) -> dict[str, float] | None:
        """Number with its interval, as it is drawn."""
        return (
            dict(zip(("estimate", "low", "high"), self.plain, strict=True)) if isinstance(self.plain, tuple) else None
        )

    def __str__(self) -> str:
        """Format for a terminal."""
        interval = "" if self.ends in ("", "no interval") else f" [{self.ends.replace(' to ', ', ')}]"
        return f"{self.value}{interval}{self.more}"


@dataclass(frozen=True, kw_only=True)
class Row:
    what: str
    cells: list[Cell]
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class JudgeTable:
    title: str  # Title of the table in a terminal, and of its first column on the page
    rows: list[Row]
    heading: str = ""  # Heading on the page
    columns: tuple[str, ...] = ()  # Names of the columns; empty where each is a reward
    track: tuple[float, float] | None = None
    """Ends of the axis on which the first cells are drawn as dots with intervals; None draws none."""
    marks: tuple[str, ...] = ()  # Marks of that axis, evenly spaced


def evaluation_page(result: Mapping[str, Any], images: Mapping[str, Mapping[str, Any] | None]) -> str:
    """Render the result of `visalign evaluate`; images of the worst records from `embedded`, None if unreadable."""
    about, judges = result["set"], result["judges"]
    is_pairs = about["kind"] == "preferences"
    names = [judge["judge"]["name"] for judge in judges]
    form = share if is_pairs else fixed
    numbers = [headline(judge) for judge in judges]
    return render_page(
        "reward_page.html.j2",
        title=f"{', '.join(names)} on {about['name']}",
        command="visalign evaluate",
        models=[(j["judge"]["name"], model_name(j["judge"].get("identity") or {})) for j in judges],
        banners=[finding["message"] for finding in about["findings"] if finding["kind"] == PACKAGED_JUDGE],
        about=about,
        judges=judges,
        names=names,
        results=[
            (name, form(n["estimate"]), f"{round(100 * n['level'])}\u00a0% interval {span(n, form)}")
            for name, n in zip(names, numbers, strict=True)
        ],
        sections=evaluation_tables(result),
        plots=[list(_plots(judge)) for judge in judges],
        comparisons=result["comparisons"],
        sentences=[*filter(None, [fusion_line(result)]), *comparison_lines(result)],
        is_pairs=is_pairs,
        images=images,
        worst=[judge.get("worst", []) for judge in judges],
        facts=list(_facts(result)),
    )


def evaluation_tables(result: Mapping[str, Any]) -> dict[str, list[JudgeTable]]:
    """Return section of the page -> its tables."""
    judges, first = result["judges"], {}
    if result["leaderboard"]:
        first["leaderboard"] = [_leaderboard(result)]
    if result["comparisons"]:
        first["comparison"] = [_comparisons(result["comparisons"])]
    if result["set"]["kind"] != "preferences":
        return first | {"correlation": [_correlation(judges)], "slices": _slices(judges, "srcc", "images")}
    sections = first | {"agreement": [_agreement(judges), *_both_orders(judges)]}
    if any(judge["people"]["single_vote"]["estimate"] is not None for judge in judges):
        sections["people"] = [_people(judges)]
    sections["calibration"] = [_calibration(judges)]
    return sections | {"slices": _slices(judges, "accuracy", "pairs")}


def fusion_line(result: Mapping[str, Any]) -> str:
    """Describe the fused reward; empty without one."""
    if not (fusion := result["fusion"]):
        return ""
    parts = sorted(fusion["weights"].items(), key=lambda item: -abs(item[1]))
    weights = ", ".join(f"{name} {signed(weight)}" for name, weight in parts)
    return (
        f"fused is stacked from {weights} (weights per standard deviation, mean of {fusion['folds']} folds "
        "by prompt; each prompt is scored by weights of the others)."
    )


def comparison_lines(result: Mapping[str, Any]) -> list[str]:
    """Write comparisons in words: the fused reward's with the best member, the leader's, or all of three rewards."""
    comparisons, fusion = result["comparisons"], result["fusion"]
    ranking = [row["judge"] for row in (result["leaderboard"] or {"rows": []})["rows"]]
    if fusion and ranking:
        best = next((name for name in ranking if name in fusion["members"]), "")
        comparisons = [entry for entry in comparisons if {entry["first"], entry["second"]} == {"fused", best}]
    elif len(comparisons) > 3:
        rivals = [{ranking[0], other} for other in ranking[1:3]]
        comparisons = [entry for entry in comparisons if {entry["first"], entry["second"]} in rivals]
    return [comparison_line(entry, of=len(result["comparisons"])) for entry in comparisons]


def comparison_line(comparison: Mapping[str, Any], *, of: int = 1) -> str:
    """Write a comparison as one sentence, with a verdict that holds for all `of` comparisons together."""
    is_pairs, number, needed = "pairs" in comparison, comparison["difference"], comparison["power"]["needed"]
    form, what = _difference_form(comparison), "pairs" if is_pairs else "images"
    line = f"{comparison['first']} − {comparison['second']}: {form(number['estimate'])} "
    line += "points of accuracy" if is_pairs else "of SRCC"
    if number["low"] is not None:
        line += f" ({number['level']:.0%} interval {span(number, form)})"
    if is_pairs:
        test = comparison["mcnemar"]
        line += f"; of {test['pairs']} pairs the first alone is right in {test['first_only']}, the second alone "
        line += f"in {test['second_only']}"
    correction = f" after Holm's correction for {of} comparisons" if of > 1 else ""
    needs = f", such a difference needs about {needed:,} {what}" if needed and not comparison["clear"] else ""
    return f"{line}; p = {comparison['p_holm']:.2g}{correction}: {_verdict(comparison)}{needs}."


def _verdict(comparison: Mapping[str, Any]) -> str:
    ahead = comparison["first" if comparison["difference"]["estimate"] > 0 else "second"]
    return f"{ahead} is better" if comparison["clear"] else "not settled"


def _difference_form(comparison: Mapping[str, Any]) -> Callable[[float | None], str]:
    return points if "pairs" in comparison else lambda value: signed(value, 3)


def _leaderboard(result: Mapping[str, Any]) -> JudgeTable:
    board, is_pairs = result["leaderboard"], result["set"]["kind"] == "preferences"
    form = share if is_pairs else fixed
    rows = [Row(what=row["judge"], cells=[_cell(row, form), _places(row)]) for row in board["rows"]]
    what = "Agreement" if is_pairs else "SRCC"
    level = f"{board['rows'][0]['level']:.0%} intervals that hold for all together"
    of = f"on the {board['on']} {'pairs' if is_pairs else 'images'} that all scored"
    columns, axis = (f"{what}, {level}", "Place"), _axis(board["rows"], is_pairs)
    return JudgeTable(title=f"Leaderboard {of}", rows=rows, columns=columns, **axis)


def _places(row: Mapping[str, Any]) -> Cell:
    return Cell(value="–".join(dict.fromkeys((str(row["best_place"]), str(row["worst_place"])))))


def _axis(rows: Sequence[Mapping[str, Any]], is_pairs: bool) -> dict[str, Any]:
    """Return track and marks of a leaderboard: all intervals, out to multiples of a twentieth on even quarters."""
    ends = [row[end] for row in rows for end in ("low", "estimate", "high") if row[end] is not None]
    low = math.floor(20 * min(ends, default=0.0) + 1e-9) / 20
    step = max(math.ceil(5 * (max(ends, default=1.0) - low) - 1e-9), 1) / 20
    form = whole_percent if is_pairs else partial(plain, digits=2)
    return {"track": (low, low + 4 * step), "marks": tuple(form(low + k * step) for k in range(5))}


def sets_table(board: Mapping[str, Any]) -> JudgeTable:
    is_pairs = board["kind"] == "preferences"
    form, rows = share if is_pairs else fixed, []
    for row in board["rows"]:
        cells = [_cell(row, form), _places(row), *(_cell(row["sets"][name], form) for name in board["sets"])]
        rows.append(Row(what=row["judge"], cells=cells))
    what = "Agreement with people" if is_pairs else "SRCC with mean opinions"
    columns = ("Mean of the sets", "Place", *board["sets"])
    return JudgeTable(title=what, rows=rows, columns=columns, **_axis(board["rows"], is_pairs))


def sets_page(boards: Sequence[Mapping[str, Any]], results: Mapping[str, Mapping[str, Any]], level: float) -> str:
    """Render the leaderboards over several sets, with links to the page of each set."""
    findings = [finding for result in results.values() for finding in result["set"]["findings"]]
    messages = [finding["message"] for finding in findings if finding["kind"] == PACKAGED_JUDGE]
    return render_page(
        "sets_page.html.j2",
        title="Leaderboard",
        command="visalign evaluate",
        banners=list(dict.fromkeys(messages)),
        boards=[(board, sets_table(board)) for board in boards],
        results=results,
        level=level,
    )


def _comparisons(comparisons: Sequence[Mapping[str, Any]]) -> JudgeTable:
    is_pairs = "pairs" in comparisons[0]
    rows = []
    for entry in comparisons:
        form, power, test = _difference_form(entry), entry["power"], entry.get("mcnemar")
        scale = 100 if is_pairs else 1  # percentage points in files too
        cells = [
            _cell(entry["difference"], form, scale=scale),
            *([Cell(value=f"{test['first_only']} : {test['second_only']}")] if test else []),
            _cell(entry["p_holm"], "{:.2g}".format),
            _cell(power["needed"], "{:,}".format),
            _cell(power["smallest"], lambda value, form=form: form(value).removeprefix("+"), scale=scale),
            Cell(value=_verdict(entry)),
        ]
        rows.append(Row(what=f"{entry['first']} − {entry['second']}", cells=cells))
    what = "pairs" if is_pairs else "images"
    columns = ("Points of accuracy" if is_pairs else "SRCC", *(["Right alone"] if is_pairs else []))
    columns += ("p, Holm", f"{what.capitalize()} it needs", f"Found with these {what}", "Verdict")
    return JudgeTable(title="First − second", rows=rows, columns=columns)


Spec = tuple[str, Callable[[Judge], Any], Callable[[Any], str]]
"""Name of a row; its number for a reward (plain, with an interval, or None); its format."""


def _rows(judges: Sequence[Judge], *specs: Spec) -> list[Row]:
    """Build rows; the part of a name after two spaces is its detail."""
    rows = []
    for name, pick, form in specs:
        what, _, detail = name.partition("  ")
        rows.append(Row(what=what, detail=detail, cells=[_cell(pick(judge), form) for judge in judges]))
    return rows


def _at(*keys: str) -> Callable[[Judge], Any]:
    """Return a reader of a nested entry of a reward's report, None where a part of the way is missing."""
    return lambda judge: reduce(lambda entry, key: (entry or {}).get(key), keys, judge)


def _cell(number: Any, form: Callable[[Any], str], more: str = "", scale: float = 1) -> Cell:
    """Format a number, or one with an interval; a file gets it times `scale`."""
    if number is None:
        return Cell(value=MISSING)
    if isinstance(number, Mapping):
        values = (number["estimate"], number["low"], number["high"])
        plain = tuple(None if value is None else scale * value for value in values)
        return Cell(value=form(number["estimate"]), ends=span(number, form), more=more, plain=plain)
    return Cell(value=form(number), more=more, plain=scale * number if scale != 1 else number)


def file_tables(result: Mapping[str, Any]) -> list[FileTable]:
    names = [judge["judge"]["name"] for judge in result["judges"]]
    files = []
    for section, tables in evaluation_tables(result).items():
        for table in tables:
            is_first = table is tables[0] and section != "slices"
            name = section if len(tables) == 1 or is_first else table.title
            files.append(judge_file_table(name, table, names))
    return files


def judge_file_table(name: str, table: JudgeTable, names: Sequence[str] = ()) -> FileTable:
    """Convert a table for a file; `names` are the columns of a table that has none."""
    rows = [[row.what, *map(_plain, row.cells)] for row in table.rows]
    return FileTable(name=name, columns=(table.title, *(table.columns or names)), rows=rows)


def _plain(cell: Cell) -> Any:
    if cell.plain is not None:
        return cell.plain
    return None if cell.value == MISSING else cell.value


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
    return JudgeTable(title="Agreement with people, micro", rows=rows)


def _both_orders(judges: Sequence[Judge]) -> Iterator[JudgeTable]:
    if any(judge["swap"] for judge in judges):
        rows = _rows(
            judges,
            ("Same winner in both orders", _at("swap", "same_winner"), share),
            ("How often the left side wins", _at("swap", "left_share"), share),
            ("Position bias, log-odds for the left side", _at("swap", "position_bias"), fixed),
        )
        yield JudgeTable(title="Pairwise rewards", heading="Asked in both orders", rows=rows)


def _calibration(judges: Sequence[Judge]) -> JudgeTable:
    calibration, noise = partial(_at, "calibration"), "– of a calibrated reward, from noise alone"
    specs: list[Spec] = [
        ("Scored / failed", _judged, str),
        ("NLL, nats (0.693 = a coin)", calibration("nll"), fixed),
        ("– after scaling", calibration("scaled", "nll"), fixed),
        ("Brier score (0.25 = a coin)", calibration("brier"), fixed),
        ("– after scaling", calibration("scaled", "brier"), fixed),
        ("Expected calibration error", calibration("ece"), fixed),
        (noise, calibration("ece_noise"), fixed),
        ("– after scaling", calibration("scaled", "ece"), fixed),
        ("Largest gap of a bin (MCE)", calibration("mce"), fixed),
        ("Temperature  above 1: too sure", calibration("temperature"), fixed),
    ]
    for signal, what in SIGNALS.items():
        if any(signal in (judge["selective"] or {}) for judge in judges):
            name = f"AUROC of its errors by {what}  0.5: does not know"
            specs.append((name, _at("selective", signal, "auroc"), fixed))
    if any(judge["std"] for judge in judges):
        specs += [(what, _at("std", key), fixed) for key, what in STD.items()]
    return JudgeTable(title="Calibration", rows=_rows(judges, *specs))


def _people(judges: Sequence[Judge]) -> JudgeTable:
    """Build the table of people's votes; each column counts the pairs that its reward scored."""
    rows = _rows(
        judges,
        ("One vote, predicted by the reward", _at("people", "judge_single_vote"), share),
        ("– by the majority of the other votes", _at("people", "single_vote"), share),
        ("Krippendorff's alpha", _at("people", "alpha"), fixed),
    )
    return JudgeTable(title="People", rows=rows)


def _correlation(judges: Sequence[Judge]) -> JudgeTable:
    std = "Rank correlation of its std with its error"
    rows = _rows(
        judges,
        *((what, _at("correlations", key), fixed) for key, what in CORRELATIONS.items()),
        ("RMSE after the 5-parameter fit", _at("fit", "5", "rmse"), fixed),
        (std, _at("certainty", "srcc_std_error"), fixed),
        ("Scored / failed", _judged, str),
    )
    return JudgeTable(title="Correlation with opinions", rows=rows)


def _judged(judge: Judge) -> str:
    return f"{judge['counts']['judged']} / {judge['counts']['failed']}"


def _slices(judges: Sequence[Judge], key: str, size: str) -> list[JudgeTable]:
    form, tables = share if key == "accuracy" else fixed, []
    for kind, slices in judges[0]["slices"].items():
        rows = []
        for number, part in enumerate(slices):
            cells = [_cell(judge["slices"][kind][number][key], form) for judge in judges]
            rows.append(Row(what=part["name"], detail=f"{part[size]} {size}", cells=cells))
        title = words(kind)
        tables.append(JudgeTable(title=f"{key} by {title}", heading=f"By {title}", rows=rows))
    return tables


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
        if name in result["provenance"]:
            yield f"{name} is", result["provenance"][name]
        for reason, count in judge["counts"]["failures"].items():
            yield f"{name}, {count} failed", reason
    yield "bootstrap draws, seed", f"{about['resamples']}, {about['seed']}"
    yield "seconds", fixed(result["seconds"])
