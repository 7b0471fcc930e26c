# SPDX-License-Identifier: Apache-2.0
"""Plots as inline SVG in the page's colours, light or dark, without scripts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

LEFT, TOP, BOTTOM = 60.0, 12.0, 44.0
"""Margins for tick labels and axis names, in units of the view box."""
LONGEST_X, LONGEST_Y = 38, 28
"""Letters of an axis name that fit."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Frame:
    x: tuple[float, float]
    y: tuple[float, float]
    x_name: str
    y_name: str = ""
    width: float = 360.0
    height: float = 300.0
    right: float = 14.0  # Margin at the right
    integers: bool = False  # Marks on the x axis are whole numbers only

    def project(self, x: float, y: float) -> Point:
        """Map a data point into the view box."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        wide, tall = self.width - LEFT - self.right, self.height - TOP - BOTTOM
        return LEFT + across * wide, self.height - BOTTOM - up * tall

    def path(self, name: str, points: Iterable[Point]) -> str:
        """Draw a line of class `name` through the points, with breaks where a value is not finite."""
        steps, pen = [], "M"
        for x, y in points:
            if not math.isfinite(y):
                pen = "M"
                continue
            steps.append("{}{:.1f} {:.1f}".format(pen, *self.project(x, y)))
            pen = "L"
        return f'<path class="{name}" d="{" ".join(steps)}"/>'

    def dots(self, points: Iterable[Point], name: str = "dot", radius: float = 3.5) -> str:
        """Draw circles of class `name` at the points with finite values."""
        centres = [self.project(x, y) for x, y in points if math.isfinite(y)]
        return "".join(f'<circle class="{name}" cx="{a:.1f}" cy="{b:.1f}" r="{radius:g}"/>' for a, b in centres)

    def bar(self, name: str, low: float, high: float, value: float) -> str:
        """Draw a bar of class `name` from `low` to `high`, from zero up to the value."""
        (left, top), (right, base) = self.project(low, value), self.project(high, 0)
        position = f'x="{left + 0.5:.1f}" y="{top:.1f}"'
        size = f'width="{max(right - left - 1, 0.5):.1f}" height="{base - top:.1f}"'
        return f'<rect class="{name}" {position} {size}/>'

    def svg(self, parts: Sequence[str], alt: str) -> Markup:
        """Draw grid, ticks, names, and the parts, whose texts must be escaped; `alt` describes the plot in words."""
        low, high = self.project(self.x[0], self.y[0]), self.project(self.x[1], self.y[1])
        drawn = []
        grid = '<line class="grid" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>'
        x_marks = ticks(*self.x, 5) if self.integers else ticks(*self.x)
        x_marks = [mark for mark in x_marks if not self.integers or mark.is_integer()]
        for mark in x_marks:
            x, y = self.project(mark, self.y[0])
            step = 1.0 if self.integers else _step(x_marks, self.x)
            drawn += [grid.format(x, y, x, high[1]), text(x, y + 17, label(mark, step))]
        for mark in (y_marks := ticks(*self.y)):
            x, y = self.project(self.x[0], mark)
            tick = text(x - 7, y + 5, label(mark, _step(y_marks, self.y)), "end")
            drawn += [grid.format(x, y, high[0], y), tick]
        drawn.append(text((low[0] + high[0]) / 2, self.height - 6, _cut(self.x_name, LONGEST_X)))
        if self.y_name:
            turned = text(0.0, 0.0, _cut(self.y_name, LONGEST_Y))
            middle = (low[1] + high[1]) / 2
            drawn.append(f'<g transform="translate(14 {middle:.1f}) rotate(-90)">{turned}</g>')
        return Markup(
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-label="{escape(alt)}">{"".join([*drawn, *parts])}</svg>'
        )


def _step(marks: Sequence[float], ends: Point) -> float:
    return marks[1] - marks[0] if len(marks) > 1 else ends[1] - marks[0] or 1.0


def text(x: float, y: float, content: str, anchor: str = "middle", name: str = "tick") -> str:
    """Draw an escaped text of class `name` at a point of the view box."""
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers (1, 2 or 5 times a power of ten) inside [low, high]."""
    if not high > low:
        return [float(low)]
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    candidates = []
    for step in (power * factor for factor in (0.5, 1, 2, 5, 10)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)  # 0.3 / 0.1 is 2.9999999999999996
        candidates.append([number * step for number in range(first, last + 1)])
    return min(candidates, key=lambda marks: abs(len(marks) - count))


