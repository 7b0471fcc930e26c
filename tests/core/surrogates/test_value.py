# SPDX-License-Identifier: Apache-2.0
"""Value loss on each side of its clip, its share of a step, and the explained variance."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from visalign.core.surrogates.value import explained_variance, value_clip_fraction, value_loss

NAN = float("nan")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (1.0, 0.0, 2.0, 0.5 * 1.8**2, 0.0),  # moved towards R further than ε: held at 0.2
        (1.0, 0.0, -1.0, 0.5 * 2.0**2, 2.0),  # moved away: free to come back
        (0.1, 0.0, 2.0, 0.5 * 1.9**2, -1.9),  # inside
        (0.2, 0.0, 2.0, 0.5 * 1.8**2, -1.8),  # on the edge
    ],
)
def test_hand_values(value: float, old: float, target: float, loss: float, slope: float) -> None:
    v = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (target, old)]
    result = value_loss(v, others[0], old_values=others[1], clip=0.2)
    result.sum().backward()
    assert result.item() == pytest.approx(loss, rel=1e-14)
    assert v.grad is not None and v.grad.item() == pytest.approx(slope, rel=1e-14)
    assert all(other.grad is None for other in others)


def test_equals_the_formula_as_written() -> None:
    v, target, old = draw(0, 6, 5), draw(1, 6, 5), draw(2, 6, 5)
    clipped = torch.minimum(torch.maximum(v, old - 0.3), old + 0.3)
    errors = torch.stack([(v - target) ** 2, (clipped - target) ** 2])
    ours = value_loss(v, target, old_values=old, clip=0.3)
    torch.testing.assert_close(ours, errors.max(0).values / 2)
    torch.testing.assert_close(value_loss(v, target), errors[0] / 2)
    torch.testing.assert_close(value_loss(v, target, old_values=old, clip=1e9), errors[0] / 2)
    fraction = value_clip_fraction(v, target, old_values=old, clip=0.3)
    torch.testing.assert_close(fraction, (errors[1] > errors[0]).double().mean())
    leaf = v.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: value_loss(x, target, old_values=old, clip=0.3), (leaf,))
    value_loss(leaf, target, old_values=old, clip=0.3).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close((leaf.grad == 0).double().mean(), fraction)


def test_masked_decisions_are_zero_and_nan_there_is_harmless() -> None:
    v = torch.tensor([[1.0, NAN], [NAN, 2.0]], requires_grad=True)
    other, weight = torch.tensor([[0.5, NAN], [0.0, NAN]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    for options in ({}, {"old_values": other, "clip": 0.1}):
        loss = value_loss(v, other, weight=weight, **options)
        (slope,) = torch.autograd.grad(loss.sum(), v)
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
