# SPDX-License-Identifier: Apache-2.0
"""Training curves as inline SVG: axes, units and last value are drawn, no pointer or script is needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

WIDTH, HEIGHT = 440.0, 250.0
"""Of the view box; texts are 14 units high and so stay legible on a phone."""
LEFT, RIGHT, TOP, BOTTOM = 58.0, 66.0, 14.0, 40.0
"""Margins: tick labels, the last value, nothing, the x axis."""
SMOOTH_FROM = 24
"""Curves of fewer points are drawn as they are; longer ones get a running mean over a tenth of the run."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What one panel shows: the sum of the metrics `keys` over the iterations."""

    keys: tuple[str, ...]
    title: str
    unit: str
    meaning: str
    percent: bool = False
    """Values are shares, shown in percent."""
    from_zero: bool = False
    """The y axis starts at zero."""


CURVES = (
    Curve(keys=("reward_mean",), title="Training reward", unit="reward", meaning="mean over valid samples"),
    Curve(
        keys=("heldout/accuracy",),
        title="Held-out accuracy",
        unit="%",
        meaning="held-out prompts, the same seeds each time",
        percent=True,
    ),
    Curve(keys=("loss",), title="Loss", unit="nats or reward", meaning="mean over updates"),
    Curve(
        keys=("perplexity",),
        title="Perplexity",
        unit="exp of nats per token",
        meaning="of the demonstrations, before each update",
    ),
    Curve(
        keys=("ratio_std",),
        title="Ratio spread",
        unit="root mean square of r − 1",
        meaning="how far one iteration moves the policy",
        from_zero=True,
    ),
    Curve(
        keys=("clip_low", "clip_high"),
        title="Clip fraction",
        unit="%",
        meaning="denoising steps or tokens cut at either bound",
        percent=True,
        from_zero=True,
    ),
    Curve(
        keys=("kl",),
        title="KL to the reference",
        unit="nats",
        meaning="distance from the starting model",
        from_zero=True,
    ),
    Curve(
        keys=("frac_reward_zero_std",),
        title="Samples without a signal",
        unit="%",
        meaning="advantage zero: their group has one reward",
        percent=True,
        from_zero=True,
    ),
    Curve(keys=("entropy",), title="Entropy", unit="nats", meaning="per token, mean", from_zero=True),
    Curve(
        keys=("length_mean",),
        title="Length",
        unit="tokens",
        meaning="mean of the completions",
        from_zero=True,
    ),
    Curve(
        keys=("truncated_share",),
        title="Cut off",
        unit="%",
        meaning="completions that met the length limit",
        percent=True,
        from_zero=True,
    ),
    Curve(
        keys=("grad_norm",),
        title="Gradient norm",
        unit="L2",
        meaning="before clipping, mean over updates",
        from_zero=True,
    ),
)
"""The panels of a run, each drawn where the run recorded it."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One curve, ready for the page."""

    curve: Curve
    svg: Markup
    """Empty where no value is finite."""
    note: str
    """What was smoothed or left out."""


def panels(
    metrics: Sequence[Mapping[str, Any]],
    curves: Sequence[Curve] = CURVES,
    *,
    start: Mapping[str, float] | None = None,
) -> tuple[Panel, ...]:
    """Draw every curve that has values.

    Args:
        metrics: Rows of metrics.jsonl; a row without a key is skipped, one with null or a number that is not
            finite leaves a gap that the note counts.
        curves: What to draw.
        start: key -> value at iteration 0, for numbers known before training (held-out accuracy), measured as
            those of the rows were.

    Returns:
        One panel per curve that was recorded, in order.
    """
    series = [(curve, *_series(metrics, curve, start or {})) for curve in curves]
    return tuple(_panel(curve, x, y) for curve, x, y in series if len(x))


