# SPDX-License-Identifier: Apache-2.0
"""Timestep schedules against hand values and diffusers; the noise rate against its formula; noise by seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor

from visalign.flow import diffusers_timestep_sigmas, initial_noise, sample_seed, step_noise, timestep_sigmas


def test_timestep_sigmas_by_hand():
    assert timestep_sigmas(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    expected = torch.tensor([1.0, 9 / 10, 3 / 4, 1 / 2, 0.0])
    torch.testing.assert_close(timestep_sigmas(4, shift=3.0), expected, rtol=0, atol=1e-7)
    assert timestep_sigmas(4, shift=3.0).dtype == torch.float32


@pytest.mark.parametrize("steps", [1, 2, 4, 10, 28, 50])
@pytest.mark.parametrize("shift", [0.5, 1.0, 3.0, 6.0])
def test_diffusers_timestep_sigmas_equals_the_scheduler_to_the_last_bit(steps, shift):
    scheduler: Any = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    assert torch.equal(diffusers_timestep_sigmas(steps, shift=shift), scheduler.sigmas)


def test_sample_seed_is_frozen_and_separates():
    assert sample_seed(0, 1, 2) == sample_seed(0, 1, 2) == 4216901078605280141
    seeds = {sample_seed(a, b) for a in range(30) for b in range(30)} | {sample_seed(1), sample_seed("1")}
    assert len(seeds) == 902 and all(0 <= seed < 2**63 for seed in seeds)


def test_initial_noise_is_what_diffusers_draws():
    seeds = [3, 2**62, 7]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    assert torch.equal(initial_noise(seeds, (4, 5, 5)), randn_tensor((3, 4, 5, 5), generator=generators))


def test_noise_depends_on_its_own_seed_and_step_alone():
    seeds = [11, 5, 8]
    for draw in (initial_noise, lambda seeds, shape: step_noise(seeds, 4, shape)):
        together = draw(seeds, (2, 3))
        assert torch.equal(draw([8, 11], (2, 3)), together[[2, 0]])
        assert torch.equal(draw(torch.tensor(seeds), (2, 3)), together)
    drawn = [initial_noise([11], (64,)), *(step_noise([11], step, (64,)) for step in range(4))]
    correlation = torch.corrcoef(torch.cat(drawn)) - torch.eye(5)
    assert correlation.abs().max() < 0.45


@pytest.mark.parametrize("seed", [-1, 1.5, True, 2**63])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(ValueError, match="Seeds are one integer"):
        initial_noise([0, seed], (2,))
