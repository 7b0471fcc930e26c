# SPDX-License-Identifier: Apache-2.0
"""Distance of rewards and support: hand values, identities, stacks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visalign.evaluation.statistics.diversity import starc_distance, support_metrics


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_values(ours: Tensor, *expected: float) -> None:
    torch.testing.assert_close(
        ours, torch.tensor(expected, dtype=torch.float64).reshape(ours.shape), rtol=1e-6, atol=1e-9
    )


def test_starc_distance() -> None:
    first, second = torch.tensor([0.0, 1, 2, 3]), torch.tensor([0.0, 1, 3, 2])
    assert_values(starc_distance(first, second), math.sqrt(0.4))
    a, b = normal(9), normal(9, seed=1)
    pearson = torch.corrcoef(torch.stack([a, b]))[0, 1].item()
    assert_values(starc_distance(a, b), math.sqrt(2 * (1 - pearson)))
    assert_values(starc_distance(a, 3 * a + 100), 0)
    assert_values(starc_distance(a, -0.1 * a), 2)
    assert_values(starc_distance(3 * a - 5, b / 7), starc_distance(a, b).item())
    constant = torch.full((9,), 0.1)  # says nothing
    assert starc_distance(constant, constant + 3) == 0
    assert_values(starc_distance(constant, normal(9)), 1)


def test_support_metrics() -> None:
    metrics = support_metrics(preserved=95, expanded=2, shrunk=5)
    expected = (0.95, 2 / 97, 2 * 0.95 * (2 / 97) / (0.95 + 2 / 97), -3 / 102)
    values = (metrics.retention, metrics.discovery, metrics.dynamics, metrics.net_change)
    assert values == pytest.approx(expected)
    lost = support_metrics(preserved=0, expanded=0, shrunk=3)
    assert lost.retention == 0 and math.isnan(lost.discovery) and lost.net_change == -1
    assert support_metrics(preserved=0, expanded=1, shrunk=1).dynamics == 0
    replaced = support_metrics(preserved=4, expanded=0, shrunk=0)
    assert (replaced.retention, replaced.discovery, replaced.dynamics) == (1, 0, 0)
