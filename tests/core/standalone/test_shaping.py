# SPDX-License-Identifier: Apache-2.0
"""Shaped rewards: hand values, bounds, missing rewards, likelihoods, leave-one-out."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.core import assert_values, f64
from visalign.core.rewards.likelihood import jepo_credit, likelihood_reward
from visalign.core.rewards.terms import preference_as_reward

NAN = float("nan")
INF = float("inf")


class TestPreferenceAsReward:
    def test_missing_references_are_left_out_and_missing_rewards_stay_missing(self) -> None:
        reward = f64(2, NAN, 1).requires_grad_()
        reference = torch.tensor([[0, NAN, 1], [0, 0, 0], [NAN, NAN, INF]], dtype=torch.float64)
        shaped = preference_as_reward(reward, reference)
        assert_values(shaped.detach(), 0.8059278, NAN, NAN)
        (slope,) = torch.autograd.grad(shaped[0], reward)
        assert slope[0] > 0 and slope[1:].eq(0).all()


class TestLikelihoodReward:
    log_prob = torch.tensor([[-1.0, -2.0, NAN], [-0.5, NAN, NAN], [NAN, NAN, NAN]], dtype=torch.float64)
    weight = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])

    @pytest.mark.parametrize(
        ("kind", "first", "second"),
        [
            ("log_prob", -3.0, -0.5),
            ("mean_log_prob", -1.5, -0.5),
            ("prob", math.exp(-3), math.exp(-0.5)),
            ("mean_prob", (math.exp(-1) + math.exp(-2)) / 2, math.exp(-0.5)),
        ],
    )
    def test_hand_values(self, kind: str, first: float, second: float) -> None:
        assert_values(likelihood_reward(self.log_prob, self.weight, kind=kind), first, second, NAN)  # type: ignore[arg-type]

    def test_padding_gets_no_gradient(self) -> None:
        log_prob = self.log_prob.clone().requires_grad_()
        for kind in ("log_prob", "mean_prob", "prob"):
            reward = likelihood_reward(log_prob, self.weight, kind=kind)
            (slope,) = torch.autograd.grad(reward[:2].sum(), log_prob)
            assert bool((slope[self.weight == 0] == 0).all()) and bool((slope[self.weight == 1] > 0).all())


class TestJepo:
    def test_equals_enumeration_of_the_others(self) -> None:
        generator = torch.Generator().manual_seed(3)
        value = 30 * torch.randn(12, dtype=torch.float64, generator=generator)
        value[4] = value[0]  # the largest may be there twice
        group = ["a", "b", "a", "b", "a", "a", "b", "c", "a", "b", "c", "a"]
        bound, credit = jepo_credit(value, group)
        for i, label in enumerate(group):
            members = [j for j, other in enumerate(group) if other == label]
            rest = [j for j in members if j != i]
            everything = value[members].logsumexp(0) - math.log(len(members))
            without = value[rest].logsumexp(0) - math.log(len(rest))
            torch.testing.assert_close(bound[i], everything)
            torch.testing.assert_close(credit[i], everything - without, rtol=1e-9, atol=1e-12)

    def test_equal_alone_and_missing(self) -> None:
        bound, credit = jepo_credit(f64(-0.3, -0.3, -0.3, 7, NAN, NAN), [0, 0, 0, 1, 0, 2])
        assert credit.eq(0).all()
        assert_values(bound, -0.3, -0.3, -0.3, 7, -0.3, NAN)
