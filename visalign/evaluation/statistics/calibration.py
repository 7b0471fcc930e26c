# SPDX-License-Identifier: Apache-2.0
"""Whether a judge's probabilities mean what they say: NLL, Brier, ECE and MCE, temperature scaling."""

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
"""Probabilities are kept this far from 0 and 1 in the NLL, so that one certain error costs 27.6 nats."""


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """One reliability diagram of `bins` equal-width bins."""

    edges: Array
    """[bins + 1]."""
    count: Array
    """[bins] samples (or their weight) in each."""
    confidence: Array
    """[bins] mean probability; NaN in an empty bin."""
    frequency: Array
    """[bins] mean outcome; NaN in an empty bin."""

    @property
    def ece(self) -> float:
        """Expected calibration error: Σ n_b/N · |frequency − confidence|."""
        return float(np.nansum(self.count * self._gap(0)) / self.count.sum())

    @property
    def mce(self) -> float:
        """Largest gap of a bin that is not empty."""
        return float(np.nanmax(self._gap(0)))

    @property
    def overconfidence(self) -> tuple[float, float]:
        """Expected and largest max(confidence − frequency, 0): a lower bound's fault (ELCE, MLCE)."""
        return self._one_sided(-1)

    @property
    def underconfidence(self) -> tuple[float, float]:
        """Expected and largest max(frequency − confidence, 0): an upper bound's fault (EUCE, MUCE)."""
        return self._one_sided(1)

    def _one_sided(self, sign: int) -> tuple[float, float]:
        gap = self._gap(sign)
        return float(np.nansum(self.count * gap) / self.count.sum()), float(np.nanmax(gap))

    def _gap(self, sign: int) -> Array:
        gap = self.frequency - self.confidence
        return np.abs(gap) if sign == 0 else np.maximum(sign * gap, 0.0)


def reliability(prob: ArrayLike, outcome: ArrayLike, *, bins: int = 10) -> Reliability:
    """Sort probabilities into equal-width bins; one that stands on an edge goes into the upper bin.

    Outcomes are 0 or 1, or shares of votes. The diagram's properties are the calibration errors.

    Source: Guo et al., arXiv 1706.04599, eq. 3 and 5.
    """
    p, y = _check(prob, outcome)
    place = bin_index(p, bins)
    count, confidence, frequency = cluster_sums(np.stack([np.ones_like(p), p, y], axis=1), place, bins).T
    return Reliability(
        edges=np.linspace(0.0, 1.0, bins + 1),
        count=count,
        confidence=ratio(confidence, count),
        frequency=ratio(frequency, count),
    )


def bin_index(prob: Array, bins: int) -> NDArray[np.int64]:
    """[N] number of the equal-width bin of each probability."""
    if bins < 1:
        raise ValueError(f"bins is {bins}; at least 1 is needed.")
    return np.digitize(prob, np.linspace(0.0, 1.0, bins + 1)[1:-1])


def both_sides(prob: ArrayLike, outcome: ArrayLike) -> tuple[Array, Array]:
    """Every pair and its mirror image, [2N] each, so that no result depends on the order.

    Probabilities [N] that the left image is better, and shares [N] of the people who say so.
    """
    p, y = np.asarray(prob, dtype=np.float64), np.asarray(outcome, dtype=np.float64)
    return np.concatenate([p, 1 - p]), np.concatenate([y, 1 - y])


def nll(prob: ArrayLike, outcome: ArrayLike) -> Array:
    """−y ln p − (1 − y) ln(1 − p) of each sample, in nats; its mean is the negative log-likelihood.

    Args:
        prob: [N], clipped to [`SMALLEST`, 1 − `SMALLEST`].
        outcome: [N] in [0, 1]; with votes this is the cross-entropy to their shares.
    """
    p, y = _check(prob, outcome)
    p = np.clip(p, SMALLEST, 1 - SMALLEST)
    return -(special.xlogy(y, p) + special.xlog1py(1 - y, -p))


