# SPDX-License-Identifier: Apache-2.0
"""Yes or no from logits: sets of tokens, mass, losses, both orders; hand values, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.support.core import assert_values, f64, normal
from visalign.core.preference.yes_no import YesNo, both_orders, yes_no_answer, yes_no_loss, yes_no_pair_loss

NAN = float("nan")


def answer(log_odds: Tensor, mass: float = 1.0) -> YesNo:
    """An answer with these log-odds that holds this share of the vocabulary."""
    yes, no = torch.sigmoid(log_odds), torch.sigmoid(-log_odds)
    return YesNo(log_odds, (mass * yes).log(), (mass * no).log())


class TestAnswer:
    def test_hand_values(self) -> None:
        logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.05, 0.35]], dtype=torch.float64))
        yes_no = yes_no_answer(logits + 7, [0, 2], [1])
        assert_values(yes_no.log_odds, math.log(0.4 / 0.2))
        assert_values(yes_no.prob, 2 / 3)
        assert_values(yes_no.mass, 0.6)
        assert_values(yes_no.log_yes.exp(), 0.4)

    def test_saturated_answers_still_differ(self) -> None:
        logits = torch.tensor([[60.0, 0], [90, 0]])
        yes_no = yes_no_answer(logits, [0], [1])
        assert yes_no.prob[0] == yes_no.prob[1] == 1 and yes_no.log_odds.tolist() == [60, 90]

    def test_log_probabilities_of_a_few_tokens(self) -> None:
        log_probs = f64(math.log(0.5), math.log(0.2), math.log(0.1))
        yes_no = yes_no_answer(log_probs, [0, 2], [1], normalised=True)
        assert yes_no.mass.item() == pytest.approx(0.8) and yes_no.log_odds.item() == pytest.approx(math.log(3))
        neither = yes_no_answer(log_probs, [], [], normalised=True)
        assert neither.log_odds.isnan() and neither.prob.isnan() and neither.mass == 0
        only_yes = yes_no_answer(log_probs, [0], [], normalised=True)
        assert only_yes.log_odds.isnan() and only_yes.prob.isnan() and only_yes.mass.item() == pytest.approx(0.5)
        certain = yes_no_answer(f64(math.log(0.5), -math.inf), [0], [1], normalised=True)
        assert certain.log_odds == math.inf and certain.prob == 1

    def test_precision_neighbours_and_gradient(self) -> None:
        logits = normal(3, 6)
        yes_no = yes_no_answer(logits.bfloat16(), [0], [3, 4])
        assert yes_no.log_odds.dtype == torch.float32
        batch, single = yes_no_answer(logits, [0], [3, 4]), yes_no_answer(logits[1:2], [0], [3, 4])
        assert torch.equal(batch.log_odds[1:2], single.log_odds) and torch.equal(batch.mass[1:2], single.mass)
        leaf = logits.clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda z: (yes_no_answer(z, [0, 1], [3]).log_odds, yes_no_answer(z, [0, 1], [3]).mass), (leaf,)
        )


class TestLosses:
    def test_likelihood_by_hand(self) -> None:
        yes_no, label = answer(f64(math.log(3), 0), 0.5), f64(1, 0.25)
        assert_values(yes_no_loss(yes_no, label), -math.log(0.75), math.log(2))
        assert yes_no_loss(yes_no, f64(NAN, NAN)).eq(0).all()

    def test_pairs_on_log_odds(self) -> None:
        left, right = answer(f64(4, 0)), answer(f64(2, 1))
        assert_values(yes_no_pair_loss(left, right), math.log1p(math.exp(-2)), math.log1p(math.exp(1)))
        assert yes_no_pair_loss(answer(f64(80)), answer(f64(-80))).item() < 1e-60

    def test_the_likelihood_term(self) -> None:
        left, right, label = answer(f64(0.4, 1)), answer(f64(-0.1, 2)), f64(1, 0.3)
        with_term = yes_no_pair_loss(left, right, label, likelihood_weight=0.1)
        losses = yes_no_loss(left, label) + yes_no_loss(right, 1 - label)
        torch.testing.assert_close(with_term, yes_no_pair_loss(left, right, label) + 0.1 * losses)
        one = yes_no_pair_loss(left, right, likelihood_weight=1.0)
        assert_values(
            one[:1] - yes_no_pair_loss(left, right)[:1], math.log1p(math.exp(-0.4)) + math.log1p(math.exp(-0.1))
        )

    def test_gradients(self) -> None:
        logits = [normal(3, 5, seed=s).requires_grad_() for s in (0, 1)]
        assert torch.autograd.gradcheck(
            lambda a, b: yes_no_pair_loss(
                yes_no_answer(a, [0, 1], [2]), yes_no_answer(b, [0, 1], [2]), f64(1, 0.3, NAN), likelihood_weight=0.2
            ),
            logits,
        )

    def test_both_orders(self) -> None:
        """A true lead of 1.5 and a bias of 0.4 for the first place."""
        lead, bias = both_orders(f64(1.5 + 0.4), f64(-1.5 + 0.4))
        assert_values(lead, 1.5)
        assert_values(bias, 0.4)
