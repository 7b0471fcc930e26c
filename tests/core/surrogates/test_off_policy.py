# SPDX-License-Identifier: Apache-2.0
"""Importance weights of the rollout, sequence mask, effective sample size: by hand, by enumeration, edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from visalign.core.surrogates.off_policy import effective_sample_size, importance_weights, off_policy_mask

NAN = float("nan")
DOUBLE: dict[str, Any] = {"dtype": torch.float64}
RATIO = torch.tensor([[3.0, 0.5, NAN], [NAN, 0.2, 1.0], [NAN, NAN, NAN]], **DOUBLE)
MASK = torch.tensor([[1.0, 1, 0], [0, 1, 1], [0, 0, 0]])


@pytest.mark.parametrize(
    ("level", "mode", "bounds", "values"),
    [
        ("token", "mask", (0.4, 2.0), [[0, 0.5, 0], [0, 0, 1]]),
        ("sequence_sum", "mask", (0.0, 1.4), [[0, 0, 0], [0, 0.2, 0.2]]),
        ("sequence", "truncate", (0.0, 9.0), [[1.5**0.5, 1.5**0.5, 0], [0, 0.2**0.5, 0.2**0.5]]),
        ("sequence", "mask", (0.5, 1.3), [[1.5**0.5, 1.5**0.5, 0], [0, 0, 0]]),
    ],
)
def test_importance_weights_by_hand(
    level: Any, mode: Any, bounds: tuple[float, float], values: list[list[float]]
) -> None:
    log_ratio = RATIO.log().requires_grad_()
    weights = importance_weights(log_ratio, MASK, level=level, mode=mode, low=bounds[0], high=bounds[1])
    torch.testing.assert_close(weights.value, torch.tensor([*values, [0, 0, 0]], **DOUBLE))
    assert torch.equal(weights.keep, weights.value != 0)
    assert not weights.value.requires_grad


def test_weights_are_bounded_without_overflow_and_in_float32() -> None:
    log_ratio = torch.tensor([[300.0, -300.0]]).half()
    weights = importance_weights(log_ratio, torch.ones(1, 2), level="token", mode="truncate", high=2.0)
    assert torch.equal(weights.value, torch.tensor([[2.0, 0.0]])) and weights.value.dtype == torch.float32
    masked = importance_weights(log_ratio, torch.ones(1, 2), level="token", mode="mask", high=2.0)
    assert torch.equal(masked.keep, torch.tensor([[False, True]]))


def test_off_policy_mask_by_hand() -> None:
    """Mean log-ratios −0.2, −0.2, 0.2, none; δ = 0.1: only the bad and unlikely one goes."""
    log_ratio = torch.tensor([[-0.1, -0.3, NAN], [NAN, -0.1, -0.3], [0.2, 0.2, 0.2], [NAN, NAN, NAN]])
    weight = torch.tensor([[1.0, 1, 0], [0, 1, 1], [1, 1, 1], [0, 0, 0]])
    keep = off_policy_mask(log_ratio, torch.tensor([1.0, -1.0, -1.0, -1.0]), weight, delta=0.1)
    assert keep.tolist() == [True, False, True, True]
    assert off_policy_mask(log_ratio, -torch.ones(4), weight, delta=0.3).all()
    tokens = torch.tensor([[1.0, -1.0, -1.0]]).repeat(4, 1)
    keep = off_policy_mask(log_ratio, tokens, weight, delta=0.1)
    assert keep.tolist() == [[True, False, False]] * 2 + [[True] * 3] * 2


def test_effective_sample_size_by_hand() -> None:
    log_weight = torch.tensor([1.0, 2.0, 3.0, 0.0], **DOUBLE).log()
    assert effective_sample_size(log_weight).item() == pytest.approx(36 / 14)
    assert effective_sample_size(log_weight + 900).item() == pytest.approx(36 / 14)
    assert effective_sample_size(torch.zeros(7, 3)).item() == pytest.approx(21)
    assert effective_sample_size(torch.tensor([0.0, -80.0])).item() == pytest.approx(1)
    assert not effective_sample_size(log_weight.requires_grad_()).requires_grad


def test_effective_sample_size_of_the_present() -> None:
    log_weight = torch.tensor([[0.0, NAN], [math.log(3.0), NAN]])
    weight = torch.tensor([[1.0, 0.0], [5.0, 0.0]])
    assert effective_sample_size(log_weight, weight).item() == pytest.approx(16 / 10)
    assert effective_sample_size(log_weight, torch.zeros(2, 2)) == 0
    assert effective_sample_size(torch.full((3,), -math.inf)) == 0
    assert effective_sample_size(torch.zeros(0)) == 0
