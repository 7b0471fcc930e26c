# SPDX-License-Identifier: Apache-2.0
"""KL: the table of values and gradients by enumeration, straight-through pairs, far-off tokens, exact KL."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from visalign.core.surrogates.kl import categorical_kl, gaussian_kl, kl_estimate, kl_penalty, velocity_kl
from visalign.flow.transitions import Kernel

NAN, INF = float("nan"), float("inf")
ESTIMATORS = ("k1", "k2", "k3", "abs", "low_var_kl")
V = 6


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGITS, REF, OLD = draw(0, V), draw(1, V).log_softmax(0), draw(2, V).log_softmax(0)


def gradient_of_expectation(loss: Any, behaviour: Tensor | None = None) -> Tensor:
    """E_{a~behaviour}[∇ loss(log π(a))] over the whole vocabulary; behaviour π when not given."""
    logits = LOGITS.clone().requires_grad_()
    log_prob = logits.log_softmax(0)
    chance = (log_prob if behaviour is None else behaviour).detach().exp()
    return torch.autograd.grad((chance * loss(log_prob)).sum(), logits)[0]


def exact_gradient(divergence: Any) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    return torch.autograd.grad(divergence(logits.log_softmax(0)), logits)[0]


REVERSE = exact_gradient(lambda p: (p.exp() * (p - REF)).sum())
FORWARD = exact_gradient(lambda p: (REF.exp() * (REF - p)).sum())
L1 = exact_gradient(lambda p: (p.exp() - REF.exp()).abs().sum())


def assert_near(ours: Tensor, theirs: Tensor | float) -> None:
    wanted = torch.as_tensor(theirs, dtype=ours.dtype).expand_as(ours)
    torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-12)


def test_values_in_expectation() -> None:
    new = LOGITS.log_softmax(0)
    reverse = (new.exp() * (new - REF)).sum()
    for estimator in ("k1", "k3"):
        assert_near((new.exp() * kl_estimate(new, REF, estimator)).sum(), reverse)
        importance = kl_estimate(new, REF, estimator, log_ratio=new - OLD)
        assert_near((OLD.exp() * importance).sum(), reverse)
    assert abs((new.exp() * kl_estimate(new, REF, "k2")).sum() - reverse) > 1e-3


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", torch.zeros(V)), ("k2", REVERSE), ("k3", FORWARD), ("abs", L1)]
)
def test_gradient_of_each_estimator_as_a_loss(estimator: Any, expected: Tensor) -> None:
    assert_near(gradient_of_expectation(lambda p: kl_estimate(p, REF, estimator)), expected.double())


def test_gradient_times_a_live_ratio() -> None:
    """k1 and k3 become right off-policy, k2 and abs wrong, on-policy too."""
    for behaviour in (LOGITS.log_softmax(0), OLD):

        def gradient(estimator: Any, b: Tensor = behaviour) -> Tensor:
            return gradient_of_expectation(lambda p: kl_estimate(p, REF, estimator, log_ratio=p - b), b)

        assert_near(gradient("k1"), REVERSE)
        assert_near(gradient("k3"), REVERSE)
        for estimator in ("k2", "abs"):
            assert min((gradient(estimator) - g).abs().max() for g in (REVERSE, FORWARD)) > 1e-3


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", math.log(2), 1.0),
        ("k2", math.log(2) ** 2 / 2, math.log(2)),
        ("k3", math.log(2) - 0.5, 0.5),
        ("abs", math.log(2), 1.0),
        ("low_var_kl", math.log(2) - 0.5, 0.5),
    ],
)
def test_hand_values(estimator: Any, value: float, slope: float) -> None:
    new = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([math.log(0.25)], dtype=torch.float64, requires_grad=True)
    result = kl_estimate(new, ref, estimator)
    assert_near(result, value)
    result.sum().backward()
    assert new.grad is not None and ref.grad is None
    assert_near(new.grad, slope)
    assert torch.autograd.gradcheck(lambda p: kl_estimate(p, ref, estimator, log_ratio=p + 1), (new,))


def test_value_and_gradient_are_separate() -> None:
    new, ref = draw(3, 4, 5).requires_grad_(), draw(4, 4, 5)
    for value in ESTIMATORS:
        for gradient in ESTIMATORS[1:]:
            result = kl_penalty(new, ref, value=value, gradient=gradient)
            assert torch.equal(result, kl_estimate(new, ref, value))
            alone = torch.autograd.grad(kl_estimate(new, ref, gradient).sum(), new)
            assert torch.equal(torch.autograd.grad(result.sum(), new)[0], alone[0])


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


def test_categorical_gradients() -> None:
    logits = LOGITS.clone().requires_grad_()
    assert_near(torch.autograd.grad(categorical_kl(logits, REF), logits)[0], REVERSE)
    assert_near(torch.autograd.grad(categorical_kl(logits, REF, direction="forward"), logits)[0], FORWARD)
    for direction in ("reverse", "forward"):
        assert torch.autograd.gradcheck(
            lambda x, d=direction: categorical_kl(x, REF, direction=d),  # type: ignore[arg-type]
            (logits,),
        )


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
    found = velocity_kl(v, ref)
    assert found.tolist() == [(1 + 0 + 1 + 9) / 4]
    found.sum().backward()
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
