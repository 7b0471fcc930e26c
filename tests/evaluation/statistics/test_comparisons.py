# SPDX-License-Identifier: Apache-2.0
"""Judges against one another: the exact test by hand and by enumeration, Holm, power."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy import stats

from visalign.evaluation.statistics.comparisons import cluster_std, holm, mcnemar, power


def test_mcnemar_is_the_exact_binomial_test() -> None:
    first = [True] * 8 + [False] * 2 + [True] * 5
    second = [False] * 8 + [True] * 2 + [True] * 5
    comparison = mcnemar(first, second)
    assert [comparison[key] for key in ("pairs", "first_only", "second_only")] == [15, 8, 2]
    assert comparison["p_value"] == pytest.approx(2 * stats.binom.cdf(2, 10, 0.5))
    assert mcnemar([True], [True])["p_value"] == 1.0


def test_prompts_are_flipped_whole_and_ties_count_half() -> None:
    rng = np.random.default_rng(3)
    first, second = rng.choice([0, 0.5, 1], (2, 40))
    cluster = np.arange(40) % 9
    change = np.array([(first - second)[cluster == c].sum() for c in range(9)])
    sums = np.array([np.dot(signs, change) for signs in product([1, -1], repeat=9)])
    expected = np.mean(np.abs(sums) >= abs(change.sum()) - 1e-9)
    comparison = mcnemar(first, second, cluster.tolist())
    assert comparison["p_value"] == pytest.approx(expected)
    assert comparison["p_value"] != pytest.approx(mcnemar(first, second)["p_value"], rel=0.02)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_power_says_how_many_pairs_a_difference_needs() -> None:
    """With that many pairs, the difference is found four times in five."""
    rng = np.random.default_rng(5)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        shared, own = rng.normal(0, 1, (count, 1)), rng.normal(0, 1, (count, 2))
        right = shared + own + [0.75, 0.5] > 0
        return right[:, 0].astype(float), right[:, 1].astype(float)

    first, second = draw(200_000)
    difference = float((first - second).mean())
    std = cluster_std(first - second, range(len(first)))
    needed = power(difference, std, len(first))["needed"]
    assert needed is not None and needed < 5_000
    share = sum(mcnemar(*draw(int(needed)))["p_value"] < 0.05 for _ in range(300)) / 300
    assert share == pytest.approx(0.8, abs=0.07)
    smallest = power(difference, std, len(first))["smallest"]
    assert smallest is not None
    assert power(smallest, std, len(first))["needed"] == pytest.approx(len(first), abs=1)
    assert power(0.0, std, 10)["needed"] is None
