# SPDX-License-Identifier: Apache-2.0
"""COPO, RiskPO, EMPG, AEM, TEA: hand values, independent loops, identities, missing values."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.core import assert_values, f64, normal
from visalign.core.advantages.copo import between_group_advantages, consistency_entropy, copo_weight
from visalign.core.advantages.entropy import aem_advantages, aem_scale, empg_advantages, empg_scale
from visalign.core.advantages.risk import (
    conditional_value_at_risk,
    mixed_value_at_risk,
    range_value_at_risk,
    track_quantile,
)
from visalign.core.surrogates.value import soft_minimum
from visalign.core.tokens.entropy_terms import tea_weights

NAN = float("nan")
INF = float("inf")


class TestCopo:
    def test_equal_rewards_one_group_and_missing(self) -> None:
        ragged = [0, 0, 0, 1, 1, 1, 1, 2]
        assert between_group_advantages(torch.full((8,), 0.1), ragged, eps=0).eq(0).all()
        assert between_group_advantages(f64(1, 2), [5, 5]).eq(0).all()
        full = between_group_advantages(f64(1, 3, 0, 5), [0, 0, 1, 2])
        holes = between_group_advantages(f64(1, 3, NAN, 0, INF, 5, NAN), [0, 0, 0, 1, 1, 2, 3])
        torch.testing.assert_close(holes[[0, 1, 3, 5]], full)
        assert holes[[2, 4, 6]].eq(0).all()

    def test_entropy_of_answers(self) -> None:
        group = ["a", "b", "a", "b", "a", "a", "c"]
        cluster = ["x", "x", "y", "x", "x", "x", "x"]
        expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
        ours = consistency_entropy(cluster, group).double()
        assert_values(ours, expected, 0, expected, 0, expected, expected, 0)
        mass = f64(0.5, 0.2, 0.5, 0, 0, 0, 0)
        assert_values(consistency_entropy(cluster, group, mass)[:4], math.log(2), 0, math.log(2), 0)
        assert consistency_entropy(cluster, group, mass)[6].isnan()
        same = consistency_entropy(torch.tensor([7, 7, 3]), torch.tensor([1, 1, 1]))
        assert_values(same.double(), *[math.log(3) - 2 / 3 * math.log(2)] * 3)

    def test_weight(self) -> None:
        uniform = torch.tensor([1.0, 2, 4, 6], dtype=torch.float64).log()
        torch.testing.assert_close(
            copo_weight(uniform), f64(9.357623e-14, 9.812184e-8, 0.09328969, 0.9970860), rtol=1e-5, atol=0
        )
        assert copo_weight(torch.tensor([1.5]).half()).item() == 0.5


class TestRisk:
    score = torch.arange(6, dtype=torch.float64)

    def test_hand_values(self) -> None:
        assert_values(range_value_at_risk(self.score, 1, 4), -5, -5, -10 / 3, -5 / 3, 0, 0)
        assert_values(conditional_value_at_risk(self.score, 1), -5, 0, 0, 0, 0, 0)
        assert_values(mixed_value_at_risk(self.score, 1, 4), -5, -2, -4 / 3, -2 / 3, 0, 0)
        plain = mixed_value_at_risk(self.score, 1, 4, natural_baseline=False)
        assert_values(plain, -3, 0, 2 / 3, 4 / 3, 2, 2)
        assert_values(track_quantile(2.0, torch.arange(5).double(), level=0.2)[None], 1.96)

    def test_missing_scores(self) -> None:
        assert_values(mixed_value_at_risk(f64(NAN, 0, INF), 1, 4), 0, -5, 0)
        assert_values(track_quantile(2.0, f64(0, NAN, 4), level=0.5)[None], 2)
        assert_values(track_quantile(f64(2)[0], f64(NAN), level=0.5)[None], 2)

    def test_soft_minimum(self) -> None:
        values = f64(1, 2)[None].requires_grad_()
        assert_values(soft_minimum(values.detach()), 1.1974281, atol=1e-7)
        for a, low, high in ((1e-3, 1, 1.001), (0.3, 1, 1.5), (1e4, 1.4999, 1.5)):
            assert low <= soft_minimum(values, temperature=a).item() <= high
        assert_values(soft_minimum(torch.full((1, 5), 0.7).double()), 0.7)
        assert torch.autograd.gradcheck(soft_minimum, (values,))
        assert soft_minimum(torch.tensor([9e3, 1e4]).half()).item() == pytest.approx(9e3, abs=1)


class TestEmpg:
    def test_absent_segments_change_nothing(self) -> None:
        weight = torch.tensor([[0, 1, 0, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
        entropy = torch.where(weight == 1, normal(3, 5).abs(), NAN)
        advantage = f64(1, -2, NAN)
        ours = empg_advantages(advantage, entropy, weight, k=1.3, k_bonus=0.4, zeta=0.2)
        values = [(0, entropy[0, i].item()) for i in (1, 3, 4)] + [(1, entropy[1, i].item()) for i in (0, 1)]
        low, high = min(v for _, v in values), max(v for _, v in values)
        scaled = [(v - low) / (high - low + 1e-8) for _, v in values]
        mean = sum(math.exp(-1.3 * h) for h in scaled) / 5
        raw = []
        for i, (row, _) in enumerate(values):
            last = i == 4 or values[i + 1][0] != row
            bonus = 0 if last else 0.2 * math.exp(-0.4 * scaled[i + 1])
            raw.append(advantage[row].item() * math.exp(-1.3 * scaled[i]) / mean + bonus)
        assert_values(ours[weight == 1], *[r - sum(raw) / 5 for r in raw], atol=1e-9)
        assert ours[weight == 0].eq(0).all()
        assert empg_scale(entropy, weight)[weight == 1].mean().item() == pytest.approx(1)


class TestAem:
    def test_hand_values(self) -> None:
        scale = aem_scale(f64(0.2, 0.4, 0.6, 1.0), [0] * 4)
        assert_values(scale, 1.45285, 1.13148, 0.88120, 0.53447, atol=1e-5)
        torch.testing.assert_close(aem_advantages(2 * scale, f64(0.2, 0.4, 0.6, 1), [0] * 4), 2 * scale**2)

    def test_close_entropies_singles_and_missing_are_left_alone(self) -> None:
        entropy = f64(0.5, 0.55, 3, NAN, 0.1, 0.1, 0.9, NAN, 0.4)
        group = [0, 0, 1, 1, 2, 2, 3, 3, 3]
        scale = aem_scale(entropy, group)
        assert scale[:6].eq(1).all() and scale[7] == 1
        assert aem_scale(entropy, group, min_range=0)[4:6].eq(1).all()
        torch.testing.assert_close(scale[[6, 8]], aem_scale(f64(0.9, 0.4), [0, 0]))
        assert aem_scale(entropy, group, lam=0).eq(1).all()
        rows = aem_advantages(torch.ones(9, 2), entropy, group)
        torch.testing.assert_close(rows, scale.float()[:, None].expand(9, 2), check_dtype=False)


class TestTea:
    covariance = f64(0.95, -0.95, -0.95, 0.95)[None]

    def test_hand_values(self) -> None:
        weight = tea_weights(self.covariance)
        assert_values(weight[0], 0.4349458, 0.0650542, 0.0650542, 0.4349458, atol=1e-7)

    def test_infinite_temperature_is_the_plain_mean_and_a_cap_caps(self) -> None:
        assert_values(tea_weights(self.covariance, tau=INF)[0], *[0.25] * 4)
        assert_values(tea_weights(self.covariance, cap=1)[0], 0.25, 0.0650542, 0.0650542, 0.25, atol=1e-7)
