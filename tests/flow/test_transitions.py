# SPDX-License-Identifier: Apache-2.0
"""The two kernels: diffusers, torch.distributions, identities, marginals.

Values and gradients of the released codes stand in tests/golden.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from tests.support.flow_policies import GaussianPolicy, Shift
from visalign.flow import Kernel, diffusers_timestep_sigmas, replacement_step, sde_step, timestep_sigmas
from visalign.flow.transitions import ODESolver

LEVELS = {"flow": 0.7, "dance": 0.3, "cps": 0.8, "ddim": 1.0, "precise": 1.5, "dance_precise": 0.5, "linear": 1.0}


def latents(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_schedule_none_is_the_diffusers_euler_step(steps):
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    grid = diffusers_timestep_sigmas(steps, shift=3.0)
    x = peer = latents(2, 4, 3, 3, dtype=torch.float32)
    for k in range(steps):
        v = latents(2, 4, 3, 3, seed=k, dtype=torch.float32)
        peer = scheduler.step(v, scheduler.timesteps[k], peer).prev_sample
        step = sde_step(x, v, grid[k], grid[k + 1], schedule="none")
        x = step.mean
        assert torch.equal(x, peer) and step.std.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("schedule", LEVELS)
def test_log_prob_is_torch_distributions(schedule):
    kernel = Kernel(schedule=schedule, noise_level=LEVELS[schedule], sigma_max=0.95)
    step = kernel.step(latents(3, 2, 4), latents(3, 2, 4, seed=1), 0.6, 0.5)
    x_next = latents(3, 2, 4, seed=2)
    expected = torch.distributions.Normal(step.mean, step.std[:, None, None]).log_prob(x_next).flatten(1)
    torch.testing.assert_close(step.log_prob(x_next, "sum"), expected.sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(step.log_prob(x_next, "mean"), expected.mean(1), rtol=1e-12, atol=1e-12)
    square = -((x_next - step.mean) ** 2).flatten(1)
    torch.testing.assert_close(step.log_prob(x_next, "mean", form="quadratic"), square.mean(1))
    torch.testing.assert_close(step.log_prob(x_next, "sum", form="quadratic"), square.sum(1))


@pytest.mark.parametrize("schedule", LEVELS)
def test_the_inverse_gradient_takes_the_size_of_a_step_out_of_its_gradient(schedule):
    kernel = Kernel(schedule=schedule, noise_level=LEVELS[schedule], sigma_max=0.95)
    levels = torch.tensor([0.9, 0.6]).double(), torch.tensor([0.8, 0.3]).double()
    noise, v = latents(2, 3, seed=2), latents(2, 3, seed=1).requires_grad_()
    step = kernel.step(latents(2, 3), v, *levels)
    (gradient,) = torch.autograd.grad(step.log_prob(step.sample(noise).detach(), "sum").sum(), v)
    weight = kernel.step_weight("inverse_gradient", *levels)
    torch.testing.assert_close((weight[:, None] * gradient).abs(), noise.abs())
    torch.testing.assert_close(kernel.step_weight("std", *levels), step.std)


@pytest.mark.parametrize(("schedule", "noise_level"), [("none", 0.0), ("flow", 0.7), ("dance", 0.5)])
def test_sde_and_ode_have_the_marginals_of_the_flow(schedule, noise_level):
    """Gaussian data with exact velocity: x at every σ is N((1 − σ)m, (1 − σ)²c² + σ²), whatever the noise."""
    policy, samples, steps = GaussianPolicy(), 20_000, 100
    grid, nobody = timestep_sigmas(steps), Shift(torch.zeros(samples))
    x = latents(samples, 1, 1, 1)
    generator = torch.Generator().manual_seed(7)
    for k in range(steps):
        v = policy.velocity(x, grid[k].expand(samples), nobody)
        step = sde_step(x, v, grid[k], grid[k + 1], schedule=schedule, noise_level=noise_level, sigma_max=0.99)
        x = step.sample(torch.randn(x.shape, generator=generator, dtype=x.dtype))
        if k + 1 in (50, 80, 100):
            sigma = grid[k + 1].item()
            std = math.sqrt((1 - sigma) ** 2 * policy.scale**2 + sigma**2)
            assert abs(x.mean() - (1 - sigma) * policy.mean) < 0.012
            assert abs(x.std() - std) < 0.012


def test_precise_at_root_two_is_ancestral_sampling():
    """κ = ρ^(η²) is DDIM's 1 − η²(1 − ρ²) there; noise level 0 is the ODE."""
    x, v, sigma = latents(3, 2), latents(3, 2, seed=1), torch.tensor([1.0, 0.7, 0.2]).double()
    precise, ancestral = (
        replacement_step(x, v, sigma, sigma / 2, schedule=schedule, noise_level=level)
        for schedule, level in (("precise", math.sqrt(2)), ("ddim", 1.0))
    )
    torch.testing.assert_close(precise, ancestral)
    for schedule in ("cps", "ddim", "precise", "dance_precise"):
        step = replacement_step(x, v, sigma, 0 * sigma, schedule=schedule, noise_level=0.0)
        torch.testing.assert_close(step.mean, sde_step(x, v, sigma, 0 * sigma, schedule="none").mean)
        assert step.std.tolist() == [0, 0, 0]