def label(value: float, step: float) -> str:
    """Format a number as short as its tick distance allows; a power of ten beyond five digits."""
    if value == 0:
        return "0"
    decimals = max(0, -math.floor(math.log10(abs(step)) + 1e-9))
    if decimals <= 5 and abs(value) < 1e5:
        return f"{value:.{decimals}f}".replace("-", "−")
    exponent = math.floor(math.log10(abs(value)) + 1e-12)
    decimals = max(0, exponent - math.floor(math.log10(abs(step)) + 1e-9))
    digits = f"{value / 10.0**exponent:.{min(decimals, 2)}f}".replace("-", "−")
    return f"{digits}e{str(exponent).replace('-', '−')}"


def _cut(name: str, longest: int) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1].rstrip()}…"


def reliability_plot(calibration: Mapping[str, Any]) -> Markup:
    """Plot the mean outcome against the mean probability of each bin, as scored and after scaling."""
    frame = Frame(x=(0, 1), y=(0, 1), x_name="probability", y_name="share of people")
    raw = _bin_points(calibration["bins"])
    scaled = _bin_points((calibration["scaled"] or {}).get("bins", []))
    largest = max((entry["count"] for entry in calibration["bins"]), default=1) or 1
    bars = [frame.bar("bin", b["low"], b["high"], 0.18 * b["count"] / largest) for b in calibration["bins"]]
    parts = [*bars, frame.path("ideal", [(0, 0), (1, 1)]), frame.path("line", raw), frame.dots(raw)]
    if scaled:
        parts.append(frame.path("scaled", scaled))
    ece = calibration["ece"]["estimate"]
    alt = f"Reliability diagram with {len(raw)} bins that hold pairs; expected calibration error {_say(ece)}."
    return frame.svg(parts, alt)


def risk_plot(signal: Mapping[str, Any], name: str) -> Markup:
    """Plot the error rate against the share of the pairs answered, the surest by the named signal first."""
    points = [(float(x), float(y)) for x, y in signal["curve"]]
    top = min(1.08 * max([y for _, y in points] + [0.1]), 1.0)
    frame = Frame(x=(0, 1), y=(0, top), x_name="share answered, surest first", y_name="error rate")
    few, everything = (_say(signal["risk_at"][share]) for share in ("25%", "100%"))
    alt = f"Risk against coverage by {name}: error {few} on the surest quarter, {everything} on all pairs."
    return frame.svg([frame.path("line", points)], alt)


def scatter_plot(points: Mapping[str, Any], unit: str) -> Markup:
    """Plot opinions against scores in their unit, with the logistic map."""
    sample = [(float(x), float(y)) for x, y in points["sample"]]
    x, y = (_padded(side) for side in zip(*sample, strict=True))
    frame = Frame(x=x, y=y, x_name=f"score, {unit}", y_name="opinion")
    inside = [(float(x), float(y)) for x, y in points["line"] if frame.y[0] <= y <= frame.y[1]]
    alt = f"{len(sample)} images: mean opinion against score in {unit}, with the logistic fit."
    return frame.svg([frame.dots(sample, "cloud", 2), frame.path("line", inside)], alt)


