# SPDX-License-Identifier: Apache-2.0
"""Correlation with mean opinion scores: SRCC, PLCC with the usual logistic fit, Kendall's τ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

Array = NDArray[np.float64]

_SEARCHED = 2_000
"""Samples, evenly spaced over the sorted scores, on which starting points of the fit are searched."""
_POLISHED = 5
"""Starting points that are polished."""


@dataclass(frozen=True, kw_only=True)
class LogisticFit:
    """Map from scores to opinions: monotone with four parameters, not always with five."""

    parameters: tuple[float, ...]  # Four (β1..β4) or five (β1..β5), for standardised scores.
    fitted: Array  # [N] opinions predicted by the map
    plcc: float  # Pearson correlation of `fitted` with the opinions
    rmse: float  # Root mean square error of `fitted`, in the unit of the opinions
    monotone: bool  # True where the map only rises or only falls between the lowest and the highest score


def srcc(x: ArrayLike, y: ArrayLike) -> float:
    """Compute Spearman's ρ of scores and opinions [N]: Pearson's r of average ranks."""
    first, second = _check_sides(x, y)
    return _pearson(stats.rankdata(first), stats.rankdata(second))


def plcc(x: ArrayLike, y: ArrayLike) -> float:
    """Compute Pearson's r of scores and opinions [N], without a fit."""
    return _pearson(*_check_sides(x, y))


def kendall(x: ArrayLike, y: ArrayLike, variant: Literal["b", "c"] = "b") -> float:
    """Compute Kendall's τ-b (corrected for ties) or τ-c (Stuart's, for tables of unequal size)."""
    statistic: Any = stats.kendalltau(*_check_sides(x, y), variant=variant)[0]
    return float(statistic)


def rmse(x: ArrayLike, y: ArrayLike) -> float:
    """Compute √mean (x − y)²; meaningful only where both have one unit."""
    return float(np.sqrt(np.mean((np.asarray(x, dtype=np.float64) - np.asarray(y, dtype=np.float64)) ** 2)))


def logistic(x: Array, *beta: float) -> Array:
    """Evaluate the map with four or five parameters.

    4: β2 + (β1 − β2) / (1 + exp(−(x − β3)/|β4|));  5: β1 (½ − 1/(1 + exp(β2 (x − β3)))) + β4 x + β5

    Source: VQEG, Final report on the validation of objective models of video quality assessment (2000), for
    four; Sheikh, Sabir and Bovik, IEEE Trans. Image Processing 15 (2006) 3440, for five.
    """
    if len(beta) == 4:
        b1, b2, b3, b4 = beta
        return b2 + (b1 - b2) * special.expit((x - b3) / max(abs(b4), 1e-12))
    b1, b2, b3, b4, b5 = beta
    return b1 * (0.5 - special.expit(-b2 * (x - b3))) + b4 * x + b5


def fit_logistic(x: ArrayLike, y: ArrayLike, parameters: Literal[4, 5] = 5) -> LogisticFit:
    """Fit the logistic map by least squares, the usual step before PLCC and RMSE are reported.

    Scores are standardised first. Given centre and steepness the map is linear in the other parameters, so
    these two are searched on a grid, and its best points are polished by Levenberg-Marquardt; for five
    parameters the straight line is too. Needed are more samples than parameters.
    """
    scores, opinions = _check_sides(x, y, least=parameters + 1)
    z = (scores - scores.mean()) / scores.std()
    fits = [_polished(z, opinions, start) for start in _starts(z, opinions, parameters)]
    best = min(fits, key=lambda beta: rmse(logistic(z, *beta), opinions))
    fitted = logistic(z, *best)
    slack = 1e-9 * max(1.0, float(np.ptp(opinions)))
    steps = np.diff(logistic(np.linspace(z.min(), z.max(), 1_000), *best))
    return LogisticFit(
        parameters=best,
        fitted=fitted,
        plcc=math.nan if np.ptp(fitted) <= 1e-3 * slack else _pearson(fitted, opinions),
        rmse=rmse(fitted, opinions),
        monotone=bool((steps >= -slack).all() or (steps <= slack).all()),
    )


