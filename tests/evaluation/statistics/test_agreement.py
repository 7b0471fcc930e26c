# SPDX-License-Identifier: Apache-2.0
"""Agreement with people: every tie policy by hand, intervals of shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from visalign.evaluation.statistics.agreement import POLICIES, best_tie_threshold, policy_credit
from visalign.evaluation.statistics.intervals import (
    RatioTable,
    interval,
    resample_weights,
    share_interval,
    wilson_interval,
)

MARGIN = np.array([2.0, -1.0, 0.0, 0.5, 0.0, -3.0])
LABEL = np.array([1.0, 1.0, 1.0, 0.5, 0.5, 0.0])
"""Right, wrong, predicted tie, label tie with a preference, both tie, right."""


@pytest.mark.parametrize(
    ("policy", "credit", "count"),
    [
        ("half_credit", 2.5, 4),
        ("inversion_score", 5, 6),
        ("calc_ImageReward", 2, 4),
        ("PickScore", 4, 6),
        ("HPSv3_strict", 3, 4),
        ("UnifiedReward_ties_wrong", 2, 6),
        ("imscore_dropped", 2, 3),
        ("VisionReward_tau", 3, 6),
        ("VisionReward_diff", 2, 4),
    ],
)
def test_policies_by_hand(policy: str, credit: float, count: float) -> None:
    own, of = policy_credit(policy, MARGIN, LABEL)
    assert (own.sum(), of.sum()) == (credit, count)
    assert policy in POLICIES


def test_without_ties_all_policies_agree() -> None:
    rng = np.random.default_rng(0)
    margin, label = rng.normal(size=200), (rng.random(200) < 0.5).astype(float)
    right = np.mean((margin > 0) == (label > 0.5))
    for policy in POLICIES:
        credit, count = policy_credit(policy, margin, label)
        assert credit.sum() / count.sum() == pytest.approx(right, abs=1e-12), policy


def test_macro_is_the_mean_over_prompts() -> None:
    credit, count = policy_credit("half_credit", np.array([1.0, 1.0, 1.0, -1.0]), np.ones(4))
    table = RatioTable(np.array([0, 0, 0, 1]), 3)  # of the third prompt nothing was judged
    table.add("micro", credit, count)
    table.add("macro", credit, count, macro=True)
    intervals = table.intervals(generator=torch.Generator(), resamples=100)
    assert (intervals["micro"].estimate, intervals["macro"].estimate) == (0.75, 0.5)


def test_thresholds_maximise_the_three_class_accuracy() -> None:
    margin = np.array([0.1, -0.2, 0.3, 2.0, -1.0])
    label = np.array([0.5, 0.5, 1.0, 1.0, 0.0])
    assert best_tie_threshold(margin, label) == 0.2
    values = {t: policy_credit("VisionReward_tau", margin, label, t)[0].sum() for t in (0.0, 0.1, 0.2, 0.3, 1.0)}
    assert max(values, key=lambda t: values[t]) == 0.2 and values[0.2] == 5
    half = {t: policy_credit("PickScore", margin, label, t)[0].sum() for t in (0.0, 0.1, 0.2, 0.3, 1.0, 2.0)}
    assert half[best_tie_threshold(margin, label, half=True)] == max(half.values())


def test_the_bootstrap_resamples_whole_clusters() -> None:
    weights, again = (
        np.concatenate(list(resample_weights(50, generator=torch.Generator().manual_seed(1), resamples=300)))
        for _ in range(2)
    )
    assert weights.shape == (300, 50) and (weights.sum(1) == 50).all()
    assert abs(weights.var(0).mean() - 0.98) < 0.1  # multinomial: 1 − 1/50
    assert np.array_equal(weights, again)


def test_a_share_of_one_counts_each_prompt_once_and_a_ratio_may_exceed_one() -> None:
    index = np.arange(48) // 4
    right = (np.random.default_rng(1).random(48) < 0.7).astype(float)
    table = RatioTable(index, 12)
    table.add("share", right, np.ones(48))
    table.add("all", np.ones(48), np.ones(48))
    table.add("ties", np.full(48, 0.5), np.ones(48))
    table.add("beyond", 1.5 * right, np.ones(48))
    intervals = table.intervals(generator=torch.Generator().manual_seed(0))
    assert intervals["all"] == wilson_interval(12, 12)
    assert intervals["ties"] == share_interval(np.full(12, 0.5), range(12)) == wilson_interval(6, 12)
    assert intervals["beyond"].high == pytest.approx(1.5 * intervals["share"].high)
    assert share_interval(right, index) == intervals["share"]
    assert share_interval(right, np.arange(48)) == wilson_interval(int(right.sum()), 48)


def test_one_cluster_or_mostly_undefined_draws_give_no_interval() -> None:
    assert math.isnan(interval(0.5, np.full(200, 0.5), clusters=1).low)
    assert math.isnan(interval(0.5, np.append(np.full(150, np.nan), np.zeros(50)), clusters=9).low)
    table = RatioTable(np.arange(2), 2)
    table.add("nothing", np.zeros(2), np.zeros(2))
    undefined = table.intervals(generator=torch.Generator(), resamples=100)["nothing"]
    assert np.isnan([undefined.estimate, undefined.low, undefined.high]).all()
