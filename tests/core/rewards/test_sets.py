# SPDX-License-Identifier: Apache-2.0
"""Rewards of sets and their gains: hand values, scipy, stacks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from tests.support.core import f64, normal
from visalign.core.rewards.sets import (
    contrast_sets,
    frechet_closeness,
    frechet_distance,
    set_gains,
    vendi_gains,
    vendi_score,
)


def assert_values(ours: Tensor, *expected: float) -> None:
    torch.testing.assert_close(ours, f64(*expected).reshape(ours.shape), rtol=1e-6, atol=1e-9)


def test_vendi_score() -> None:
    a, b = torch.eye(2)
    assert_values(vendi_score(torch.stack([a, a, 3 * b])), 1.8898816)
    value = normal(6, 4)
    torch.testing.assert_close(vendi_score(torch.cat([value, value])), vendi_score(value))


def test_vendi_gains() -> None:
    a, b = torch.eye(2)
    assert_values(vendi_gains(torch.stack([a, a, b])), -0.1101184, -0.1101184, 0.8898816)
    assert_values(vendi_gains(torch.eye(3)), 1, 1, 1)
    assert_values(vendi_gains(torch.ones(1, 4)), 1)
    for value in (normal(5, 3), normal(5, 40)):
        rest = [torch.cat([value[:i], value[i + 1 :]]) for i in range(5)]
        assert_values(vendi_gains(value), *[(vendi_score(value) - vendi_score(part)).item() for part in rest])


def plain_distance(left: Tensor, right: Tensor) -> float:
    """By scipy's root of the product of the covariances."""
    first, second = (torch.cov(rows.T, correction=0) for rows in (left, right))
    root = np.asarray(scipy.linalg.sqrtm((first @ second).numpy()))
    away = (left.mean(0) - right.mean(0)).square().sum()
    return (away + torch.trace(first + second)).item() - 2 * float(np.trace(root).real)


def test_frechet_distance() -> None:
    row = torch.tensor([[-1.0], [1]])
    assert_values(frechet_distance(row, 3 * row + 5), 25 + 4)  # (μ − μ_r)² + (σ − σ_r)²
    left, right = normal(9, 4), 2 * normal(30, 4, seed=1) + 1
    assert_values(frechet_distance(left, right), plain_distance(left, right))
    assert_values(frechet_distance(right, left), plain_distance(left, right))
    assert_values(frechet_distance(left, left.flip(0)), 0)
    few = torch.tensor([[0.0, 0, 3], [0, 0, 1]])  # singular covariances have a distance too
    assert_values(frechet_distance(few, torch.tensor([[2.0, 0, 2], [0, 0, 2]])), 1 + 2)


@pytest.mark.parametrize(
    "measure",
    [
        vendi_score,
        vendi_gains,
        lambda x: frechet_distance(x, normal(6, 4)),
        lambda x: set_gains(frechet_closeness(normal(3, 4)), x),
    ],
)
def test_stacks_equal_single_sets(measure: Callable[[Tensor], Tensor]) -> None:
    value = normal(2, 3, 5, 4)
    stacked = measure(value)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(stacked[i, j], measure(value[i, j]))


def test_pairs_are_swapped_where_that_parts_the_sets() -> None:
    """By hand: R({a, b, a}) = 1.8899, R({a, b, c}) = 3, R({a, a, a}) = 1; and nothing to gain by a swap."""
    a, b, c = torch.eye(3)
    is_first, values = contrast_sets(vendi_score, torch.stack([a, b, a]), torch.stack([a, a, c]))
    assert is_first.tolist() == [True, True, False]
    assert_values(values, 3, 1)
    is_first, values = contrast_sets(vendi_score, torch.stack([a, b, c]), torch.stack([a, a, a]))
    assert is_first.all() and values.tolist() == pytest.approx([3, 1])
    assert not contrast_sets(vendi_score, torch.stack([a, a, a]), torch.stack([b, c, a]))[0][:2].any()


def test_sets_of_an_instance_reward_are_its_better_samples_and_others_are_no_worse_than_before() -> None:
    first, second = normal(8, 3), normal(8, 3, seed=1)
    is_first, _ = contrast_sets(lambda sets: sets[..., 0].mean(-1), first, second)
    assert is_first.tolist() == (first[:, 0] > second[:, 0]).tolist()
    for measure in (vendi_score, frechet_closeness(normal(9, 3, seed=2))):
        _, (positive, negative) = contrast_sets(measure, first, second)
        assert positive - negative > (measure(first) - measure(second)).abs()
