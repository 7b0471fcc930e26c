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
    """A map from scores to opinions: monotone with four parameters, and with five where it says so."""

    parameters: tuple[float, ...]
    """Four (β1..β4) or five (β1..β5), for standardised scores."""
    fitted: Array
    """[N] opinions as the map predicts them."""
    plcc: float
    """Pearson correlation of `fitted` with the opinions."""
    rmse: float
    """Root mean square error of `fitted`, in the unit of the opinions."""
    monotone: bool
    """Whether the map only rises or only falls between the lowest and the highest score."""


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

    Scores are standardised first. The map is linear in all parameters but place and steepness, so these two
    are searched on a grid, and the best of it, the usual starts, and the straight line for five parameters
    are polished: the result is never worse than any of them.
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
    steps = np.diff(logistic(np.linspace(z.min(), z.max(), 1_000), *best))
    slack = 1e-9 * max(1.0, float(np.ptp(opinions)))
    return LogisticFit(
        parameters=best,
        fitted=fitted,
        plcc=math.nan if flat else _pearson(fitted, opinions),
        rmse=float(np.sqrt(np.mean((fitted - opinions) ** 2))),
        monotone=bool((steps >= -slack).all() or (steps <= slack).all()),
    )


def _starts(z: Array, y: Array, parameters: int) -> list[tuple[float, ...]]:
    low, high, middle = float(y.min()), float(y.max()), float(np.median(z))
    rising = _pearson(z, y) >= 0
    found: list[tuple[float, ...]]
    if parameters == 4:
        ends = (high, low) if rising else (low, high)
        found = [(*ends, middle, width) for width in (0.5, 1.0, 3.0)]
    else:
        slope, offset = (float(value) for value in np.polyfit(z, y, 1))
        sign = 1.0 if rising else -1.0
        found = [(sign * (high - low), steep, middle, 0.0, float(y.mean())) for steep in (0.5, 2.0)]
        found.append((0.0, 1.0, middle, slope, offset))
    order = np.argsort(z, kind="stable")
    some = order[np.linspace(0, len(z) - 1, min(len(z), _SEARCHED)).astype(int)]
    place, steep = _grid(z, np.linspace(0.0, 1.0, 21), np.geomspace(0.1, 100.0, 19))
    error = 1 - _explained(_profile(z[some], y[some], place, steep).sum(0)[None], parameters)[0]
    for k in _valleys(error, steep):
        curve = special.expit(steep[k] * (z - place[k]))
        columns = [curve, np.ones_like(z), z][: parameters - 2]
        height, base, *line = (float(v) for v in np.linalg.lstsq(np.stack(columns, 1), y, rcond=None)[0])
        at, bend = float(place[k]), float(steep[k])
        if parameters == 4:
            found.append((base + height, base, at, 1 / bend))
        else:
            found.append((height, bend, at, line[0], base + height / 2))
    return found


_VALLEYS = 5
"""Steepnesses whose best place is polished."""
_SEARCHED = 2_000
"""Samples, evenly over the scores, with which the grid is searched for them."""


def _valleys(error: Array, steep: Array) -> list[int]:
    best = [min(np.flatnonzero(steep == value), key=lambda k: error[k]) for value in np.unique(steep)]
    return sorted((int(k) for k in best), key=lambda k: error[k])[:_VALLEYS]


def _grid(z: Array, quantiles: Array, steepness: Array) -> tuple[Array, Array]:
    """Places and steepnesses [G] of every map of the grid; places are quantiles of the scores."""
    places = np.unique(np.quantile(z, quantiles))
    place, steep = np.meshgrid(places, steepness)
    return place.ravel(), steep.ravel()


def _profile(z: Array, y: Array, place: Array, steep: Array) -> Array:
    """[N, 6 + 4 G] products whose sums give the least squares of every map of a grid."""
    curve = special.expit(steep * (z[:, None] - place))
    y = (y - y.mean()) / (float(y.std()) or 1.0)
    plain = np.stack([np.ones_like(z), z, z * z, y, y * y, z * y], axis=1)
    return np.concatenate([plain, curve, curve**2, curve * z[:, None], curve * y[:, None]], axis=1)


