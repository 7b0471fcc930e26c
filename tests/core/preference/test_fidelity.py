# SPDX-License-Identifier: Apache-2.0
"""Thurstone and fidelity: hand values, masks, single answers, data sets apart, gradients."""

from __future__ import annotations

import math

import torch
from scipy.stats import norm

from tests.support.core import assert_values, f64, normal
from visalign.core.preference.fidelity import (
    answer_statistics,
    fidelity,
    fidelity_loss,
    fidelity_rewards,
    quality_preferences,
    rating_distribution,
    thurstone_probability,
    thurstone_score,
)

NAN = float("nan")


class TestStatistics:
    def test_hand_values_with_holes(self) -> None:
        answers = torch.tensor([[1, 2, 3], [4, NAN, 2], [5, NAN, NAN], [NAN] * 3], dtype=torch.float64)
        statistics = answer_statistics(answers)
        assert_values(statistics.mean, 2, 3, 5, NAN)
        assert_values(statistics.variance, 1, 2, 0, NAN)
        assert statistics.count.tolist() == [3, 2, 1, 0]
        assert_values(answer_statistics(answers, ddof=0).variance, 2 / 3, 1, 0, NAN)
        marked = answer_statistics(answers, valid=torch.tensor([[True, True, False]] * 4))
        assert_values(marked.mean, 1.5, 4, 5, NAN)


class TestThurstone:
    def test_equals_scipy(self) -> None:
        left, right, v, w = normal(9), normal(9, seed=1), normal(9, seed=2) ** 2, normal(9, seed=3) ** 2
        prob = thurstone_probability(left, right, v, w, floor=0.01)
        expected = norm.cdf((left - right).numpy(), scale=(v + w + 0.01).sqrt().numpy())
        assert_values(prob, *expected.tolist(), rtol=1e-12)
        assert_values(prob + thurstone_probability(right, left, w, v, floor=0.01), *[1.0] * 9)

    def test_single_and_identical_answers_have_a_probability(self) -> None:
        zero = f64(0)
        assert_values(thurstone_probability(f64(3), f64(3), zero, zero), 0.5)
        assert_values(thurstone_probability(f64(3.05), f64(3), zero, zero), float(norm.cdf(1.0)))
        assert_values(thurstone_score(f64(3.1), f64(3), zero, zero, floor=1e-6), 100, rtol=1e-9)


class TestFidelity:
    def test_hand_values(self) -> None:
        assert_values(fidelity(f64(1, 0, 0.5, 1), f64(1, 0, 0.5, 0)), 1, 1, 1, 0)
        assert_values(fidelity(f64(0.5), f64(1)), math.sqrt(0.5))
        upstream = fidelity(f64(1, 1), f64(1, 0), mode="upstream")
        assert_values(upstream, math.sqrt(1 + 1e-6) + 1e-3, 2e-3)
        assert upstream[0] > 1

    def test_loss_has_a_finite_slope_everywhere(self) -> None:
        score = f64(-60, -9, -1, 0, 1, 9, 60).requires_grad_()
        for label in (0.0, 0.5, 1.0):
            loss = fidelity_loss(score, torch.full_like(score, label))
            (slope,) = torch.autograd.grad(loss.sum(), score)
            assert slope.isfinite().all() and slope.abs().max() < 1
        label = f64(0, 0.2, 0.5, 1, NAN, 0.9, 0.3)
        assert torch.autograd.gradcheck(lambda s: fidelity_loss(s, label), (score,))
        assert fidelity_loss(f64(NAN), f64(NAN)).item() == 0

    def test_targets_from_quality(self) -> None:
        table = quality_preferences(f64(3, 1, 3, NAN))
        assert table[0, 1] == 1 and table[1, 0] == 0 and table[0, 2] == 0.5 and table[0, 0] == 0.5
        assert table[3].isnan().all() and table[:, 3].isnan().all()


class TestRewards:
    ANSWERS = torch.tensor([[3, 4, 5], [2, 2, 3.5], [4, 1, 1]], dtype=torch.float64)
    QUALITY = f64(5, 3, 3)

    def test_probabilities_as_target_are_the_same(self) -> None:
        table = quality_preferences(self.QUALITY)
        torch.testing.assert_close(fidelity_rewards(self.ANSWERS, table), fidelity_rewards(self.ANSWERS, self.QUALITY))
        table[0, 1] = NAN
        rewards = fidelity_rewards(self.ANSWERS, table)
        torch.testing.assert_close(rewards[0], fidelity_rewards(self.ANSWERS[[0, 2]], self.QUALITY[[0, 2]])[0])

    def test_invalid_answers_take_no_part(self) -> None:
        padded = torch.cat([self.ANSWERS, torch.full((3, 1), 99.0).double()], 1)
        valid = torch.cat([torch.ones(3, 3), torch.zeros(3, 1)], 1).bool()
        rewards = fidelity_rewards(padded, self.QUALITY, valid=valid)
        torch.testing.assert_close(rewards[:, :3], fidelity_rewards(self.ANSWERS, self.QUALITY))
        assert rewards[:, 3].isnan().all()

    def test_one_answer_each_and_one_image(self) -> None:
        rewards = fidelity_rewards(f64(3, 1)[:, None], f64(5, 2))
        assert_values(rewards[:, 0], 1, 1, rtol=1e-9)
        assert fidelity_rewards(f64(3)[:, None], f64(5)).isnan().all()


def test_a_soft_rating_keeps_its_mean_and_is_shared_by_neighbours_without_spread() -> None:
    scores = torch.arange(1.0, 6.0)
    sharp = rating_distribution(torch.tensor([3.25, 1.0, 5.0]), torch.zeros(3), scores)
    expected = torch.tensor([[0, 0, 0.75, 0.25, 0], [1.0, 0, 0, 0, 0], [0, 0, 0, 0, 1.0]])
    torch.testing.assert_close(sharp, expected, atol=1e-5, rtol=0)
    mean, std = torch.tensor([2.2, 4.6], dtype=torch.float64), torch.tensor([0.7, 1.3], dtype=torch.float64)
    soft = rating_distribution(mean, std, scores.double())
    draws = mean[:, None] + std[:, None] * torch.special.ndtri((torch.arange(200000) + 0.5).double() / 200000)
    torch.testing.assert_close(soft @ scores.double(), draws.clamp(1, 5).mean(1), atol=1e-6, rtol=0)
    tent = (1 - (draws[..., None] - 3).abs()).clamp(min=0).mean((1, 2))
    torch.testing.assert_close(soft[:, 2], tent, atol=1e-6, rtol=0)
