# SPDX-License-Identifier: Apache-2.0
"""Advantages: hand values, exact zeros, missing rewards, invariances.

Values and gradients of the released codes stand in tests/golden.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from visalign.core import clamp_advantages, group_advantages, whiten

NAN = float("nan")
OPTIONS: list[dict[str, Any]] = [
    {"scale": scale, "baseline": baseline, "ddof": ddof, "eps": eps}
    for scale in ("group", "batch", "none")
    for baseline in ("mean", "leave_one_out")
    for ddof in (0, 1)
    for eps in (0.0, 1e-4)
]


def test_hand_values() -> None:
    reward = torch.tensor([1.0, 3.0, 10.0, 20.0, 30.0], dtype=torch.float64)
    group = ["x", "x", "y", "y", "y"]
    half = 1 / math.sqrt(2)
    grpo = group_advantages(reward, group, eps=0.0)
    torch.testing.assert_close(grpo, torch.tensor([-half, half, -1, 0, 1], dtype=torch.float64))
    biased = group_advantages(reward, group, eps=0.0, ddof=0)
    high = math.sqrt(1.5)
    torch.testing.assert_close(biased, torch.tensor([-1, 1, -high, 0, high], dtype=torch.float64))
    loo = group_advantages(reward, group, scale="none", baseline="leave_one_out")
    torch.testing.assert_close(loo, torch.tensor([-2, 2, -15, 0, 15], dtype=torch.float64))
    centred = group_advantages(reward, group, scale="none")
    torch.testing.assert_close(centred, torch.tensor([-1, 1, -10, 0, 10], dtype=torch.float64))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_equal_groups_are_exactly_zero(options: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    constants = torch.rand(40, generator=generator, dtype=torch.float64) * 10
    for size in (3, 8, 12, 24):
        reward = constants.repeat_interleave(size).to(dtype)
        labels = torch.arange(40).repeat_interleave(size)
        assert group_advantages(reward, labels, **options).eq(0).all()


def test_a_large_offset_costs_no_digits() -> None:
    reward = torch.tensor([0.0, 0.001, 0.002, 0.003], dtype=torch.float64)
    plain = group_advantages(reward, [0] * 4, eps=0.0)
    shifted = group_advantages(reward + 2.0**20, [0] * 4, eps=0.0)
    torch.testing.assert_close(plain, shifted, rtol=1e-6, atol=0)


def test_missing_rewards_leave_the_statistics_and_get_zero() -> None:
    reward = torch.tensor([1.0, NAN, 3.0, 99.0, 5.0, 7.0], dtype=torch.float64)
    valid = torch.tensor([True, True, True, False, True, True])
    group = [0, 0, 0, 0, 1, 1]
    for options in OPTIONS:
        result = group_advantages(reward, group, valid=valid, **options)
        valid_rows = [0, 2, 4, 5]
        expected = group_advantages(reward[valid_rows], [group[i] for i in valid_rows], **options)
        assert torch.equal(result[valid_rows], expected)
        assert result[[1, 3]].eq(0).all()


def test_singletons_are_zero() -> None:
    reward = torch.tensor([5.0, NAN, 1.0, 2.0])
    for options in OPTIONS:
        assert group_advantages(reward, ["alone", "alone", "pair", "pair"], **options)[0] == 0


def test_result_has_no_gradient_and_at_least_float32() -> None:
    reward = torch.tensor([1.0, 2.0], requires_grad=True)
    assert not group_advantages(reward, [0, 0]).requires_grad
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool):
        assert group_advantages(torch.tensor([0, 1]).to(dtype), [0, 0]).dtype == torch.float32
    assert group_advantages(reward.double(), [0, 0]).dtype == torch.float64


def test_whiten_values() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 77.0, NAN], dtype=torch.float64)
    valid = torch.tensor([True, True, True, False, True])
    plain = torch.tensor([-1.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(whiten(values, valid, eps=0.0), plain)
    torch.testing.assert_close(whiten(values, valid, eps=3.0), plain / 2)
    torch.testing.assert_close(whiten(values, valid, eps=3.0, eps_inside=False), plain / 4)
    torch.testing.assert_close(whiten(values, valid, eps=0.0, ddof=0), plain * math.sqrt(1.5))
    uncentred = torch.tensor([1.0, 2.0, 3.0, 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(whiten(values, valid, eps=0.0, keep_mean=True), uncentred)


def test_whiten_per_group_is_whiten_of_each_group() -> None:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    valid = torch.rand(5, 3, generator=generator) > 0.2
    group = ["x", "y", "x", "y", "x"]
    result = whiten(values, valid, group=group, keep_mean=True)
    for rows in ([0, 2, 4], [1, 3]):
        torch.testing.assert_close(result[rows], whiten(values[rows], valid[rows], keep_mean=True))
    per_sample = whiten(values[:, 0], group=group, eps=1e-4, eps_inside=False)
    torch.testing.assert_close(per_sample, group_advantages(values[:, 0], group))
    torch.testing.assert_close(whiten(values, group=[0] * 5), whiten(values))
    assert whiten(torch.full((4, 3), 0.3), group=[0, 0, 1, 1]).eq(0).all()


def test_whiten_equal_or_single_or_absent_values_give_zero() -> None:
    for values in (torch.full((7,), 0.3), torch.tensor([2.0]), torch.full((3,), NAN)):
        for eps in (0.0, 1e-8):
            assert whiten(values, eps=eps).eq(0).all()


def test_clamp() -> None:
    advantage = torch.tensor([-7.0, 0.5, 7.0])
    assert torch.equal(clamp_advantages(advantage, 5.0), torch.tensor([-5.0, 0.5, 5.0]))
