# SPDX-License-Identifier: Apache-2.0
"""Correlation of a judge with mean opinion scores: SRCC, PLCC with the usual logistic fit, Kendall's τ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LogisticFit:
    """A monotone map from scores to opinions."""

    parameters: tuple[float, ...]
    """Four (β1..β4) or five (β1..β5), for standardised scores."""
    fitted: Array
    """[N] opinions as the map predicts them."""
    plcc: float
    """Pearson correlation of `fitted` with the opinions."""
    rmse: float
    """Root mean square error of `fitted`, in the unit of the opinions."""


def srcc(x: ArrayLike, y: ArrayLike) -> float:
    """Spearman's ρ of scores and opinions [N]: Pearson's r of average ranks."""
    first, second = check_sides(x, y)
    return _pearson(stats.rankdata(first), stats.rankdata(second))


def plcc(x: ArrayLike, y: ArrayLike) -> float:
    """Pearson's r of scores and opinions [N], without a fit."""
    return _pearson(*check_sides(x, y))


def kendall(x: ArrayLike, y: ArrayLike, variant: str = "b") -> float:
    """Kendall's τ-b (corrected for ties on either side) or τ-c (Stuart's, for tables of unequal size).

    Raises:
        ValueError: As `srcc`, or another variant.
    """
    if variant not in ("b", "c"):
        raise ValueError(f"variant is {variant!r}; allowed are 'b' and 'c'.")
    first, second = check_sides(x, y)
    statistic: Any = stats.kendalltau(first, second, variant=variant)[0]
    return float(statistic)


def rmse(x: ArrayLike, y: ArrayLike) -> float:
    """√mean (x − y)²; means something only where both have one unit."""
    first, second = check_sides(x, y, constant=True)
    return float(np.sqrt(np.mean((first - second) ** 2)))


def logistic(x: Array, *beta: float) -> Array:
    """The map with four or five parameters.

    4: β2 + (β1 − β2) / (1 + exp(−(x − β3)/|β4|));  5: β1 (½ − 1/(1 + exp(β2 (x − β3)))) + β4 x + β5

    Source: VQEG, Final report on the validation of objective models of video quality assessment (2000), for
    four; Sheikh, Sabir and Bovik, IEEE Trans. Image Processing 15 (2006) 3440, for five.
    """
    if len(beta) == 4:
        b1, b2, b3, b4 = beta
        return b2 + (b1 - b2) * special.expit((x - b3) / max(abs(b4), 1e-12))
    b1, b2, b3, b4, b5 = beta
    return b1 * (0.5 - special.expit(-b2 * (x - b3))) + b4 * x + b5


def fit_logistic(x: ArrayLike, y: ArrayLike, parameters: int = 5) -> LogisticFit:
    """Least-squares fit of the logistic map, the usual step before PLCC and RMSE are reported.

    Scores are standardised first, several starts are tried, and the straight line is among them for five
    parameters; so the result is never worse than it.
    """
    if parameters not in (4, 5):
        raise ValueError(f"parameters is {parameters}; the usual fits have 4 or 5.")
    scores, opinions = check_sides(x, y)
    if len(scores) <= parameters:
        raise ValueError(f"a fit of {parameters} parameters needs more than {parameters} samples.")
    z = (scores - scores.mean()) / scores.std()
    tried = [_least_squares(z, opinions, start) for start in _starts(z, opinions, parameters)]
    best = min(tried, key=lambda beta: float(np.sum((logistic(z, *beta) - opinions) ** 2)))
    fitted = logistic(z, *best)
    flat = float(np.ptp(fitted)) <= 1e-12 * max(1.0, float(np.ptp(opinions)))
    return LogisticFit(
        parameters=best,
        fitted=fitted,
        plcc=math.nan if flat else _pearson(fitted, opinions),
        rmse=float(np.sqrt(np.mean((fitted - opinions) ** 2))),
    )


def _starts(z: Array, y: Array, parameters: int) -> list[tuple[float, ...]]:
    low, high, middle = float(y.min()), float(y.max()), float(np.median(z))
    rising = _pearson(z, y) >= 0
    if parameters == 4:
        ends = (high, low) if rising else (low, high)
        return [(*ends, middle, width) for width in (0.5, 1.0, 3.0)]
    slope, offset = np.polyfit(z, y, 1)
    sign = 1.0 if rising else -1.0
    bent = [(sign * (high - low), steep, middle, 0.0, float(y.mean())) for steep in (0.5, 2.0)]
    return [(0.0, 1.0, middle, float(slope), float(offset)), *bent]


