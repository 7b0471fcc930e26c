# SPDX-License-Identifier: Apache-2.0
"""Votes, Bradley-Terry and its variants, ties, averages: hand values, identities, gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.support.core import assert_values, f64, normal
from visalign.core.preference.bradley_terry import (
    average_pairs,
    bradley_terry_loss,
    margin_ranking_loss,
    outcome_loss,
    soft_labels,
    tie_log_prob,
    vote_shares,
)

NAN = float("nan")


class TestVotes:
    def test_hand_values(self) -> None:
        left, right, ties = f64(3, 0, 0, 2), f64(1, 0, 5, 0), f64(0, 2, 0, 0)
        assert_values(soft_labels(left, right, ties), 0.75, 0.5, 0, 1)
        assert_values(soft_labels(left, right, ties, smoothing=1), 4 / 6, 0.5, 1 / 7, 3 / 4)
        assert_values(vote_shares(left, right, ties)[0], 0.75, 0, 0.25)
        assert_values(vote_shares(left, right, ties, smoothing=1)[1], 1 / 5, 3 / 5, 1 / 5)

    def test_nobody_voted(self) -> None:
        none = f64(0)
        assert soft_labels(none, none).isnan().all() and vote_shares(none, none, none).isnan().all()
        assert_values(soft_labels(none, none, smoothing=0.5), 0.5)

    def test_vote_counts_are_a_binomial_likelihood(self) -> None:
        """One pair with 3 : 1 votes weighs and pulls like its four votes given one by one."""
        lead = f64(0.4).requires_grad_()
        label, weight = soft_labels(f64(3), f64(1)), f64(4)
        together = average_pairs(bradley_terry_loss(lead, f64(0), label), weight, over="none")
        one_by_one = bradley_terry_loss(lead.expand(4), torch.zeros(4).double(), f64(1, 1, 1, 0)).sum()
        torch.testing.assert_close(together, one_by_one)
        slopes = [torch.autograd.grad(loss, lead)[0] for loss in (together, one_by_one)]
        torch.testing.assert_close(*slopes)


class TestBradleyTerry:
    def test_sides_can_be_swapped(self) -> None:
        left, right, label = normal(20), normal(20, seed=1), torch.rand(20).double()
        rows: tuple[dict[str, Any], ...] = (
            {},
            {"margin": 0.4},
            {"centre": 0.1},
            {"displacement": 0.6},
            {"margin": normal(20, seed=3)},
        )
        for options in rows:
            torch.testing.assert_close(
                bradley_terry_loss(left, right, label, **options),
                bradley_terry_loss(right, left, 1 - label, **options),
            )

    def test_a_pair_without_label_costs_nothing_even_with_nan_scores(self) -> None:
        left, right = f64(NAN, 1).requires_grad_(), f64(2, 0)
        loss = bradley_terry_loss(left, right, f64(NAN, 1), centre=0.1)
        assert loss[0] == 0 and loss[1] > 0
        (slope,) = torch.autograd.grad(loss.sum(), left)
        assert slope[0] == 0 and slope[1] != 0

    def test_gradient(self) -> None:
        left, right = (normal(5, seed=s).requires_grad_() for s in (0, 1))
        label = f64(0, 0.2, 0.5, 1, NAN)
        assert torch.autograd.gradcheck(
            lambda a, b: bradley_terry_loss(a, b, label, margin=0.2, centre=0.05, displacement=0.8), (left, right)
        )


class TestTies:
    @pytest.mark.parametrize("model", ["rao_kupper", "davidson"])
    @pytest.mark.parametrize("strength", [1.5, 5.0])
    def test_probabilities_sum_to_one_and_mirror(self, model: str, strength: float) -> None:
        left, right = 4 * normal(30), normal(30, seed=1)
        direct = tie_log_prob(left, right, strength, model=model)  # pyright: ignore[reportArgumentType]  # parametrised
        assert_values(direct.exp().sum(-1), *[1.0] * 30)
        mirrored = tie_log_prob(right, left, strength, model=model)  # pyright: ignore[reportArgumentType]
        torch.testing.assert_close(direct, mirrored.flip(-1))

    def test_hand_values(self) -> None:
        won = math.exp(1) / (math.exp(1) + 2)
        lost = 1 / (1 + 2 * math.exp(1))
        assert_values(tie_log_prob(f64(1), f64(0), 2.0).exp()[0], won, 1 - won - lost, lost)
        total = math.exp(0.5) + 2 + math.exp(-0.5)
        prob = tie_log_prob(f64(1), f64(0), 2.0, model="davidson").exp()[0]
        assert_values(prob, math.exp(0.5) / total, 2 / total, math.exp(-0.5) / total)

    def test_no_ties_is_bradley_terry(self) -> None:
        left, right = normal(9), normal(9, seed=1)
        for model, strength in (("rao_kupper", 1 + 1e-12), ("davidson", 1e-12)):
            log_prob = tie_log_prob(left, right, strength, model=model)  # pyright: ignore[reportArgumentType]
            torch.testing.assert_close(-log_prob[:, 0], bradley_terry_loss(left, right))

    def test_gradient_and_missing_shares(self) -> None:
        left, right, strength = (
            normal(3).requires_grad_(),
            normal(3, seed=1).requires_grad_(),
            f64(2).requires_grad_(),
        )
        share = torch.stack([f64(0.2, 0.5, 0.3), f64(NAN, NAN, NAN), f64(0, 1, 0)])
        for model in ("rao_kupper", "davidson"):
            assert torch.autograd.gradcheck(
                lambda a, b, k, m=model: outcome_loss(tie_log_prob(a, b, k, model=m), share),  # pyright: ignore[reportArgumentType]
                (left, right, strength),
            )
        assert outcome_loss(tie_log_prob(left, right, 2.0), share)[1] == 0


def test_margin_ranking() -> None:
    assert_values(margin_ranking_loss(f64(1, 0.2, 0), f64(0, 0, 1), margin=0.3), 0, 0.1, 1.3)
    better, worse = normal(8), normal(8, seed=1)
    theirs = F.margin_ranking_loss(better, worse, torch.ones(8), margin=0.3, reduction="none")
    torch.testing.assert_close(margin_ranking_loss(better, worse, margin=0.3), theirs)


def test_averages() -> None:
    loss, weight = f64(1, 2, 4), f64(1, 0, 3)
    assert average_pairs(loss).item() == pytest.approx(7 / 3)
    assert average_pairs(loss, weight).item() == pytest.approx(13 / 4)
    assert average_pairs(loss, weight, over="pairs").item() == pytest.approx(13 / 3)
    assert average_pairs(loss, weight, over="none").item() == pytest.approx(13)
    assert average_pairs(loss, torch.zeros(3)).item() == 0
    assert average_pairs(loss[:0], over="pairs").item() == 0