def histogram_plot(histogram: Mapping[str, Any], unit: str, median: float) -> Markup:
    """Plot counts [K] of images over scores, `edges` [K + 1], with the median as a line."""
    edges, counts = histogram["edges"], histogram["counts"]
    top = max(counts) * 1.05
    frame = Frame(x=(edges[0], edges[-1]), y=(0, top), x_name=f"score, {unit}", y_name="images")
    bars = [frame.bar("bar", *entry) for entry in zip(edges[:-1], edges[1:], counts, strict=True)]
    alt = (
        f"Histogram of {sum(counts):.0f} scores from {edges[0]:.4g} to {edges[-1]:.4g} in {unit}, median {median:.4g}."
    )
    return frame.svg([*bars, frame.path("ideal", [(median, 0), (median, top)])], alt)


def response_plot(probe: Mapping[str, Any]) -> Markup | None:
    """Plot the mean response with its interval against the strength of a change; None without an order."""
    rows = [
        (float(level["x"]), level["mean"], level["low"], level["high"])
        for level in probe["levels"]
        if level["x"] is not None and level["mean"] is not None
    ]
    if len(rows) < 2:
        return None
    if probe["neutral"] is not None:
        rows.append((float(probe["neutral"]), 0.0, 0.0, 0.0))
    rows.sort()
    lows = [(x, mean if low is None else low) for x, mean, low, _ in rows]
    highs = [(x, mean if high is None else high) for x, mean, _, high in rows]
    line = [(x, mean) for x, mean, *_ in rows]
    bottom, top = min([y for _, y in lows] + [-0.2]), max([y for _, y in highs] + [0.2])
    pad = (top - bottom) / 20
    ends = (rows[0][0], rows[-1][0])
    frame = Frame(x=ends, y=(bottom - pad, top + pad), x_name=probe["x_name"], y_name="response, spreads")
    band, zero = frame.path("band", [*lows, *highs[::-1]]), frame.path("zero", [(x, 0.0) for x in ends])
    alt = f"{probe['title']}: mean response from {min(y for _, y in line):.3g} to "
    alt += f"{max(y for _, y in line):.3g} spreads over {len(line)} strengths."
    return frame.svg([band, zero, frame.path("line", line), frame.dots(line)], alt)


def heatmap_plot(labels: Sequence[str], cells: Sequence[Sequence[float | None]], alt: str) -> Markup:
    """Plot K × K correlations, None as a dash; `labels` are those of the rows and, by number, of the columns."""
    names = [_cut(f"{number} {label}", 25) for number, label in enumerate(labels, 1)]
    size, left, top = 52.0, 16 + 7.8 * max(map(len, names)), 30.0
    drawn = []
    for row, (name, values) in enumerate(zip(names, cells, strict=True)):
        y = top + row * size
        drawn.append(text(left - 12, y + size / 2 + 5, name, "end"))
        drawn.append(text(left + row * size + size / 2, top - 10, str(row + 1)))
        for column, value in enumerate(values):
            x, correlation = left + column * size, math.nan if value is None else value
            kind = "itself" if row == column else "agrees" if correlation >= 0 else "parts"
            opacity = 1.0 if row == column else 0.06 + 0.5 * abs(correlation) if math.isfinite(correlation) else 0.0
            position = f'x="{x + 1:.0f}" y="{y + 1:.0f}" width="{size - 2:.0f}" height="{size - 2:.0f}"'
            drawn.append(f'<rect class="cell {kind}" {position} fill-opacity="{opacity:.2f}"/>')
            if row != column:
                number = f"{value:.2f}".replace("-", "−") if math.isfinite(correlation) else "–"
                drawn.append(text(x + size / 2, y + size / 2 + 5, number, name="number"))
    width, height = left + len(labels) * size, top + len(labels) * size
    return Markup(
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" style="max-width: {width:.0f}px" role="img" '
        f'aria-label="{escape(alt)}">{"".join(drawn)}</svg>'
    )


def _bin_points(bins: Sequence[Mapping[str, Any]]) -> list[Point]:
    return [(entry["confidence"], entry["frequency"]) for entry in bins if entry["confidence"] is not None]


def _padded(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    pad = (high - low) / 25 or abs(high) / 25 or 0.5
    return low - pad, high + pad


def _say(value: float | None) -> str:
    return "unknown" if value is None or not math.isfinite(value) else f"{value:.3f}"
