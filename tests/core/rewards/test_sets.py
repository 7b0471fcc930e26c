# SPDX-License-Identifier: Apache-2.0
"""Rewards of sets and their gains: hand values, scipy, stacks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from tests.support.core import f64, normal
from visalign.core.rewards.sets import frechet_distance, frechet_gains, vendi_gains, vendi_score


def assert_values(ours: Tensor, *expected: float) -> None:
    torch.testing.assert_close(ours, f64(*expected).reshape(ours.shape), rtol=1e-6, atol=1e-9)


def test_vendi_score() -> None:
    a, b = torch.eye(2)
    assert_values(vendi_score(a.expand(5, 2)), 1)
    assert_values(vendi_score(torch.eye(6)), 6)
    assert_values(vendi_score(torch.stack([a, a, 3 * b])), 1.8898816)
    value = normal(6, 4)
    eigenvalues = torch.linalg.eigvalsh(
        torch.nn.functional.normalize(value) @ torch.nn.functional.normalize(value).T / 6
    )
    expected = math.exp(-sum(x * math.log(x) for x in eigenvalues.tolist() if x > 1e-12))
    assert_values(vendi_score(value), expected)
    assert_values(vendi_score(torch.cat([value, value])), expected)


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
    one, two = (torch.cov(rows.T, correction=0) for rows in (left, right))
    root = np.asarray(scipy.linalg.sqrtm((one @ two).numpy()))
    away = (left.mean(0) - right.mean(0)).square().sum()
    return (away + torch.trace(one + two)).item() - 2 * float(np.trace(root).real)


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
    [vendi_score, vendi_gains, lambda x: frechet_distance(x, normal(6, 4)), lambda x: frechet_gains(x, normal(3, 4))],
)
def test_stacks_equal_single_sets(measure: Callable[[Tensor], Tensor]) -> None:
    value = normal(2, 3, 5, 4)
    stacked = measure(value)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(stacked[i, j], measure(value[i, j]))
