# SPDX-License-Identifier: Apache-2.0
"""Calibration of probabilities: NLL, Brier score, ECE and MCE, temperature scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special, stats

from .intervals import cluster_sums, ratio

Array = NDArray[np.float64]

SMALLEST = 1e-12
"""Distance of probabilities from 0 and 1 in the NLL, so that one certain error costs 27.6 nats."""


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Reliability diagram of `bins` equal-width bins."""

    edges: Array  # [bins + 1]
    count: Array  # [bins] samples (or their weight) in each
    confidence: Array  # [bins] mean probability; NaN in an empty bin
    frequency: Array  # [bins] mean outcome; NaN in an empty bin

    @property
    def gap(self) -> Array:
        """[bins] frequency − confidence; NaN in an empty bin."""
        return self.frequency - self.confidence

    @property
    def ece(self) -> float:
        """Expected calibration error: Σ n_b/N · |frequency − confidence|."""
        return float(np.nansum(self.count * np.abs(self.gap)) / self.count.sum())

    @property
    def mce(self) -> float:
        """Largest gap of a bin that is not empty."""
        return float(np.nanmax(np.abs(self.gap)))


def reliability(prob: ArrayLike, outcome: ArrayLike, *, bins: int = 10) -> Reliability:
    """Sort probabilities [N] into equal-width bins; a probability on an edge goes into the upper bin.

    Outcomes [N] are 0 or 1, or shares of votes. The diagram's properties are the calibration errors.

    Source: Guo et al., arXiv 1706.04599, eq. 3 and 5.
    """
    p, y = np.asarray(prob, dtype=np.float64), np.asarray(outcome, dtype=np.float64)
    columns = np.stack([np.ones_like(p), p, y], axis=1)
    count, confidence, frequency = cluster_sums(columns, bin_index(p, bins), bins).T
    return Reliability(
        edges=np.linspace(0.0, 1.0, bins + 1),
        count=count,
        confidence=ratio(confidence, count),
        frequency=ratio(frequency, count),
    )


def bin_index(prob: Array, bins: int) -> NDArray[np.int64]:
    """Return the number [N] of the equal-width bin of each probability."""
    return np.digitize(prob, np.linspace(0.0, 1.0, bins + 1)[1:-1])


def both_sides(prob: ArrayLike, outcome: ArrayLike) -> tuple[Array, Array]:
    """Append the mirror image of every pair [N], [2N] each, so that no result depends on the order of images."""
    p, y = np.asarray(prob, dtype=np.float64), np.asarray(outcome, dtype=np.float64)
    return np.concatenate([p, 1 - p]), np.concatenate([y, 1 - y])


def nll(prob: ArrayLike, outcome: ArrayLike) -> Array:
    """NLL −y ln p − (1 − y) ln(1 − p) [N], nats, p clipped by `SMALLEST`: cross-entropy to shares of votes y."""
    p, y = np.asarray(prob, dtype=np.float64), np.asarray(outcome, dtype=np.float64)
    p = np.clip(p, SMALLEST, 1 - SMALLEST)
    return -(special.xlogy(y, p) + special.xlog1py(1 - y, -p))


def brier(prob: ArrayLike, outcome: ArrayLike) -> Array:
    """Squared error (p − y)² of each sample: Brier, Monthly Weather Review 78 (1950), without its factor 2."""
    p, y = np.asarray(prob, dtype=np.float64), np.asarray(outcome, dtype=np.float64)
    return (p - y) ** 2


def win_probability(margin: ArrayLike, std: ArrayLike | None = None, *, link: str = "logistic") -> Array:
    """Compute the probability [N] that the left image is better from the means and deviations of two scores.

    logistic: P = E σ(m + sε), ε ~ N(0, 1), by Gauss-Hermite quadrature (σ(m) without a std);
    probit: P = Φ(m/s) (Thurstone's case III), a step where s = 0.

    m [N] is left minus right, s = √(s_left² + s_right²), which probit needs.

    Source: HPSv3, arXiv 2508.03789, and PURM, arXiv 2503.22480, for the integral.
    """
    m = np.asarray(margin, dtype=np.float64)
    if link == "probit":
        s = np.asarray(std, dtype=np.float64)
        z = np.divide(m, s, out=np.where(m > 0, np.inf, -np.inf), where=s > 0)
        return np.where((s <= 0) & (m == 0), 0.5, stats.norm.cdf(z))
    if std is None:
        return special.expit(m)
    x, weight = np.polynomial.hermite_e.hermegauss(32)  # nodes; exact to 1e-7 for s ≤ 2
    s = np.asarray(std, dtype=np.float64)
    return special.expit(m[..., None] + s[..., None] * x) @ (weight / weight.sum())


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """p = σ(logit / T) with the T that minimises the NLL."""

    value: float  # T; above 1 the reward was too sure. Infinity where its logits say nothing or the opposite.
    nll: float  # Mean NLL at T, in nats

    def apply(self, logit: ArrayLike) -> Array:
        return special.expit(np.asarray(logit, dtype=np.float64) / self.value)


