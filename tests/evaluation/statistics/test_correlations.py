# SPDX-License-Identifier: Apache-2.0
"""Correlations against scipy, the logistic fits, and their weighted forms against repeated samples."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from scipy import special, stats

from visalign.evaluation.statistics.correlations import (
    fit_logistic,
    kendall,
    logistic,
    plcc,
    srcc,
    weighted_kendall,
    weighted_pearson,
    weighted_srcc,
)

RNG = np.random.default_rng(0)
X = RNG.integers(0, 12, 80) / 4.0
Y = np.round(X + RNG.normal(0, 1, 80), 1)


def test_parity_with_scipy_under_ties() -> None:
    assert srcc(X, Y) == pytest.approx(stats.spearmanr(X, Y)[0], abs=1e-12)
    assert plcc(X, Y) == pytest.approx(stats.pearsonr(X, Y)[0], abs=1e-12)
    for variant in ("b", "c"):
        assert kendall(X, Y, variant) == pytest.approx(stats.kendalltau(X, Y, variant=variant)[0], abs=1e-12)


def test_srcc_ignores_a_monotone_map_and_plcc_after_the_fit_nearly_does() -> None:
    x = np.linspace(-3, 3, 200)
    y = 1 + 4 / (1 + np.exp(-2 * x))
    assert srcc(x, y) == pytest.approx(1.0)
    for parameters in (4, 5):
        fit = fit_logistic(x, y, parameters)
        assert fit.plcc > 0.9999 and fit.rmse < 0.02 and plcc(x, y) < 0.98


@pytest.mark.parametrize("parameters", [4, 5])
def test_the_fit_is_no_worse_than_any_map_of_a_grid(parameters: int) -> None:
    """A set like a table of metrics (skewed scores, bounded opinions) on which fixed starts stay above."""
    rng, n = np.random.default_rng(2), 30
    x = (rng.normal(size=n), rng.beta(0.6, 4, n), np.exp(rng.normal(size=n)))[2]
    rank = np.argsort(np.argsort(x)) / n
    y = np.clip(3 + 1.2 * (rank - 0.5) * 2 * rng.random() + rng.normal(0, 0.9, n), 1, 5)
    z = (x - x.mean()) / x.std()
    best = np.inf
    for at in np.quantile(z, np.linspace(0, 1, 21)):
        for steep in np.geomspace(0.1, 100, 19):
            curve = special.expit(steep * (z - at))
            columns = np.stack([curve, np.ones(n), z][: parameters - 2], axis=1)
            fitted = columns @ np.linalg.lstsq(columns, y, rcond=None)[0]
            best = min(best, float(np.sqrt(np.mean((fitted - y) ** 2))))
    assert fit_logistic(x, y, cast(Any, parameters)).rmse <= best + 1e-6


def test_a_map_that_turns_is_not_called_monotone() -> None:
    x = np.linspace(-3, 3, 120)
    rising, turning = 1 / (1 + np.exp(-2 * x)), 3 / (1 + np.exp(-4 * x)) - 0.5 * x
    assert fit_logistic(x, rising, 5).monotone and fit_logistic(x, rising, 4).monotone
    assert not fit_logistic(x, turning, 5).monotone and fit_logistic(x, turning, 4).monotone
    assert fit_logistic(x, -rising, 5).monotone


def test_logistic_by_hand() -> None:
    assert logistic(np.array([0.5]), 5.0, 1.0, 0.5, 2.0)[0] == pytest.approx(3.0)  # half way
    assert logistic(np.array([0.5]), 8.0, 3.0, 0.5, 2.0, 1.0)[0] == pytest.approx(2.0)  # β4 x + β5
    assert logistic(np.array([1e3]), 8.0, 3.0, 0.5, 0.0, 1.0)[0] == pytest.approx(5.0)  # β1/2 + β5


def test_weighted_forms_equal_repeated_samples() -> None:
    weights = np.random.default_rng(1).integers(0, 4, (5, 80)).astype(float)
    for row, spearman, pearson in zip(
        weights, weighted_srcc(X, Y, weights), weighted_pearson(X, Y, weights), strict=True
    ):
        x, y = np.repeat(X, row.astype(int)), np.repeat(Y, row.astype(int))
        assert spearman == pytest.approx(srcc(x, y), abs=1e-12)
        assert pearson == pytest.approx(plcc(x, y), abs=1e-12)
    assert np.isnan(weighted_srcc(np.ones(4), np.arange(4.0), np.ones((1, 4)))).all()


@pytest.mark.parametrize("step", [0.0, 0.5])
def test_weighted_kendall_equals_scipy_on_repeated_samples(step: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=256)
    y = x + rng.normal(size=256)
    if step:
        x, y = np.round(x / step) * step, np.round(y)
    weights = rng.integers(0, 4, (3, 256)).astype(float)
    for row, tau in zip(weights.astype(int), weighted_kendall(x, y, weights), strict=True):
        assert tau == pytest.approx(stats.kendalltau(np.repeat(x, row), np.repeat(y, row))[0], abs=1e-12)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="sides that are not constant"):
        plcc([1, 2, 3], [4, 4, 4])
    with pytest.raises(ValueError, match="finite values; leave out failed samples"):
        srcc([1, np.nan], [1, 2])
    with pytest.raises(ValueError, match="at least 6 samples"):
        fit_logistic(X[:5], Y[:5])
