# SPDX-License-Identifier: Apache-2.0
"""REINFORCE, CISPO, VESPO, DPPO and their weights: what they share, torch.distributions, edges.

Values and gradients of the released codes stand in tests/golden.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Bernoulli, kl_divergence

from visalign.core.surrogates.weighted import binary_kl, binary_tv, cispo, dppo, prefix_excess, reinforce, vespo

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
LIMITS: dict[str, Any] = {"limit_low": 0.05, "limit_high": 0.1}


def slope(loss: Callable[[Tensor], Tensor], log_prob: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, ∂ Σ loss / ∂ log π)."""
    leaf = log_prob.clone().requires_grad_()
    value = loss(leaf)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def draw(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(log π ≤ 0, log r, A), float64."""
    generator = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(*shape, generator=generator, **DOUBLE) - 0.7
    change = 0.5 * torch.randn(*shape, generator=generator, **DOUBLE)
    return (old + change).clamp(max=-0.01), change, torch.randn(*shape, generator=generator, **DOUBLE)


Form = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]

FORMS: dict[str, Form] = {
    "reinforce": lambda p, r, a, w: reinforce(p, a, weight=w),
    "reinforce_is": lambda p, r, a, w: reinforce(p, a, r, weight=w),
    "cispo": lambda p, r, a, w: cispo(p, r, a, bound_low=0.0, bound_high=5.0, weight=w),
    "vespo": lambda p, r, a, w: vespo(p, r, a, weight=w),
    "dppo": lambda p, r, a, w: dppo(r, a, torch.zeros_like(r), **LIMITS, log_prob=p, weight=w),
}


@pytest.mark.parametrize("name", FORMS)
def test_contracts_of_every_form(name: str) -> None:
    """At r = 1 the policy gradient, through log π alone; one A per row; half precision is lifted."""
    form = FORMS[name]
    log_p, _, advantage = draw(3, 3)
    ratio = torch.zeros(3, 3, requires_grad=True, **DOUBLE)
    advantage.requires_grad_()
    value, grad = slope(lambda p: form(p, ratio, advantage, None), log_p)
    torch.testing.assert_close(grad, -advantage.detach())
    torch.testing.assert_close(value, -(advantage * log_p).detach())
    form(log_p.requires_grad_(), ratio, advantage, None).sum().backward()
    assert ratio.grad is None and advantage.grad is None
    row = torch.tensor([1.0, -2.0, 0.0], **DOUBLE)
    assert torch.equal(form(log_p, ratio, row, None), form(log_p, ratio, row[:, None].repeat(1, 3), None))
    assert form(log_p.bfloat16(), ratio.bfloat16(), row, None).dtype == torch.float32


@pytest.mark.parametrize("name", FORMS)
def test_far_off_ratios_stay_finite(name: str) -> None:
    ratio = torch.tensor([500.0, -500.0])
    for gain in (1.0, -1.0):
        value, grad = slope(lambda p, g=gain: FORMS[name](p, ratio, torch.full((2,), g), None), -torch.ones(2))
        assert torch.isfinite(value).all() and torch.isfinite(grad).all()


def test_reinforce_with_the_ratio_has_the_gradient_of_the_ratio() -> None:
    log_p, change, advantage = draw(4, 5)
    _, grad = slope(lambda p: reinforce(p, advantage, change), log_p)
    torch.testing.assert_close(grad, -advantage * change.exp())


def test_binary_divergences_equal_those_of_two_coins() -> None:
    log_p, change, _ = draw(200)
    old = (log_p - change).clamp(max=-0.02)
    coins = Bernoulli(old.exp()), Bernoulli(log_p.exp())
    torch.testing.assert_close(binary_kl(log_p, old), kl_divergence(*coins))
    torch.testing.assert_close(binary_tv(log_p, old), (coins[0].probs - coins[1].probs).abs())
    assert binary_kl(log_p, log_p).eq(0).all() and not binary_kl(log_p.requires_grad_(), old).requires_grad


def test_binary_kl_next_to_certainty() -> None:
    """1 − π = 1e-12 against 2e-12: 1e-12 (1 − log 2 …); a constant of 1e-8 in the logarithm would hide it."""
    old, new = (torch.tensor([-x], **DOUBLE) for x in (2e-12, 1e-12))
    expected = 2e-12 * math.log(2) - 1e-12
    torch.testing.assert_close(binary_kl(new, old), torch.tensor([expected], **DOUBLE), rtol=1e-3, atol=0)
    certain, never = torch.zeros(1), torch.tensor([-math.inf])
    assert binary_kl(certain, certain) == 0 and binary_kl(never, never) == 0
    assert binary_kl(certain, torch.tensor([-0.5])) == math.inf
    assert binary_kl(torch.tensor([1e-7]), certain) == 0


def test_cppo_charges_a_token_for_what_its_prefix_moved() -> None:
    """By hand: D = (.1, .1, 0, .1) with w = (1, .9, absent, .8), δ = .12, b = .04, the most that P90 = .1 may be."""
    divergence, weight = torch.tensor([[0.1, 0.1, 9.0, 0.1]], **DOUBLE), torch.tensor([[1.0, 1.0, 0.0, 1.0]], **DOUBLE)
    excess = prefix_excess(divergence, weight, limit=0.12, smallest=0.8, budget=0.02)
    # limits .12; .12 + .04·1 − .1 = .06; .12 + .04·1.9 − .19 = .006
    expected = [0.1 - 0.12, 0.09 - 0.06, 0.08 - 0.006]
    torch.testing.assert_close(excess[0, [0, 1, 3]], torch.tensor(expected, **DOUBLE))
    still = prefix_excess(torch.zeros(2, 3), torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]), limit=0.12)
    assert bool((still <= 0).all())


@pytest.mark.parametrize(
    ("ratio", "gain", "distance", "keep"),
    [
        (1.5, 1.0, 0.2, False),  # moved up as pushed, too far
        (1.5, 1.0, 0.08, True),  # within limit_high
        (1.5, -1.0, 0.2, True),  # on its way back
        (0.5, 1.0, 0.2, True),  # on its way back
        (0.5, -1.0, 0.08, False),  # moved down as pushed, beyond limit_low
        (0.5, -1.0, 0.04, True),
        (1.0, 1.0, 0.2, True),
    ],
)
def test_dppo_drops_what_has_moved_too_far(ratio: float, gain: float, distance: float, keep: bool) -> None:
    log_r = torch.tensor([math.log(ratio)], **DOUBLE)
    arguments = (torch.tensor([gain]), torch.tensor([distance]))
    value, grad = slope(lambda r: dppo(r, *arguments, **LIMITS), log_r)
    expected = torch.tensor([-gain * ratio if keep else 0.0], **DOUBLE)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(grad, expected)
    value, grad = slope(lambda p: dppo(log_r, *arguments, **LIMITS, log_prob=p), log_r - 1)
    torch.testing.assert_close(grad, expected)
    torch.testing.assert_close(value, expected * (log_r - 1))