def _series(
    metrics: Sequence[Mapping[str, Any]], curve: Curve, start: Mapping[str, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Iterations and values (NaN for gaps) of the rows that have one of the keys."""
    points = [(0.0, sum(start[key] for key in curve.keys))] if all(key in start for key in curve.keys) else []
    for number, row in enumerate(metrics, start=1):
        if any(key in row for key in curve.keys):
            parts = [row[key] for key in curve.keys if key in row]
            numeric = all(isinstance(part, int | float) for part in parts)
            points.append((float(row.get("iteration", number)), float(sum(parts)) if numeric else math.nan))
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    values = np.where(np.isfinite(table[:, 1]), table[:, 1], np.nan)
    return table[:, 0], values * 100 if curve.percent else values


def _panel(curve: Curve, x: NDArray[np.float64], y: NDArray[np.float64]) -> Panel:
    finite = np.isfinite(y)
    gaps = int((~finite).sum())
    if not finite.any():
        return Panel(curve=curve, svg=Markup(""), note=f"No finite value in {gaps} rows.")
    window = max(3, len(y) // 10 | 1) if len(y) >= SMOOTH_FROM else 1
    smooth = running_mean(y, window)
    notes = [f"thin: each iteration; thick: mean of the nearest {window}"] if window > 1 else []
    if gaps:
        notes.append(f"{gaps} of {len(y)} values were not finite and are left out")
    return Panel(curve=curve, svg=_draw(curve, x, y, smooth), note="; ".join(notes))


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Centred mean over the `window` nearest rows, fewer at the ends; gaps are skipped and stay gaps."""
    if window <= 1:
        return values
    half = window // 2
    found = np.full_like(values, np.nan)
    for row in np.flatnonzero(np.isfinite(values)):
        near = values[max(0, row - half) : row + half + 1]
        found[row] = near[np.isfinite(near)].mean()
    return found


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) inside [low, high], about `count` of them."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / count))
    found = [_multiples(low, high, power * factor) for factor in (0.5, 1, 2, 5, 10)]
    return min(found, key=lambda marks: abs(len(marks) - count))


def _multiples(low: float, high: float, step: float) -> list[float]:
    """All multiples of a step in [low, high], up to rounding."""
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def label(value: float, step: float) -> str:
    """A number as short as its tick distance allows; a power of ten beyond five decimals or digits."""
    if value == 0:
        return "0"
    decimals = max(0, -math.floor(math.log10(abs(step)) + 1e-9))
    if decimals <= 5 and abs(value) < 1e5:
        return f"{value:.{decimals}f}".replace("-", "−")
    exponent = math.floor(math.log10(abs(value)) + 1e-12)
    decimals = max(0, exponent - math.floor(math.log10(abs(step)) + 1e-9))
    digits = f"{value / 10.0**exponent:.{min(decimals, 2)}f}".replace("-", "−")
    return f"{digits}e{str(exponent).replace('-', '−')}"


def _draw(curve: Curve, x: NDArray, y: NDArray, smooth: NDArray) -> Markup:
    """The SVG of a panel with at least one finite value."""
    seen, last = y[np.isfinite(y)], float(smooth[np.isfinite(smooth)][-1])
    low, high = _limits(curve, float(seen.min()), float(seen.max()))
    first, end = (float(x[0]), float(x[-1])) if x[-1] > x[0] else (float(x[0]) - 0.5, float(x[0]) + 0.5)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def at_x(value: Any) -> Any:
        return LEFT + (value - first) / (end - first) * (right - LEFT)

    def at_y(value: Any) -> Any:
        return bottom - (value - low) / (high - low) * (bottom - TOP)

    marks = ticks(low, high)
    step = marks[1] - marks[0] if len(marks) > 1 else high - low
    whole = [m for m in ticks(first, end, 5) if float(m).is_integer()]
    parts = [_rule("grid", right, float(at_y(m))) for m in marks]
    parts += [_text("tick", LEFT - 8, float(at_y(m)) + 5, label(m, step), "end") for m in marks]
    parts += [_text("tick", float(at_x(m)), bottom + 18, f"{m:.0f}") for m in whole]
    parts.append(_text("tick", (LEFT + right) / 2, HEIGHT - 4, "iteration"))
    parts.append(_rule("axis", right, bottom))
    raw = smooth is not y
    if raw:
        parts.append(_polyline("raw", at_x(x), at_y(y)))
    parts.append(_polyline("line", at_x(x), at_y(smooth)))
    if not raw:
        places = _finite(at_x(x), at_y(y))
        parts += [f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in places]
    fine = step / 10
    end_label = f"{label(last, min(fine, 0.1))} %" if curve.percent else label(last, fine)
    end_x = float(at_x(x[np.isfinite(smooth)][-1]))
    parts.append(_text("last", end_x + 7, at_y(last) + 5, end_label, "start"))
    said = _alternative(curve, x, y, end_label)
    inner = "".join(parts)
    return Markup(  # the only text from outside is escaped in `said`
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{escape(said)}">{inner}</svg>'
    )


def _rule(name: str, right: float, y: float) -> str:
    return f'<line class="{name}" x1="{LEFT:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(name: str, x: float, y: float, content: str, anchor: str = "middle") -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


def _limits(curve: Curve, low: float, high: float) -> tuple[float, float]:
    """The y range: padded by a twentieth, from zero where asked, never empty."""
    if curve.from_zero and low >= 0:
        return 0.0, high * 1.05 if high > 0 else 1.0
    pad = (high - low) / 20 or abs(high) / 20 or 0.5
    low, high = low - pad, high + pad
    return (max(low, 0.0), min(high, 100.0)) if curve.percent else (low, high)


def _finite(x: NDArray, y: NDArray) -> list[tuple[float, float]]:
    return [(float(a), float(b)) for a, b in zip(x, y, strict=True) if math.isfinite(b)]


def _polyline(name: str, x: NDArray, y: NDArray) -> str:
    """A path with breaks at the gaps."""
    path, pen = [], "M"
    for a, b in zip(x, y, strict=True):
        if not math.isfinite(b):
            pen = "M"
            continue
        path.append(f"{pen}{a:.1f} {b:.1f}")
        pen = "L"
    return f'<path class="{name}" d="{" ".join(path)}"/>'


def _alternative(curve: Curve, x: NDArray, y: NDArray, last: str) -> str:
    """What the picture says, in words."""
    rows = np.flatnonzero(np.isfinite(y))
    low, high = y[rows].min(), y[rows].max()
    return (
        f"{curve.title} ({curve.unit}) over iterations {x[rows[0]]:.0f} to {x[rows[-1]]:.0f}: "
        f"from {y[rows[0]]:.3g} to {last} at the end, smallest {low:.3g}, largest {high:.3g}."
    )