def fit_temperature(logit: ArrayLike, outcome: ArrayLike) -> Temperature:
    """Fit temperature scaling to log-odds or score differences [N] and outcomes [N].

    The NLL is convex in 1/T; ln T is searched within ±ln 1e4. Logits whose best inverse temperature is not
    positive get T = infinity: ½ for everything is better than what they say.

    Source: Guo et al., arXiv 1706.04599, section 4.2.
    """
    z, y = np.asarray(logit, dtype=np.float64), np.asarray(outcome, dtype=np.float64)

    def mean_nll(log_t: float) -> float:
        scaled = z * math.exp(-log_t)
        return float(np.mean(np.logaddexp(0.0, scaled) - y * scaled))

    if float(np.mean(z * (y - 0.5))) <= 0:  # the slope of the NLL in 1/T at 0 is not downwards
        return Temperature(value=math.inf, nll=math.log(2.0))
    end = math.log(1e4)
    result: Any = optimize.minimize_scalar(mean_nll, bounds=(-end, end), method="bounded", options={"xatol": 1e-8})
    # separable data push T to the end of the range, which a bounded search only approaches
    log_t = min((float(result.x), -end, end), key=lambda t: mean_nll(t) + 1e-12 * (abs(t) < end))
    return Temperature(value=math.exp(log_t), nll=mean_nll(log_t))


@dataclass(frozen=True, kw_only=True)
class NoiseScaling:
    """p = σ(logit / (T w)), w² = (1 − r) + r s² / m²: sure where the margin is large and the std is small."""

    share: float  # r in [0, 1): 0 is temperature scaling, near 1 the odds depend on margin / std alone
    median_std: float  # m, the median of s over the pairs of the fit
    temperature: Temperature  # T, and the NLL reached

    def apply(self, logit: ArrayLike, std: ArrayLike) -> Array:
        return self.temperature.apply(_damped(logit, std, self.share, self.median_std))


_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)


def fit_noise_scaling(logit: ArrayLike, std: ArrayLike, outcome: ArrayLike) -> NoiseScaling:
    """Fit the temperature and the share of the std that together minimise the NLL of outcomes [N].

    Share 0 is among those tried, so on the pairs of the fit the NLL is never above `fit_temperature`'s.
    """
    s = np.asarray(std, dtype=np.float64)
    median_std = float(np.median(s)) or float(s.mean()) or 1.0
    fits = [(fit_temperature(_damped(logit, s, share, median_std), outcome), share) for share in _SHARES]
    temperature, share = min(fits, key=lambda fit: fit[0].nll)
    return NoiseScaling(share=share, median_std=median_std, temperature=temperature)


def _damped(logit: ArrayLike, std: ArrayLike, share: float, median_std: float) -> Array:
    square = (np.asarray(std, dtype=np.float64) / median_std) ** 2
    return np.asarray(logit, dtype=np.float64) / np.sqrt((1 - share) + share * square)


def cross_fitted_temperature(
    logit: ArrayLike, outcome: ArrayLike, fold: NDArray[np.int64], std: ArrayLike | None = None
) -> Array:
    """Scale the probabilities [N] of each fold by the fit to the other folds, of which there are two or more.

    With the std [N] of the logits the fit is `fit_noise_scaling`. Put all pairs of a prompt into one fold.
    """
    fit: Any = fit_temperature if std is None else fit_noise_scaling
    y = np.asarray(outcome, dtype=np.float64)
    columns = [np.asarray(column, dtype=np.float64) for column in (logit, std) if column is not None]
    prob = np.empty_like(columns[0])
    for number in np.unique(fold):
        inside, others = fold == number, fold != number
        fitted = fit(*(column[others] for column in columns), y[others])
        prob[inside] = fitted.apply(*(column[inside] for column in columns))
    return prob
