# SPDX-License-Identifier: Apache-2.0
"""Plots of a reward's evaluation as inline SVG in the page's own colours: light or dark, no script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from .curves import label, ticks

WIDTH, HEIGHT = 360.0, 300.0
LEFT, RIGHT, TOP, BOTTOM = 60.0, 14.0, 12.0, 44.0
"""Margins for tick labels and the names of the axes."""

LONGEST_X, LONGEST_Y = 38, 28
"""Letters of an axis' name that fit beside it."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The axes of one plot."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_name: str
    y_name: str

    def place(self, x: float, y: float) -> Point:
        """A data point in the view box."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def draw(self) -> list[str]:
        """Grid, tick labels and names."""
        parts = []
        for marks, on_x in ((ticks(*self.x), True), (ticks(*self.y), False)):
            step = marks[1] - marks[0] if len(marks) > 1 else 1.0
            for mark in marks:
                ends = self._ends(mark, on_x)
                parts.append(
                    '<line class="grid" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>'.format(*ends)
                )
                x, y = (ends[0], ends[1] + 17) if on_x else (ends[0] - 7, ends[1] + 5)
                parts.append(_text(x, y, label(mark, step), "middle" if on_x else "end"))
        across, up = escape(_cut(self.x_name, LONGEST_X)), escape(_cut(self.y_name, LONGEST_Y))
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, str(across), "middle"))
        middle = (TOP + HEIGHT - BOTTOM) / 2
        turned = _text(0.0, 0.0, str(up), "middle")
        parts.append(f'<g transform="translate(14 {middle:.1f}) rotate(-90)">{turned}</g>')
        return parts

    def _ends(self, mark: float, on_x: bool) -> tuple[float, float, float, float]:
        low, high = (self.y, self.x)[0 if on_x else 1]
        first, second = ((mark, low), (mark, high)) if on_x else ((low, mark), (high, mark))
        return *self.place(*first), *self.place(*second)


def reliability_plot(calibration: Mapping[str, Any]) -> Markup:
    """Mean outcome against mean probability of each bin, as judged and after scaling.

    Args:
        calibration: The part of a report.
    """
    frame = Frame(x=(0, 1), y=(0, 1), x_name="probability", y_name="share of people")
    raw = _bin_points(calibration["bins"])
    scaled = _bin_points((calibration["scaled"] or {}).get("bins", []))
    largest = max((entry["count"] for entry in calibration["bins"]), default=1) or 1
    parts = frame.draw()
    for entry in calibration["bins"]:
        (x1, base), (x2, top) = (
            frame.place(entry["low"], 0),
            frame.place(entry["high"], 0.18 * entry["count"] / largest),
        )
        parts.append(
            f'<rect class="bin" x="{x1 + 1:.1f}" y="{top:.1f}" width="{x2 - x1 - 2:.1f}" '
            f'height="{base - top:.1f}"/>'
        )
    parts += [_path("ideal", [frame.place(0, 0), frame.place(1, 1)])]
    parts += [_path("scaled", [frame.place(*p) for p in scaled])] if scaled else []
    parts += [_path("line", [frame.place(*p) for p in raw])]
    parts += [_dot(*frame.place(*p)) for p in raw]
    ece = calibration["ece"]["estimate"]
    said = (
        f"Reliability diagram with {len(raw)} bins that hold pairs; expected calibration error {_say(ece)}."
    )
    return _svg(parts, said)


def risk_plot(signal: Mapping[str, Any], name: str) -> Markup:
    """Error rate against the share of the pairs that are answered, the surest first.

    Args:
        signal: Part of `selective` in a report.
        name: What certainty is measured by, for the alternative text.
    """
    points = [(float(x), float(y)) for x, y in signal["curve"]]
    top = max([y for _, y in points] + [0.1]) * 1.08
    frame = Frame(x=(0, 1), y=(0, min(top, 1.0)), x_name="share answered, surest first", y_name="error rate")
    risk = signal["risk_at"]
    few, everything = _say(risk["25%"]), _say(risk["100%"])
    said = f"Risk against coverage by {name}: error {few} on the surest quarter, {everything} on all pairs."
    return _svg([*frame.draw(), _path("line", [frame.place(*p) for p in points])], said)


def scatter_plot(points: Mapping[str, Any], unit: str) -> Markup:
    """Opinions against scores with the logistic map.

    Args:
        points: Part of a quality report.
        unit: Of the scores.
    """
    sample = [(float(x), float(y)) for x, y in points["sample"]]
    line = [(float(x), float(y)) for x, y in points["line"]]
    frame = Frame(
        x=_span([x for x, _ in sample]),
        y=_span([y for _, y in sample]),
        x_name=f"score, {unit}",
        y_name="opinion",
    )
    parts = frame.draw()
    for x, y in sample:
        a, b = frame.place(x, y)
        parts.append(f'<circle class="cloud" cx="{a:.1f}" cy="{b:.1f}" r="2"/>')
    inside = [p for p in line if frame.y[0] <= p[1] <= frame.y[1]]
    parts += [_path("line", [frame.place(*p) for p in inside])] if len(inside) > 1 else []
    return _svg(parts, f"{len(sample)} images: mean opinion against score in {unit}, with the logistic fit.")


def histogram_plot(histogram: Mapping[str, Any], unit: str, median: float) -> Markup:
    """How many images have which score.

    Args:
        histogram: `edges` [K + 1] and `counts` [K].
        unit: Of the scores.
        median: Of the scores, marked by a line.
    """
    edges, counts = histogram["edges"], histogram["counts"]
    frame = Frame(
        x=(edges[0], edges[-1]), y=(0, max(counts) * 1.05), x_name=f"score, {unit}", y_name="images"
    )
    parts = frame.draw()
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        (left, top), (right, base) = frame.place(low, count), frame.place(high, 0)
        width = max(right - left - 1, 0.5)
        parts.append(
            f'<rect class="bar" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{base - top:.1f}"/>'
        )
    parts.append(_path("ideal", [frame.place(median, frame.y[0]), frame.place(median, frame.y[1])]))
    said = (
        f"Histogram of {sum(counts):.0f} scores from {edges[0]:.4g} to {edges[-1]:.4g} in {unit}, "
        f"median {median:.4g}."
    )
    return _svg(parts, said)


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1].rstrip()}…"


def _bin_points(bins: Sequence[Mapping[str, Any]]) -> list[Point]:
    return [(entry["confidence"], entry["frequency"]) for entry in bins if entry["confidence"] is not None]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = (high - low) / 25 or abs(high) / 25 or 0.5
    return low - pad, high + pad


def _svg(parts: Sequence[str], said: str) -> Markup:
    inner = "".join(parts)
    return Markup(  # texts from outside are escaped where they enter
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escape(said)}">{inner}</svg>'
    )


def _path(name: str, points: Sequence[Point]) -> str:
    steps = " ".join(f"{'L' if k else 'M'}{x:.1f} {y:.1f}" for k, (x, y) in enumerate(points))
    return f'<path class="{name}" d="{steps}"/>'


def _dot(x: float, y: float) -> str:
    return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'


def _text(x: float, y: float, content: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


def _say(value: float | None) -> str:
    return "unknown" if value is None or not math.isfinite(value) else f"{value:.3f}"
