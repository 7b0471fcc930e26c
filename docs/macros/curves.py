# SPDX-License-Identifier: Apache-2.0
"""Figures of expected results: curves of kept runs, else the numbers in a configuration's header.

Kept runs of several seeds are in `docs/curves/NAME.json`, made from their folders by

    PYTHONPATH=docs python -m macros NAME FOLDER FOLDER ...
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from visalign.evaluation.pages.curves import running_mean
from visalign.evaluation.pages.plots import BOTTOM, TOP, Frame, label, text, ticks

from .markdown import ROOT
from .runs import header

FOLDER = ROOT / "docs/curves"
NEAREST = 5
"""Iterations over which a drawn curve is averaged, where it has so many."""
ROW = 36.0
"""Height of a configuration's line in a figure of changes, in units of the view box."""
GAP = 16.0
"""Between the names of lines, in units of the view box."""
NAMES = {"reward_mean": "training reward", "heldout/accuracy": "held-out accuracy"}
CHANGE = re.compile(r"(?P<measure>[\w -]+?) (?P<before>0?\.\d+) -> (?P<after>0?\.\d+)")
SEEDS = re.compile(r"mean of seeds [\d, ]+: (?P<values>[\d., ]+\d)")
INTERVAL = re.compile(r"95 % interval \+?(?P<low>[\d.]+) to \+?(?P<high>[\d.]+)")


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Content of one figure."""

    command: str
    measure: str
    """Quantity of `before` and `after`."""
    before: list[float]
    after: list[float]
    """Value of each run; from a header the number, then its seeds or the ends of its interval."""
    metric: str = ""
    seeds: list[int] | None = None
    points: list[list[float]] | None = None
    """(iteration, mean, smallest, largest) of the metric over the seeds."""


def keep(name: str, folders: list[Path]) -> Path:
    """Write the curve of a configuration from the folders of its runs, one for each seed.

    The metric is the held-out accuracy where it was measured on the way, else the training reward; iterations
    that not every run has are left out.
    """
    runs = [[json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    metric = "heldout/accuracy" if any("heldout/accuracy" in row for row in runs[0]) else "reward_mean"
    columns = [{row["iteration"]: row[metric] for row in rows if metric in row} for rows in runs]
    shared = sorted(set.intersection(*(set(column) for column in columns)))
    values = np.array([[column[iteration] for column in columns] for iteration in shared])
    table = np.stack([shared, values.mean(1), values.min(1), values.max(1)], axis=1)
    curve = Curve(
        command=f"{_command(name)} seed=SEED",
        measure="held-out accuracy",
        before=[round(summary["before"]["accuracy"], 4) for summary in summaries],
        after=[round(summary["after"]["accuracy"], 4) for summary in summaries],
        metric=metric,
        seeds=[summary["config"]["seed"] for summary in summaries],
        points=[[int(row[0]), *(round(value, 4) for value in row[1:])] for row in table.tolist()],
    )
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in asdict(curve).items()]
    path = FOLDER / f"{name}.json"
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return path


def curve_of(name: str) -> Curve:
    """Return the kept runs of a configuration, else before and after as its header states them.

    Raises:
        ValueError: no run is kept, and the header has no "MEASURE BEFORE -> AFTER".
    """
    path = FOLDER / f"{name}.json"
    if path.is_file():
        return Curve(**json.loads(path.read_text(encoding="utf-8")))
    fields = header(name)
    change = CHANGE.search(fields["Expected"])
    if change is None:
        raise ValueError(f"the header of {name!r} has no 'MEASURE BEFORE -> AFTER': {fields['Expected']!r}")
    before, after = float(change["before"]), [float(change["after"])]
    if seeds := SEEDS.search(fields["Expected"]):
        after += [float(value) for value in seeds["values"].split(",")]
    elif interval := INTERVAL.search(fields["Expected"]):
        gains = [float(interval["low"]), float(interval["high"])]
        after += [before + (gain / 100 if max(gains) > 1 else gain) for gain in gains]
    measure = change["measure"].strip()
    return Curve(command=_command(name), measure=measure, before=[before], after=after)


def curves(*names: str) -> str:
    """Draw a curve for each configuration with kept runs, and the others together as before and after."""
    chosen = {name: curve_of(name) for name in names}
    drawn = [_figure(name, curve) for name, curve in chosen.items() if curve.points]
    changes: dict[str, dict[str, Curve]] = {}
    for name, curve in chosen.items():
        if not curve.points:
            changes.setdefault(curve.measure, {})[name] = curve
    drawn += [_changes(measure, curves) for measure, curves in changes.items()]
    return f'<div class="curves">{"".join(drawn)}</div>'


def _figure(name: str, curve: Curve) -> str:
    table = np.array(curve.points)
    window = NEAREST if len(table) >= 4 * NEAREST else 1
    x, (mean, low, high) = table[:, 0], (running_mean(column, window) for column in table.T[1:])
    values = np.concatenate([low, high, curve.before, curve.after])
    pad = max(float(np.ptp(values)) / 12, 1e-3)  # the measure of some runs ends where it began
    title = NAMES.get(curve.metric, curve.measure)
    frame = Frame(
        x=(0.0, float(x[-1])),
        y=(float(values.min()) - pad, float(values.max()) + pad),
        x_name="iteration",
        y_name=title,
        width=440.0,
        height=250.0,
        integers=True,
    )
    band = [*zip(x, low, strict=True), *zip(x[::-1], high[::-1], strict=True)]
    ends = [(0.0, value) for value in curve.before] + [(float(x[-1]), value) for value in curve.after]
    parts = [frame.path("band", band), frame.path("line", zip(x, mean, strict=True)), frame.dots(ends)]
    seeds = ", ".join(str(seed) for seed in curve.seeds or [])
    near = f", mean of the nearest {window} iterations" if window > 1 else ""
    legend = f"line: {title}, mean of seeds {seeds}{near}; band: lowest to highest seed; "
    legend += f"dots: {curve.measure} before and after training, each seed"
    drawn = frame.svg(parts, f"{name}: {legend}")
    caption = f"<code>{html.escape(curve.command)}</code><br>{html.escape(legend.capitalize())}."
    return f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>"


def _changes(measure: str, curves: Mapping[str, Curve]) -> str:
    """Draw a line from before to after training for each configuration, with its seeds or interval."""
    values = [value for curve in curves.values() for value in (*curve.before, *curve.after)]
    pad = max(float(np.ptp(values)) / 20, 1e-3)
    ends, height = (min(values) - pad, max(values) + pad), TOP + BOTTOM + ROW * len(curves)
    frame = Frame(x=ends, y=(0.0, len(curves)), x_name=measure, width=440.0, height=height)
    drawn = []
    marks = ticks(*frame.x)
    for mark in marks:
        left, base = frame.project(mark, 0.0)
        drawn.append(frame.path("grid", [(mark, 0.0), (mark, len(curves))]))
        drawn.append(text(left, base + 17, label(mark, marks[1] - marks[0] if len(marks) > 1 else 1.0)))
    for row, (name, curve) in enumerate(curves.items()):
        y = len(curves) - row - 0.7
        drawn.append(text(frame.project(frame.x[0], y)[0], frame.project(0.0, y)[1] - 10, name, "start"))
        drawn.append(frame.path("change", [(curve.before[0], y), (curve.after[0], y)]))
        drawn.append(frame.path("range", [(min(curve.after), y), (max(curve.after), y)]))
        drawn += [frame.dots([(curve.before[0], y)], "dot before"), frame.dots([(curve.after[0], y)])]
    drawn.append(text(frame.width / 2, frame.height - 6, measure))
    legend = f"{measure} before (hollow) and after training; bars: the seeds, or the 95 % interval, where known"
    alt = f"{measure}: " + "; ".join(f"{name} {c.before[0]:g} to {c.after[0]:g}" for name, c in curves.items())
    size = f'viewBox="0 0 {frame.width:.0f} {frame.height:.0f}"'
    svg = f'<svg {size} role="img" aria-label="{html.escape(alt)}">{"".join(drawn)}</svg>'
    commands = "<br>".join(f"<code>{html.escape(curve.command)}</code>" for curve in curves.values())
    caption = f"{commands}<br>{html.escape(legend.capitalize())}."
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def equal_cost() -> str:
    """Draw algorithms at equal cost, twice: held-out accuracy after training against its cost.

    The numbers are those that `tests/benchmarks/images/image_algorithms.py --numbers` wrote.
    """
    results = json.loads((ROOT / "docs/evidence/equal_cost.json").read_text(encoding="utf-8"))
    drawn = [_costs(results, "forward_equivalents", "thousand forward-equivalents", 1000.0)]
    drawn.append(_costs(results, "seconds", "seconds of training, fastest seed", 1.0))
    return f'<div class="curves">{"".join(drawn)}</div>'


def _costs(results: dict[str, dict[str, list[float]]], key: str, name: str, unit: float) -> str:
    costs = {row: min(result[key]) / unit for row, result in results.items()}
    before = float(np.mean([value for result in results.values() for value in result["before"]]))
    accuracies = [before, *(value for result in results.values() for value in result["after"])]
    frame = Frame(
        x=(0.0, max(costs.values()) * 1.05),
        y=(min(accuracies) - 0.01, max(accuracies) + 0.01),
        x_name=name,
        y_name="held-out accuracy",
        width=600.0,
        height=420.0,
        right=230.0,
    )
    parts = []
    order = sorted(results, key=lambda row: -float(np.mean(results[row]["after"])))
    ends = [(costs[row], float(np.mean(results[row]["after"]))) for row in order]
    heights = [frame.project(*end)[1] for end in ends]
    for at in range(1, len(heights)):  # names do not lie on each other, nor below the axis
        heights[at] = max(heights[at], heights[at - 1] + GAP)
    for at in range(len(heights) - 1, -1, -1):
        heights[at] = min(heights[at], frame.project(0.0, frame.y[0])[1] - GAP * (len(heights) - 1 - at))
    for row, end, y in zip(order, ends, heights, strict=True):
        after, (left, height) = results[row]["after"], frame.project(*end)
        parts.append(frame.path("change", [(0.0, before), end]))
        parts.append(frame.path("range", [(end[0], min(after)), (end[0], max(after))]))
        parts.append(f'<path class="leader" d="M{left + 5:.1f} {height:.1f}L{frame.width - 226:.1f} {y:.1f}"/>')
        parts += [frame.dots([end]), text(frame.width - 222, y + 4, row, "start")]
    seeds = max(len(result["after"]) for result in results.values())
    legend = f"dots: mean of {seeds} seeds; bars: lowest to highest seed; lines begin at the untrained model"
    return f"<figure>{frame.svg(parts, legend)}<figcaption>{legend.capitalize()}.</figcaption></figure>"


def _command(name: str) -> str:
    """Return the command of a configuration, the last one of its header."""
    return header(name)["Command"].splitlines()[-1]
