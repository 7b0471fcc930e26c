# SPDX-License-Identifier: Apache-2.0
"""The tables of `visalign evaluate` in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from visalign.evaluation.statistics.agreement import HEADLINE

Result = Mapping[str, Any]


def show_evaluation(console: Console, result: Result) -> None:
    """What an evaluation found: one column per judge.

    Args:
        console: Where to write.
        result: What `visalign.pipelines.evaluate.job.evaluate` returned.
    """
    about = result["set"]
    what = "pairs" if about["kind"] == "preferences" else "images"
    console.print(Text(f"{about['name']}: {about['size']} {what}"))
    for finding in about["findings"]:
        console.print(Text(f"  {finding['message']}"))
    judges = result["judges"]
    tables = _preference_tables(judges) if about["kind"] == "preferences" else _quality_tables(judges)
    for table in tables:
        console.print(table)
    for comparison in result["comparisons"]:
        console.print(Text(comparison_line(comparison)))
    for judge in judges:
        for note in judge["notes"]:
            console.print(Text(f"! {judge['judge']['name']}: {note}"))


def comparison_line(comparison: Result) -> str:
    """Two judges in one sentence.

    Args:
        comparison: An entry of `comparisons`.
    """
    unit = "points of accuracy" if "pairs" in comparison else "of SRCC"
    scale = 100 if "pairs" in comparison else 1
    number = comparison["difference"]
    line = f"{comparison['first']} − {comparison['second']}: {_signed(number['estimate'], scale)} {unit}"
    if number["low"] is not None:
        span = f"{_signed(number['low'], scale)} to {_signed(number['high'], scale)}"
        line += f" ({number['level']:.0%} interval {span}"
        line += ")"
    if "mcnemar" in comparison:
        test = comparison["mcnemar"]
        line += f"; McNemar p = {test['p_value']:.2g} on the {test['pairs']} pairs that both decided"
    return f"{line}."


def _preference_tables(judges: Sequence[Result]) -> list[Table]:
    agreement = _table("agreement with people, micro (macro)", judges)
    for policy in judges[0]["agreement"]:
        cells = []
        for judge in judges:
            row = judge["agreement"][policy]
            macro = _percent(row["macro"]["estimate"])
            tuned = " *" if row["threshold"] else ""
            cells.append(f"{_interval(row['micro'])} ({macro}){tuned}")
        label = policy if policy != HEADLINE else f"{policy} (headline)"
        agreement.add_row(label, *cells)
    if any(row["threshold"] for judge in judges for row in judge["agreement"].values()):
        agreement.caption = "* tie threshold tuned on this set"
    return [
        agreement,
        _rows_table("calibration", judges, _calibration_cells),
        *_slice_tables(judges, "accuracy", "pairs", percent=True),
        *([_control_table(judges)] if any(judge["generators"] for judge in judges) else []),
        *([_rows_table("both orders", judges, _swap_cells)] if any(j["swap"] for j in judges) else []),
    ]


def _calibration_cells(judge: Result) -> dict[str, str]:
    calibration, selective = judge["calibration"], judge["selective"] or {}
    scaled = calibration["scaled"] or {}
    cells = {
        "judged / failed": f"{judge['counts']['judged']} / {judge['counts']['failed']}",
        "NLL, nats": _interval(calibration["nll"], percent=False),
        "Brier": _interval(calibration["brier"], percent=False),
        "ECE": _interval(calibration["ece"], percent=False),
        "after scaling: NLL / ECE": f"{_number(scaled.get('nll'))} / {_number(scaled.get('ece'))}",
        "temperature": _number(calibration["temperature"]),
    }
    for signal, what in (("margin", "size of the margin"), ("std", "its std")):
        if signal in selective:
            cells[f"AUROC of errors by {what}"] = _interval(selective[signal]["auroc"], percent=False)
    return cells


def _swap_cells(judge: Result) -> dict[str, str]:
    swap = judge["swap"] or {}
    return {
        "same winner": _percent(swap.get("same_winner")),
        "left side wins": _percent(swap.get("left_share")),
        "position bias, log-odds": _number(swap.get("position_bias")),
    }


def _control_table(judges: Sequence[Result]) -> Table:
    names = {
        "identity_alone": "between generators: by their names alone",
        "judge_between": "between generators: the judge",
        "judge_within": "within one generator",
        "judge_against": "against the usual order",
    }
    table = _table("which generator? accuracy (pairs)", judges)
    for key, title in names.items():
        cells = []
        for judge in judges:
            part = (judge["generators"] or {}).get(key)
            cells.append("-" if part is None else f"{_interval(part)} ({part['pairs']})")
        table.add_row(title, *cells)
    return table


def _quality_tables(judges: Sequence[Result]) -> list[Table]:
    table = _table("correlation with opinions", judges)
    for name in judges[0]["correlations"]:
        cells = [_interval(judge["correlations"].get(name), percent=False) for judge in judges]
        table.add_row(name.replace("_", " "), *cells)
    table.add_row("RMSE after the fit", *(_number(judge["fit"]["5"]["rmse"]) for judge in judges))
    table.add_row("judged / failed", *(f"{j['counts']['judged']} / {j['counts']['failed']}" for j in judges))
    return [table, *_slice_tables(judges, "srcc", "images", percent=False)]


def _slice_tables(judges: Sequence[Result], key: str, size: str, *, percent: bool) -> list[Table]:
    found = []
    for kind, rows in judges[0]["slices"].items():
        table = _table(f"{key} by {kind.replace('_', ' ')} ({size})", judges)
        for place, row in enumerate(rows):
            cells = [_interval(judge["slices"][kind][place][key], percent=percent) for judge in judges]
            table.add_row(f"{row['name']} ({row[size]})", *cells)
        found.append(table)
    return found


def _rows_table(title: str, judges: Sequence[Result], cells: Any) -> Table:
    table = _table(title, judges)
    columns = [cells(judge) for judge in judges]
    for name in dict.fromkeys(key for column in columns for key in column):
        table.add_row(name, *(column.get(name, "-") for column in columns))
    return table


def _table(title: str, judges: Sequence[Result]) -> Table:
    names = [escape(judge["judge"]["name"]) for judge in judges]
    return Table("", *names, title=title, title_justify="left", box=None, pad_edge=False)


def _interval(number: Result | None, *, percent: bool = True) -> str:
    if number is None or number["estimate"] is None:
        return "-"
    shown = _percent if percent else _number
    if number["low"] is None:
        return shown(number["estimate"])
    low, high = (shown(number[end]).removesuffix(" %") for end in ("low", "high"))
    return f"{shown(number['estimate'])} [{low}, {high}]"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _signed(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{scale * value:+.1f}" if scale == 100 else f"{value:+.3f}"
