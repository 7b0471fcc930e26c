# SPDX-License-Identifier: Apache-2.0
"""Stacking of several rewards into one, cross-fitted: no prompt is scored by weights that saw its votes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.errors import UserError
from visalign.evaluation.statistics.intervals import cluster_index

from .judged_pairs import pair_labels
from .pair_scores import PairScores, from_probabilities
from .quality import QualityScores, from_values, opinions

Array = NDArray[np.float64]
Fit = Callable[[Array, Array, float], Array]
"""(values [N, J], targets [N], ridge) -> weights [J]."""
Loss = Callable[[Array, Array], float]

NAME = "fused"
FOLDS = 5
FEWEST_GROUPS = 20
"""Prompts below which nothing is stacked."""
RIDGES = (0.001, 0.01, 0.1, 1.0)
"""Penalties on the squared weights; the best at predicting inside the other folds is taken."""
LARGEST = 4.0
"""Standard deviations at which a reward's value is clipped, so that one outlier does not set a weight."""


def fuse_preferences(pairs: PreferenceSet, members: Sequence[PairScores]) -> tuple[PairScores, dict[str, Any]]:
    """Stack rewards on pairs: P(left) = σ(Σ_j w_j·m_j), m_j a reward's margin over its root mean square.

    A pair's weights come from the prompts of the other four folds, by log loss on votes and a ridge; a failed reward
    adds 0. Returns the scores of "fused", and JSON-able `members`, `weights` (means, log-odds per standard deviation),
    `ridges`, `folds`.
    """
    columns = {entry.name: entry.margin for entry in members}
    groups = [pair.group for pair in pairs.pairs]
    log_odds, record = _cross_fit(columns, pair_labels(pairs), groups, _logistic, _log_loss)
    return from_probabilities(NAME, special.expit(log_odds)), record


def fuse_quality(records: QualitySet, members: Sequence[QualityScores]) -> tuple[QualityScores, dict[str, Any]]:
    """Stack rewards on single images by ridge regression on the opinions; folds are by `QualitySet.groups`."""
    target = opinions(records)
    columns = {entry.name: entry.oriented for entry in members}
    columns = {name: x - np.nanmean(x) if np.isfinite(x).any() else x for name, x in columns.items()}
    mean = target.mean()
    fused, record = _cross_fit(columns, target - mean, records.groups, _least_squares, _squared_error)
    return from_values(NAME, "opinion, predicted", fused + mean), record


def _cross_fit(
    columns: Mapping[str, Array], target: Array, groups: Sequence[Hashable], fit: Fit, loss: Loss
) -> tuple[Array, dict[str, Any]]:
    """Return predictions [N] by weights of the other folds, NaN where no reward has a value, and a record."""
    index, count = cluster_index(groups)
    silent = [name for name, column in columns.items() if not np.isfinite(column).any()]
    if len(columns) < 2 or silent or count < FEWEST_GROUPS:
        raise UserError(
            f"--fuse needs 2 rewards that score the set, and {FEWEST_GROUPS} prompts or references; there "
            f"are {len(columns)} rewards ({', '.join(silent) or 'none'} without a score) and {count} prompts."
        )
    names, values = list(columns), np.stack(list(columns.values()), axis=1)
    fold, fused = index % FOLDS, np.full(len(target), np.nan)
    weights, ridges = [], []
    for number in range(FOLDS):
        inside = fold == number
        scale = np.sqrt(np.nanmean(values[~inside] ** 2, axis=0))
        scale = np.where(np.isfinite(scale) & (scale > 0), scale, 1.0)
        x = np.clip(np.nan_to_num(values / scale), -LARGEST, LARGEST)
        train_x, train_y, inner_fold = x[~inside], target[~inside], index[~inside] // FOLDS % FOLDS
        ridge = min(RIDGES, key=lambda r: _inner_loss(train_x, train_y, inner_fold, fit, loss, r))
        weights.append(fit(train_x, train_y, ridge))
        ridges.append(ridge)
        fused[inside] = x[inside] @ weights[-1]
    fused[~np.isfinite(values).any(1)] = np.nan
    mean = dict(zip(names, np.mean(weights, axis=0).tolist(), strict=True))
    return fused, {"members": names, "weights": mean, "ridges": ridges, "folds": FOLDS}


def _inner_loss(x: Array, y: Array, fold: NDArray[np.int64], fit: Fit, loss: Loss, ridge: float) -> float:
    total = 0.0
    for number in np.unique(fold):
        inside = fold == number
        total += loss(x[inside] @ fit(x[~inside], y[~inside], ridge), y[inside]) * inside.sum()
    return total


def _log_loss(prediction: Array, y: Array) -> float:
    return float(np.mean(np.logaddexp(0, prediction) - y * prediction))


def _squared_error(prediction: Array, y: Array) -> float:
    return float(np.mean((prediction - y) ** 2))


def _logistic(x: Array, y: Array, ridge: float) -> Array:
    """Compute argmin_w mean(log(1 + e^{xw}) − y·xw) + ridge·|w|²."""

    def objective(w: Array) -> tuple[float, Array]:
        z = x @ w
        slope = x.T @ (special.expit(z) - y) / len(y) + 2 * ridge * w
        return _log_loss(z, y) + float(ridge * w @ w), slope

    return optimize.minimize(objective, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x


def _least_squares(x: Array, y: Array, ridge: float) -> Array:
    """Compute argmin_w mean((y − xw)²) + ridge·|w|²."""
    normal = x.T @ x / len(y) + ridge * np.eye(x.shape[1])
    return np.asarray(np.linalg.solve(normal, x.T @ y / len(y)), dtype=np.float64)