def brier(prob: ArrayLike, outcome: ArrayLike) -> Array:
    """(p − y)² of each sample; its mean is the Brier score.

    Source: Brier, Monthly Weather Review 78 (1950) 1, for two classes, without its factor 2.
    """
    p, y = _check(prob, outcome)
    return (p - y) ** 2


def win_probability(
    margin: ArrayLike, std: ArrayLike | None = None, *, link: str = "logistic", nodes: int = 32
) -> Array:
    """Probability that the left image is better, from the means and standard deviations of two scores.

    logistic: P = E σ(m + sε), ε ~ N(0, 1), by Gauss-Hermite quadrature (σ(m) where s = 0);
    probit: P = Φ(m/s) (Thurstone's case III), a step where s = 0.

    Args:
        margin: [N] m, left minus right.
        std: [N] s = √(s_left² + s_right²), or None for 0.
        link: "logistic" or "probit".
        nodes: Of the quadrature; 32 are exact to 1e-7 for s ≤ 2.

    Returns:
        [N].

    Source: HPSv3, arXiv 2508.03789, and PURM, arXiv 2503.22480, for the integral.
    """
    m = np.asarray(margin, dtype=np.float64)
    if link == "probit":
        if std is None:
            raise ValueError("the probit link needs the standard deviation of the margin.")
        s = np.asarray(std, dtype=np.float64)
        z = np.divide(m, s, out=np.where(m > 0, np.inf, -np.inf), where=s > 0)
        return np.where((s <= 0) & (m == 0), 0.5, stats.norm.cdf(z))
    if link != "logistic":
        raise ValueError(f"link is {link!r}; allowed are 'logistic' and 'probit'.")
    if std is None:
        return special.expit(m)
    x, weight = np.polynomial.hermite_e.hermegauss(nodes)
    s = np.asarray(std, dtype=np.float64)
    return special.expit(m[..., None] + s[..., None] * x) @ (weight / weight.sum())


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """p = σ(logit / T) with the T that minimises the NLL."""

    value: float
    """T; above 1 the judge was too sure of itself. Infinity where its logits say nothing or the opposite."""
    nll: float
    """Mean NLL at T, in nats."""
    bounded: bool
    """True where the best T lies at the end of the range that was searched: 1e-4 to 1e4."""

    def apply(self, logit: ArrayLike) -> Array:
        """Scaled probabilities [N]."""
        return special.expit(np.asarray(logit, dtype=np.float64) / self.value)


def fit_temperature(logit: ArrayLike, outcome: ArrayLike) -> Temperature:
    """Temperature scaling of a judge of pairs, from its log-odds or score differences [N] and outcomes [N].

    The NLL is convex in 1/T and the search runs over ln T. Logits whose best inverse temperature is not
    positive get T = infinity: ½ for everything is better than what they say.

    Source: Guo et al., arXiv 1706.04599, section 4.2.
    """
    z = np.asarray(logit, dtype=np.float64)
    _, y = _check(np.full(np.shape(z), 0.5), outcome)
    if not np.isfinite(z).all():
        raise ValueError("some logits are NaN or infinite; leave out what was not judged.")

    def mean_nll(log_t: float) -> float:
        scaled = z * math.exp(-log_t)
        return float(np.mean(np.logaddexp(0.0, scaled) - y * scaled))

    if float(np.mean(z * (y - 0.5))) <= 0:  # the slope of the NLL in 1/T at 0 is not downwards
        return Temperature(value=math.inf, nll=math.log(2.0), bounded=False)
    end = math.log(1e4)
    found: Any = optimize.minimize_scalar(
        mean_nll, bounds=(-end, end), method="bounded", options={"xatol": 1e-8}
    )
    at_end = [log_t for log_t in (-end, end) if mean_nll(log_t) <= float(found.fun) + 1e-12]
    log_t = at_end[0] if at_end else float(found.x)
    return Temperature(value=math.exp(log_t), nll=mean_nll(log_t), bounded=bool(at_end))


