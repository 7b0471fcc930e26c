# SPDX-License-Identifier: Apache-2.0
"""Ranks of hidden states and the latent flow: hand values, identities, edges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.core import LABELS, assert_values, f64, normal, step
from visalign.core.advantages.group import group_advantages
from visalign.core.advantages.hidden_states import (
    effective_rank,
    flow_deviation,
    flow_rewards,
    rank_average,
    rank_bonus,
    rank_dynamics,
)
from visalign.core.objective.algorithms import named_objective

NAN = float("nan")


def test_effective_rank() -> None:
    cross = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    assert float(effective_rank(cross)) == pytest.approx(2)
    line = torch.arange(4.0)[:, None] * torch.tensor([1.0, 2, -1])
    assert float(effective_rank(line)) == pytest.approx(1)
    value = normal(7, 4)
    turned = value @ torch.linalg.qr(normal(4, 4, seed=1)).Q
    torch.testing.assert_close(effective_rank(3 * turned + 1e3), effective_rank(value), rtol=1e-9, atol=0)
    assert 1 < effective_rank(value) <= 4
    stack = normal(2, 3, 5, 4)
    torch.testing.assert_close(effective_rank(stack)[1, 2], effective_rank(stack[1, 2]))


def test_velocity_and_acceleration_are_those_of_the_ranks_of_prefixes() -> None:
    states = normal(11, 5)
    m = [float(effective_rank(states[:end])) for end in (3, 6, 9)]
    first, second = m[1] - m[0], m[2] - (m[0] + m[1]) / 2
    expected = float(effective_rank(states)), (first + second) / 2, second - first
    assert_values(rank_dynamics(states, stride=3), *expected)
    assert_values(
        rank_dynamics(states, stride=5)[1:], float(effective_rank(states[:10])) - float(effective_rank(states[:5])), 0
    )
    assert_values(rank_dynamics(states, stride=6)[1:], 0, 0)  # one stride
    assert_values(rank_dynamics(states[:0]), 0, 0, 0)


def test_the_bonus_is_capped_by_the_advantage_and_turns_no_sign() -> None:
    """(A, aux) -> A′: (−1, .8) -> −.5; (1, .3) -> 1.3; (1, −.4) -> 1; (0, .9) -> 0."""
    aux = f64(0.8, 0.3, -0.4, 0.9)
    away = torch.atanh(aux)  # of rank and velocity alike, so that β does not matter
    rank = torch.stack([2 * (1 + away), 2 * (1 + away), f64(3, 1, 2, 2)], 1)
    assert_values(rank_bonus(f64(-1, 1, 1, 0), rank, (2.0, 2.0, 2.0)), -0.5, 1.3, 1, 0)
    accelerated = f64(1.2, 1.0, 1.5)[None]  # x = .2, 0, .5: β = σ(1)
    assert_values(rank_bonus(f64(1), accelerated, (1.0, 1.0, 1.0)), 1 + math.tanh(0.2) / (1 + math.exp(-1)))
    assert_values(rank_bonus(f64(1, 2), f64(NAN, 1, 1).expand(2, 3), (0.5, 0.5, 0.5)), 1, 2)
    assert_values(rank_bonus(f64(1, 2), torch.ones(2, 3), None), 1, 2)
    assert_values(rank_bonus(f64(1), f64(3, 1, 1)[None], (0.0, 1.0, 1.0)), 1)  # no average to be off


def test_the_average_moves_by_its_rate_and_leaves_out_what_is_missing() -> None:
    rank = torch.stack([f64(1, 2, 3), f64(3, 4, 5), f64(NAN, 1, 1)])
    assert rank_average(rank, None) == (2, 3, 4)
    assert rank_average(rank, (1.0, 1.0, 1.0)) == pytest.approx((1.3, 1.6, 1.9))
    assert rank_average(rank[2:], None) is None and rank_average(rank[2:], (1.0, 2.0, 3.0)) == (1, 2, 3)


def test_the_row_pays_what_is_above_the_average_of_the_rollouts_before() -> None:
    t, _ = step(3)
    assert t.reward is not None and t.rank is not None
    gain = group_advantages(t.reward, LABELS)
    expected = rank_bonus(gain, t.rank, t.rank_average)
    row = named_objective("rank_bonus")
    result, present = row.prepare(t).advantage, row.prepare(t).weight != 0
    assert torch.equal(result[present], expected[:, None].expand(8, 6)[present])
    first = row.prepare(replace(t, rank_average=None)).advantage
    assert torch.equal(first[present], gain[:, None].expand(8, 6)[present]) and not torch.equal(first, result)


def test_a_state_on_the_flow_does_not_stray() -> None:
    h, eps = normal(4, 3), normal(4, 3, seed=1)
    assert_values(flow_deviation(h - eps, h, eps), 0, 0, 0, 0)
    assert_values(flow_deviation(h - eps + 0.5, h, eps), *[4 * 0.25] * 4)  # t/(1−t) = 4 at .8
    assert_values(flow_deviation(h - eps + 0.5, h, eps, t=0.5), *[0.25] * 4)


def test_the_farthest_tokens_of_a_row_lose_most() -> None:
    weight = torch.ones(3, 5)
    weight[1, 4] = 0
    score = torch.stack([f64(1, 2, 3, 4, 5), f64(0, 1, 0.7, 0.5, 99), f64(2, 2, 2, 2, 2)])
    result = flow_rewards(score, weight)
    assert_values(result[0], 0, 0, 0, -0.0075, -0.01)
    assert_values(result[1], 0, -0.01, -0.007, 0, 0)
    assert_values(result[2], 0, 0, 0, 0, 0)
    assert_values(flow_rewards(score, weight, keep=0.0, top=2, scale=1)[0], 0, 0, 0, -0.75, -1)
    many = flow_rewards(torch.rand(1, 60, generator=torch.Generator().manual_seed(0)), torch.ones(1, 60))
    assert int((many < 0).sum()) == 15


def test_returns_of_single_decisions_are_added_to_the_groups_advantage() -> None:
    t, _ = step(3)
    assert t.reward is not None
    gain = group_advantages(t.reward, LABELS)
    row = named_objective("rlfr")
    zero = row.prepare(replace(t, process_reward=torch.zeros_like(t.weight)))
    present = zero.weight != 0
    assert torch.equal(zero.advantage[present], gain[:, None].expand(8, 6)[present])
    paid = torch.where(torch.arange(6) == 3, -0.5, 0.0).double().expand(8, 6)
    result = row.prepare(replace(t, process_reward=paid)).advantage - zero.advantage
    lost = torch.where((torch.arange(6) <= 3) & (t.weight[:, 3:4] != 0) & present, -0.5, 0.0).double()
    torch.testing.assert_close(result, lost)
