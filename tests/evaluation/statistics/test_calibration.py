# SPDX-License-Identifier: Apache-2.0
"""Calibration, temperature, AUROC and risk-coverage by hand, against scipy and against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, stats

from visalign.evaluation.rewards.pair_scores import from_probabilities, from_scores, swap_consistency
from visalign.evaluation.statistics.calibration import (
    cross_fitted_temperature,
    fit_temperature,
    nll,
    reliability,
    win_probability,
)
from visalign.evaluation.statistics.selective import auroc, risk_coverage, weighted_auroc


def test_reliability_by_hand() -> None:
    diagram = reliability([0.1, 0.2, 0.9, 0.8], [0, 1, 1, 1], bins=2)
    assert diagram.count.tolist() == [2, 2]
    assert diagram.confidence.tolist() == pytest.approx([0.15, 0.85])
    assert diagram.frequency.tolist() == [0.5, 1.0]
    assert diagram.ece == pytest.approx(0.5 * 0.35 + 0.5 * 0.15) and diagram.mce == pytest.approx(0.35)
    diagram = reliability([0.5, 1.0, 0.0], [1, 1, 0], bins=4)  # an edge goes up, an empty bin is NaN
    assert diagram.count.tolist() == [1, 0, 1, 1]
    assert math.isnan(diagram.confidence[1]) and diagram.ece == pytest.approx(0.5 / 3)


def test_win_probability_is_the_integral() -> None:
    for mean, spread in ((0.7, 0.5), (-2.0, 2.0), (1.0, 0.0)):
        density = lambda z, m=mean, s=spread: stats.norm.pdf(z) / (1 + math.exp(-(m + s * z)))  # noqa: E731
        expected = integrate.quad(density, -12, 12)[0]
        assert win_probability([mean], [spread])[0] == pytest.approx(expected, abs=2e-7)
    assert win_probability([1.0], [2.0], link="probit")[0] == pytest.approx(stats.norm.cdf(0.5))
    assert win_probability([0.0, 1.0], [0.0, 0.0], link="probit").tolist() == [0.5, 1.0]


def test_temperature_is_found_and_useless_logits_are_said_to_be() -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(0, 2, 20_000)
    y = (rng.random(20_000) < 1 / (1 + np.exp(-true))).astype(float)
    temperature = fit_temperature(3 * true, y)
    assert temperature.value == pytest.approx(3.0, rel=0.05)
    assert temperature.nll == pytest.approx(float(nll(temperature.apply(3 * true), y).mean()), abs=1e-9)
    against = fit_temperature(-true, y)
    assert math.isinf(against.value) and against.apply([5.0])[0] == 0.5
    assert fit_temperature([1.0, -1.0], [1.0, 0.0]).value == pytest.approx(1e-4)  # separable: ever colder


def test_cross_fitting_uses_the_other_folds() -> None:
    rng = np.random.default_rng(0)
    z, fold = rng.normal(size=400), np.arange(400) % 2
    y = (rng.random(400) < 1 / (1 + np.exp(-np.where(fold == 0, 4.0, 1.0) * z))).astype(float)
    prob = cross_fitted_temperature(z, y, fold)
    first, second = (fit_temperature(z[fold == k], y[fold == k]) for k in (0, 1))
    assert second.value > 2 * first.value
    assert prob[fold == 0].tolist() == second.apply(z[fold == 0]).tolist()
    assert prob[fold == 1].tolist() == first.apply(z[fold == 1]).tolist()


def test_auroc_counts_pairs() -> None:
    rng = np.random.default_rng(0)
    score, positive = rng.integers(0, 6, 60).astype(float), rng.random(60) < 0.4
    wins = [(a > b) + 0.5 * (a == b) for a in score[positive] for b in score[~positive]]
    assert auroc(score, positive) == pytest.approx(np.mean(wins))
    weights = rng.integers(0, 3, (4, 60)).astype(float)
    for row, value in zip(weights, weighted_auroc(score, positive, weights), strict=True):
        repeats = row.astype(int)
        assert value == pytest.approx(auroc(np.repeat(score, repeats), np.repeat(positive, repeats)))
    assert math.isnan(auroc([1.0, 2.0], [True, True]))


def test_risk_coverage_by_hand() -> None:
    curve = risk_coverage([0.1, 0.4, 0.2, 0.3], [0, 1, 0, 1])
    assert curve.coverage.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert curve.risk.tolist() == pytest.approx([0, 0, 1 / 3, 0.5])
    assert curve.area == pytest.approx((0 + 0 + 1 / 3 + 0.5) / 4) and curve.at(0.5) == 0.0


def test_equal_certainty_is_answered_in_random_order() -> None:
    curve = risk_coverage([1.0, 1.0, 1.0, 1.0], [1, 0, 0, 0])
    assert curve.coverage.tolist() == [1.0] and curve.area == pytest.approx(0.25) and curve.at(0.3) == 0.25


def test_swapped_sides_show_a_bias() -> None:
    quality, bias = np.array([1.0, -2.0, 0.2]), 0.5
    sigmoid = lambda z: 1 / (1 + np.exp(-z))  # noqa: E731
    scores = from_probabilities("judge", sigmoid(quality + bias), swapped=sigmoid(-quality + bias))
    assert scores.margin.tolist() == pytest.approx(quality.tolist())
    consistency = swap_consistency(scores)
    assert consistency is not None
    assert consistency["position_bias"] == pytest.approx(bias)
    assert consistency["same_winner"] == pytest.approx(2 / 3)  # of the weak one the left side always wins
    assert consistency["left_share"] == pytest.approx((2 + 2) / 6)


def test_failed_answers_are_no_margins() -> None:
    scores = from_scores("judge", "kB", [1.0, np.nan, np.inf], [0.0, 1.0, 1.0], reasons=[None, "broken file", None])
    assert scores.judged.tolist() == [True, False, False]
    assert scores.failures() == {"broken file": 1, "no score": 1}
    assert from_scores("judge", "kB", [1.0], [3.0], higher_is_better=False).margin.tolist() == [2.0]
    both = from_probabilities("judge", [0.9, 0.9], swapped=[0.2, np.nan])
    assert both.judged.tolist() == [True, False]


def test_bad_probabilities_are_named() -> None:
    with pytest.raises(ValueError, match="for scores give those of both images"):
        from_probabilities("judge", [3.0])