def _explained(sums: Array, parameters: int) -> Array:
    """[R, G] share R² of the variance that each map of a grid explains, from the sums [R, 6 + 4 G].

    With s(z) = σ(steep · (z − place)) the rest is linear: R² = c_sy² / (c_ss c_yy) of β + γ s for four
    parameters, and (c_zz c_sy² − 2 c_sz c_sy c_zy + c_ss c_zy²) / ((c_ss c_zz − c_sz²) c_yy) of β + γ s + δ z
    for five, c the sums of squares and products about the means.
    """
    n, z, zz, y, yy, zy = (sums[:, k : k + 1] for k in range(6))
    s, ss, sz, sy = np.split(sums[:, 6:], 4, axis=1)
    c_zz, c_yy, c_zy = zz - z * z / n, yy - y * y / n, zy - z * y / n
    c_ss, c_sz, c_sy = ss - s * s / n, sz - s * z / n, sy - s * y / n
    with np.errstate(invalid="ignore", divide="ignore"):
        if parameters == 4:
            return np.where(c_ss > 1e-9 * n, c_sy**2 / (c_ss * c_yy), 0.0)
        line = c_zy**2 / (c_zz * c_yy)
        inside = c_ss * c_zz - c_sz**2
        both = (c_zz * c_sy**2 - 2 * c_sz * c_sy * c_zy + c_ss * c_zy**2) / (inside * c_yy)
        return np.fmax(np.where(inside > 1e-6 * c_ss * c_zz, both, line), line)


class RefittedPlcc:
    """PLCC after the logistic fit in every resample, the map fitted anew in each.

    A map is searched on a grid of places and steepnesses that holds those of the fit to all samples; with an
    intercept the PLCC of a least-squares fit is √R².
    """

    def __init__(self, x: ArrayLike, y: ArrayLike, fit: LogisticFit) -> None:
        scores, opinions = check_sides(x, y)
        z = (scores - scores.mean()) / scores.std()
        beta, self._parameters = fit.parameters, len(fit.parameters)
        own = (beta[2], 1 / max(abs(beta[3]), 1e-12) if self._parameters == 4 else beta[1])
        place, steep = _grid(z, np.linspace(0.02, 0.98, 13), np.geomspace(0.25, 32.0, 10))
        self.products = _profile(z, opinions, np.append(place, own[0]), np.append(steep, own[1]))
        """[N, M] whose sums over a resample, by `bootstrap`, are what `draws` takes."""

    def draws(self, sums: Array) -> Array:
        """[R, 1] PLCC from the sums [R, M] of `products` over each resample."""
        best = np.nanmax(_explained(sums, self._parameters), axis=1, initial=0.0)
        return np.sqrt(np.clip(best, 0.0, 1.0))[:, None]


def _least_squares(z: Array, y: Array, start: tuple[float, ...]) -> tuple[float, ...]:
    """Levenberg-Marquardt from one start; it never ends above it."""
    # least_squares(method="lm") differentiates in Python, which takes four fifths of its time
    found, *_ = optimize.leastsq(
        lambda beta: logistic(z, *beta) - y, start, ftol=1e-8, xtol=1e-8, maxfev=3_000, full_output=True
    )
    return tuple(float(value) for value in found)


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
    few = len(x) <= 500  # then the signs of all pairs are faster than a sort for each row
    signs = math.prod(np.sign(np.subtract.outer(side, side)) for side in (x, y)) if few else None
    found = np.full((len(weights), 2), np.nan)
    for row, taus in zip(weights, found, strict=True):
        counts = [np.bincount(place, weights=row) for place in places]
        distinct = min(np.count_nonzero(count) for count in counts)
        if distinct > 1:
            total = row.sum() ** 2
            scale = math.sqrt(math.prod((total - count @ count) / 2 for count in counts))
            if signs is None:
                sides = (np.repeat(side, row.astype(np.int64)) for side in (x, y))
                taus[0] = stats.kendalltau(*sides)[0]
            else:
                taus[0] = row @ signs @ row / 2 / scale
            taus[1] = 2 * taus[0] * scale * distinct / (total * (distinct - 1))
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
