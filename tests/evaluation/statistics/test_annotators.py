# SPDX-License-Identifier: Apache-2.0
"""Annotators: hand values, what a careless one looks like, labels that are nearer the truth than shares."""

from __future__ import annotations

import math

import numpy as np
import pytest

from visalign.evaluation.statistics.annotators import alpha_of_rating_sums, fit_annotators, rating_sums


def simulated(seed: int, gamma: list[float], bias: list[float], pairs: int, per_pair: int):
    rng = np.random.default_rng(seed)
    d = rng.normal(size=pairs)
    i = np.repeat(np.arange(pairs), per_pair)
    a = np.concatenate([rng.permutation(len(gamma))[:per_pair] for _ in range(pairs)])
    x = rng.choice([-1, 1], size=len(i))
    odds = np.array(gamma)[a] * d[i] + np.array(bias)[a] * x
    return d, i, a, (rng.random(len(i)) < 1 / (1 + np.exp(-odds))).astype(float), x


def test_a_careless_voter_and_a_side_are_found():
    gamma, bias = [2.5, 2.0, 2.0, 0.0, 2.0], [0.0, 0.0, 1.0, 0.0, 0.0]
    _, i, a, votes, x = simulated(0, gamma, bias, 400, 4)
    fit = fit_annotators(i, a, votes, x, pairs=400, annotators=5)
    assert np.abs(fit.reliability - gamma).max() < 3 * fit.reliability_std.max()
    low, high = (fit.reliability + side * fit.reliability_std for side in (-2, 2))
    assert high[3] < 0.7 < low[0]
    assert fit.side_bias.argmax() == 2 and abs(fit.side_bias[2] - 1) < 0.4
    assert abs(fit.agreement[3] - 0.5) < 0.1 and fit.agreement[0] > 0.72


def test_one_pair_by_hand():
    """γ = 0 for nobody: one vote for the left moves the label above ½, its mirror below by as much."""
    both = [fit_annotators([0], [0], [vote], [1], pairs=2, annotators=1) for vote in (1.0, 0.0)]
    assert both[0].soft_label[0] > 0.55 and math.isnan(both[0].soft_label[1])
    assert both[0].posterior_std[1] == pytest.approx(1.0, abs=1e-6)
    tied = fit_annotators([0, 1], [0, 0], [0.5, 0.5], [1, -1], pairs=2, annotators=1)
    assert tied.soft_label == pytest.approx([0.5, 0.5], abs=1e-6)


def test_alpha_of_ratings_as_krippendorff_prints_it():
    """The reliability data of his section 11.1 (four observers, twelve units): α of interval data is .849."""
    nan = math.nan
    table = [
        [1, 2, 3, 3, 2, 1, 4, 1, 2, nan, nan, nan],
        [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, nan, 3],
        [nan, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, nan],
        [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, nan],
    ]
    ratings = [(value, unit) for row in table for unit, value in enumerate(row) if not math.isnan(value)]
    sums = rating_sums([value for value, _ in ratings], [unit for _, unit in ratings], items=12)
    assert alpha_of_rating_sums(sums.sum(0)[None])[0] == pytest.approx(0.849, abs=5e-4)
    assert sums[11].tolist() == [0, 0, 0, 0]  # a single rating says nothing of agreement
