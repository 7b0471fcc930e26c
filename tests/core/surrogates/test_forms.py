# SPDX-License-Identifier: Apache-2.0
"""PPO-KL, gradient-keeping clip, SAPO, GMPO: what they share, enumeration, gradients, edges."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from visalign.core import gaussian_kl, gaussian_log_prob, log_ratio, ppo_clip
from visalign.core.surrogates.forms import drpo, gmpo, gradient_keeping_clip, ppo_kl, sapo

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
EPS: dict[str, float] = {"eps_low": 0.2, "eps_high": 0.28}


def slope(loss: Callable[[Tensor], Tensor], log_r: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, ∂ Σ loss / ∂ log r)."""
    leaf = log_r.clone().requires_grad_()
    value = loss(leaf)
    return value.detach(), torch.autograd.grad(value.sum(), leaf)[0]


def draw(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(log r, A), float64."""
    generator = torch.Generator().manual_seed(seed)
    return 0.5 * torch.randn(*shape, generator=generator, **DOUBLE), torch.randn(*shape, generator=generator, **DOUBLE)


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ppo_kl": lambda r, a: ppo_kl(r, a, beta=0.7),
    "gradient_keeping_clip": lambda r, a: gradient_keeping_clip(r, a, **EPS),
    "drpo": lambda r, a: drpo(r, a, -torch.ones_like(r)),
    "sapo": sapo,
    "gmpo": lambda r, a: gmpo(r, a, torch.ones_like(r)),
}


@pytest.mark.parametrize("name", FORMS)
def test_contracts_of_every_form(name: str) -> None:
    """Ratio 1 gives the policy gradient; no gradient into A; one A per row; half precision is lifted."""
    form = FORMS[name]
    _, advantage = draw(4, 1, seed=1)
    new = torch.zeros(4, 1, requires_grad=True, **DOUBLE)
    advantage.requires_grad_()
    form(log_ratio(new, new.detach()), advantage).sum().backward()
    assert new.grad is not None and advantage.grad is None
    torch.testing.assert_close(new.grad, -advantage.detach())
    log_r, _ = draw(3, 3)
    row = torch.tensor([1.0, -2.0, 0.0], **DOUBLE)
    assert torch.equal(form(log_r, row), form(log_r, row[:, None].repeat(1, 3)))
    assert form(log_r.half(), row).dtype == torch.float32
    assert form(log_r, row.half()).dtype == torch.float64


@pytest.mark.parametrize("name", FORMS)
def test_far_off_ratios_stay_finite(name: str) -> None:
    log_r = torch.tensor([[500.0], [500.0], [-500.0], [-500.0]])
    advantage = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    value, grad = slope(lambda r: FORMS[name](r, advantage), log_r)
    assert torch.isfinite(value).all() and torch.isfinite(grad).all()


@pytest.mark.parametrize("name", ["ppo_kl", "drpo", "sapo", "gmpo"])
def test_gradcheck(name: str) -> None:
    log_r, advantage = draw(4, 5)
    assert torch.autograd.gradcheck(lambda r: FORMS[name](r, advantage), (log_r.requires_grad_(),))


@pytest.mark.parametrize("gain", [2.0, -3.0])
def test_drpo_pulls_by_the_old_probability(gain: float) -> None:
    """SPO turns at r = 1 + ε sign A; at half the probability the turn is twice as far."""
    advantage = torch.tensor([gain], **DOUBLE)
    for likely, distance in ((None, 0.2), (torch.tensor([math.log(0.5)], **DOUBLE), 0.4)):
        turn = torch.tensor([math.log(1 + math.copysign(distance, gain))], **DOUBLE)
        value, grad = slope(lambda r, likely=likely: drpo(r, advantage, likely, epsilon=0.2), turn)
        assert abs(float(grad)) < 1e-12
        share = 1.0 if likely is None else 0.5
        by_hand = -float(turn.exp()) * gain + abs(gain) * share * distance**2 / 0.4
        assert float(value) == pytest.approx(by_hand)


def test_ppo_kl_by_hand() -> None:
    log_r = torch.tensor([math.log(2.0)], **DOUBLE)
    value, grad = slope(lambda r: ppo_kl(r, torch.tensor([3.0]), beta=0.5), log_r)
    torch.testing.assert_close(value, torch.tensor([-6 + 0.5 * (1 - math.log(2))], **DOUBLE))
    torch.testing.assert_close(grad, torch.tensor([-6 + 0.5], **DOUBLE))


def test_ppo_kl_estimates_the_divergence_and_its_gradient() -> None:
    """Expected over all actions of the old policy: KL(π_old ‖ π) and ∇KL exactly."""
    generator = torch.Generator().manual_seed(2)
    old = torch.randn(6, generator=generator, **DOUBLE).log_softmax(0)
    logits = torch.randn(6, generator=generator, requires_grad=True, **DOUBLE)
    new = logits.log_softmax(0)
    estimate = (old.exp() * ppo_kl(new - old, torch.zeros(6), beta=1.0)).sum()
    exact = (old.exp() * (old - new)).sum()
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(*(torch.autograd.grad(k, logits, retain_graph=True)[0] for k in (estimate, exact)))


def test_ppo_kl_takes_the_exact_divergence_of_a_denoising_step() -> None:
    generator = torch.Generator().manual_seed(3)
    mean_old, change, noise = torch.randn(3, 4, 8, generator=generator, **DOUBLE)
    mean = (mean_old + 0.1 * change).requires_grad_()
    std = torch.full((4,), 0.5, **DOUBLE)
    new, old = (
        gaussian_log_prob(mean_old + std[:, None] * noise, m, std, log_prob_reduction="sum") for m in (mean, mean_old)
    )
    kl = gaussian_kl(mean, mean_old, std, log_prob_reduction="sum")
    loss = ppo_kl(log_ratio(new, old), torch.zeros(4), beta=2.0, kl=kl)
    torch.testing.assert_close(loss, 2 * kl)
    (grad,) = torch.autograd.grad(loss.sum(), mean)
    torch.testing.assert_close(grad, 2 * (mean.detach() - mean_old) / 0.25)


def test_gradient_keeping_clip_has_the_value_of_ppo_clip() -> None:
    log_r, advantage = draw(50)
    for eps in (EPS, {"eps_low": 1.0, "eps_high": math.inf}, {"eps_low": 1e-5, "eps_high": 1e-5}):
        value, grad = slope(lambda r, e=eps: gradient_keeping_clip(r, advantage, **e), log_r)
        plain, without = slope(lambda r, e=eps: ppo_clip(r, advantage, **e), log_r)
        assert torch.equal(value, plain)
        above = (advantage > 0) & (log_r.exp() > 1 + eps["eps_high"])
        torch.testing.assert_close(grad, torch.where(above, value, without))
