# SPDX-License-Identifier: Apache-2.0
"""Step rewards: holes, missing labels, trees, which turning points stay, gradients.

Values and gradients of the released codes stand in tests/golden.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from tests.support.core import assert_values, f64
from visalign.core.advantages.returns import discounted_returns
from visalign.core.rewards.steps import (
    branch_rewards,
    clip_step_rewards,
    delta_step_rewards,
    implicit_prm_loss,
    implicit_step_rewards,
    progress_loss,
    turning_point_rewards,
)

NAN = float("nan")
assert_hand = partial(assert_values, rtol=1e-9)
STEPS = torch.tensor([[0.2, 0.9, 0.6, 0.8]], dtype=torch.float64)


def test_absent_steps_change_nothing() -> None:
    """Left padding, holes and right padding, NaN inside: the present steps get what they get alone."""
    spread = torch.full((3, 7), NAN, dtype=torch.float64)
    weight = torch.zeros(3, 7)
    for row, steps in enumerate([(0, 1, 2, 3), (3, 4, 5, 6), (0, 2, 3, 6)]):
        spread[row, list(steps)] = STEPS[0]
        weight[row, list(steps)] = 1
    for ours, expected in (
        (delta_step_rewards(spread, weight), delta_step_rewards(STEPS)),
        (clip_step_rewards(spread, weight, eta=0.5), clip_step_rewards(STEPS, eta=0.5)),
        (implicit_step_rewards(spread, weight).step, implicit_step_rewards(STEPS).step),
    ):
        assert ours[weight == 0].eq(0).all()
        torch.testing.assert_close(ours[weight == 1].reshape(3, 4), expected.expand(3, 4))


def test_a_common_step_earns_the_mean_of_what_came_of_it() -> None:
    """Two trees of four: 0, 1, 2, 5 and 4, 4, x, 8, which split in two at each of two steps."""
    reward = f64(0, 1, 2, 5, 4, 4, NAN, 8)
    node = torch.tensor([[0, 0], [0, 1], [2, 2], [2, 3], [4, 4], [4, 5], [6, 6], [6, 7]])
    result = branch_rewards(reward, node)
    assert_hand(result[:, 0], 0.5, 0.5, 3.5, 3.5, 4, 4, 8, 8)
    assert_hand(result[:6, 1], 0, 1, 2, 5, 4, 4)
    assert result[6, 1].isnan() and result[7, 1] == 8
    separate = torch.arange(8)[:, None].expand(8, 2)
    assert torch.equal(branch_rewards(reward, separate).nan_to_num(-1), reward.nan_to_num(-1)[:, None].expand(8, 2))
    # equal rewards stay equal where one of three is missing, in any precision
    for value in (f64(*[0.1] * 6), torch.full((6,), 0.1)):
        some = torch.where(torch.arange(6) == 4, NAN, value)
        means = branch_rewards(some, torch.tensor([0, 0, 0, 3, 3, 3])[:, None])
        assert means.unique().tolist() == [value[0].item()]


def test_nca_and_kto_of_outcomes_by_hand() -> None:
    log_ratio = f64(0.5, -0.2, 0.3)[None]
    for label, nca in ((1.0, 1.5), (0.0, 0.5), (0.5, 1.0)):
        # at q = 0: −y ln ½ − ½ ln ½; of one completion z is q, so KTO's loss is ½
        assert_hand(implicit_prm_loss(0 * log_ratio, f64(label), form="nca"), nca * math.log(2))
        assert_hand(implicit_prm_loss(0 * log_ratio + 0.5, f64(label), form="kto"), 0.5)
    q = torch.tensor([[2.0], [-4.0]], dtype=torch.float64, requires_grad=True)  # mean −1, so z = 0
    losses = implicit_prm_loss(q, torch.tensor([1.0, 0.0]), beta=1.0, form="kto")
    right, wrong = 1 / (1 + math.exp(2)), 1 / (1 + math.exp(4))
    assert_hand(losses, right, wrong)
    losses.sum().backward()
    assert q.grad is not None
    assert_hand(q.grad[:, 0], -right * (1 - right), wrong * (1 - wrong))


def test_implicit_loss_with_missing_labels_absent_nan_and_extremes() -> None:
    log_ratio = torch.tensor([[1e6, NAN], [1e6, NAN], [NAN, NAN]], requires_grad=True)
    weight = torch.tensor([[1, 0], [1, 0], [0, 0]])
    loss = implicit_prm_loss(log_ratio, torch.tensor([1.0, 0.0, NAN]), weight)
    (slope,) = torch.autograd.grad(loss.sum(), log_ratio)
    assert loss.tolist() == [0, pytest.approx(5e4), 0]
    assert slope[:, 1].eq(0).all() and slope[2].eq(0).all() and slope[1, 0] == pytest.approx(0.05)
    assert implicit_prm_loss(torch.ones(1, 2).half(), torch.ones(1)).dtype == torch.float32


def test_balancing_keeps_the_largest_of_the_commoner_sign() -> None:
    """Three rises and one fall: the rise that matters most stays; with only rises all stay."""
    final, start = f64(1.0, 2.0, 0.5, -1.0), torch.zeros(4, dtype=torch.float64)
    middle = final[:, None] / 2
    assert turning_point_rewards(final, start, middle, balanced=False).turn.all()
    result = turning_point_rewards(final, start, middle)
    assert result.turn[:, 0].tolist() == [False, True, False, True]
    assert_hand(result.step_reward[:, 0], 0.5, 2, 0.25, -1)
    assert turning_point_rewards(final[:3], start[:3], middle[:3]).turn.all()


def test_contributions_that_add_up_to_the_outcome() -> None:
    """SPA-RL's worked case; the slope of every present step is 2 (Σ c − R), whatever the others are."""
    c = f64(0.2, 0.1, 0.5, 0.2)[None]
    assert progress_loss(c, f64(1)).item() < 1e-30
    assert_hand(discounted_returns(c)[0], 1, 0.8, 0.7, 0.2)
    predicted = torch.cat([c, c, torch.full_like(c, NAN)]).requires_grad_()
    weight = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]])
    loss = progress_loss(predicted, f64(0, 1, NAN), weight)
    assert_hand(loss, 1, 0.01, 0)
    (slope,) = torch.autograd.grad(loss.sum(), predicted)
    torch.testing.assert_close(slope, f64(*[2.0] * 4, -0.2, 0, -0.2, -0.2, *[0.0] * 4).reshape(3, 4))
    assert progress_loss(f64(NAN)[None], f64(1)).isnan(), "what an estimator says is not hidden"
    assert progress_loss(f64(NAN)[None], f64(NAN)).item() == 0
