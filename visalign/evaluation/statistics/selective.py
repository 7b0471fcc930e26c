# SPDX-License-Identifier: Apache-2.0
"""Selective prediction: AUROC of a reward's errors by its uncertainty, and the risk-coverage curve."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .intervals import ratio

Array = NDArray[np.float64]


def auroc(score: ArrayLike, positive: ArrayLike) -> float:
    """Compute the probability that a random positive scores above a random negative, ties counted half.

    It is the area under the ROC curve of scores [N] and positives [N]; NaN where one class is absent.

    Source: Mann and Whitney, Ann. Math. Statist. 18 (1947) 50: U / (n₁ n₀).
    """
    values = np.asarray(score, dtype=np.float64)
    return float(weighted_auroc(values, np.asarray(positive, dtype=bool), np.ones((1, len(values))))[0])


def weighted_auroc(score: Array, positive: NDArray[np.bool_], weights: Array) -> Array:
    """AUROC [R] of scores [N] under weights [R, N], a bootstrap without copies; NaN where a class has no weight."""
    order = np.argsort(score, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(score[order]) > 0))
    sorted_weights = weights[:, order]
    ones = np.add.reduceat(sorted_weights * positive[order], starts, axis=1)
    zeros = np.add.reduceat(sorted_weights * ~positive[order], starts, axis=1)
    below = np.cumsum(zeros, axis=1) - zeros / 2
    return ratio((ones * below).sum(1), ones.sum(1) * zeros.sum(1))


@dataclass(frozen=True, kw_only=True)
class RiskCoverage:
    """Error rate of a reward that answers only where it is surest."""

    coverage: Array  # [K] share of the pairs answered, ascending, at the ends of blocks of equal certainty
    risk: Array  # [K] mean error of those
    area: float  # AURC: mean risk over the coverages 1/N ... 1; equal certainties are answered in random order.

    def at(self, coverage: float) -> float:
        """Return the risk at a coverage in (0, 1]; a block of equal certainty has its mean error."""
        errors = self.coverage * self.risk
        return float(np.interp(coverage, np.append(0, self.coverage), np.append(0, errors)) / coverage)


def risk_coverage(uncertainty: ArrayLike, error: ArrayLike) -> RiskCoverage:
    """Sort samples by certainty and accumulate their error.

    The uncertainty [N] is a standard deviation, or minus the size of a margin; the error [N] in [0, 1] is ½
    for a predicted tie.

    Source: El-Yaniv and Wiener, JMLR 11 (2010) 1605.
    """
    u, e = np.asarray(uncertainty, dtype=np.float64), np.asarray(error, dtype=np.float64)
    order = np.argsort(u, kind="stable")
    ends = np.flatnonzero(np.append(np.diff(u[order]) > 0, True)) + 1
    total = np.cumsum(e[order])[ends - 1]
    errors = np.interp(np.arange(1, len(u) + 1), np.append(0, ends), np.append(0.0, total))
    return RiskCoverage(
        coverage=ends / len(u), risk=total / ends, area=float(np.mean(errors / np.arange(1, len(u) + 1)))
    )
