# SPDX-License-Identifier: Apache-2.0
"""PPO clip: hand values on each side of each bound, identities, gradients, far-off ratios; the statistics."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from visalign.core import ppo_clip

BOUNDS: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.3}


def gradient(log_r: Tensor, advantage: Tensor, **bounds: float) -> tuple[Tensor, Tensor]:
    """(loss, ∂ Σ loss / ∂ log r)."""
    log_r = log_r.clone().requires_grad_()
    loss = ppo_clip(log_r, advantage, **(BOUNDS | bounds))
    return loss.detach(), torch.autograd.grad(loss.sum(), log_r)[0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.5, 2.0, -2.6, 0.0),  # above, A > 0: held at 1.3
        (1.5, -2.0, 3.0, 3.0),  # above, A < 0: free to come back
        (0.5, 2.0, -1.0, -1.0),  # below, A > 0: free to come back
        (0.5, -2.0, 1.6, 0.0),  # below, A < 0: held at 0.8
        (1.1, 2.0, -2.2, -2.2),
        (0.9, -2.0, 1.8, 1.8),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_hand_values(ratio: float, advantage: float, loss: float, slope: float) -> None:
    log_r = torch.tensor([math.log(ratio)], dtype=torch.float64)
    value, grad = gradient(log_r, torch.tensor([advantage], dtype=torch.float64))
    torch.testing.assert_close(value, torch.tensor([loss], dtype=torch.float64))
    torch.testing.assert_close(grad, torch.tensor([slope], dtype=torch.float64))


def test_gradcheck() -> None:
    log_r = torch.tensor([[-0.5, -0.1, 0.1, 0.5], [-0.5, -0.1, 0.1, 0.5]], dtype=torch.float64, requires_grad=True)
    for advantage in (torch.tensor([1.5, -0.7]), torch.randn(2, 4)):
        assert torch.autograd.gradcheck(lambda r, a=advantage: ppo_clip(r, a, **BOUNDS), (log_r,))


def test_advantage_per_sample_is_broadcast_over_decisions_even_in_a_square() -> None:
    log_r = torch.randn(3, 3) * 0.3
    advantage = torch.tensor([1.0, -2.0, 0.5])
    assert torch.equal(
        ppo_clip(log_r, advantage, **BOUNDS), ppo_clip(log_r, advantage[:, None].repeat(1, 3), **BOUNDS)
    )


def test_far_off_ratios_stay_finite_and_keep_their_direction() -> None:
    log_r = torch.tensor([200.0, 200.0, -200.0, -200.0, 200.0])
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    loss, grad = gradient(log_r, advantage)
    cap = math.exp(20)
    torch.testing.assert_close(loss, torch.tensor([-1.3, cap, 0.0, 0.8, 0.0]))
    torch.testing.assert_close(grad, torch.tensor([0.0, cap, 0.0, 0.0, 0.0]))


def test_no_gradient_into_advantages_and_half_precision_is_lifted() -> None:
    log_r = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    advantage = torch.ones(2, requires_grad=True)
    loss = ppo_clip(log_r, advantage, **BOUNDS)
    assert loss.dtype == torch.float32
    loss.sum().backward()
    assert advantage.grad is None and log_r.grad is not None
    assert ppo_clip(log_r.double(), advantage, **BOUNDS).dtype == torch.float64


def test_narrow_bounds_are_exact_in_float32() -> None:
    """Flow-GRPO clips at 1e-5: 1 + 1e-5 must not be rounded away before it is compared."""
    log_r = torch.tensor([0.9e-5, 1.1e-5])
    _, grad = gradient(log_r, torch.ones(2), eps_low=1e-5, eps_high=1e-5)
    assert grad[0] < 0 and grad[1] == 0


CEILINGS: dict[str, dict[str, Any]] = {
    "dual": {"dual_clip": 3.0},
    "dual below the bound": {"dual_clip": 1.1},
    "delta": {"delta": 4.0},
    "delta below the bound": {"delta": 1.1},
}


def as_written(ratio: Tensor, advantage: Tensor, options: dict[str, Any]) -> Tensor:
    """The papers' formulas, term by term."""
    clipped = ratio.clamp(0.8, 1.3) * advantage
    if "delta" in options:
        return -torch.minimum(ratio.clamp(max=options["delta"]) * advantage, clipped)
    plain = torch.minimum(ratio * advantage, clipped)
    held = torch.maximum(plain, options["dual_clip"] * advantage)
    return -torch.where(advantage < 0, held, plain)


@pytest.mark.parametrize("name", CEILINGS)
def test_ceilings_equal_the_formulas_as_written(name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    log_r = 2 * torch.randn(400, generator=generator, dtype=torch.float64)
    advantage = torch.randn(400, generator=generator, dtype=torch.float64)
    advantage[:5] = 0
    value, grad = gradient(log_r, advantage, **CEILINGS[name])
    leaf = log_r.clone().requires_grad_()
    expected = as_written(leaf.exp(), advantage, CEILINGS[name])
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), leaf)[0])
    assert (value != gradient(log_r, advantage)[0]).any()
