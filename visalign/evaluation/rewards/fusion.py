# SPDX-License-Identifier: Apache-2.0
"""Several judges stacked into one, cross-fitted: no prompt is judged by weights that saw its votes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.errors import UserError
from visalign.evaluation.statistics.intervals import cluster_index

from .judged_pairs import labels_of
from .pair_scores import PairScores, from_probabilities
from .quality import QualityScores, from_values

Array = NDArray[np.float64]
Fit = Callable[[Array, Array, float], Array]
"""(values [N, J], what people said [N], ridge) -> weights [J]."""

NAME = "fused"
FOLDS = 5
FEWEST_GROUPS = 20
"""Prompts below which nothing is stacked."""
RIDGES = (0.001, 0.01, 0.1, 1.0)
"""Penalties on the squared weights; the one that predicts best inside the other folds is taken."""
LARGEST = 4.0
"""A judge's value counts as at most so many of its standard deviations: one outlier does not set a weight."""


def fuse_preferences(
    pairs: PreferenceSet, members: Sequence[PairScores]
) -> tuple[PairScores, dict[str, Any]]:
    """Stack judges of pairs: P(left) = σ(Σ_j w_j·m_j), m_j a judge's margin over its root mean square.

    The weights of a pair come from the prompts of the other four folds, by the log loss of what people said
    and a ridge. A judge without an answer to a pair adds nothing to it.

    Returns:
        The scores of "fused", which nobody else's numbers enter; JSON-able: `members`, `weights` (mean over
        folds, in log-odds per standard deviation), `ridges`, `folds`.

    Raises:
        UserError: Fewer than two judges, or fewer than 20 prompts.
    """
    label = labels_of(pairs)
    values = np.stack([entry.margin for entry in members], axis=1) if members else np.zeros((0, 0))
    groups = [pair.group for pair in pairs.pairs]

    def loss(prediction: Array, y: Array) -> float:
        return float(np.mean(np.logaddexp(0, prediction) - y * prediction))

    found, record = _cross_fitted(values, label, groups, _logistic, loss, names=[m.name for m in members])
    return from_probabilities(NAME, special.expit(found)), record


def fuse_quality(
    records: QualitySet, members: Sequence[QualityScores]
) -> tuple[QualityScores, dict[str, Any]]:
    """Stack judges of single images as `fuse_preferences` stacks judges of pairs, by ridge regression on
    the opinions; folds by `QualitySet.groups`.
    """
    opinion = np.array([record.mos for record in records.records]) * (1 if records.higher_is_better else -1)
    columns = [m.value * (1 if m.higher_is_better else -1) for m in members]
    columns = [x - np.nanmean(x) if np.isfinite(x).any() else x for x in columns]
    values = np.stack(columns, axis=1) if columns else np.zeros((0, 0))
    centred = opinion - opinion.mean()

    def loss(prediction: Array, y: Array) -> float:
        return float(np.mean((prediction - y) ** 2))

    groups = records.groups
    found, record = _cross_fitted(
        values, centred, groups, _least_squares, loss, names=[m.name for m in members]
    )
    return from_values(NAME, "opinion, predicted", found + opinion.mean()), record


def _cross_fitted(
    values: Array,
    said: Array,
    groups: Sequence[Hashable],
    fit: Fit,
    loss: Callable[[Array, Array], float],
    *,
    names: list[str],
) -> tuple[Array, dict[str, Any]]:
    """(predictions [N] of folds that the weights did not see, NaN where no judge judged; what was fitted)."""
    index, count = cluster_index(groups)
    if len(names) < 2:
        raise UserError(
            f"{len(names)} judge was named; stacking takes two or more. Add --scores or --reward."
        )
    silent = [name for name, column in zip(names, values.T, strict=True) if not np.isfinite(column).any()]
    if silent:
        raise UserError(f"{', '.join(silent)} judged nothing of the set; leave it out of --fuse.")
    if count < FEWEST_GROUPS:
        raise UserError(
            f"The set has {count} prompts (or references); stacking needs {FEWEST_GROUPS}. Leave --fuse out."
        )
    fold, found = index % FOLDS, np.full(len(said), np.nan)
    weights, ridges = [], []
    for number in range(FOLDS):
        inside = fold == number
        seen = values[~inside]
        scale = np.sqrt(np.nanmean(seen**2, axis=0))
        scale = np.where(np.isfinite(scale) & (scale > 0), scale, 1.0)
        x = np.clip(np.nan_to_num(values / scale), -LARGEST, LARGEST)
        inner, y = index[~inside] // FOLDS % FOLDS, said[~inside]
        ridge = min(RIDGES, key=lambda r: _inner_loss(x[~inside], y, inner, fit, loss, r))
        weights.append(fit(x[~inside], y, ridge))
        ridges.append(ridge)
        found[inside] = x[inside] @ weights[-1]
    found[~np.isfinite(values).any(1)] = np.nan
    mean = dict(zip(names, np.mean(weights, axis=0).tolist(), strict=True))
    return found, {"members": names, "weights": mean, "ridges": ridges, "folds": FOLDS}


def _inner_loss(
    x: Array, y: Array, fold: NDArray[np.int64], fit: Fit, loss: Callable[[Array, Array], float], ridge: float
) -> float:
    total = 0.0
    for number in np.unique(fold):
        inside = fold == number
        total += loss(x[inside] @ fit(x[~inside], y[~inside], ridge), y[inside]) * inside.sum()
    return total


def _logistic(x: Array, y: Array, ridge: float) -> Array:
    """argmin_w mean(log(1 + e^{xw}) − y·xw) + ridge·|w|²."""

    def value(w: Array) -> tuple[float, Array]:
        z = x @ w
        slope = x.T @ (special.expit(z) - y) / len(y) + 2 * ridge * w
        return float(np.mean(np.logaddexp(0, z) - y * z) + ridge * w @ w), slope

    return optimize.minimize(value, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x


def _least_squares(x: Array, y: Array, ridge: float) -> Array:
    """argmin_w mean((y − xw)²) + ridge·|w|²."""
    normal = x.T @ x / len(y) + ridge * np.eye(x.shape[1])
    return np.asarray(np.linalg.solve(normal, x.T @ y / len(y)), dtype=np.float64)
