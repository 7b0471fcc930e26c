# SPDX-License-Identifier: Apache-2.0
"""What the selection rules share: masked quantiles, order statistics and means, at their edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from visalign.core.tokens.statistics import (
    kth_smallest,
    masked_quantile,
    present_decisions,
    share_count,
    token_terms,
    weighted_mean,
)

NAN = float("nan")
INF = float("inf")


@pytest.mark.parametrize("q", [0.0, 0.1, 0.3, 0.8, 0.93, 1.0])
def test_quantile_is_numpys(q: float) -> None:
    generator = torch.Generator().manual_seed(3)
    values, weight = (torch.rand(5, 11, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = 2.5 * (weight > 0.3)
    weight[2] = 0
    values[weight == 0] = NAN
    present_values = values.numpy()[weight.numpy() > 0]
    assert masked_quantile(values, weight, q).item() == pytest.approx(np.quantile(present_values, q), rel=1e-14)
    rows = masked_quantile(values, weight, q, per_row=True)
    for row, value, inside in zip(rows, values.numpy(), weight.numpy() > 0, strict=True):
        expected = np.quantile(value[inside], q) if inside.any() else NAN
        assert row.item() == pytest.approx(expected, rel=1e-14, nan_ok=True)


def test_quantile_hits_whole_ranks_exactly() -> None:
    """1 − (1 − 0.3) is 0.30000000000000004: the threshold must still be a value, or its tie is lost."""
    for n in (6, 11, 21, 31, 41, 101):
        values = torch.rand(n, generator=torch.Generator().manual_seed(n))
        ordered = values.double().sort().values
        for tenths in range(11):
            if tenths * (n - 1) % 10 == 0:
                rank = tenths * (n - 1) // 10
                assert masked_quantile(values, torch.ones(n), 1 - (1 - tenths / 10)) == ordered[rank]


def test_order_statistics_at_their_ends() -> None:
    values, inside = torch.tensor([3.0, 1.0, 2.0, NAN]), torch.tensor([True, True, False, False])
    assert [kth_smallest(values, inside, torch.tensor(k)) for k in range(6)] == [-INF, 1, 3, INF, INF, INF]
    assert kth_smallest(torch.zeros(0), torch.zeros(0, dtype=torch.bool), torch.tensor(0)) == -INF
    assert masked_quantile(torch.zeros(0, 2), torch.zeros(0, 2), 0.5).isnan()
    assert [share_count(inside, r).item() for r in (0.0, 1e-9, 0.5, 1.0)] == [0, 1, 1, 2]
    assert share_count(torch.zeros(3, dtype=torch.bool), 0.5) == 0


def test_mean_of_equal_values_is_that_value() -> None:
    weight = torch.tensor([0.3, 0.1, 0.2, 0.0], dtype=torch.float64)
    assert weighted_mean(torch.tensor([0.1, 0.1, 0.1, NAN], dtype=torch.float64), weight) == 0.1
    values = torch.tensor([1.0, 2.0, 4.0, NAN], dtype=torch.float64)
    assert weighted_mean(values, weight).item() == pytest.approx(1.3 / 0.6, rel=1e-15)
    assert weighted_mean(values, torch.zeros(4)).isnan()


def test_present_is_what_has_a_weight_and_a_value() -> None:
    values = torch.tensor([[1.0, NAN, INF, 2.0]])
    weight = torch.tensor([[0.5, 1.0, 1.0, 0.0]])
    assert present_decisions(values, weight).tolist() == [[True, False, False, False]]
    terms = token_terms(torch.ones(2, 2), torch.tensor([1.0, NAN]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert terms[2].tolist() == [[True, False], [False, False]]
    assert torch.equal(terms[0], terms[2].double()) and torch.equal(terms[1], terms[2].double())
