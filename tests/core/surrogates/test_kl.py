# SPDX-License-Identifier: Apache-2.0
"""KL: straight-through pairs, far-off tokens, what is masked, exact KL.

Values and gradients of the released codes stand in tests/golden.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from visalign.core.surrogates.kl import categorical_kl, gaussian_kl, kl_estimate, kl_penalty, velocity_kl
from visalign.flow.transitions import Kernel

NAN, INF = float("nan"), float("inf")
ESTIMATORS = ("k1", "k2", "k3", "abs", "low_var_kl")


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_near(ours: Tensor, theirs: Tensor | float) -> None:
    expected = torch.as_tensor(theirs, dtype=ours.dtype).expand_as(ours)
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)


def test_value_and_gradient_are_separate() -> None:
    new, ref = draw(3, 4, 5).requires_grad_(), draw(4, 4, 5)
    for value in ESTIMATORS:
        for gradient in ESTIMATORS[1:]:
            result = kl_penalty(new, ref, value=value, gradient=gradient)
            assert torch.equal(result, kl_estimate(new, ref, value))
            expected = torch.autograd.grad(kl_estimate(new, ref, gradient).sum(), new)
            assert torch.equal(torch.autograd.grad(result.sum(), new)[0], expected[0])


def test_far_off_tokens_stay_finite_and_keep_their_gradient() -> None:
    new = torch.tensor([-900.0, -30.0, 0.0, 0.0], requires_grad=True)
    ref = torch.tensor([0.0, 0.0, -30.0, -900.0])
    cap = math.exp(20)
    expected = torch.tensor([cap - 901, cap - 31, 29.0, 899.0])
    result = kl_estimate(new, ref, "k3")
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), new)[0], torch.tensor([-cap, -cap, 1.0, 1.0]))
    saturated = kl_estimate(new, ref, "low_var_kl")
    assert saturated.eq(10).all() and torch.autograd.grad(saturated.sum(), new)[0].eq(0).all()
    corrected = kl_penalty(new, ref, log_ratio=new + 500)
    assert corrected.isfinite().all()
    slopes = torch.autograd.grad(corrected.sum(), new)[0]
    assert slopes.isfinite().all() and (slopes[1:] * (new - ref)[1:] > 0).all()
    live = kl_estimate(new, ref, "k1", log_ratio=new + 500)
    slopes = torch.autograd.grad(live.sum(), new)[0]
    torch.testing.assert_close(slopes[1:], cap * ((new - ref).detach()[1:] + 1))


def test_small_differences_keep_their_slope_in_float32() -> None:
    d = torch.tensor([1e-6], requires_grad=True)
    slope = torch.autograd.grad(kl_estimate(d, torch.zeros(1)).sum(), d)[0]
    torch.testing.assert_close(slope, torch.tensor([1e-6]), rtol=1e-5, atol=0.0)


def test_masked_decisions_are_zero_and_nan_there_is_harmless() -> None:
    new = torch.tensor([[0.5, NAN], [INF, -1.0]], requires_grad=True)
    old = torch.tensor([[0.1, NAN], [NAN, 0.0]], requires_grad=True)
    ref, weight = torch.tensor([[0.0, 1.0], [NAN, NAN]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    calls: list[Any] = [
        lambda: kl_estimate(new, ref, log_ratio=old, weight=weight),
        lambda: kl_penalty(new, ref, log_ratio=old, weight=weight),
        lambda: kl_penalty(new, ref, weight=weight),
    ]
    for call in calls:
        result = call()
        assert result[weight == 0].eq(0).all() and result[0, 0] > 0
        (slope,) = torch.autograd.grad(result.sum(), new)
        assert slope[weight == 0].eq(0).all() and slope[0, 0] > 0


def test_categorical_kl_equals_torch_distributions_both_ways() -> None:
    new, ref = draw(10, 3, 2, 7), draw(11, 3, 2, 7)
    p, q = Categorical(logits=new), Categorical(logits=ref)
    assert_near(categorical_kl(new, ref), kl_divergence(p, q))
    assert_near(categorical_kl(new, ref, direction="forward"), kl_divergence(q, p))
    assert_near(categorical_kl(new.log_softmax(-1), ref + 5), kl_divergence(p, q))
    assert categorical_kl(new, new + 3).abs().max() < 1e-14


def test_forbidden_entries_have_probability_zero() -> None:
    new = torch.tensor([0.0, 0.0, -INF], requires_grad=True)
    ref = torch.tensor([0.0, 1.0, -INF])
    result = categorical_kl(new, ref)
    torch.testing.assert_close(result, categorical_kl(new[:2], ref[:2]))
    (slope,) = torch.autograd.grad(result, new)
    assert slope.isfinite().all() and slope[2] == 0
    assert categorical_kl(new, torch.zeros(3)).isfinite()
    assert categorical_kl(torch.zeros(3), ref) == INF
    assert categorical_kl(new, torch.zeros(3), direction="forward") == INF


def test_masked_rows_of_the_categorical_kl() -> None:
    logits = torch.tensor([[0.0, 1.0], [NAN, INF]], requires_grad=True)
    result = categorical_kl(logits, torch.tensor([[1.0, 0.0], [NAN, NAN]]), weight=torch.tensor([1.0, 0.0]))
    (slope,) = torch.autograd.grad(result.sum(), logits)
    assert result[1] == 0 and result[0] > 0 and slope[1].eq(0).all() and slope[0].ne(0).all()


def test_the_kl_of_velocities_by_hand_and_as_the_gaussian_one_without_its_factor() -> None:
    v = torch.tensor([[[1.0, 2.0], [0.0, -1.0]]], requires_grad=True)
    ref = torch.tensor([[[0.0, 2.0], [1.0, 2.0]]], requires_grad=True)
    kl = velocity_kl(v, ref)
    assert kl.tolist() == [(1 + 0 + 1 + 9) / 4]
    kl.sum().backward()
    assert v.grad is not None and v.grad.tolist() == [[[0.5, 0.0], [-0.5, -1.5]]] and ref.grad is None
    x, new, old = draw(3, 2, 3, 4), draw(4, 2, 3, 4), draw(5, 2, 3, 4)
    sigma, sigma_next = torch.tensor([0.9, 0.5]).double(), torch.tensor([0.6, 0.4]).double()
    kernel = Kernel(schedule="flow", noise_level=0.7)
    step, other = (kernel.step(x, v, sigma, sigma_next) for v in (new, old))
    rate = kernel.std(sigma, sigma_next).square() / (sigma - sigma_next)
    # Δμ = Δv (1 + s² (1 − σ) / (2σ)) dt
    factor = (1 + rate * (1 - sigma) / (2 * sigma)) * (sigma_next - sigma)
    exact = gaussian_kl(step.mean, other.mean, step.std, log_prob_reduction="mean")
    assert_near(velocity_kl(new, old) * factor.square() / (2 * step.std.square()), exact)
