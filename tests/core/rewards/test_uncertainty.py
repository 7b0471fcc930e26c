# SPDX-License-Identifier: Apache-2.0
"""Uses of a judge's uncertainty: overlap, bounds, ensembles, shrinkage, Ctrl-U, Laplace maps, old pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch.nn import functional as F

from tests.support.core import assert_values, f64, normal
from visalign.core.preference.diversity import nuclear_diversity
from visalign.core.preference.heatmaps import ctrl_u_loss, fuse_heatmaps, laplace_loss
from visalign.core.preference.off_policy import off_policy_pair_weights, relative_log_density
from visalign.core.rewards.uncertainty import (
    bhattacharyya,
    bhattacharyya_overlap,
    combine_members,
    penalise,
    relative_uncertainty_weight,
)

NAN = float("nan")


class TestOverlap:
    def test_equals_the_integral(self) -> None:
        cases = ((0.0, 1.0, 0.5, 2.0), (-1.0, 0.3, 1.0, 0.5), (2.0, 0.7, 2.0, 0.7))
        for m, s, n, t in cases:
            expected = quad(
                lambda x, p=(m, s, n, t): math.sqrt(norm.pdf(x, p[0], p[1]) * norm.pdf(x, p[2], p[3])), -20, 20
            )[0]
            assert bhattacharyya(f64(m), f64(s), f64(n), f64(t)).item() == pytest.approx(expected, rel=1e-8)

    def test_mean_overlap_with_the_others(self) -> None:
        mean, std = normal(6), normal(6, seed=1).abs() + 0.1
        table = bhattacharyya(mean, std, mean, std)
        assert_values(table.diagonal(), *[1.0] * 6)
        torch.testing.assert_close(table, table.T)
        loops = [sum(table[i, j].item() for j in range(6) if j != i) / 5 for i in range(6)]
        assert_values(bhattacharyya_overlap(mean, std), *loops)
        assert bhattacharyya_overlap(mean[:1], std[:1]).item() == 0

    def test_penalty_is_a_lower_bound(self) -> None:
        assert_values(penalise(f64(2, 1), f64(0.5, 0), strength=2), 1, 1)


class TestMembers:
    MEAN = torch.tensor([[1, 2, NAN], [3, 2, NAN], [5, NAN, NAN]], dtype=torch.float64)

    def test_by_hand(self) -> None:
        mean, spread = combine_members(self.MEAN)
        assert_values(mean, 3, 2, NAN)
        assert_values(spread, 2, 0, NAN)
        assert_values(combine_members(self.MEAN, how="min")[0], 1, 2, NAN)
        assert_values(combine_members(self.MEAN, how="lower_bound", strength=0.5)[0], 2, 2, NAN)
        std = torch.tensor([[1.0, 1, 1], [2, 1, 1], [1e9, NAN, 1]], dtype=torch.float64)
        precise = combine_members(self.MEAN, std=std, how="inverse_variance")[0]
        assert_values(precise[:2], (1 + 3 / 4) / (5 / 4), 2, rtol=1e-5)
        assert precise[2].isnan()

    def test_a_member_without_a_known_deviation_has_no_weight(self) -> None:
        std = torch.tensor([[1.0, NAN], [2, NAN], [NAN, NAN]], dtype=torch.float64)
        mean = torch.tensor([[1.0, 1], [3, 3], [1000, 5]], dtype=torch.float64)
        precise, spread = combine_members(mean, std=std, how="inverse_variance")
        assert_values(precise[:1], (1 + 3 / 4) / (5 / 4), rtol=1e-5)
        assert precise[1].isnan() and spread[1] == 2
        vague = torch.tensor([[1e20], [2e20]], dtype=torch.float64)
        assert_values(combine_members(f64(0, 5)[:, None], std=vague, how="inverse_variance")[0], 1)


class TestWeightsOfAdvantages:
    def test_hand_values(self) -> None:
        u = f64(0, 1, 2, NAN).requires_grad_()
        result = relative_uncertainty_weight(u, strength=2.0)
        assert_values(result[:3], 1, math.exp(-2), math.exp(-4))
        assert bool(result[3].isnan()) and not result.requires_grad
        assert_values(relative_uncertainty_weight(f64(1, 2)), math.exp(-2 / 3), math.exp(-4 / 3))

    def test_certain_samples_keep_their_advantage_and_set_no_scale_where_they_are_most(self) -> None:
        result = relative_uncertainty_weight(f64(0, 0, 0, 3, 1))
        assert_values(result, 1, 1, 1, math.exp(-1.5), math.exp(-0.5))
        assert_values(relative_uncertainty_weight(f64(0, 0)), 1, 1)


class TestCtrlU:
    def test_disagreement_is_a_kl(self) -> None:
        first, second, labels = normal(2, 4, 3), normal(2, 4, 3, seed=1), torch.zeros(2, 3, dtype=torch.int64)
        expected = F.kl_div(first.log_softmax(1), second.softmax(1), reduction="none").sum(1).mean()
        torch.testing.assert_close(ctrl_u_loss(first, second, labels).uncertainty, expected)

    def test_agreement_is_plain_cross_entropy_of_what_counts(self) -> None:
        logits, labels = normal(3, 4, 2, 2), torch.tensor([0, 3, 255, 1]).reshape(1, 2, 2).expand(3, 2, 2)
        result = ctrl_u_loss(logits, logits, labels, counted=f64(1, 0, 1), weight=0.3)
        losses = [F.cross_entropy(logits[i : i + 1], labels[i : i + 1], ignore_index=255) for i in (0, 2)]
        torch.testing.assert_close(result.reward, torch.stack(losses).mean())
        torch.testing.assert_close(result.total, 0.3 * result.reward)
        assert result.uncertainty.abs() < 1e-15

    def test_without_detaching_disagreement_lowers_the_weighted_loss(self) -> None:
        primary, auxiliary = normal(2, 4, 3).requires_grad_(), normal(2, 4, 3, seed=1).requires_grad_()
        labels = torch.zeros(2, 3, dtype=torch.int64)
        slopes = {}
        for detach in (False, True):
            result = ctrl_u_loss(primary, auxiliary, labels, detach=detach)
            slopes[detach] = torch.autograd.grad(result.reward, auxiliary, allow_unused=True)[0]
            expected = 0.1 * result.reward + (0 if detach else result.uncertainty)
            torch.testing.assert_close(result.total, expected)
        assert slopes[False].abs().max() > 0 and slopes[True] is None
        assert torch.autograd.gradcheck(lambda a, b: ctrl_u_loss(a, b, labels).total, (primary, auxiliary))


class TestMaps:
    def test_laplace_is_least_where_the_scale_is_the_error(self) -> None:
        error = f64(0.3, 1.2)
        scale = (math.sqrt(2) * error).requires_grad_()
        loss = laplace_loss(error, torch.zeros(2).double(), scale)
        assert_values(loss.detach(), *(1 + torch.log(scale)).tolist())
        assert torch.autograd.grad(loss.sum(), scale)[0].abs().max() < 1e-12
        assert torch.autograd.gradcheck(
            lambda h, s: laplace_loss(h, f64(1, 2), s), (f64(0.5, 3).requires_grad_(), scale)
        )

    def test_fusion_by_hand(self) -> None:
        maps, scale = (
            torch.stack([f64(0, 1, 1), f64(1, 0, NAN)]),
            torch.stack([f64(0, 2, 1), f64(math.log(3), 2, NAN)]),
        )
        valid = torch.tensor([[True, True, False], [True, True, False]])
        merged, weight = fuse_heatmaps(maps, scale, valid=valid)
        assert_values(merged, 0.25, 0.5, NAN)
        assert_values(weight[0], 0.75, 0.5, 0)
        first_only = fuse_heatmaps(maps, scale, valid=torch.tensor([[True] * 3, [False] * 3]))[0]
        assert_values(first_only, 0, 1, 1)


class TestOldPairs:
    def test_by_hand(self) -> None:
        ratio = relative_log_density(f64(math.log(0.4)), f64(math.log(0.1)), alpha=0.2)
        assert_values(ratio, math.log(0.4 / (0.2 * 0.4 + 0.8 * 0.1)))
        weight = off_policy_pair_weights(
            *[f64(math.log(0.4))] * 2, *[f64(math.log(0.1))] * 2, alpha=0.2, multiplier=0.5, normalise=False
        )
        assert_values(weight, 2.5)

    def test_as_the_paper_writes_it(self) -> None:
        """α = 0, m = 1: w = π(a_w) π(a_l) / (π₁(a_w) π₁(a_l)), also where e^ratio is no number."""
        zeros = f64(0, 0)
        paper: dict[str, Any] = {"alpha": 0.0, "multiplier": 1.0}
        weight = off_policy_pair_weights(f64(1, 5), f64(1, 5), zeros, zeros, **paper, normalise=False)
        assert_values(weight, math.exp(2), math.exp(10))
        huge = off_policy_pair_weights(f64(900, 899), f64(0, 0), zeros, zeros, **paper)
        assert_values(huge, 2 / (1 + math.exp(-1)), 2 / (1 + math.e))

    def test_an_unmoved_policy_weighs_all_alike_and_the_mean_is_one(self) -> None:
        logs = [normal(7, seed=s) * 5 for s in range(4)]
        assert_values(off_policy_pair_weights(logs[0], logs[1], logs[0], logs[1]), *[1.0] * 7)
        leaf = logs[0].requires_grad_()
        weight = off_policy_pair_weights(leaf, *logs[1:])
        assert weight.mean().item() == pytest.approx(1) and not weight.requires_grad


class TestDiversityOfMembers:
    def test_one_for_matrices_that_share_nothing_less_for_equal_ones(self) -> None:
        eye = torch.eye(8, dtype=torch.float64)
        assert nuclear_diversity([eye[:2], eye[2:4]]).item() == pytest.approx(1)
        assert nuclear_diversity([eye[:2], eye[:2]]).item() == pytest.approx(0.5**0.5)
        assert nuclear_diversity([eye[:, :2], eye[:, 3:5]], dim=1).item() == pytest.approx(1)

    def test_by_singular_values_and_without_regard_to_scale(self) -> None:
        first, second = normal(3, 7), normal(3, 7, seed=1)
        result = nuclear_diversity([first, second])
        values = torch.linalg.svdvals(torch.cat([first, second]))
        torch.testing.assert_close(result, values.sum() / values.square().sum().sqrt() / 6**0.5)
        torch.testing.assert_close(nuclear_diversity([5 * first, 5 * second]), result)

    def test_a_member_that_is_zero_is_drawn_to_where_the_others_are_not(self) -> None:
        other, zeros = torch.eye(4, dtype=torch.float64)[:, :1], torch.zeros(4, 1, dtype=torch.float64)
        zeros.requires_grad_()
        nuclear_diversity([other, zeros], dim=1).backward()
        assert zeros.grad is not None and zeros.grad[0].item() == pytest.approx(0, abs=1e-9)
        assert zeros.grad.norm().item() == pytest.approx(0.5**0.5)  # of ‖C‖_* 1, over ‖C‖_F √2
        leaf = normal(3, 4).requires_grad_()
        assert torch.autograd.gradcheck(lambda x: nuclear_diversity([normal(2, 4, seed=3), x]), (leaf,))