def test_the_page_has_the_variances_of_the_kernels():
    """Var ← a²·Var + b² of steps with mean a·x and std b; docs/trainers/flow_grpo.md has their end over the data's."""
    page = (Path(__file__).parents[2] / "docs" / "trainers" / "flow_grpo.md").read_text(encoding="utf-8")
    page = page.partition("in closed form.")[2].partition("Narrow data")[0]
    rows = re.findall(
        r"^\| (the ODE|`(\w+)` at ([\d.]+)).*? \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE
    )
    assert len(rows) == 6
    one = torch.ones(1, 1, dtype=torch.float64)
    for _, schedule, level, *printed in rows:
        for (spread, steps), number in zip(((1.0, 10), (0.2, 6), (0.2, 10)), printed, strict=True):
            sigmas, variance = timestep_sigmas(steps, shift=3.0).double(), 1.0
            kernel = Kernel(schedule=schedule or "none", noise_level=float(level or 0), sigma_max=float(sigmas[1]))
            for sigma, sigma_next in pairwise(sigmas):
                v = (sigma - (1 - sigma) * spread**2) / ((1 - sigma) ** 2 * spread**2 + sigma**2)
                step = kernel.step(one, one * v, sigma, sigma_next)
                variance = float(step.mean) ** 2 * variance + float(step.std) ** 2
            assert variance / spread**2 == pytest.approx(float(number), abs=0.0051)


def test_last_step_flow_std_is_finite_and_cps_log_prob_is_refused():
    x, v = latents(2, 3), latents(2, 3, seed=1)
    flow = sde_step(x, v, 0.01, 0.0, schedule="flow", noise_level=0.7, sigma_max=0.9)
    assert bool(torch.isfinite(flow.log_prob(x, "mean")).all()) and bool((flow.std > 0).all())
    cps = replacement_step(x, v, 0.01, 0.0, schedule="cps", noise_level=0.8)
    with pytest.raises(ValueError, match=r"smallest std is 0\..*last step .* of cps, ddim, precise"):
        cps.log_prob(x, "mean")
    ode = sde_step(x, v, 0.5, 0.4, schedule="none")
    with pytest.raises(ValueError, match="log-probability is undefined"):
        ode.log_prob(x)


def test_transitions_refuse_bad_arguments():
    x, v = latents(2, 3), latents(2, 3, seed=1)
    with pytest.raises(ValueError, match=r"sigma_next must be a number or \[2\]; got shape \[3\]"):
        sde_step(x, v, 0.5, torch.zeros(3), schedule="none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "cps", "noise_level": 1.5}, r"noise_level of cps must lie in \[0, 1\]; got 1.5"),
        ({"schedule": "flow", "noise_level": 0.7, "sigma_max": 1.0}, "sigma_max stands in for σ = 1"),
        (
            {"schedule": "flow", "noise_level": 0.7, "log_prob": "quadratic"},
            "log_prob under schedule flow must be one of gaussian; got 'quadratic'",
        ),
    ],
)
def test_kernel_refuses_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        Kernel(**arguments)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' set_timesteps
def test_dpm_solver_is_diffusers_own_step():
    """On flow sigmas, up to their float32; the first step has no step before it."""
    scheduler: Any = DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=2.0,
        final_sigmas_type="zero",  # type: ignore[arg-type]
        lower_order_final=True,
        euler_at_final=False,
    )
    scheduler.set_timesteps(6)

    def velocity(x, sigma):
        return torch.sin(3 * x) + x * sigma

    theirs = ours = latents(4, 3, seed=1)
    solver, sigmas = ODESolver("dpmpp_2m"), scheduler.sigmas.double()
    for t, sigma, sigma_next in zip(scheduler.timesteps, sigmas[:-1], sigmas[1:], strict=True):
        theirs = scheduler.step(velocity(theirs, sigma), t, theirs).prev_sample
        ours = solver.step(ours, velocity(ours, sigma), sigma.expand(4), sigma_next.expand(4))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    x, sigma, onward = latents(4, 3), torch.full((4,), 0.6), torch.full((4,), 0.4)
    solver = ODESolver("dpmpp_2m")
    solver.step(x, x, torch.full((4,), 0.8), sigma)
    second = solver.step(x, x - 1, sigma, onward)
    first = ODESolver("dpmpp_2m").step(x, x - 1, sigma, onward)
    euler = sde_step(x, x - 1, sigma, onward, schedule="none").mean
    torch.testing.assert_close(first, euler)  # the first order is exact where x̂0 is held, as is Euler's
    assert (second - first).abs().max() > 1e-3
    with pytest.raises(ValueError, match="solver must be one of euler, dpmpp_2m; got 'heun'"):
        ODESolver("heun")
