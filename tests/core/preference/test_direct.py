# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation: hand values, identities between the rows, gradients, bad input.

Values and gradients of TRL's trainers stand in tests/golden/I_direct_preferences.json.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.core import assert_values, f64, normal
from visalign.core.preference.direct import (
    DIRECT,
    direct_preference_loss,
    dynamic_labels,
    implicit_reward,
    kto_loss,
    kto_reference_point,
)

PAIRED = [name for name, row in DIRECT.items() if row.loss is not None]
ANSWERS = (f64(-3, -8), f64(-5, -6), f64(-4, -7), f64(-4, -7), f64(2, 4), f64(1, 3))
"""Chosen, rejected, their references, their lengths: log-ratios 1 and −1 of the chosen, −1 and 1 of the rejected."""


def test_a_policy_that_is_its_reference_has_no_reward_and_the_loss_of_a_coin() -> None:
    better, worse = f64(-3.0, -9), f64(-5.0, -1)
    lengths = (f64(2, 3), f64(4, 1))
    for row in PAIRED:
        if not DIRECT[row].reference:
            continue
        loss = direct_preference_loss(better, worse, better, worse, *lengths, row=row)
        expected = {"hinge": 1.0, "ipo": 25.0}.get(row, math.log(2))
        assert_values(loss, expected, expected)
        assert_values(implicit_reward(better, better, lengths[0], row=row), 0, 0)


def test_robust_is_unbiased_under_flipped_labels() -> None:
    """Over pairs with a share ε flipped, its mean is the loss of the clean ones."""
    answers = [normal(5, seed=seed) for seed in range(4)]
    flipped = [answers[i] for i in (1, 0, 3, 2)]
    clean, turned = (direct_preference_loss(*log_probs, row="robust", eps=0.2) for log_probs in (answers, flipped))
    torch.testing.assert_close(0.8 * clean + 0.2 * turned, direct_preference_loss(*answers))


def test_far_pairs_stay_finite_and_half_precision_is_computed_in_float32() -> None:
    far = (torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]))
    zero = torch.zeros(2)
    assert_values(direct_preference_loss(*far, zero, zero, beta=1.0).double(), 1e4, 0.0)
    assert direct_preference_loss(*(tensor.bfloat16() for tensor in (*far, zero, zero))).dtype == torch.float32


def test_gradients_by_differences() -> None:
    leaves = [normal(4, seed=seed).requires_grad_() for seed in range(2)]
    rest = [normal(4, seed=2), normal(4, seed=3), f64(1, 2, 3, 4), f64(4, 3, 2, 1)]
    for row in PAIRED:
        assert torch.autograd.gradcheck(
            lambda better, worse, row=row: direct_preference_loss(better, worse, *rest, row=row, beta=0.7), leaves
        )


class TestPower:
    def test_hand_values(self) -> None:
        """The second pair: m = 2 (−4 + 1)/2 − 2 (−6 + 1)/4 = −1/2, and η β w log π = 0.1 · 2 · (−4)/2."""
        lengths = f64(10), f64(10)
        for eta, expected in ((0.0, 0.126928), (None, 0.127928)):
            loss = direct_preference_loss(f64(-10), f64(-20), None, None, *lengths, row="power", eta=eta)
            assert loss.item() == pytest.approx(expected, abs=5e-7)
        second = direct_preference_loss(f64(-4), f64(-6), None, None, f64(2), f64(4), row="power", eta=0.1)
        assert_values(second, math.log1p(math.exp(0.5)) + 0.4)

    def test_of_answers_of_one_length_it_is_simpo_without_a_margin(self) -> None:
        answers, length = [normal(5, seed=seed) for seed in range(2)], f64(3, 1, 4, 1, 5)
        arguments: dict[str, Any] = dict(zip(("chosen", "rejected"), answers, strict=True))
        arguments |= {"chosen_length": length, "rejected_length": length}
        simpo = direct_preference_loss(**arguments, row="simpo", gamma=0.0)
        torch.testing.assert_close(direct_preference_loss(**arguments, row="power", eta=0.0), simpo)

    @pytest.mark.parametrize("row", ["sigmoid_norm", "simpo", "power"])
    def test_a_stationary_label_takes_the_gradient_and_one_of_1_changes_nothing(self, row: str) -> None:
        better, worse = normal(5, seed=0).requires_grad_(), normal(5, seed=1).requires_grad_()
        refs, lengths = (normal(5, seed=2), normal(5, seed=3)), (f64(1, 2, 3, 4, 5), f64(5, 4, 3, 2, 1))
        rewards = [implicit_reward(a, r, n, row=row) for a, r, n in zip((better, worse), refs, lengths, strict=True)]
        lead = rewards[0] - rewards[1] - DIRECT[row].gamma
        eta = 0.0 if row == "power" else None
        options: dict[str, Any] = {"row": row, "eta": eta}
        arguments = (better, worse, *refs, *lengths)
        still = direct_preference_loss(*arguments, **options, label=torch.sigmoid(lead))
        assert all(bool((slope == 0).all()) for slope in torch.autograd.grad(still.sum(), [better, worse]))
        plain = direct_preference_loss(*arguments, **options)
        assert_values(direct_preference_loss(*arguments, **options, label=torch.ones(5)), *plain.tolist())
        smooth = direct_preference_loss(*arguments, **options, eps=0.2)
        assert_values(direct_preference_loss(*arguments, **options, label=f64(*[0.8] * 5)), *smooth.tolist())

    def test_labels_go_a_part_of_the_way_to_the_stationary_one(self) -> None:
        label, lead = f64(1, 1, 0.5, 0.3), f64(0, math.log(3), -math.inf, math.nan).requires_grad_()
        moved = dynamic_labels(label, lead, rate=0.2)
        assert_values(moved, 0.9, 0.95, 0.4, 0.3)
        assert not moved.requires_grad and torch.equal(dynamic_labels(label, lead, rate=0), label)


class TestVotes:
    def test_the_reference_point_is_no_less_than_zero_and_has_no_gradient(self) -> None:
        log_prob = f64(-1, -2).requires_grad_()
        point = kto_reference_point(log_prob, f64(-3, -3))
        assert point == 1.5 and not point.requires_grad
        assert kto_reference_point(log_prob, f64(0, 0)) == 0

    def test_a_vote_moves_its_answer_towards_it(self) -> None:
        log_prob = f64(-3, -3).requires_grad_()
        loss = kto_loss(log_prob, f64(-3, -3), torch.tensor([True, False]), f64(0)[0])
        (slope,) = torch.autograd.grad(loss.sum(), log_prob)
        assert_values(slope, -0.1 / 4, 0.1 / 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.1, "row": "ipo"}, "row ipo with eps=0.1 has no use for eps; leave it out"),
        ({"ref_chosen": None}, "row sigmoid measures from a reference; give ref_log_prob, or take simpo"),
        ({"row": "simpo"}, "row simpo divides by the tokens of a completion; give their number as length"),
    ],
)
def test_bad_input_by_its_message(options: dict[str, Any], message: str) -> None:
    names = ("chosen", "rejected", "ref_chosen", "ref_rejected")
    with pytest.raises(ValueError, match=message):
        direct_preference_loss(**{**dict(zip(names, ANSWERS, strict=False)), **options})
