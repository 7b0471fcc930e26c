# SPDX-License-Identifier: Apache-2.0
"""Weights of a checklist: found again from votes, never negative, optimal; masks, holes, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.core import assert_values, f64, normal
from visalign.core.preference.bradley_terry import bradley_terry_loss
from visalign.rewards.questions.checklist import ChecklistRule, fit_checklist, fit_weights

TRUE = (1.5, 0.0, 0.4, 0.8)


def answers(pairs: int, questions: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.rand(2, pairs, questions, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (draw[0] > 0.5).double(), (draw[1] > 0.5).double()


def test_exact_labels_give_the_weights_back() -> None:
    left, right = (2 * part - 1 for part in answers(500, 4))
    label = torch.sigmoid((left - right) @ f64(*TRUE))
    fit = fit_weights(left, right, label, penalty=0)
    assert_values(fit.weights, *TRUE, rtol=1e-4, atol=1e-5)
    assert fit.pairs == 500 and fit.left_out == 0 and fit.accuracy > 0.99
    assert fit.loss == pytest.approx(
        bradley_terry_loss((left - right) @ f64(*TRUE), torch.zeros(500).double(), label).mean().item(),
        rel=1e-6,
    )


def test_no_weight_is_negative_and_the_rest_is_optimal() -> None:
    """A question that speaks against an image gets 0, and no allowed step lowers the loss."""
    left, right = (2 * part - 1 for part in answers(400, 4, seed=1))
    label = torch.sigmoid((left - right) @ f64(1.0, -0.7, 0.5, 0.2))
    fit = fit_weights(left, right, label, penalty=1e-3)
    assert fit.weights[1] == 0 and (fit.weights >= 0).all()
    free = fit_weights(left, right, label, penalty=1e-3, non_negative=False)
    assert free.weights[1] == pytest.approx(-0.7, rel=0.05) and free.loss < fit.loss
    w = fit.weights.clone().requires_grad_()
    loss = bradley_terry_loss((left - right) @ w, torch.zeros(400).double(), label).mean()
    (slope,) = torch.autograd.grad(loss + 0.5e-3 * w.square().sum(), w)
    assert slope[1] > 0 and slope[[0, 2, 3]].abs().max() < 1e-6


def test_votes_weigh_and_missing_pairs_are_left_out() -> None:
    left, right = (2 * part - 1 for part in answers(60, 3, seed=2))
    label = (torch.rand(60, generator=torch.Generator().manual_seed(3)) > 0.4).double()
    votes = torch.arange(60).remainder(4).double()
    once = fit_weights(left, right, label, weight=votes)
    again = torch.repeat_interleave(torch.arange(60), votes.long())
    copied = fit_weights(left[again], right[again], label[again])
    torch.testing.assert_close(once.weights, copied.weights, rtol=1e-5, atol=1e-7)
    assert once.left_out == 15
    left[0, 1], label[1] = math.nan, math.nan
    holes = fit_weights(left, right, label)
    rest = fit_weights(left[2:], right[2:], label[2:])
    assert holes.left_out == 2
    torch.testing.assert_close(holes.weights, rest.weights)


def test_the_rule_that_is_returned_scores_as_it_was_fitted() -> None:
    yes_left, yes_right = answers(800, 5, seed=4)
    alignment = normal(2, 800, seed=5)
    truth = ChecklistRule(weights=(2.0, 0.9, 0.3, 0.6, 0.4), masked={0: (3,)}, has_alignment=True)
    label = torch.sigmoid(truth.score(yes_left, alignment[0]) - truth.score(yes_right, alignment[1]))
    rule, fit = fit_checklist(
        yes_left,
        yes_right,
        label,
        masked={0: (3,)},
        left_alignment=alignment[0],
        right_alignment=alignment[1],
        penalty=0,
    )
    assert rule.masked == {0: (3,)} and rule.has_alignment
    assert_values(torch.tensor(rule.weights).double(), *truth.weights, rtol=1e-3)
    torch.testing.assert_close(
        rule.score(yes_left, alignment[0]), truth.score(yes_left, alignment[0]), rtol=1e-3, atol=1e-3
    )
    assert fit.accuracy == 1.0
    soft = fit_checklist(0.1 + 0.8 * yes_left, 0.1 + 0.8 * yes_right, label)[0]
    assert not soft.has_alignment and len(soft.weights) == 5


def test_ties_alone_say_nothing() -> None:
    left, right = answers(30, 2)
    fit = fit_weights(left, right, torch.full((30,), 0.5).double())
    assert_values(fit.weights, 0, 0, atol=1e-7)
    assert fit.loss == pytest.approx(math.log(2)) and math.isnan(fit.accuracy)


def test_a_question_that_separates_the_pairs_is_held_by_the_penalty() -> None:
    left, right = torch.ones(20, 1).double(), -torch.ones(20, 1).double()
    small, large = (fit_weights(left, right, torch.ones(20).double(), penalty=p).weights for p in (0.01, 1.0))
    assert 0 < large < small < 5


WEIGHTS: Any = fit_weights
CHECKLIST: Any = fit_checklist
ONE: Any = (torch.ones(1, 2), torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: WEIGHTS(torch.ones(2), torch.ones(2), f64(1, 1)),
            r"must be \[N, F\] and label \[N\]; got \(2,\)",
        ),
        (
            lambda: WEIGHTS(*ONE, f64(1), weight=f64(1, 1)),
            r"weight must be \(1,\) like label; got \(2,\)",
        ),
        (lambda: WEIGHTS(*ONE, f64(1), penalty=-1), "penalty must be finite and ≥ 0; got -1"),
        (lambda: WEIGHTS(*ONE, f64(1.5)), r"label must lie in \[0, 1\]"),
        (lambda: WEIGHTS(*ONE, f64(1), weight=f64(-1)), "each weight be ≥ 0"),
        (
            lambda: WEIGHTS(*ONE, f64(math.nan)),
            "None of the 1 pairs has all answers, a label and a weight",
        ),
        (lambda: CHECKLIST(*ONE, f64(1), left_alignment=f64(1)), "go together; one of them is missing"),
        (lambda: CHECKLIST(*ONE, f64(1), masked={0: (7,)}), "The masks name question 7; there are 2"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
