# SPDX-License-Identifier: Apache-2.0
"""Kendall's τ under weights against scipy on repeated samples, its bootstrap's coverage, and its time."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from visalign.data.sets.records import QualityRecord, QualitySet
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.rewards.quality import evaluate_quality, from_values
from visalign.evaluation.statistics.correlations import weighted_kendall
from visalign.evaluation.statistics.intervals import interval, resample_samples

SIMULATIONS = 100
"""The standard error of a coverage of 0.95 is then 0.022."""
TAU = 2 / math.pi * math.asin(0.6)
"""Of two normal variables with correlation 0.6 (Kruskal, J. Am. Stat. Assoc. 53 (1958) 814)."""


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


def covered(clusters: int, members: int, *, by_cluster: bool, spread: float = 1.0) -> float:
    """Share of the simulated sets whose 95 % interval holds the true τ.

    Cluster and own parts have the same correlation, so that τ is that of every pair of samples.
    """
    rng = np.random.default_rng(0)
    covariance = np.array([[1.0, 0.6], [0.6, 1.0]])
    index = np.repeat(np.arange(clusters), members) if by_cluster else np.arange(clusters * members)
    hits = 0
    for seed in range(SIMULATIONS):
        shared = rng.multivariate_normal([0, 0], covariance, clusters).repeat(members, 0)
        own = rng.multivariate_normal([0, 0], covariance, clusters * members)
        x, y = (spread * shared + own).T
        generator = torch.Generator().manual_seed(seed)
        blocks = resample_samples(index, int(index.max()) + 1, generator=generator, resamples=100)
        draws = np.concatenate([weighted_kendall(x, y, block)[:, 0] for block in blocks])
        estimate = scipy_tau(x, y, "b")
        found = interval(estimate, draws, int(index.max()) + 1)
        hits += found.low <= TAU <= found.high
    return hits / SIMULATIONS


def test_intervals_hold_the_true_value_as_often_as_they_say() -> None:
    assert 0.9 <= covered(80, 1, by_cluster=True) <= 0.99


def test_only_whole_clusters_do_where_samples_of_one_are_alike() -> None:
    assert 0.89 <= covered(40, 4, by_cluster=True, spread=3.0) <= 0.99
    assert covered(40, 4, by_cluster=False, spread=3.0) < 0.85


def quality(size: int, references: int) -> tuple[QualitySet, np.ndarray]:
    rng = np.random.default_rng(1)
    shared = 3 * rng.normal(size=references).repeat(size // references)
    mos = shared + rng.normal(size=size)
    records = tuple(
        QualityRecord(image=f"{k}.png", mos=float(value), reference=f"r{k * references // size}")
        for k, value in enumerate(mos)
    )
    return QualitySet(name="set", records=records), shared + rng.normal(size=size)


def test_a_report_resamples_references() -> None:
    records, x = quality(200, 20)
    settings = IntervalSettings(resamples=200)
    report = evaluate_quality(records, from_values("judge", "unit", x), settings)
    y = np.array([record.mos for record in records.records])
    assert report["counts"]["clusters"] == 20
    for variant in "bc":
        found = report["correlations"][f"kendall_{variant}"]
        assert found["estimate"] == pytest.approx(scipy_tau(x, y, variant), abs=1e-12)
        assert found["low"] < found["estimate"] < found["high"] and found["level"] == 0.95
    alone = QualitySet(name="set", records=tuple(replace_reference(record) for record in records.records))
    apart = evaluate_quality(alone, from_values("judge", "unit", x), settings)["correlations"]["kendall_b"]
    whole = report["correlations"]["kendall_b"]
    assert whole["high"] - whole["low"] > 1.3 * (apart["high"] - apart["low"])


def replace_reference(record: QualityRecord) -> QualityRecord:
    return QualityRecord(image=record.image, mos=record.mos)


def test_ten_thousand_images_and_a_thousand_draws_take_seconds() -> None:
    records, x = quality(10_000, 100)
    y = np.array([record.mos for record in records.records])
    weights = np.random.default_rng(0).integers(0, 3, (100, 10_000)).astype(float)
    start = time.process_time()
    weighted_kendall(x, y, weights)
    assert time.process_time() - start < 2.0, "naive pairs of a draw would take a second each"
