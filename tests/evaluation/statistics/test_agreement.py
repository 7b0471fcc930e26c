# SPDX-License-Identifier: Apache-2.0
"""Agreement with people: every tie policy by hand, intervals, two judges, the control of generators."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from visalign.evaluation.statistics.agreement import (
    POLICIES,
    best_tie_threshold,
    credits_of,
    ranking_pairs,
)
from visalign.evaluation.statistics.generator_control import bradley_terry, generator_control
from visalign.evaluation.statistics.intervals import (
    RatioTable,
    clustered_wilson,
    drawn_share,
    interval,
    resample_weights,
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
    own, of = credits_of(policy, MARGIN, LABEL)
    assert (own.sum(), of.sum()) == (credit, count)
    assert policy in POLICIES


def test_without_ties_all_policies_agree() -> None:
    rng = np.random.default_rng(0)
    margin, label = rng.normal(size=200), (rng.random(200) < 0.5).astype(float)
    right = np.mean((margin > 0) == (label > 0.5))
    for policy in POLICIES:
        credit, count = credits_of(policy, margin, label)
        assert credit.sum() / count.sum() == pytest.approx(right, abs=1e-12), policy


def test_macro_is_the_mean_over_prompts() -> None:
    credit, count = credits_of("half_credit", np.array([1.0, 1.0, 1.0, -1.0]), np.ones(4))
    table = RatioTable(np.array([0, 0, 0, 1]), 3)  # of the third prompt nothing was judged
    table.add("micro", credit, count)
    table.add_macro("macro", credit, count)
    found = table.intervals(generator=torch.Generator(), resamples=100)
    assert (found["micro"].estimate, found["macro"].estimate) == (0.75, 0.5)


def test_thresholds_maximise_the_three_class_accuracy() -> None:
    margin = np.array([0.1, -0.2, 0.3, 2.0, -1.0])
    label = np.array([0.5, 0.5, 1.0, 1.0, 0.0])
    assert best_tie_threshold(margin, label) == 0.2
    values = {t: credits_of("VisionReward_tau", margin, label, t)[0].sum() for t in (0.0, 0.1, 0.2, 0.3, 1.0)}
    assert max(values, key=lambda t: values[t]) == 0.2 and values[0.2] == 5
    half = {t: credits_of("PickScore", margin, label, t)[0].sum() for t in (0.0, 0.1, 0.2, 0.3, 1.0, 2.0)}
    assert half[best_tie_threshold(margin, label, half=True)] == max(half.values())


def test_rankings_expand_to_pairs() -> None:
    margin, label = ranking_pairs([3.0, 1.0, 1.0], [-1.0, -2.0, -2.0])
    assert margin.tolist() == [2.0, 2.0, 0.0] and label.tolist() == [1.0, 1.0, 0.5]


def test_the_bootstrap_resamples_whole_clusters() -> None:
    weights = np.concatenate(
        list(resample_weights(50, generator=torch.Generator().manual_seed(1), resamples=300))
    )
    assert weights.shape == (300, 50) and (weights.sum(1) == 50).all()
    assert abs(weights.var(0).mean() - 0.98) < 0.1  # multinomial: 1 − 1/50
    again = np.concatenate(
        list(resample_weights(50, generator=torch.Generator().manual_seed(1), resamples=300))
    )
    assert np.array_equal(weights, again)
    with pytest.raises(ValueError, match="at least 100 resamples"):
        list(resample_weights(5, generator=torch.Generator(), resamples=99))


def test_the_interval_of_a_share_covers_it_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        rate = rng.beta(7, 3, 60).repeat(5)  # pairs of a prompt go together
        right = (rng.random(300) < rate).astype(float)
        table = RatioTable(np.arange(300) // 5, 60)
        table.add("share", right, np.ones(300))
        found = table.intervals(generator=torch.Generator().manual_seed(trial), resamples=400)["share"]
        hits += found.low <= 0.7 <= found.high
    assert 0.90 <= hits / 200 <= 0.99


def test_a_share_has_wilsons_interval_at_the_size_that_its_prompts_are_worth() -> None:
    rng = np.random.default_rng(1)
    index = np.arange(48) // 4
    right = (rng.random(48) < rng.beta(2, 1, 12)[index]).astype(float)
    table = RatioTable(index, 12)
    table.add("share", right, np.ones(48))
    table.add("half", 0.5 + 0 * right, np.ones(48))
    table.add("all", 1 + 0 * right, np.ones(48))
    table.add("beyond", 1.5 * right, np.ones(48))
    table.add("other", right, np.ones(48), share=False)
    found = table.intervals(generator=torch.Generator().manual_seed(0), resamples=400)
    p, sums = right.mean(), (right - right.mean()).reshape(12, 4).sum(1)
    size = p * (1 - p) / (12 / 11 * (sums @ sums) / 48**2)
    t = stats.t.ppf(0.975, 11)
    for end in (
        found["share"].low,
        found["share"].high,
    ):  # Wilson's: (p̂ − p)² = t² p (1 − p) / n at both ends
        assert (p - end) ** 2 == pytest.approx(t**2 * end * (1 - end) / size, rel=1e-9)
    own = clustered_wilson(right, index)
    assert (own.low, own.high) == pytest.approx((found["share"].low, found["share"].high), rel=1e-9)
    assert (found["half"].low, found["half"].high) == (0.5, 0.5)
    assert found["all"].high == 1 and found["all"].low == pytest.approx(12 / (12 + t**2))
    assert found["beyond"].high > 1.2, "percentiles: what can be more than all is no share"
    assert (found["other"].low, found["other"].high) != (found["share"].low, found["share"].high)


def test_an_area_under_a_curve_has_the_interval_of_a_share() -> None:
    draws = 0.7 + 0.05 * np.random.default_rng(0).normal(size=500)
    found, p = drawn_share(0.7, np.append(draws, np.nan), 40), 0.7
    size, t = p * (1 - p) / (draws.var() * 40 / 39), stats.t.ppf(0.975, 39)
    for end in (found.low, found.high):
        assert (p - end) ** 2 == pytest.approx(t**2 * end * (1 - end) / size, rel=1e-9)
    perfect = drawn_share(1.0, np.ones(500), 6)
    assert perfect.high == 1 and perfect.low < 0.6, "six pairs in order are no certainty"
    assert math.isnan(drawn_share(0.7, np.append(draws, np.full(600, np.nan)), 40).low)


def test_one_cluster_or_mostly_undefined_draws_give_no_interval() -> None:
    assert math.isnan(interval(0.5, np.full(200, 0.5), clusters=1).low)
    assert math.isnan(interval(0.5, np.append(np.full(150, np.nan), np.zeros(50)), clusters=9).low)
    table = RatioTable(np.arange(2), 2)
    table.add("nothing", np.zeros(2), np.zeros(2))
    found = table.intervals(generator=torch.Generator(), resamples=100)["nothing"]
    assert np.isnan([found.estimate, found.low, found.high]).all()


def test_bradley_terry_recovers_log_odds() -> None:
    left, right = np.array([0, 0, 0, 0]), np.array([1, 1, 1, 1])
    strength = bradley_terry(left, right, np.array([1.0, 1.0, 1.0, 0.0]), 2, ridge=0.0)
    assert strength[0] - strength[1] == pytest.approx(math.log(3), abs=1e-4)
    assert bradley_terry(left[:0], right[:0], np.array([]), 3).tolist() == [0, 0, 0]


def test_the_control_sees_through_a_detector_of_generators() -> None:
    rng = np.random.default_rng(0)
    count = 600
    new_is_left = rng.random(count) < 0.5
    label = np.where(rng.random(count) < 0.9, new_is_left, ~new_is_left).astype(
        float
    )  # the new one wins 90 %
    left, right = np.where(new_is_left, "new", "old"), np.where(new_is_left, "old", "new")
    left[:100], right[:100] = "old", "old"
    label[:100] = rng.random(100) < 0.5
    control = generator_control(left.tolist(), right.tolist(), label, np.arange(count))
    detector = np.where(left == right, 0.0, np.where(left == "new", 1.0, -1.0))
    between = ~control.same
    alone = np.sign(control.identity_margin[between]) == np.sign(label[between] - 0.5)
    assert abs(alone.mean() - 0.9) < 0.04
    against = control.against(label)
    assert against.sum() > 20
    assert not (np.sign(detector[against]) == np.sign(label[against] - 0.5)).any()
    assert control.follows(detector) == 1.0
    assert control.strength["new"] > control.strength["old"]


def test_the_control_learns_nothing_from_the_pair_that_it_predicts() -> None:
    left, right = [f"a{k}" for k in range(50)], [f"b{k}" for k in range(50)]  # no generator comes twice
    control = generator_control(left, right, np.arange(50) % 2 * 1.0, np.arange(50))
    np.testing.assert_allclose(control.identity_margin, 0.0, atol=1e-9)


def test_the_control_leaves_unknown_generators_out() -> None:
    control = generator_control(["a", None], ["b", "b"], [1.0, 0.0], np.array([0, 1]))
    assert control.known.tolist() == [True, False]
    with pytest.raises(ValueError, match="one entry per pair"):
        generator_control(["a"], [], [1.0], np.array([0]))
