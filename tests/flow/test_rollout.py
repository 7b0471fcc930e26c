# SPDX-License-Identifier: Apache-2.0
"""Rollout and replay: what is stored was seen, the ratio is 1, samples do not depend on their batch."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.support.flow_policies import GaussianPolicy, LinearPolicy, Shift
from tests.support.ratio import all_pairs, ratio_check
from visalign.flow import (
    RatioError,
    check_log_ratio,
    diffusers_timestep_sigmas,
    initial_noise,
    replay,
    rollout,
    sde_step,
)
from visalign.flow.rollout import visited_steps
from visalign.flow.trajectory import Trajectory
from visalign.flow.transitions import ODESolver
from visalign.interfaces import DiffusionPolicy

SIGMAS = diffusers_timestep_sigmas(6, shift=3.0)
SEEDS = [101, 202, 303, 404, 505]
CONDITION = Shift(torch.tensor([0.0, 0.5, -0.5, 1.0, -1.0]))
KERNELS = [*((name, 0.5, "gaussian") for name in ("flow", "dance", "cps", "precise")), ("cps", 0.8, "quadratic")]


def run(policy: DiffusionPolicy, **settings) -> Trajectory:
    settings = {"sigmas": SIGMAS, "sde_steps": (0, 2, 3), "seeds": SEEDS} | settings
    return rollout(policy, CONDITION, **settings)


def replay_all(policy: DiffusionPolicy, trajectory: Trajectory, condition: Shift = CONDITION):
    sample, step = all_pairs(trajectory)
    pairs = trajectory.pairs(sample, step)
    return pairs, replay(policy, condition.select(sample), pairs, trajectory.kernel)


@pytest.mark.parametrize(("schedule", "noise_level", "form"), KERNELS)
def test_trajectory_is_consistent(schedule, noise_level, form):
    policy = LinearPolicy(storage_dtype=torch.bfloat16)
    samples = run(policy, schedule=schedule, noise_level=noise_level, log_prob=form)
    assert samples.x.shape == samples.x_next.shape == samples.mean.shape == (5, 3, 2, 3, 3)
    assert samples.x.dtype == samples.x_next.dtype == samples.latents.dtype == torch.bfloat16
    assert samples.log_prob.dtype == samples.mean.dtype == samples.std.dtype == samples.sigma.dtype == torch.float32
    assert samples.log_prob.shape == samples.std.shape == (5, 3) and samples.sde_steps == (0, 2, 3)
    assert torch.equal(samples.sigma, SIGMAS[[0, 2, 3]]) and torch.equal(samples.sigma_next, SIGMAS[[1, 3, 4]])
    assert torch.equal(samples.x[:, 2], samples.x_next[:, 1])  # steps 2 and 3 are neighbours
    assert torch.equal(samples.x[:, 0], initial_noise(SEEDS, (2, 3, 3)).bfloat16())
    assert len(samples) == 5
    assert not samples.log_prob.requires_grad and not samples.x.requires_grad


def test_steps_between_noise_steps_are_euler_steps():
    policy = LinearPolicy()
    samples = run(policy)
    with torch.no_grad():
        x = samples.x_next[:, 0]
        v = policy.velocity(x, SIGMAS[1].expand(5), CONDITION)
        assert torch.equal(sde_step(x, v, SIGMAS[1], SIGMAS[2], schedule="none").mean, samples.x[:, 1])
        x = samples.x_next[:, 2]
        for k in (4, 5):
            x = x + (SIGMAS[k + 1] - SIGMAS[k]) * policy.velocity(x, SIGMAS[k].expand(5), CONDITION)
    torch.testing.assert_close(samples.latents, x)


@pytest.mark.parametrize(("dtype", "log_prob_reduction"), [(torch.float32, "sum"), (torch.bfloat16, "mean")])
@pytest.mark.parametrize(("schedule", "noise_level", "form"), KERNELS)
def test_replay_under_unchanged_weights_has_ratio_one(dtype, log_prob_reduction, schedule, noise_level, form):
    policy = GaussianPolicy(latent_shape=(2, 3, 3), storage_dtype=dtype)
    samples = run(
        policy, schedule=schedule, noise_level=noise_level, log_prob=form, log_prob_reduction=log_prob_reduction
    )
    pairs, stats = replay_all(policy, samples)
    assert torch.equal(stats.log_prob, pairs.log_prob)  # exactly 1: elementwise policy, rounded before the log-prob
    assert torch.equal(stats.mean, pairs.mean) and torch.equal(stats.std, pairs.std)
    check = ratio_check(policy, CONDITION, samples)
    assert check.ok and check.max_abs_log_ratio == check.mean_abs_log_ratio == 0 and check.pairs == 15


@pytest.mark.parametrize("shape", [(5,), (6, 4), (3, 4, 2), (2, 3, 2, 2)], ids=["flat", "packed", "last", "video"])
def test_a_latent_has_any_shape(shape):
    policy = LinearPolicy(shape=shape)
    samples = run(policy, log_prob_reduction="sum")
    assert samples.x.shape == (5, 3, *shape)
    pairs, stats = replay_all(policy, samples)
    assert stats.mean.shape == (15, *shape)
    expected = torch.distributions.Normal(stats.mean.flatten(1), stats.std[:, None]).log_prob(pairs.x_next.flatten(1))
    torch.testing.assert_close(stats.log_prob, expected.sum(1))
    assert ratio_check(policy, CONDITION, samples).max_abs_log_ratio < 1e-5 * math.prod(shape)


def test_the_time_that_the_network_saw_is_recorded_and_replayed():
    """A grid whose times follow from the number of the step, not from σ."""

    class Timed(LinearPolicy):
        def times(self, sigmas):
            return torch.linspace(999, 0, len(sigmas))

        def velocity(self, x, sigma, condition, time=None):
            return super().velocity(x, sigma, condition) + (self.times(sigma) if time is None else time).view(
                -1, 1, 1, 1
            )

    policy = Timed()
    samples = run(policy)
    times = torch.linspace(999, 0, 7)
    assert torch.equal(samples.time, times[[0, 2, 3]])
    pairs, _ = replay_all(policy, samples)
    assert torch.equal(pairs.time, times[[0, 2, 3]].repeat(5))
    assert ratio_check(policy, CONDITION, samples).max_abs_log_ratio < 1e-5
    guess = dataclasses.replace(pairs, time=policy.times(pairs.sigma))
    guessed = replay(policy, CONDITION.select(all_pairs(samples)[0]), guess, samples.kernel)
    assert (guessed.log_prob - pairs.log_prob).abs().max() > 1


def test_ratio_error_names_causes_and_carries_the_measurement():
    policy = LinearPolicy()
    samples = run(policy)
    policy.network.weight.data += 0.05
    with pytest.raises(
        RatioError, match=r"ratio must be 1.*15 pairs.*allowed 1e-05.*dropout.*guidance.*objective\.ratio_bound"
    ) as caught:
        ratio_check(policy, CONDITION, samples)
    assert not caught.value.check.ok and caught.value.check.max_abs_log_ratio > 1e-5
    loose = ratio_check(policy, CONDITION, samples, bound=100.0)
    assert loose.ok and loose.pairs == 15 and loose.bound == 100.0
    assert not ratio_check(policy, CONDITION, samples, strict=False).ok


def test_a_log_ratio_that_is_no_number_is_not_one():
    assert check_log_ratio(torch.tensor([[0.0, -3e-6]]), bound=1e-5).max_abs_log_ratio == pytest.approx(3e-6)
    assert not check_log_ratio(torch.tensor([0.0, math.nan]), bound=1e-5, strict=False).ok


@pytest.mark.parametrize(("schedule", "noise_level", "form"), KERNELS)
def test_replay_gradient_equals_finite_differences(schedule, noise_level, form):
    policy = LinearPolicy(storage_dtype=torch.float64, shape=(1, 2, 2))
    samples = run(policy, schedule=schedule, noise_level=noise_level, log_prob=form)
    weight = policy.network.weight
    weight.data += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
    _, stats = replay_all(policy, samples)
    (gradient,) = torch.autograd.grad(stats.log_prob.sum(), weight)
    assert gradient.abs().max() > 1e-3
    for row, column in [(0, 0), (1, 3), (3, 5), (2, 4)]:
        values = []
        for nudge in (1e-5, -2e-5):
            weight.data[row, column] += nudge
            values.append(replay_all(policy, samples)[1].log_prob.sum().item())
        weight.data[row, column] += 1e-5
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(gradient[row, column].item(), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("schedule", ["flow", "cps"])
def test_a_sample_does_not_depend_on_its_batch(schedule):
    policy = GaussianPolicy(latent_shape=(2, 3, 3), storage_dtype=torch.float32)
    full = run(policy, schedule=schedule)
    for batch_size in (1, 2, 3, 5, 99, 10**20):
        chunked = run(policy, schedule=schedule, batch_size=batch_size)
        for name in ("latents", "x", "x_next", "log_prob", "mean", "std"):
            assert torch.equal(getattr(full, name), getattr(chunked, name)), (name, batch_size)
    order = torch.tensor([4, 1])
    few = rollout(
        policy,
        CONDITION.select(order),
        sigmas=SIGMAS,
        sde_steps=(0, 2, 3),
        schedule=schedule,
        seeds=torch.tensor(SEEDS)[order],
    )
    assert torch.equal(few.latents, full.latents[order]) and torch.equal(few.log_prob, full.log_prob[order])


def test_deterministic_rollout_needs_no_noise_and_counts_its_forwards():
    policy = GaussianPolicy(latent_shape=(2, 3, 3), storage_dtype=torch.float32)
    ode = run(policy, sde_steps=())
    assert ode.x.shape == (5, 0, 2, 3, 3) and ode.log_prob.shape == (5, 0) and ode.kernel.schedule == "none"
    assert policy.forward_count.forward == 5 * 6
    noise = initial_noise(SEEDS, (2, 3, 3))
    from_noise = rollout(policy, CONDITION, sigmas=SIGMAS, noise=noise)
    assert torch.equal(from_noise.latents, ode.latents)
    assert torch.equal(noise, initial_noise(SEEDS, (2, 3, 3)))  # the caller's tensor is left as it was


def test_steps_behind_the_last_noise_can_be_fewer():
    """MixGRPO-Flash: the stochastic steps stay as they are, and what follows visits every other level."""
    policy = GaussianPolicy(latent_shape=(2, 3, 3), storage_dtype=torch.float64)
    full = run(policy, sde_steps=(0, 1))
    policy.forward_count.forward = 0
    flash = run(policy, sde_steps=(0, 1), compression=0.5, batch_size=2)
    assert policy.forward_count.forward == 5 * 4 and visited_steps(6, (0, 1), 0.5) == [0, 1, 2, 4, 6]
    assert torch.equal(flash.x_next, full.x_next) and torch.equal(flash.log_prob, full.log_prob)
    x = flash.x_next[:, 1]
    for sigma, sigma_next, time in zip(SIGMAS[[2, 4]], SIGMAS[[4, 6]], policy.times(SIGMAS[[2, 4]]), strict=True):
        v = policy.velocity(x, sigma.expand(5), CONDITION, time.expand(5))
        x = (x + v * (sigma_next - sigma)).double()
    torch.testing.assert_close(flash.latents, x)
    assert visited_steps(6, (0, 5), 0.5) == visited_steps(6, (), 0.5) == visited_steps(6, (0,)) == list(range(7))
    assert visited_steps(6, (0,), 0.01) == [0, 1, 6]
    solved = run(policy, sde_steps=(0, 1), compression=0.5, solver="dpmpp_2m")
    assert torch.equal(solved.x_next, full.x_next) and not torch.equal(solved.latents, flash.latents)
    x, solver = solved.x_next[:, 1], ODESolver("dpmpp_2m")  # the window's x̂0 are the solver's history
    for step in (0, 1):
        levels = SIGMAS[step].expand(5), SIGMAS[step + 1].expand(5)
        velocity = policy.velocity(solved.x[:, step], levels[0], CONDITION, policy.times(SIGMAS)[step].expand(5))
        solver.observe(solved.x[:, step], velocity, *levels)
    for k, k_next in ((2, 4), (4, 6)):
        v = policy.velocity(x, SIGMAS[k].expand(5), CONDITION, policy.times(SIGMAS)[k].expand(5))
        x = solver.step(x, v, SIGMAS[k].expand(5), SIGMAS[k_next].expand(5))
    torch.testing.assert_close(solved.latents, x)
    assert ratio_check(policy, CONDITION, solved, bound=0.0).ok


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sde_steps": (0, 6)}, r"rising indices in 0 to 5; got \[0, 6\]"),
        ({"schedule": "cps", "sde_steps": (5,)}, "last step .* of cps"),
        ({"sigmas": torch.tensor([1.0, 0.5])}, "fall strictly from at most 1 down to 0; got .1.0, 0.5"),
        ({"seeds": [1, 2]}, "of 5 samples needs one seed for each, .*got 2"),
        ({"noise": torch.zeros(5, 2, 3, 4)}, r"must be \[5, 2, 3, 3\].*got \[5, 2, 3, 4\]"),
    ],
)
def test_rollout_refuses_bad_arguments(changes, message):
    policy = LinearPolicy()
    with pytest.raises(ValueError, match=message):
        run(policy, **changes)


def test_an_empty_condition_and_fractional_steps_are_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        rollout(LinearPolicy(), Shift(torch.zeros(0)), sigmas=SIGMAS, seeds=[])
    with pytest.raises(TypeError, match="integer"):
        run(LinearPolicy(), sde_steps=(0.5,))


def test_a_rollout_that_diverges_is_refused():
    policy = LinearPolicy(storage_dtype=torch.float16)
    policy.network.bias.data += 1e6
    with pytest.raises(FloatingPointError, match=r"not finite \(stored in torch.float16\).*overflow"):
        run(policy)


def test_a_policy_that_breaks_the_velocity_contract_is_refused(monkeypatch):
    policy = LinearPolicy()
    monkeypatch.setattr(policy, "velocity", lambda *arguments: arguments[0].bfloat16())
    with pytest.raises(ValueError, match=r"must return float32 \[5, 2, 3, 3\].*got torch.bfloat16"):
        run(policy)


def test_replay_and_pairs_refuse_lengths_that_differ():
    policy = LinearPolicy()
    samples = run(policy)
    pairs = samples.pairs(torch.tensor([0, 1]), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"flat .sample, step. pairs; got 2, and a condition of 5"):
        replay(policy, CONDITION, pairs, samples.kernel)
