# SPDX-License-Identifier: Apache-2.0
"""Kendall's τ under weights against scipy on repeated samples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from visalign.evaluation.statistics.correlations import weighted_kendall


@pytest.mark.parametrize("step", [0.0, 0.5])
def test_parity_with_scipy_on_repeated_samples(step: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=256)
    y = x + rng.normal(size=256)
    if step:
        x, y = np.round(x / step) * step, np.round(y)
    weights = rng.integers(0, 4, (3, 256)).astype(float)
    for row, tau in zip(weights.astype(int), weighted_kendall(x, y, weights), strict=True):
        assert tau == pytest.approx(stats.kendalltau(np.repeat(x, row), np.repeat(y, row))[0], abs=1e-12)


def test_by_hand_and_where_it_is_not_defined() -> None:
    # Order 1 < 2 < 3 against 10, 30, 20: two pairs in order, one not.
    sides = np.array([1.0, 2, 3]), np.array([10.0, 30, 20])
    found = weighted_kendall(*sides, np.array([[1.0, 1, 1], [1, 1, 0], [1, 0, 0]]))
    assert found[:2] == pytest.approx([1 / 3, 1]) and np.isnan(found[2])
