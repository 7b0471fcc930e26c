# SPDX-License-Identifier: Apache-2.0
"""Rewards of steps: spans to decisions, three ways to place them, one number per sample, GRPO on steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visalign.core.advantages.process import (
    aggregate_steps,
    prime_advantages,
    process_advantages,
    span_index,
    span_rewards,
)

NAN = float("nan")
STEP = torch.tensor([[0, 0, 1, 1, 1, -1], [-1, 0, -1, 2, 2, 2]])
REWARD = torch.tensor([[2.0, 3.0, NAN], [5.0, NAN, 6.0]], dtype=torch.float64)


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_span_index() -> None:
    start, end = torch.tensor([[0, 2, 9], [1, 4, 3]]), torch.tensor([[2, 5, 9], [2, 4, 6]])
    assert torch.equal(span_index(start, end, 6), STEP)
    overlap = span_index(torch.tensor([[0, 1]]), torch.tensor([[3, 2]]), 4)
    assert overlap.tolist() == [[0, 1, 0, -1]]
    assert span_index(torch.zeros(2, 0).long(), torch.zeros(2, 0).long(), 3).eq(-1).all()


def test_places() -> None:
    assert torch.equal(span_rewards(REWARD, STEP, place="last"), rows([0, 2, 0, 0, 3, 0], [0, 5, 0, 0, 0, 6]))
    every = span_rewards(REWARD, STEP, place="every")
    assert torch.equal(every, rows([2, 2, 3, 3, 3, 0], [0, 5, 0, 6, 6, 6]))
    spread = span_rewards(REWARD, STEP, place="spread")
    assert torch.equal(spread, rows([1, 1, 1, 1, 1, 0], [0, 5, 0, 2, 2, 2]))


def test_absent_decisions_are_no_part_of_a_step() -> None:
    """A reward is not lost with the decision that held it; a step without decisions leaves nothing."""
    weight = rows([1, 0, 1, 1, 0, 1], [1, 0, 1, 1, 1, 0])
    last = span_rewards(REWARD, STEP, place="last", weight=weight)
    assert torch.equal(last, rows([2, 0, 0, 3, 0, 0], [0, 0, 0, 0, 6, 0]))
    spread = span_rewards(REWARD, STEP, place="spread", weight=weight)
    assert torch.equal(spread, rows([2, 0, 1.5, 1.5, 0, 0], [0, 0, 0, 3, 3, 0]))
    assert span_rewards(torch.zeros(2, 0), torch.full((2, 4), -1), place="last").eq(0).all()


def test_aggregate_steps() -> None:
    reward = rows([0.5, 0.8, NAN], [0.9, 0.1, 0.2], [0.3, NAN, 0.4], [NAN, NAN, NAN])
    exists = torch.tensor([[True, True, False], [True] * 3, [True] * 3, [False] * 3])
    expected = {"sum": [1.3, 1.2], "mean": [0.65, 0.4], "min": [0.5, 0.1], "product": [0.4, 0.018], "last": [0.8, 0.2]}
    hows: tuple[Any, ...] = ("sum", "mean", "min", "product", "last")
    for how in hows:
        result = aggregate_steps(reward, how, exists)
        torch.testing.assert_close(result[:2], torch.tensor(expected[how], dtype=torch.float64))
        assert result[2:].isnan().all(), "a failed step, and no step at all, are missing"
        assert aggregate_steps(torch.zeros(2, 0), how).isnan().all()
    assert aggregate_steps(reward.bfloat16(), "min", exists).dtype == torch.float32
    assert torch.equal(aggregate_steps(reward[1:2], "sum"), aggregate_steps(reward[1:2], "sum", exists[1:2]))


def test_process_advantages_by_hand() -> None:
    """Rewards 2, 3, 5, 6 of one group: mean 4, deviations −2, −1, 1, 2; later steps are added up."""
    std = torch.tensor([2.0, 3, 5, 6]).std().double()
    expected = rows([-3, -3, -1, -1, -1, 0], [3, 3, 2, 2, 2, 2]) / std
    torch.testing.assert_close(process_advantages(REWARD, STEP, [0, 0], eps=0.0), expected)
    weight = torch.ones(2, 6)
    weight[0, 0] = 0
    masked = process_advantages(REWARD, STEP, ["p", "p"], weight=weight, eps=0.0)
    torch.testing.assert_close(masked, expected * weight)


def test_a_failed_step_takes_its_sample_out() -> None:
    broken = torch.cat([REWARD, rows([NAN, 4.0, 1e6])])
    step = torch.cat([STEP, torch.tensor([[0, 0, 1, 1, 2, 2]])])
    result = process_advantages(broken, step, [0, 0, 0])
    assert torch.equal(result[:2], process_advantages(REWARD, STEP, [0, 0]))
    assert result[2].eq(0).all()


def test_prime_adds_the_leave_one_out_returns_of_both_sources() -> None:
    """Means 2, 0 and outcomes 1, 0: r̂ = 2r − 2, so the returns are (2 − 2, 6 − 2 + …) and their outcomes ±1."""
    process, weight = rows([1.0, 3.0], [0.0, 9.0]), rows([1.0, 1.0], [1.0, 0.0])
    got = prime_advantages(rows([1.0, 0.0])[0], process, [0, 0], weight, eps=0.0)
    # r̂ = (0, 4), (−2): returns (4, 4), (−2), with the outcomes (5, 5), (−3); mean 7/3, std √(64/3)
    expected = [(5 - 7 / 3) / (64 / 3) ** 0.5] * 2 + [(-3 - 7 / 3) / (64 / 3) ** 0.5]
    torch.testing.assert_close(torch.cat([got[0], got[1, :1]]), rows(expected)[0])
    assert got[1, 1] == 0
    more = rows([1, 3], [0, 9], [5, 5]), [0, 0, 0], rows([1, 1], [1, 0], [1, 1])
    missing = prime_advantages(rows([1.0, 0.0, NAN])[0], *more, eps=0.0)
    torch.testing.assert_close(missing[:2], got, msg="a failed sample moves nobody")
    assert (missing[2] == 0).all()
