# SPDX-License-Identifier: Apache-2.0
"""Several rewards into one: sums by hand, what missing means, and units that must not matter under GDPO."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from visalign.core.advantages.combine import gdpo_advantages, normalise_then_sum, weighted_mean, weighted_sum
from visalign.core.advantages.group import group_advantages, whiten

NAN = float("nan")
REWARDS = torch.tensor([[1.0, 10.0], [2.0, NAN], [NAN, NAN], [4.0, 40.0]], dtype=torch.float64)


def test_weighted_sum_by_hand() -> None:
    dropped = torch.tensor([6.0, NAN, NAN, 24.0], dtype=torch.float64)
    torch.testing.assert_close(weighted_sum(REWARDS, [1.0, 0.5]), dropped, equal_nan=True)
    skipped = torch.tensor([6.0, 2.0, NAN, 24.0], dtype=torch.float64)
    torch.testing.assert_close(weighted_sum(REWARDS, [1, 0.5], missing="skip"), skipped, equal_nan=True)


def test_a_reward_of_weight_zero_makes_nothing_missing() -> None:
    assert torch.equal(weighted_sum(REWARDS[:2], [2.0, 0.0]), torch.tensor([2.0, 4.0], dtype=torch.float64))
    only_logged = weighted_sum(torch.tensor([[NAN, 3.0]]), [1.0, 0.0], missing="skip")
    assert only_logged.isnan().all()


def test_missing_is_never_a_reward_of_zero() -> None:
    """A sample that lost one of its rewards must not pull its group down."""
    rewards = torch.tensor([[5.0, 5.0], [6.0, 6.0], [5.5, NAN]])
    advantages = group_advantages(weighted_sum(rewards, [1.0, 1.0]), [0, 0, 0], scale="none")
    assert torch.equal(advantages, torch.tensor([-1.0, 1.0, 0.0]))
    decoupled = normalise_then_sum(rewards, [1.0, 1.0], [0, 0, 0])
    expected = normalise_then_sum(rewards[:2], [1.0, 1.0], [0, 0])
    assert torch.equal(decoupled[:2], expected) and decoupled[2].isnan()


def test_normalise_then_sum_is_the_weighted_sum_of_advantages() -> None:
    generator = torch.Generator().manual_seed(5)
    rewards = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    group, weights = [0, 0, 0, 0, 1, 1, 1, 1], [1.0, 0.5, -2.0]
    expected = sum(w * group_advantages(rewards[:, k], group) for k, w in enumerate(weights))
    torch.testing.assert_close(normalise_then_sum(rewards, weights, group), expected)


def test_weighted_mean_by_hand() -> None:
    dropped = torch.tensor([4.0, NAN, NAN, 16.0], dtype=torch.float64)
    torch.testing.assert_close(weighted_mean(REWARDS, [2.0, 1.0]), dropped, equal_nan=True)
    skipped = torch.tensor([4.0, 2.0, NAN, 16.0], dtype=torch.float64)
    torch.testing.assert_close(weighted_mean(REWARDS, [2.0, 1], missing="skip"), skipped, equal_nan=True)
    assert torch.equal(weighted_mean(REWARDS[:2], [3.0, 0.0]), REWARDS[:2, 0])
    with pytest.raises(ValueError, match=r"weights of a mean must be ≥ 0; got \[1.0, -1.0\]"):
        weighted_mean(REWARDS, [1.0, -1.0])


def test_gdpo_per_sample() -> None:
    """Two rewards with opposite order in each group: the heavier one decides; the batch std is then 1."""
    rewards = torch.tensor([[0.0, 30], [1, 10], [5, 200], [9, 100]], dtype=torch.float64)
    result = gdpo_advantages(rewards, [3.0, 1.0], [0, 0, 1, 1], eps=0.0)
    high = 3**0.5 / 2
    torch.testing.assert_close(result, torch.tensor([-high, high, -high, high], dtype=torch.float64))
    generator = torch.Generator().manual_seed(7)
    rewards = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    rewards[5, 1] = NAN
    result = gdpo_advantages(rewards, [1, 2, 0.5], ["a", "b"] * 4)
    valid_rows = [0, 1, 2, 3, 4, 6, 7]
    assert result[5] == 0 and result[valid_rows].mean().abs() < 1e-12
    assert result[valid_rows].std().item() == pytest.approx(1, abs=1e-3)
    torch.testing.assert_close(
        result[valid_rows], gdpo_advantages(rewards[valid_rows], [1, 2, 0.5], [["a", "b"][i % 2] for i in valid_rows])
    )


def test_gdpo_per_decision_weighs_samples_by_their_length() -> None:
    generator = torch.Generator().manual_seed(8)
    rewards = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    weight = torch.tensor([[1, 1, 1], [0, 0.5, 0], [1, 0, 1], [0, 0, 0]])
    result = gdpo_advantages(rewards, [1, 1], [0, 0, 1, 1], decision_weight=weight)
    combined = normalise_then_sum(rewards, [1, 1], [0, 0, 1, 1])
    repeated = whiten(combined.repeat_interleave((weight != 0).sum(1)), eps=1e-4, eps_inside=False)
    torch.testing.assert_close(result[weight != 0], repeated)
    assert result[weight == 0].eq(0).all()
    even = gdpo_advantages(rewards, [1, 1], [0, 0, 1, 1], decision_weight=torch.ones(4, 1))[:, 0]
    torch.testing.assert_close(even, gdpo_advantages(rewards, [1, 1], [0, 0, 1, 1]))
    with pytest.raises(ValueError, match=r"rewards must be \[B, M\] and decision_weight \[B, T\]; got \(4, 2\)"):
        gdpo_advantages(rewards, [1, 1], [0, 0, 1, 1], decision_weight=torch.ones(3, 2))


@pytest.mark.parametrize(
    ("rewards", "weights", "options", "message"),
    [
        (torch.zeros(4, 1), [NAN], {}, r"weights must be finite and not all 0; got \[nan\]"),
        (torch.zeros(4, 2), [0.0, 0.0], {}, r"weights must be finite and not all 0; got \[0.0, 0.0\]"),
    ],
)
def test_bad_input_is_named(rewards: Any, weights: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weighted_sum(rewards, weights, **options)
    with pytest.raises(ValueError, match=message):
        weighted_mean(rewards, weights, **options)
    for function in (normalise_then_sum, gdpo_advantages):
        with pytest.raises(ValueError, match=message):
            function(rewards, weights, [0] * 4, **options)
