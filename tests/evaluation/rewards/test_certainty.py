# SPDX-License-Identifier: Apache-2.0
"""What a margin and a std are worth: errors among the pairs that are decided, both signals together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from visalign.data.sets.records import PreferencePair, PreferenceSet
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.rewards.pair_scores import from_scores
from visalign.evaluation.rewards.preferences import evaluate_preferences
from visalign.evaluation.statistics.calibration import fit_noise_scaling, fit_temperature, nll
from visalign.evaluation.statistics.selective import auroc

FAST = IntervalSettings(resamples=200)


def report(margin: Any, left: Any, voters: int = 1, std: Any = None, unit: str = "logit") -> dict[str, Any]:
    """Report on margins; `left` of `voters` votes are for the left; four pairs a prompt."""
    pairs = tuple(
        PreferencePair(
            prompt=f"prompt {k // 4}",
            image_left=f"{k}a.png",
            image_right=f"{k}b.png",
            label=float(wins) / voters,
            votes=(int(wins), voters - int(wins), 0),
        )
        for k, wins in enumerate(left)
    )
    half = None if std is None else np.asarray(std) / np.sqrt(2)
    scores = from_scores("j", unit, margin, np.zeros(len(pairs)), std_left=half, std_right=half)
    return evaluate_preferences(PreferenceSet(name="set", pairs=pairs), scores, FAST)


def test_predicted_ties_are_no_hits() -> None:
    """A coarse judge: the margins of the pairs it decides tell its errors, and half of its answers tie."""
    rng = np.random.default_rng(0)
    true = rng.normal(0, 1.5, 800)
    margin = np.round(true + rng.normal(0, 0.8, 800))
    left = rng.random(800) < 1 / (1 + np.exp(-2 * true))
    margin[rng.random(800) < 0.4] = 0.0
    selective = report(margin, left)["selective"]["margin"]
    decided = margin != 0
    wrong = (margin > 0) != left
    expected = auroc(-np.abs(margin[decided]), wrong[decided])
    as_hits = auroc(-np.abs(margin), wrong & decided)
    assert as_hits < 0.5 < 0.6 < expected
    assert selective["auroc"]["estimate"] == pytest.approx(expected) and selective["auroc"]["low"] > 0.5
    assert selective["pairs"] == decided.sum() and selective["risk_at"]["25%"] < selective["risk_at"]["100%"]
    assert selective["risk_at"]["100%"] == pytest.approx(np.mean(np.where(decided, wrong, 0.5)))


def noisy(count: int = 2_000, voters: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Margin, votes for the left, std: where images are noisy, judge and voters err more."""
    rng = np.random.default_rng(1)
    true, std = rng.normal(size=count), np.exp(rng.normal(0, 0.9, count))
    margin = true + std * rng.normal(size=count)
    return margin, rng.binomial(voters, stats.norm.cdf(true / std)), std


def test_a_std_that_knows_is_worth_something_beside_the_margin() -> None:
    margin, left, std = noisy()
    with_std, without = report(margin, left, 7, std), report(margin, left, 7)
    areas = {name: entry["auroc"]["estimate"] for name, entry in with_std["selective"].items()}
    assert areas["both"] > areas["margin"] + 0.05 and areas["both"] > areas["std"]
    assert areas["margin"] == without["selective"]["margin"]["auroc"]["estimate"]
    assert with_std["selective"]["both"]["aurc"] < without["selective"]["margin"]["aurc"]
    scaled = with_std["calibration"]["scaled"]
    assert scaled["by"] == "margin and std" and scaled["nll"] < without["calibration"]["scaled"]["nll"]
    std_report = with_std["std"]
    rho = stats.spearmanr(std, left * (7 - left))[0]  # over 21: the chance that two people disagree
    assert std_report["srcc_votes"]["estimate"] == pytest.approx(rho) and std_report["srcc_votes"]["low"] > 0.2
    assert std_report["srcc_votes_given_margin"]["low"] > 0.2 and std_report["nll_gain"]["low"] > 0.01
    assert std_report["pairs"] == 2_000 and without["std"] is None


def test_noise_scaling_finds_thurstones_odds_and_never_loses_to_a_temperature() -> None:
    rng = np.random.default_rng(3)
    margin, std = rng.normal(0, 2, 3_000), np.exp(rng.normal(0, 0.8, 3_000))
    odds = margin / std
    outcome = rng.random(3_000) < 1 / (1 + np.exp(-odds))
    scaling = fit_noise_scaling(margin, std, outcome)
    assert scaling.share == 0.99
    assert nll(scaling.apply(margin, std), outcome).mean() == pytest.approx(scaling.temperature.nll, abs=1e-9)
    assert np.abs(scaling.apply(margin, std) - 1 / (1 + np.exp(-odds))).mean() < 0.01
    plain = rng.random(3_000) < 1 / (1 + np.exp(-margin / 2))
    none = fit_noise_scaling(margin, std, plain)
    assert none.share == 0.0 and none.temperature.nll == fit_temperature(margin, plain).nll
