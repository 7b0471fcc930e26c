# SPDX-License-Identifier: Apache-2.0
"""Votes with a row per annotator: what a judge gets, what people get, and what a coin gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from visalign.data.sets.checks import summed_votes, without_duplicates
from visalign.data.sets.records import PreferencePair, PreferenceSet
from visalign.evaluation.rewards.judged_pairs import IntervalSettings
from visalign.evaluation.rewards.pair_scores import from_scores
from visalign.evaluation.rewards.preferences import evaluate_preferences
from visalign.evaluation.statistics.agreement import alpha_of_sums, alpha_sums, leave_one_out

FAST = IntervalSettings(resamples=200)


def table(count: int, voters: int, right: float, *, with_names: bool = True) -> PreferenceSet:
    """A row per annotator, who names the better image with this probability; sides are mixed row by row."""
    rng = np.random.default_rng(0)
    rows = []
    for pair, voter in np.ndindex(count, voters):
        better, label = f"{pair}-good.png", float(rng.random() < right)
        entry = PreferencePair(
            prompt=f"prompt {pair // 2}",
            image_left=better,
            image_right=f"{pair}-bad.png",
            label=label,
            annotator=f"a{voter}" if with_names else None,
        )
        rows.append(entry if rng.random() < 0.5 else entry.swapped())
    return PreferenceSet(name="votes", pairs=tuple(rows))


def report(rows: PreferenceSet) -> dict[str, Any]:
    """Report of a judge that always knows the better image, on the rows as evaluated."""
    pairs, _ = summed_votes(without_duplicates(rows))
    left = [float("good" in pair.image_left) for pair in pairs.pairs]
    return evaluate_preferences(pairs, from_scores("perfect", "x", left, [1 - s for s in left]), FAST)


@pytest.mark.parametrize("with_names", [True, False])
def test_five_votes_of_80_percent_and_a_perfect_judge(with_names: bool) -> None:
    rows = table(400, 5, 0.8, with_names=with_names)
    votes = np.mean([(pair.label > 0.5) == ("good" in pair.image_left) for pair in rows.pairs])
    evaluation = report(rows)
    people = evaluation["people"]
    assert evaluation["counts"]["pairs"] == 400 and people["pairs_with_votes"] == 400
    assert people["judge_single_vote"]["estimate"] == pytest.approx(votes) and abs(votes - 0.8) < 0.02
    headline = evaluation["agreement"]["half_credit"]["micro"]
    assert headline["estimate"] == pytest.approx(0.942, abs=0.03)  # Σ_{k≥3} C(5, k) 0.8^k 0.2^(5−k)
    # 0.8 · (P(4 or 3 of 4) + ½ P(2 of 4)) + 0.2 · its counterpart: 0.8 · 0.896 + 0.2 · 0.104
    assert people["single_vote"]["low"] < 0.7376 < people["single_vote"]["high"]
    assert people["alpha"]["low"] < 1 - 0.32 / 0.5 < people["alpha"]["high"]


@pytest.mark.parametrize("voters", [1, 4])
def test_the_ceiling_of_coin_flippers_is_a_half(voters: int) -> None:
    people = report(table(500, voters, 0.5))["people"]
    if voters == 1:
        assert people["single_vote"]["estimate"] is None and people["alpha"]["estimate"] is None
        return
    assert people["single_vote"]["low"] < 0.5 < people["single_vote"]["high"]
    assert people["single_vote"]["estimate"] == pytest.approx(0.5, abs=0.05)
    assert people["alpha"]["low"] < 0 < people["alpha"]["high"]


def test_leave_one_out_by_hand() -> None:
    votes = np.array([[3, 1, 0], [1, 1, 0], [2, 1, 0], [1, 0, 2], [1, 0, 0], [0, 0, 0]], dtype=float)
    credit, count = leave_one_out(votes)
    # 3:1 the left votes are right and the right one wrong; 1:1 both wrong; 2:1 the left ones see 1:1, ½ each,
    # the right one is wrong; one vote and two ties: the rest is tied, ½
    assert credit.tolist() == [3, 0, 1, 0.5, 0, 0]
    assert count.tolist() == [4, 2, 3, 1, 0, 0]


@pytest.mark.parametrize(
    ("votes", "alpha"),
    [
        ([(3, 1, 0), (0, 2, 1), (5, 0, 0), (1, 1, 1), (1, 0, 0), (2, 2, 0)], 0.15843137254901973),
        ([(4, 1, 0), (0, 5, 0), (2, 2, 1), (0, 0, 3)], 0.5),
        ([(4, 0, 0), (3, 0, 0)], 1.0),
    ],
)
def test_alpha_equals_the_package_krippendorff_on_pairs_and_mirror_images(
    votes: list[tuple[int, int, int]], alpha: float
) -> None:
    """Values of krippendorff 0.9 (`value_counts`, nominal) on every pair and its mirror image."""
    sums = alpha_sums(np.array(votes, dtype=float)).sum(0)
    assert alpha_of_sums(sums[None])[0] == pytest.approx(alpha, abs=1e-12)
