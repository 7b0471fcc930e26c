# SPDX-License-Identifier: Apache-2.0
"""Intervals: hand values, scipy, coverage by simulation, edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from visalign.evaluation.statistics.intervals import expanded_tail, paired_bootstrap, wilson_interval


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_wilson_by_hand() -> None:
    """p = 1/2 of n = 4: centre 1/2, half = z / (2 √(n + z²))."""
    z = 1.959963984540054
    ours = wilson_interval(2, 4)
    assert ours.high - 0.5 == pytest.approx(z / (2 * math.sqrt(4 + z * z)), abs=1e-12)
    assert ours.low + ours.high == pytest.approx(1.0)
    assert wilson_interval(0, 0).to_dict() == {"estimate": None, "low": None, "high": None, "level": 0.95}
    assert wilson_interval(0, 9).low == 0.0 and wilson_interval(9, 9).high == 1.0


def test_wilson_coverage_exactly_enumerated() -> None:
    """Coverage, summed over all binomial outcomes and averaged over p, is nominal within half a point."""
    n, grid = 40, np.linspace(0.05, 0.95, 181)
    intervals = [wilson_interval(k, n) for k in range(n + 1)]
    low, high = np.array([i.low for i in intervals]), np.array([i.high for i in intervals])
    inside = (low[None] <= grid[:, None]) & (grid[:, None] <= high[None])
    coverage = (stats.binom.pmf(np.arange(n + 1)[None], n, grid[:, None]) * inside).sum(1)
    assert coverage.mean() == pytest.approx(0.95, abs=0.005)
    assert coverage.min() > 0.91


def clustered(rng: np.random.Generator, prompts: int, seeds: int) -> tuple[NDArray, NDArray, NDArray]:
    """0/1 outcomes whose difficulty is shared by the seeds of a prompt; true change E[q] - E[p] = 0.15."""
    ease = rng.beta(0.6, 0.6, (prompts, 1))
    before = rng.random((prompts, seeds)) < 0.7 * ease
    after = rng.random((prompts, seeds)) < 0.7 * ease + 0.3 * (rng.random((prompts, 1)) < 0.5)
    return before.ravel().astype(float), after.ravel().astype(float), np.repeat(np.arange(prompts), seeds)


def test_bootstrap_covers_the_truth() -> None:
    """300 simulated evaluations: coverage of the 95 % interval within three standard errors of 0.95."""
    rng, hits, runs = np.random.default_rng(0), 0, 300
    for run in range(runs):
        before, after, cluster = clustered(rng, 25, 4)
        interval = paired_bootstrap(before, after, cluster, generator=seeded(run), resamples=600)
        hits += interval.low <= 0.15 <= interval.high
    assert hits / runs == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / runs))


def test_ignoring_clusters_would_be_too_narrow() -> None:
    """Eight seeds that always agree are one observation: the interval must not shrink with their number."""
    rng = np.random.default_rng(1)
    before, after = (rng.random(40) < 0.4).astype(float), (rng.random(40) < 0.6).astype(float)
    once = paired_bootstrap(before, after, range(40), generator=seeded())
    many = paired_bootstrap(before.repeat(8), after.repeat(8), np.arange(40).repeat(8), generator=seeded())
    naive = paired_bootstrap(before.repeat(8), after.repeat(8), range(320), generator=seeded())
    assert (many.low, many.high) == pytest.approx((once.low, once.high))
    assert naive.high - naive.low < 0.5 * (many.high - many.low)


def test_bootstrap_agrees_with_scipy() -> None:
    """scipy's paired percentile bootstrap on per-prompt sums, at the expanded tail; unequal cluster sizes."""
    rng = np.random.default_rng(2)
    size = rng.integers(1, 5, 60)
    cluster = np.repeat(np.arange(60), size)
    before, after = rng.normal(size=cluster.size), rng.normal(0.3, 1, size=cluster.size)
    ours = paired_bootstrap(before, after, cluster, generator=seeded(), resamples=40_000)
    change = np.bincount(cluster, weights=after - before)
    theirs = stats.bootstrap(
        (change, size.astype(float)),
        lambda d, n, axis: d.sum(axis) / n.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=40_000,
        confidence_level=1 - 2 * expanded_tail(60),
        rng=np.random.default_rng(3),
    ).confidence_interval
    assert ours.estimate == pytest.approx((after - before).mean(), abs=1e-12)
    assert ours.low == pytest.approx(theirs.low, abs=0.006)
    assert ours.high == pytest.approx(theirs.high, abs=0.006)


def test_expanded_tail() -> None:
    """By hand for K = 10: Φ(√(10/9) · -2.262157) = Φ(-2.384517); wider for few clusters, α/2 in the limit."""
    assert expanded_tail(10) == pytest.approx(0.0085511, abs=1e-6)
    assert expanded_tail(5) < expanded_tail(20) < 0.025
    assert expanded_tail(100_000) == pytest.approx(0.025, abs=1e-5)


def test_nan_pairs_are_left_out_and_too_few_clusters_give_no_interval() -> None:
    before, after = np.array([0.0, 1.0, np.nan, 0.0, 1.0]), np.array([1.0, 1.0, 1.0, np.nan, 0.0])
    valid = [0, 1, 4]
    interval = paired_bootstrap(before, after, range(5), generator=seeded())
    assert interval == paired_bootstrap(before[valid], after[valid], valid, generator=seeded())
    small = paired_bootstrap(1e-12 * before, 1e-12 * after, range(5), generator=seeded())
    assert (small.low, small.high) == pytest.approx((1e-12 * interval.low, 1e-12 * interval.high), abs=1e-18)
    single = paired_bootstrap([0.0, 0.0], [1.0, 0.0], ["p", "p"], generator=seeded())
    assert single.estimate == 0.5 and math.isnan(single.low) and math.isnan(single.high)
    assert not single.excludes_zero
    assert math.isnan(paired_bootstrap([np.nan], [1.0], ["p"], generator=seeded()).estimate)


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"one entry per sample; got \(2, 1, 2\)"):
        paired_bootstrap([0, 1], [1], ["a", "b"], generator=seeded())
    with pytest.raises(ValueError, match="level is 2; it must lie between 0 and 1"):
        wilson_interval(0, 0, level=2)
