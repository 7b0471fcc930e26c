# SPDX-License-Identifier: Apache-2.0
"""Two policies on the same problems: hand values, identities."""

from __future__ import annotations

import math

import pytest
import torch

from visalign.evaluation.statistics.intervals import wilson_interval
from visalign.evaluation.statistics.two_policies import (
    advantage_at_stake,
    best_of_n_curve,
    clip_bias,
    crossing,
    pass_at_k_curves,
    runner_up_gap,
)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_curves_by_hand_cross_where_the_base_knows_more() -> None:
    base = torch.tensor([[1.0, 0, 0, 0], [0, 1, 0, 0]]).repeat(20, 1)
    tuned = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0]]).repeat(20, 1)
    points = pass_at_k_curves(base, tuned, generator=_generator())
    assert [point.k for point in points] == [1, 2, 4]
    assert [point.base.estimate for point in points] == pytest.approx([0.25, 0.5, 1.0])
    assert [point.tuned.estimate for point in points] == pytest.approx([0.5] * 3)
    assert [point.change.estimate for point in points] == pytest.approx([0.25, 0.0, -0.5])
    assert points[2].base == wilson_interval(40, 40)
    assert points[2].change.high < 0 < points[0].change.low
    assert crossing(points) == (4, True)
    assert crossing(points[:2]) == (None, False)


def test_a_policy_against_itself_changes_nothing() -> None:
    solved = (torch.rand(9, 8, generator=_generator()) < 0.4).float()
    points = pass_at_k_curves(solved, solved, generator=_generator())
    assert all((p.change.estimate, p.change.low, p.change.high) == (0, 0, 0) for p in points)
    assert not any(point.change.excludes_zero for point in points)
    assert crossing(points) == (None, False)


def test_a_crossing_within_the_noise_is_not_shown() -> None:
    tuned = torch.tensor([[1.0, 1], [0, 0], [0, 0], [1, 1]])
    base = torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 0]])
    points = pass_at_k_curves(base, tuned, generator=_generator())
    assert [p.change.estimate for p in points] == pytest.approx([0.125, -0.25])
    assert crossing(points) == (2, False)


def test_a_problem_counts_where_both_have_enough_known_samples() -> None:
    base = torch.tensor([[1.0, torch.nan], [0, 0]])
    points = pass_at_k_curves(base, torch.tensor([[0.0, 0], [1, 0]]), generator=_generator())
    assert points[0].base.estimate == 0.5 and points[0].tuned.estimate == 0.25
    assert points[1].base.estimate == 0 and points[1].tuned.estimate == 1


def test_the_best_of_n_by_hand() -> None:
    reward = torch.tensor([[0.0, 3, 1, 2], [torch.nan, 9, 9, 9]])
    log_prob = torch.tensor([[0.1, 0.2, 0.3, 0.4], [1, 1, 1, 1]]).log()
    points = best_of_n_curve(reward, log_prob, generator=_generator())
    assert [point.n for point in points] == [1, 2, 4]
    # all pairs: 3, 1, 2, 3, 3, 2; their mean is 14/6
    assert [point.reward.estimate for point in points] == pytest.approx([1.5, 14 / 6, 3])
    assert [point.kl_bound for point in points] == pytest.approx([0, 0.193147, 0.636294], abs=1e-6)

    def kl(eps: float, n: int) -> float:
        rest = (1 - eps) ** n
        spread = math.log(n) + (n - 1) * math.log(1 - eps) - (n - 1) / n
        return rest * spread + (1 - rest) * math.log((1 - rest) / eps)

    expected = [0, (kl(0.2, 2) + kl(0.4, 2)) / 2, kl(0.2, 4)]
    assert [point.kl_estimate for point in points] == pytest.approx(expected, abs=1e-6)
    assert best_of_n_curve(reward[1:], log_prob[1:], generator=_generator()) == []


def test_the_gap_to_the_second_choice() -> None:
    logits = torch.tensor([[1.0, 4.0, 3.5], [2.0, 2.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(runner_up_gap(logits), torch.tensor([0.5, 0.0], dtype=torch.float64))
    torch.testing.assert_close(runner_up_gap(logits.log_softmax(-1)), runner_up_gap(logits))


def test_what_a_clip_took_and_a_reward_by_lot_withholds() -> None:
    bias = clip_bias(torch.tensor([0.0, 0.1, 0.0, 0.1]), torch.tensor([0.0, 0.3, 0.1, 0.0]))
    assert bias == pytest.approx({"low": 0.05, "high": 0.1, "net": 0.05, "iterations": 0.75})
    right = torch.tensor([0, 1, 4, 8])
    assert advantage_at_stake(right, 8).tolist() == pytest.approx([0, 7 / 8, 2, 0])
    generator = _generator()
    reward = (torch.rand(20_000, 8, generator=generator) < 0.5).double()
    by_lot = (reward - reward.mean(1, keepdim=True))[:, :4].sum(1)
    assert abs(float(by_lot.mean())) < 0.03
