# SPDX-License-Identifier: Apache-2.0
"""Noise, v and x0 predictions as velocities of the flow: against DDIM and against the definition."""

from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler

from tests.support.flow_policies import GaussianPolicy
from visalign.flow import flow_sigma, preserving_scale, rollout, sde_step, velocity_of_prediction

DIFFUSERS: dict[str, Any] = {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}


def parts(shape=(3, 2, 4)):
    g = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=g, dtype=torch.float64), torch.randn(shape, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("prediction", ["velocity", "epsilon", "v", "x0"])
def test_each_prediction_gives_noise_minus_image(prediction):
    x0, noise = parts()
    sigma = torch.tensor([0.9, 0.5, 0.02], dtype=torch.float64)
    rows = sigma.view(-1, 1, 1)
    x, scale = (1 - rows) * x0 + rows * noise, preserving_scale(rows)
    output = {
        "velocity": noise - x0,
        "epsilon": noise,
        "v": ((1 - rows) * noise - rows * x0) / scale,  # α ε − s x0
        "x0": x0,
    }[prediction]
    velocity = velocity_of_prediction(output, x, sigma, prediction)
    torch.testing.assert_close(velocity, noise - x0, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
@pytest.mark.parametrize("schedule", ["linear", "scaled_linear"])
def test_a_ddim_step_is_the_euler_step_of_the_flow(prediction, schedule):
    """η = 0: α' x0 + s' ε at DDIM's scale, whatever the network predicts."""
    scheduler = DDIMScheduler(
        beta_schedule=schedule,
        prediction_type=DIFFUSERS[prediction],
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    scheduler.set_timesteps(10)
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    sample, output = parts()
    for k in (0, 4, 8):
        time, following = scheduler.timesteps[k : k + 2].tolist()
        expected = scheduler.step(output, time, sample, return_dict=False)[0]
        sigma, sigma_next = flow_sigma(scheduler.alphas_cumprod[[time, following]])
        levels = sigma.expand(3)
        x = sample * preserving_scale(sigma)
        v = velocity_of_prediction(output, x, levels, prediction)
        x_next = sde_step(x, v, sigma, sigma_next, schedule="none").mean
        torch.testing.assert_close(x_next / preserving_scale(sigma_next), expected, rtol=1e-9, atol=1e-9)


def test_a_rollout_of_another_prediction_starts_from_noise_of_its_own_scale(monkeypatch):
    policy = GaussianPolicy(latent_shape=(2, 3), prediction="epsilon")
    calls = []
    monkeypatch.setattr(policy, "velocity", lambda x, sigma, _, time: calls.append((x, time)) or 0 * x)
    noise = torch.randn(2, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grid = torch.tensor([0.8, 0.4, 0.0])
    rollout(policy, policy.encode(["a", "b"]), sigmas=grid, noise=noise)
    torch.testing.assert_close(calls[0][0], noise * (0.2**2 + 0.8**2) ** 0.5, rtol=1e-6, atol=0)
    assert [time.tolist() for _, time in calls] == [[800.0] * 2, [400.0] * 2]


def test_levels_that_do_not_fix_the_velocity_are_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r'"epsilon" leaves the velocity open at σ = 1\. Let the timesteps'):
        velocity_of_prediction(x, x, torch.tensor([0.5, 1.0]), "epsilon")
    with pytest.raises(ValueError, match='"x0" leaves the velocity open at σ = 0'):
        velocity_of_prediction(x, x, torch.tensor([0.0, 1.0]), "x0")
