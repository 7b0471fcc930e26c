# SPDX-License-Identifier: Apache-2.0
"""Kendall's τ under weights against scipy on repeated samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from visalign.evaluation.statistics.correlations import weighted_kendall


def scipy_tau(x: Any, y: Any, variant: str) -> float:
    statistic: Any = stats.kendalltau(x, y, variant=variant)[0]
    return float(statistic)


@pytest.mark.parametrize("size", [7, 256, 818])
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_parity_with_scipy_on_repeated_samples(size: int, step: float) -> None:
    rng = np.random.default_rng(size)
    x = rng.normal(size=size)
    y = x + rng.normal(size=size)
    if step:
        x, y = np.round(x / step) * step, np.round(y)
    weights = rng.integers(0, 4, (3, size)).astype(float)
    weights[0] = 1
    found = weighted_kendall(x, y, weights)
    for row, taus in zip(weights.astype(int), found, strict=True):
        repeated = np.repeat(x, row), np.repeat(y, row)
        assert taus[0] == pytest.approx(scipy_tau(*repeated, "b"), abs=1e-12)
        assert taus[1] == pytest.approx(scipy_tau(*repeated, "c"), abs=1e-12)


def test_by_hand_and_where_it_is_not_defined() -> None:
    # Order 1 < 2 < 3 against 10, 30, 20: two pairs in order, one not; all distinct, so b = c = 1/3.
    sides = np.array([1.0, 2, 3]), np.array([10.0, 30, 20])
    found = weighted_kendall(*sides, np.array([[1.0, 1, 1], [1, 1, 0], [1, 0, 0]]))
    assert found[0] == pytest.approx([1 / 3, 1 / 3]) and found[1] == pytest.approx([1, 1])
    assert np.isnan(found[2]).all()
