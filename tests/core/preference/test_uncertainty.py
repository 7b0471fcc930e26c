# SPDX-License-Identifier: Apache-2.0
"""−ln E σ(z): against high precision, in the tail, gradients; and what the published form does to σ."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from scipy.integrate import quad
from scipy.special import expit, log_expit

from tests.support.core import assert_values, f64, normal
from visalign.core.preference.bradley_terry import bradley_terry_loss
from visalign.core.preference.uncertainty import (
    WIDE,
    log_win_probability,
    mean_log_win,
    soft_clamp,
    uncertain_preference_loss,
)

MEANS = (-8.0, -3.0, -1.0, 0.0, 0.5, 2.0, 6.0)


def integral(function: Callable[[float], float], mean: float, std: float) -> float:
    """E f(μ + s x) over a standard normal x, by adaptive quadrature in pieces."""

    def weighted(x: float) -> float:
        return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) * function(mean + std * x)

    pieces = [-14.0, -6.0, -2.0, 2.0, 6.0, 14.0]
    return sum(quad(weighted, low, high, epsabs=1e-14, epsrel=1e-13, limit=200)[0] for low, high in pairwise(pieces))


@pytest.mark.parametrize("std", [0.05, 1.0, WIDE, 1.75, 6.0, 20.0])
def test_both_rules_against_adaptive_quadrature(std: float) -> None:
    mean = f64(*MEANS)
    expected = f64(*(integral(lambda z: float(expit(z)), m, std) for m in MEANS))
    log_prob = log_win_probability(mean, torch.full_like(mean, std))
    assert (log_prob.exp() - expected).abs().max() < 1e-8
    assert (log_prob - expected.log()).abs().max() < 1e-7
    upstream = f64(*(integral(lambda z: float(log_expit(z)), m, std) for m in MEANS))
    error = mean_log_win(mean, torch.full_like(mean, std)) - upstream
    assert error.abs().max() < (1e-6 if std > 2 else 1e-7)


def test_the_tail_keeps_its_relative_precision() -> None:
    """Far out σ(z) = e^z, so E σ = e^(μ + s²/2); a rule in probabilities returns ln 0 there."""
    for std in (0.3, 1.2, 2.5, 4.0):
        for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-5)):
            mean = torch.tensor([-200.0, -800.0], dtype=dtype)
            log_prob = log_win_probability(mean, torch.full_like(mean, std)).double()
            assert_values(log_prob, -200 + std**2 / 2, -800 + std**2 / 2, rtol=tolerance)
    slope = f64(-300.0).requires_grad_()
    (gradient,) = torch.autograd.grad(log_win_probability(slope, f64(1.0)).sum(), slope)
    assert_values(gradient, 1.0)


def test_certain_scores_are_bradley_terry() -> None:
    left, right, zero = normal(12), normal(12, seed=1), torch.zeros(12).double()
    label = torch.rand(12).double()
    for mode in ("paper", "upstream"):
        loss = uncertain_preference_loss(left, right, zero, zero, label, mode=mode)
        torch.testing.assert_close(loss, bradley_terry_loss(left, right, label))
    std = zero.clone().requires_grad_()
    loss = uncertain_preference_loss(left, right, std, zero, label).sum()
    assert torch.autograd.grad(loss, std)[0].eq(0).all()


def test_both_sides_sum_to_one_and_more_noise_is_less_certain() -> None:
    mean, std = normal(50) * 3, normal(50, seed=1).abs() * 3
    both = log_win_probability(mean, std).exp() + log_win_probability(-mean, std).exp()
    assert_values(both, *[1.0] * 50, rtol=1e-8)
    ladder = torch.stack([log_win_probability(f64(2.0), f64(s)) for s in (0, 0.5, 1, 1.5, 1.6, 2, 4, 8)])
    assert (ladder.diff(dim=0) < 0).all()


@pytest.mark.parametrize("mode", ["paper", "upstream"])
def test_gradients(mode: str) -> None:
    left, right = (normal(6, seed=s).requires_grad_() for s in (0, 1))
    stds = [(s + normal(6, seed=2).abs()).requires_grad_() for s in (0.2, 1.8)]
    label = f64(0, 0.3, 0.5, 0.9, 1, float("nan"))
    assert torch.autograd.gradcheck(
        lambda *inputs: uncertain_preference_loss(*inputs, label, mode=mode),  # pyright: ignore[reportArgumentType, reportCallIssue]  # parametrised
        (left, right, *stds),
    )
    assert torch.autograd.gradgradcheck(
        lambda m, s: log_win_probability(m, s), (f64(0.3, -2).requires_grad_(), f64(0.7, 2.2).requires_grad_())
    )


def test_the_published_form_only_ever_rises_with_the_spread() -> None:
    std = torch.linspace(0, 4, 30).double()
    for mean in (-2.0, 0.0, 2.0):
        assert (mean_log_win(torch.full_like(std, mean), std).diff() < 0).all()
    ours = log_win_probability(torch.full_like(std, -2.0), std)
    assert (ours.diff() > 0).all(), "a wrong lead is forgiven if it was uncertain"


class TestSoftClamp:
    def test_bounds_and_identity_inside(self) -> None:
        value = torch.linspace(-60, 60, 241).double()
        clamped = soft_clamp(value)
        assert clamped.min() > -7 and clamped.max() < 3 and (clamped.diff() > 0).all()
        assert_values(soft_clamp(f64(-2, -1, 0)), -2, -1, 0, atol=0.02)
        assert (soft_clamp(f64(-1e30, 1e30, -math.inf, math.inf)) - f64(-7, 3, -7, 3)).abs().max() < 1e-12

    def test_the_gradient_never_dies(self) -> None:
        value = torch.tensor([-100.0, -20, -7, 3, 20, 100]).requires_grad_()
        (slope,) = torch.autograd.grad(soft_clamp(value).sum(), value)
        assert (slope > 1e-8).all() and slope.max() < 1
        assert torch.autograd.gradcheck(soft_clamp, (normal(9).mul(8).requires_grad_(),))