@dataclass(frozen=True, kw_only=True)
class NoiseScaling:
    """p = σ(logit / (T w)), w² = (1 − r) + r s² / m²: sure where the margin is large and the std is small."""

    share: float
    """r in [0, 1): 0 is temperature scaling, near 1 the odds depend on margin / std alone."""
    usual: float
    """m, the median of s over the pairs of the fit."""
    temperature: Temperature
    """T, and the NLL reached."""

    def apply(self, logit: ArrayLike, std: ArrayLike) -> Array:
        """Scaled probabilities [N] from logits and their standard deviations."""
        return self.temperature.apply(_damped(logit, std, self.share, self.usual))


_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)


def fit_noise_scaling(logit: ArrayLike, std: ArrayLike, outcome: ArrayLike) -> NoiseScaling:
    """Temperature and the share of the std that together minimise the NLL of outcomes [N].

    Share 0 is among those tried, so on the pairs of the fit the NLL is never above `fit_temperature`'s.
    """
    s = np.asarray(std, dtype=np.float64)
    if s.shape != np.shape(logit) or not ((s >= 0) & np.isfinite(s)).all():
        raise ValueError(f"needed is a finite std of at least 0 of each logit; got {s.shape}.")
    usual = float(np.median(s)) or float(s.mean()) or 1.0
    tried = [(fit_temperature(_damped(logit, s, share, usual), outcome), share) for share in _SHARES]
    temperature, share = min(tried, key=lambda found: found[0].nll)
    return NoiseScaling(share=share, usual=usual, temperature=temperature)


def scaled_nll(logit: Array, std: Array, outcome: Array, share: float, temperatures: Array) -> Array:
    """[N, K + 1] NLL of each pair under noise scaling: one share, K temperatures, and infinity last."""
    usual = float(np.median(std)) or float(std.mean()) or 1.0
    scaled = _damped(logit, std, share, usual)[:, None] * np.append(1 / temperatures, 0.0)
    return np.logaddexp(0.0, scaled) - outcome[:, None] * scaled


def _damped(logit: ArrayLike, std: ArrayLike, share: float, usual: float) -> Array:
    square = (np.asarray(std, dtype=np.float64) / usual) ** 2
    return np.asarray(logit, dtype=np.float64) / np.sqrt((1 - share) + share * square)


def cross_fitted_temperature(
    logit: ArrayLike, outcome: ArrayLike, fold: NDArray[np.int64], std: ArrayLike | None = None
) -> Array:
    """Scaled probabilities [N] where each fold gets the scaling of the others: no pair judges itself.

    With the std [N] of the logits it is `fit_noise_scaling`. Give all pairs of a prompt one fold.
    """
    z, y = np.asarray(logit, dtype=np.float64), np.asarray(outcome, dtype=np.float64)
    s = None if std is None else np.asarray(std, dtype=np.float64)
    folds = np.unique(fold)
    if len(folds) < 2:
        raise ValueError("cross-fitting needs pairs in at least two folds.")
    found = np.empty_like(z)
    for number in folds:
        inside = fold == number
        if s is None:
            found[inside] = fit_temperature(z[~inside], y[~inside]).apply(z[inside])
        else:
            fit = fit_noise_scaling(z[~inside], s[~inside], y[~inside])
            found[inside] = fit.apply(z[inside], s[inside])
    return found


def _check(prob: ArrayLike, outcome: ArrayLike) -> tuple[Array, Array]:
    p, y = np.asarray(prob, dtype=np.float64), np.asarray(outcome, dtype=np.float64)
    if p.ndim != 1 or p.shape != y.shape or not len(p):
        raise ValueError(f"needed are two vectors of one length, not empty; got {p.shape} and {y.shape}.")
    for name, values in (("probabilities", p), ("outcomes", y)):
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"{name} must lie in [0, 1] without NaN; leave out what was not judged.")
    return p, y
