# SPDX-License-Identifier: Apache-2.0
"""PPO clip: broadcasting, far-off ratios, dtypes, narrow bounds.

Values and gradients of the released codes stand in tests/golden.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from visalign.core import ppo_clip

BOUNDS: dict[str, Any] = {"eps_low": 0.2, "eps_high": 0.3}


def gradient(log_r: Tensor, advantage: Tensor, **bounds: float) -> tuple[Tensor, Tensor]:
    """(loss, ∂ Σ loss / ∂ log r)."""
    log_r = log_r.clone().requires_grad_()
    loss = ppo_clip(log_r, advantage, **(BOUNDS | bounds))
    return loss.detach(), torch.autograd.grad(loss.sum(), log_r)[0]


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
