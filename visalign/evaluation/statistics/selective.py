# SPDX-License-Identifier: Apache-2.0
"""Whether a judge knows when it is wrong: AUROC of its errors against its std, risk-coverage, bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from .calibration import both_sides, reliability
from .intervals import ratio

Array = NDArray[np.float64]


def auroc(score: ArrayLike, positive: ArrayLike) -> float:
    """Probability that a random positive scores above a random negative, ties counted half.

    Args:
        score: [N], e.g. the standard deviation that a judge gives.
        positive: [N] bool, e.g. whether it was wrong.

    Returns:
        The area under the ROC curve; NaN where one class is absent.

    Source: Mann and Whitney, Ann. Math. Statist. 18 (1947) 50: U / (n₁ n₀).
    """
    values, is_positive = np.asarray(score, dtype=np.float64), np.asarray(positive, dtype=bool)
    if values.ndim != 1 or values.shape != is_positive.shape:
        raise ValueError(f"needed are two vectors of one length; got {values.shape} and {is_positive.shape}.")
    if np.isnan(values).any():
        raise ValueError("some scores are NaN; leave out what was not judged.")
    ones = int(is_positive.sum())
    zeros = len(values) - ones
    if not ones or not zeros:
        return math.nan
    found: Any = stats.mannwhitneyu(values[is_positive], values[~is_positive], method="asymptotic")
    return float(found.statistic / (ones * zeros))


def weighted_auroc(score: Array, positive: NDArray[np.bool_], weights: Array) -> Array:
    """AUROC of scores [N] under weights [R, N], one for each row: a bootstrap without copying samples.

    Returns:
        [R]; NaN where a class has no weight.
    """
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(score[order]) > 0))
    sorted_weights = weights[:, order]
    ones = np.add.reduceat(sorted_weights * positive[order], starts, axis=1)
    zeros = np.add.reduceat(sorted_weights * ~positive[order], starts, axis=1)
    below = np.cumsum(zeros, axis=1) - zeros / 2
    return ratio((ones * below).sum(1), ones.sum(1) * zeros.sum(1))


@dataclass(frozen=True, kw_only=True)
class RiskCoverage:
    """Error rate of a judge that answers only where it is surest."""

    coverage: Array
    """[K] share of the pairs answered, ascending, at the ends of blocks of equal certainty."""
    risk: Array
    """[K] mean error of those."""
    area: float
    """AURC: mean risk over the coverages 1/N ... 1; equal certainties are answered in random order."""

    def at(self, coverage: float) -> float:
        """Risk at a coverage in (0, 1]; inside a block of equal certainty its mean error is used."""
        errors = self.coverage * self.risk
        return float(np.interp(coverage, np.append(0, self.coverage), np.append(0, errors)) / coverage)


def risk_coverage(uncertainty: ArrayLike, error: ArrayLike) -> RiskCoverage:
    """Sort by certainty and accumulate the error.

    Args:
        uncertainty: [N], higher is less sure: a standard deviation, or minus the size of a margin.
        error: [N] in [0, 1]; ½ for a predicted tie.

    Returns:
        The curve.

    Source: El-Yaniv and Wiener, JMLR 11 (2010) 1605.
    """
    u, e = np.asarray(uncertainty, dtype=np.float64), np.asarray(error, dtype=np.float64)
    if u.ndim != 1 or u.shape != e.shape or not len(u) or np.isnan(u).any() or np.isnan(e).any():
        raise ValueError(f"needed are two vectors of one length without NaN; got {u.shape} and {e.shape}.")
    order = np.argsort(u, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(u[order]) > 0, True)) + 1
    total = np.cumsum(e[order])[ends - 1]
    each = np.interp(np.arange(1, len(u) + 1), np.append(0, ends), np.append(0.0, total))
    return RiskCoverage(
        coverage=ends / len(u),
        risk=total / ends,
        area=float(np.mean(each / np.arange(1, len(u) + 1))),
    )


@dataclass(frozen=True, kw_only=True)
class BoundedRewards:
    """Rewards of chosen and rejected images with their lower and upper bounds, each [N, 2]."""

    mean: Array
    lower: Array
    upper: Array

    def statistics(self, *, bins: int = 20) -> dict[str, float]:
        """Calibration of the bounds, and how often the two intervals part rightly or wrongly.

        Preferences are σ(chosen − rejected); the lower one takes the chosen image's lower and the rejected
        image's upper bound. Each pair enters with its mirror image. A ranking score weighs how many of the
        right preferences are confident against how many of the wrong ones are:
        CT/((1 − β) T + β) − CF/((1 − β) F + β), for β in 0, 0.01, 0.2 and 1.

        Args:
            bins: Of the calibration errors.

        Returns:
            win_rate, ece, mce, elce, mlce, euce, muce, brier_score, the four (un)confident rates, ranking/β.
        """
        point, low, high = (
            1 / (1 + np.exp(-gap))
            for gap in (
                self.mean[:, 0] - self.mean[:, 1],
                self.lower[:, 0] - self.upper[:, 1],
                self.upper[:, 0] - self.lower[:, 1],
            )
        )
        ones = np.ones_like(point)
        p, y = both_sides(point, ones)
        curve = reliability(p, y, bins=bins)
        # the mirror image of a lower bound is one minus the upper bound
        below = reliability(np.concatenate([low, 1 - high]), y, bins=bins).overconfidence
        above = reliability(np.concatenate([high, 1 - low]), y, bins=bins).underconfidence
        found = {
            "win_rate": float(np.mean(self.mean[:, 0] > self.mean[:, 1])),
            "ece": curve.ece,
            "mce": curve.mce,
            "elce": below[0],
            "mlce": below[1],
            "euce": above[0],
            "muce": above[1],
            "brier_score": float(np.mean((p - y) ** 2)),
        }
        return found | self._confidence(found["win_rate"])

    def _confidence(self, right: float) -> dict[str, float]:
        sure_right = float(np.mean(self.lower[:, 0] > self.upper[:, 1]))
        sure_wrong = float(np.mean(self.upper[:, 0] < self.lower[:, 1]))
        wrong = 1 - right
        found = {
            "confident_true_rate": sure_right,
            "confident_false_rate": sure_wrong,
            "unconfident_true_rate": right - sure_right,
            "unconfident_false_rate": wrong - sure_wrong,
        }
        for beta in (0.0, 0.01, 0.2, 1.0):
            shares = (
                part / weight if (weight := (1 - beta) * whole + beta) else 0.0
                for part, whole in ((sure_right, right), (sure_wrong, wrong))
            )
            found[f"ranking/{beta}"] = next(shares) - next(shares)
        return found


def ensemble_summary(members: ArrayLike, *, beta: float = 2.0) -> dict[str, Array]:
    """What an ensemble says of each sample.

    Args:
        members: [N, M] scores of M ≥ 2 members.
        beta: Half width of the bounds in standard deviations.

    Returns:
        mean, std (over M − 1), lower and upper (mean ∓ beta·std), min, max, and the lower median, each [N].
    """
    table = np.asarray(members, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] < 2:
        raise ValueError(f"members must be [N, M] with M of at least 2; got {table.shape}.")
    mean, std = table.mean(1), table.std(1, ddof=1)
    return {
        "mean": mean,
        "std": std,
        "lower": mean - beta * std,
        "upper": mean + beta * std,
        "min": table.min(1),
        "max": table.max(1),
        "median": np.sort(table, axis=1)[:, (table.shape[1] - 1) // 2],
    }