def _least_squares(z: Array, y: Array, start: tuple[float, ...]) -> tuple[float, ...]:
    """Levenberg-Marquardt from one start; it never ends above it."""
    found = optimize.least_squares(
        lambda beta: logistic(z, *beta) - y, np.array(start), method="lm", max_nfev=2000
    )
    return tuple(float(value) for value in found.x)


def weighted_srcc(x: Array, y: Array, weights: Array) -> Array:
    """Spearman's ρ of x, y [N] under weights [R, N], one for each row: a bootstrap without copying.

    Returns:
        [R]; NaN where the weighted ranks of a side do not vary.
    """
    return weighted_pearson(_weighted_ranks(x, weights), _weighted_ranks(y, weights), weights)


def weighted_pearson(x: Array, y: Array, weights: Array) -> Array:
    """Pearson's r under weights.

    Returns:
        [R]; NaN where a side does not vary.
    """
    total = weights.sum(1, keepdims=True)
    dx = x - (weights * x).sum(1, keepdims=True) / total
    dy = y - (weights * y).sum(1, keepdims=True) / total
    cross, xx, yy = ((weights * a).sum(1) for a in (dx * dy, dx * dx, dy * dy))
    scale = np.sqrt(xx * yy)
    found = np.full(len(weights), np.nan)
    np.divide(cross, scale, out=found, where=scale > 0)
    return found


def weighted_kendall(x: Array, y: Array, weights: Array) -> Array:
    """Kendall's τ-b and τ-c of x, y [N] under whole weights [R, N]: sample n stands weights[r, n] times.

    τ_c = 2 (C − D) m / (W² (m − 1)), C − D = τ_b √(P_x P_y), with W the weight of all, P the pairs of
    different values of a side, m the smaller number of distinct values.

    Returns:
        [R, 2]; NaN where a side does not vary among what has weight.
    """
    places = [np.unique(side, return_inverse=True)[1] for side in (x, y)]
    found = np.full((len(weights), 2), np.nan)
    for row, taus in zip(weights.astype(np.int64), found, strict=True):
        counts = [np.bincount(place, weights=row) for place in places]
        distinct = min(np.count_nonzero(count) for count in counts)
        if distinct > 1:
            taus[0] = stats.kendalltau(np.repeat(x, row), np.repeat(y, row))[0]
            total = row.sum() ** 2
            balance = taus[0] * math.sqrt(math.prod((total - count @ count) / 2 for count in counts))
            taus[1] = 2 * balance * distinct / (total * (distinct - 1))
    return found


def _weighted_ranks(values: Array, weights: Array) -> Array:
    """[R, N] average rank of each sample when sample n stands weights[r, n] times in the data."""
    _, place = np.unique(values, return_inverse=True)
    order = np.argsort(place, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(place[order]) > 0))
    block = np.add.reduceat(weights[:, order], starts, axis=1)
    middle = np.cumsum(block, axis=1) - block / 2
    return middle[:, place]


def check_sides(x: ArrayLike, y: ArrayLike, *, constant: bool = False) -> tuple[Array, Array]:
    """Two sides of a correlation as float64 [N]; a `constant` side may have one value alone."""
    first, second = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(f"needed are two vectors of one length; got {first.shape} and {second.shape}.")
    if len(first) < 2:
        raise ValueError(f"a correlation needs at least 2 samples; got {len(first)}.")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ValueError("some values are NaN or infinite; leave out what was not judged, and count it.")
    for name, side in (("the first", first), ("the second", second)):
        if not constant and np.ptp(side) == 0:
            raise ValueError(f"all values of {name} side equal {side[0]:g}; a correlation is not defined.")
    return first, second


def _pearson(x: Array, y: Array) -> float:
    dx, dy = x - x.mean(), y - y.mean()
    return float(np.clip(dx @ dy / math.sqrt((dx @ dx) * (dy @ dy)), -1.0, 1.0))
