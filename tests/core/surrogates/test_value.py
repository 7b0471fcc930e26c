# SPDX-License-Identifier: Apache-2.0
"""What the value loss leaves out, and the explained variance.

Values and gradients of the released codes stand in tests/golden.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from visalign.core.surrogates.value import explained_variance, value_clip_fraction, value_loss

NAN = float("nan")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_masked_decisions_are_zero_and_nan_there_is_harmless() -> None:
    v = torch.tensor([[1.0, NAN], [NAN, 2.0]], requires_grad=True)
    other = torch.tensor([[0.5, NAN], [0.0, NAN]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    for options in ({}, {"old_values": other, "clip": 0.1}):
        loss = value_loss(v, other, weight=weight, **options)
        slope, none = torch.autograd.grad(loss.sum(), [v, other], allow_unused=True)
        assert none is None
        assert loss[0, 0] > 0 and loss.flatten()[1:].eq(0).all() and slope.flatten()[1:].eq(0).all()
    fraction = value_clip_fraction(v, other, old_values=other + 5, clip=0.1, weight=weight)
    assert not fraction.requires_grad and fraction in (0, 1)
    assert value_clip_fraction(v, other, old_values=other, clip=0.1, weight=torch.zeros(2, 2)) == 0


def test_explained_variance_by_hand() -> None:
    returns = torch.tensor([0.0, 2.0, 4.0, 100.0])
    values = torch.tensor([0.0, 2.0, 1.0, NAN], requires_grad=True)  # errors 0, 0, 3 with variance 2
    weight = torch.tensor([1.0, 2.0, 1.0, 0.0])
    result = explained_variance(values, returns, weight)
    assert (
        result.item() == pytest.approx(1 - 2 / (8 / 3)) and not result.requires_grad and result.dtype == torch.float64
    )


def test_explained_variance_without_variance_is_no_number() -> None:
    same = torch.full((3,), 0.1, dtype=torch.float64)
    assert same.mean() != same[0]  # rounding must not pass for variance
    for result in (
        explained_variance(draw(9, 3), same),
        explained_variance(same, same, torch.zeros(3)),
        explained_variance(torch.zeros(0), torch.zeros(0)),
    ):
        assert result.isnan()