def _starts(z: Array, y: Array, parameters: int) -> list[tuple[float, ...]]:
    """Return the best grid points of different steepness, and the straight line for five parameters."""
    rows = np.argsort(z, kind="stable")[np.linspace(0, len(z) - 1, min(len(z), _SEARCHED)).astype(int)]
    some, target = z[rows], y[rows]
    candidates = []
    for steep in np.geomspace(0.1, 100.0, 19):
        points = []
        for centre in np.unique(np.quantile(z, np.linspace(0.0, 1.0, 21))):
            curve = special.expit(steep * (some - centre))
            columns = np.stack([curve, np.ones_like(some), some][: parameters - 2], axis=1)
            weights = np.linalg.lstsq(columns, target, rcond=None)[0]
            height, base, *slope = weights.tolist()
            beta = (
                (base + height, base, float(centre), float(1 / steep))
                if parameters == 4
                else (height, float(steep), float(centre), slope[0], base + height / 2)
            )
            points.append((rmse(columns @ weights, target), beta))
        candidates.append(min(points))
    starts = [beta for _, beta in sorted(candidates)[:_POLISHED]]
    if parameters == 5:
        slope, offset = np.polyfit(z, y, 1).tolist()
        starts.append((0.0, 1.0, float(np.median(z)), slope, offset))
    return starts


def _polished(z: Array, y: Array, start: tuple[float, ...]) -> tuple[float, ...]:
    """Run Levenberg-Marquardt from one start; it never ends above it."""
    # least_squares(method="lm") differentiates in Python, which takes four fifths of its time
    beta, *_ = optimize.leastsq(
        lambda beta: logistic(z, *beta) - y, start, ftol=1e-8, xtol=1e-8, maxfev=3_000, full_output=True
    )
    return tuple(float(value) for value in beta)


def weighted_srcc(x: Array, y: Array, weights: Array) -> Array:
    """Spearman's ρ [R] of x, y [N] under weights [R, N]: a bootstrap without copies; NaN where a side is constant."""
    return weighted_pearson(_weighted_ranks(x, weights), _weighted_ranks(y, weights), weights)


def weighted_pearson(x: Array, y: Array, weights: Array) -> Array:
    """Compute Pearson's r [R] of x, y [N] or [R, N] under weights [R, N]; NaN where a side does not vary."""
    total = weights.sum(1, keepdims=True)
    dx = x - (weights * x).sum(1, keepdims=True) / total
    dy = y - (weights * y).sum(1, keepdims=True) / total
    cross, xx, yy = ((weights * a).sum(1) for a in (dx * dy, dx * dx, dy * dy))
    scale = np.sqrt(xx * yy)
    r = np.full(len(weights), np.nan)
    np.divide(cross, scale, out=r, where=scale > 0)
    return r


def weighted_kendall(x: Array, y: Array, weights: Array) -> Array:
    """Compute Kendall's τ-b [R] of x, y [N] under whole weights [R, N]; NaN where a side does not vary."""
    taus = np.full(len(weights), np.nan)
    for row, repeats in enumerate(weights.astype(np.int64)):
        first, second = np.repeat(x, repeats), np.repeat(y, repeats)
        if np.ptp(first) > 0 and np.ptp(second) > 0:
            taus[row] = stats.kendalltau(first, second)[0]
    return taus


def _weighted_ranks(values: Array, weights: Array) -> Array:
    """Return the average rank [R, N] of each sample when sample n occurs weights[r, n] times."""
    _, value = np.unique(values, return_inverse=True)
    order = np.argsort(value, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(value[order]) > 0))
    block = np.add.reduceat(weights[:, order], starts, axis=1)
    middle = np.cumsum(block, axis=1) - block / 2
    return middle[:, value]


def _check_sides(x: ArrayLike, y: ArrayLike, *, least: int = 2) -> tuple[Array, Array]:
    """Refuse values on which the number is not defined; the message becomes the reason in a report."""
    first, second = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    rules = (
        (first.shape == second.shape and len(first) >= least, f"at least {least} samples with both values"),
        (np.isfinite(first).all() and np.isfinite(second).all(), "finite values; leave out failed samples"),
        (all(len(side) and np.ptp(side) > 0 for side in (first, second)), "two sides that are not constant"),
    )
    for holds, needed in rules:
        if not holds:
            raise ValueError(f"a correlation needs {needed}.")
    return first, second


def _pearson(x: Array, y: Array) -> float:
    dx, dy = x - x.mean(), y - y.mean()
    return float(np.clip(dx @ dy / math.sqrt((dx @ dx) * (dy @ dy)), -1.0, 1.0))
