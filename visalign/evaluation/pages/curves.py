# SPDX-License-Identifier: Apache-2.0
"""Training curves as inline SVG: the list of panels, gaps and smoothing, axes, units and last values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from .base import words
from .plots import Frame, label, text, ticks

WIDTH, HEIGHT, RIGHT = 440.0, 250.0, 66.0
"""View box of a panel, and the margin for the last value."""
SMOOTH_FROM = 24
"""Points from which a curve gets a running mean over a tenth of the run."""


@dataclass(frozen=True)
class Curve:
    """Content of a panel: the sum of the metrics `keys` over the iterations."""

    keys: tuple[str, ...]
    title: str
    unit: str
    meaning: str
    from_zero: bool = False  # The y axis starts at zero
    ends: tuple[str, ...] = ()  # Metrics that are the ends of the curve's interval

    @property
    def percent(self) -> bool:
        """True where values are shares, shown in percent."""
        return self.unit == "%"


def _from_zero(keys: str, title: str, unit: str, meaning: str) -> Curve:
    return Curve(tuple(keys.split()), title, unit, meaning, from_zero=True)


_HELDOUT_IMAGES = "of held-out images from those before training"

_THIN = "thin: 95\u00a0% interval"

CURVES = (
    Curve(("reward_mean",), "Training reward", "reward", "mean over valid samples"),
    Curve(
        ("heldout/accuracy",),
        "Held-out accuracy",
        "%",
        f"held-out prompts, the same seeds each time; {_THIN}",
        ends=("heldout/accuracy_low", "heldout/accuracy_high"),
    ),
    _from_zero("reward_group_std", "Spread within groups", "reward", "standard deviation, mean"),
    Curve(("loss",), "Loss", "nats or reward", "mean over updates"),
    Curve(("perplexity",), "Perplexity", "exp of nats per token", "of the demonstrations, before each update"),
    Curve(("rewards/accuracies",), "Pairs ranked correctly", "%", "by the implicit reward"),
    Curve(("heldout/rewards/accuracies",), "Held-out pairs ranked correctly", "%", "by the implicit reward"),
    Curve(("logps/chosen",), "Log-prob of chosen completions", "nats", "falls where both get unlikely"),
    _from_zero("ratio_std", "Ratio spread", "root mean square of r − 1", "how far one iteration moves the policy"),
    _from_zero("clip_low clip_high", "Clip fraction", "%", "denoising steps or tokens cut at either bound"),
    _from_zero("kl", "KL to the reference", "nats", "distance from the starting model"),
    _from_zero("frac_reward_zero_std", "Samples without a signal", "%", "equal rewards within their group"),
    Curve(("diversity",), "Diversity within groups", "cosine distance or share", "of one prompt's samples"),
    _from_zero("heldout/feature_distance", "Drift of held-out images", "cosine distance", "from before training"),
    _from_zero("heldout/feature_frechet", "Fréchet distance", "squared, of unit features", _HELDOUT_IMAGES),
    _from_zero("entropy", "Entropy", "nats", "mean over completions of the token mean"),
    _from_zero("entropy_answer", "Entropy of answers", "nats", "answers to one prompt, mean over groups"),
    Curve(("covariance/mean",), "Covariance of log-prob and advantage", "per token", "entropy falls where positive"),
    Curve(("entropy_drop",), "Entropy spent", "nats", "−ΔH, since the iteration before"),
    Curve(("entropy_drop_foreseen",), "Entropy spent, foreseen", "η · Cov", "up to a factor under AdamW"),
    _from_zero("repetition", "Repetition", "share", "of runs of four tokens, mean"),
    _from_zero("length_mean", "Length", "tokens", "mean of the completions"),
    _from_zero("truncated_share", "Cut off", "%", "completions that met the length limit"),
    _from_zero("grad_norm", "Gradient norm", "L2", "before clipping, mean over updates"),
)
"""Panels of a run, each drawn where the run recorded it."""

FAMILIES = {
    "agreement": ("Agreement with {}", "Kendall's τ-b", "of the trained reward with one that is held out"),
    "image": ("Images: {}", "0 to 1", "mean over the iteration's images"),
    "recorded": ("{}, held out", "its unit", "mean of a reward that is not trained on, higher is better"),
}
"""Family of metrics -> title, unit and meaning of the panel of each metric."""


def known_curves(metrics: Sequence[Mapping[str, Any]]) -> tuple[Curve, ...]:
    """Return `CURVES`, and curves for the metrics of `FAMILIES` in the rows."""
    curves = [*CURVES]
    for key in dict.fromkeys(key for row in metrics for key in row):
        family, _, name = key.partition("/")
        if family == "heldout" and name.endswith(".low") and not name.startswith("accuracy."):
            mean = key.removesuffix(".low")
            meaning = f"held-out mean, the same prompts and seeds each time; {_THIN}"
            title = f"Held-out {words(name.removesuffix('.low'))}"
            curves.insert(1, Curve((mean,), title, "its unit", meaning, ends=(key, f"{mean}.high")))
        elif family in FAMILIES:
            title, unit, meaning = FAMILIES[family]
            curves.append(Curve((key,), title.format(name.replace("_", " ")), unit, meaning))
        elif family == "reward_part" and (name == "std" or name.endswith(".std")):
            title = f"Judge's own std{': ' if name != 'std' else ''}{name.removesuffix('std').rstrip('.')}"
            curves.append(Curve((key,), title, "its unit", "mean over samples", from_zero=True))
    return tuple(curves)


@dataclass(frozen=True, kw_only=True)
class Panel:
    curve: Curve
    svg: Markup
    note: str  # Smoothing and gaps, in words


def panels(
    metrics: Sequence[Mapping[str, Any]], curves: Sequence[Curve] = CURVES, *, start: Mapping[str, float] | None = None
) -> tuple[tuple[Panel, ...], str]:
    """Draw every curve that has finite values; return its panels, and sentences that name the others.

    `metrics` are rows of metrics.jsonl, whose gaps are counted; `start` has values from before training.
    """
    series = [(curve, *_series(metrics, curve, start or {})) for curve in curves]
    drawn = []
    for curve, x, y in series:
        if np.isfinite(y).any() and not _is_zero(y):
            ends = [_series(metrics, replace(curve, keys=(key,)), start or {}) for key in curve.ends]
            gaps = int((~np.isfinite(y)).sum())
            window = max(3, len(y) // 10 | 1) if len(y) >= SMOOTH_FROM else 1  # odd, so that its mean is centred
            notes = [f"thin: each iteration; thick: mean of the nearest {window}"] if window > 1 else []
            notes += [f"{gaps} of {len(y)} values were not finite and are left out"] if gaps else []
            svg = _draw(curve, x, y, running_mean(y, window), [end for end in ends if len(end[0])])
            drawn.append(Panel(curve=curve, svg=svg, note="; ".join(notes)))
    absent = (
        ("Zero in every iteration", [curve.title for curve, _, y in series if _is_zero(y)]),
        ("Never measured", [curve.title for curve, _, y in series if len(y) and not np.isfinite(y).any()]),
    )
    lists = [(why, " and ".join(filter(None, (", ".join(titles[:-1]), *titles[-1:])))) for why, titles in absent]
    return tuple(drawn), " ".join(f"{why}, and not drawn: {titles}." for why, titles in lists if titles)


def _is_zero(values: NDArray[np.float64]) -> bool:
    return bool(len(values)) and bool((values == 0).all())


def _series(
    metrics: Sequence[Mapping[str, Any]], curve: Curve, start: Mapping[str, float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return iterations and values (NaN for gaps) of the rows that have one of the keys."""
    points = [(0.0, sum(start[key] for key in curve.keys))] if all(key in start for key in curve.keys) else []
    for number, row in enumerate(metrics, start=1):
        if any(key in row for key in curve.keys):
            parts = [row[key] for key in curve.keys if key in row]
            numeric = all(isinstance(part, int | float) for part in parts)
            points.append((float(row.get("iteration", number)), float(sum(parts)) if numeric else math.nan))
    table = np.array(points, dtype=np.float64).reshape(-1, 2)
    values = np.where(np.isfinite(table[:, 1]), table[:, 1], np.nan)
    return table[:, 0], values * 100 if curve.percent else values


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Compute the centred mean of the `window` nearest rows, fewer at the ends; gaps stay gaps."""
    if window <= 1:
        return values
    half = window // 2
    means = np.full_like(values, np.nan)
    for row in np.flatnonzero(np.isfinite(values)):
        near = values[max(0, row - half) : row + half + 1]
        means[row] = near[np.isfinite(near)].mean()
    return means


def _draw(curve: Curve, x: NDArray, y: NDArray, smooth: NDArray, ends: Sequence[tuple]) -> Markup:
    """Draw a curve with a finite value, and the (iterations, values) of the ends of its interval."""
    rows = np.flatnonzero(np.isfinite(y))
    smallest, largest = float(y[rows].min()), float(y[rows].max())
    first, end = (float(x[0]), float(x[-1])) if x[-1] > x[0] else (float(x[0]) - 0.5, float(x[0]) + 0.5)
    drawn = np.concatenate([y, *(values for _, values in ends)])
    frame = Frame(
        x=(first, end),
        y=limits(curve, float(np.nanmin(drawn)), float(np.nanmax(drawn))),
        x_name="iteration",
        width=WIDTH,
        height=HEIGHT,
        right=RIGHT,
        integers=True,
    )
    thick = list(zip(x.tolist(), smooth.tolist(), strict=True))
    parts = [frame.path("line", thick)]
    if smooth is y:
        parts.append(frame.dots(thick, radius=3))
    else:
        parts.insert(0, frame.path("raw", zip(x.tolist(), y.tolist(), strict=True)))
    parts += [frame.path("raw", zip(at.tolist(), values.tolist(), strict=True)) for at, values in ends]
    marks = ticks(*frame.y)
    fine = (marks[1] - marks[0] if len(marks) > 1 else frame.y[1] - frame.y[0]) / 10
    last_x, last = [point for point in thick if math.isfinite(point[1])][-1]
    last_text = f"{label(last, min(fine, 0.1))} %" if curve.percent else label(last, fine)
    across, down = frame.project(last_x, last)
    parts.append(text(across + 7, down + 5, last_text, "start", "last"))
    alt = (
        f"{curve.title} ({curve.unit}) over iterations {x[rows[0]]:.0f} to {x[rows[-1]]:.0f}: "
        f"from {y[rows[0]]:.3g} to {last_text} at the end, smallest {smallest:.3g}, largest {largest:.3g}."
    )
    return frame.svg(parts, alt)


def limits(curve: Curve, low: float, high: float) -> tuple[float, float]:
    """Return the y range: padded by a twentieth, from zero where set, never empty."""
    if curve.from_zero and low >= 0:
        return 0.0, high * 1.05 if high > 0 else 1.0
    pad = (high - low) / 20 or abs(high) / 20 or 0.5
    low, high = low - pad, high + pad
    return (max(low, 0.0), min(high, 100.0)) if curve.percent else (low, high)
