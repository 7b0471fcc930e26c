# SPDX-License-Identifier: Apache-2.0
"""Influence: Adam's step is torch's, its cosine by hand and against the loss after the step."""

from __future__ import annotations

import pytest
import torch

from visalign.training.policy.influence import AdamState, adam_influence

DOUBLE = torch.float64


def test_by_hand():
    """Gains (w₁, w₂): losses 3w₁, −4w₂; ∇L ∝ (3, −4). Fresh moments: Γ = sign g, so cos = 0.6 and 0.8."""
    weight = torch.zeros(2, dtype=DOUBLE, requires_grad=True)
    fresh = AdamState(exp_avg=[torch.zeros(2)], exp_avg_sq=[torch.zeros(2)], steps=0)
    losses = (3.0, 0), (-4.0, 1), (0.0, 0)
    influence = adam_influence(lambda n: losses[n][0] * weight[losses[n][1]], 3, [weight], fresh)
    assert influence.tolist() == pytest.approx([0.6, 0.8, 0.0])
    # m = (0, 1), v = 0: Γ of the third is (0, 1), against ∇L; a step of another sample turns by it
    moved = AdamState(exp_avg=[torch.tensor([0.0, 1.0])], exp_avg_sq=[torch.ones(2)], steps=10**6)
    assert adam_influence(lambda n: losses[n][0] * weight[losses[n][1]], 3, [weight], moved)[2] == pytest.approx(-0.8)


def test_the_step_is_that_of_torchs_adam_and_lowers_the_loss_as_the_cosine_says():
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(5, 4, generator=draw, dtype=DOUBLE) * torch.logspace(-2, 1, 4, dtype=DOUBLE)
    weight = torch.zeros(4, dtype=DOUBLE, requires_grad=True)

    def loss(number: int) -> torch.Tensor:
        return torch.nn.functional.softplus(-data[number] @ weight)

    def mean() -> torch.Tensor:
        return torch.stack([loss(n) for n in range(5)]).mean()

    optimizer = torch.optim.Adam([weight], lr=1e-5, betas=(0.8, 0.99), eps=1e-9)
    for number in (0, 3, 1):
        optimizer.zero_grad()
        loss(number).backward()
        optimizer.step()
    moments = optimizer.state[weight]
    options = {"steps": 3, "betas": (0.8, 0.99), "eps": 1e-9}
    state = AdamState(exp_avg=[moments["exp_avg"].clone()], exp_avg_sq=[moments["exp_avg_sq"].clone()], **options)
    cosine = adam_influence(loss, 5, [weight], state)[2]
    slope = torch.autograd.grad(mean(), weight)[0]
    before = mean().detach()
    start = weight.detach().clone()
    optimizer.zero_grad()
    loss(2).backward()
    gradient = weight.grad
    assert gradient is not None
    step = state.step(gradient)
    optimizer.step()
    torch.testing.assert_close(start - weight.detach(), 1e-5 * step)
    lowered = float(before - mean().detach()) / 1e-5
    assert lowered == pytest.approx(float(cosine * slope.norm() * step.norm()), rel=1e-3)
