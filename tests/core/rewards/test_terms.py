# SPDX-License-Identifier: Apache-2.0
"""Terms of the reward: placement, KL and its coefficients, and the two ways to treat what is too long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from visalign.core.rewards.terms import (
    adaptive_kl_coefficient,
    constraint_multiplier,
    filter_overlong,
    kl_in_reward,
    penalty_kl_coefficient,
    place_terminal,
)

NAN = float("nan")


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_place_terminal() -> None:
    weight = rows([1, 1, 1], [0, 2, 0], [1, 0, 1], [0, 0, 0], [1, 1, 0])
    reward = torch.tensor([1.0, 2.0, 3.0, 4.0, NAN], requires_grad=True)
    expected = torch.tensor([[0, 0, 1.0], [0, 2, 0], [0, 0, 3], [0, 0, 0], [0, NAN, 0]])
    result = place_terminal(reward, weight)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
    assert not result.requires_grad
    assert place_terminal(reward.half(), weight != 0).dtype == torch.float32
    assert place_terminal(reward.double(), torch.zeros(5, 0)).shape == (5, 0)


def test_kl_in_reward_by_hand() -> None:
    reward, weight = rows([0, 1, NAN], [0, 2, 5]), rows([1, 1, 0], [1, 1, 1])
    old, ref = rows([-1, -2, NAN], [-1, -1, -1]), rows([-3, -1, NAN], [-1, -3, 0])
    expected = rows([-0.2, 1.1, 0], [0, 1.8, 5.1])
    for beta in (0.1, torch.tensor(0.1, dtype=torch.float64)):
        torch.testing.assert_close(kl_in_reward(reward, old, ref, beta=beta, weight=weight), expected)
    assert torch.equal(kl_in_reward(reward[1:], old[1:], ref[1:], beta=0.0), reward[1:])
    assert kl_in_reward(*(t.half() for t in (reward, old, ref)), beta=0.1).dtype == torch.float32


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 1.0), (6.6, 1.01), (600.0, 1.02), (0.0, 0.98), (5.4, 0.99), (float("inf"), 1.02), (NAN, 1.0)],
)
def test_adaptive_coefficient(kl: float, factor: float) -> None:
    options: dict[str, Any] = {"target": 6.0, "horizon": 1000.0, "samples": 100}
    for measured in (kl, torch.tensor(kl, dtype=torch.float64)):
        result = adaptive_kl_coefficient(0.5, measured, **options)
        assert result.dtype == torch.float64 and result.item() == pytest.approx(0.5 * factor, rel=1e-12)
    assert adaptive_kl_coefficient(torch.tensor(0.5), torch.tensor(kl), **options).dtype == torch.float32


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.01, 1.0), (0.0149, 1.0), (0.016, 2.0), (0.006, 0.5), (0.0, 0.5), (NAN, 1.0)]
)
def test_penalty_coefficient(kl: float, factor: float) -> None:
    assert penalty_kl_coefficient(3.0, kl, target=0.01).item() == 3 * factor


@pytest.mark.parametrize(
    ("multiplier", "value", "expected"),
    [(0.0, 0.4, 0.05), (0.3, 0.9, 0.1), (0.1, 0.9, 0.0), (0.3, 0.5, 0.3), (0.3, NAN, 0.3)],
)
def test_constraint_multiplier(multiplier: float, value: float, expected: float) -> None:
    result = constraint_multiplier(multiplier, value, bound=0.5, rate=0.5)
    assert result.item() == pytest.approx(expected) and result.dtype == torch.float64


def test_filter_overlong() -> None:
    weight = torch.tensor([[1.0, 0.5], [2.0, NAN], [1.0, 1.0]])
    result = filter_overlong(weight, torch.tensor([False, True, False]))
    assert torch.equal(result, torch.tensor([[1.0, 0.5], [0, 0], [1.0, 1.0]]))
    assert filter_overlong(weight != 0, torch.tensor([True] * 3)).dtype == torch.bool
