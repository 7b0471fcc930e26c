# SPDX-License-Identifier: Apache-2.0
"""Timestep schedules from noise to image, and the noise rate s(σ) of each stochastic schedule.

The flow is x_σ = (1 − σ) x0 + σ noise with v = noise − x0 = dx/dσ; sampling walks σ from 1 to 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visalign.core.checks import check_choice

NOISE_SCHEDULES = ("flow", "dance", "none")
"""Noise schedules of the SDE kernel: Flow-SDE, Dance-SDE, and none (the ODE)."""
LAST_IS_EXACT = ("cps", "ddim")
"""Kernels that add no noise in the last step (σ' = 0)."""
KERNELS = (*NOISE_SCHEDULES, *LAST_IS_EXACT)


def timestep_sigmas(steps: int, *, shift: float = 1.0) -> Tensor:
    """Compute noise levels σ = shift·u / (1 + (shift − 1)·u) at u = 1, 1 − 1/steps, ..., 0; float32.

    Shift 1 leaves the levels uniform, 3 is SD3's. Source: Esser et al., arXiv 2403.03206,
    resolution-dependent shifting of timesteps.
    """
    u = torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)
    return _shifted(u, shift).float()


def diffusers_timestep_sigmas(steps: int, *, shift: float, num_train_timesteps: int = 1000) -> Tensor:
    """Compute the sigmas of diffusers' `FlowMatchEulerDiscreteScheduler.set_timesteps(steps)`.

    Its end points 1 and 1/num_train_timesteps are shifted once, `steps` levels are spaced evenly between
    them, and every level is shifted again; 0 is appended. So the last level above 0 is small (0.0089 at shift
    3) and the others differ from `timestep_sigmas(steps, shift=shift)`.

    Source: diffusers 0.42 (deviation from `timestep_sigmas` described in diffusers issue 13243).
    """
    # diffusers keeps the shifted end point in float32; doing the same makes them equal to the last bit
    lowest = _shifted(torch.tensor(1.0) / num_train_timesteps, shift).double()
    u = 1.0 + (lowest - 1.0) * torch.arange(steps, dtype=torch.float64) / max(steps - 1, 1)
    return torch.cat([_shifted(u, shift).float(), torch.zeros(1)])


def noise_rate(sigma: Tensor, sigma_max: float, *, schedule: str, noise_level: float) -> Tensor:
    """Compute the noise rate s(σ) of dx = [v + s²/(2σ)·(x + (1 − σ)v)] dσ + s dw, per √σ.

    flow: s = a·√(σ/(1 − σ̂)) with σ̂ = `sigma_max` where σ = 1 and σ elsewhere; dance: s = η; none: s = 0. The
    published code takes the second of the sigmas for sigma_max, so the noise of the first step depends on the
    number of steps. The total std of the next sample is s·√(−dt).

    Source: Flow-GRPO, arXiv 2505.05470, σ_t = a√(t/(1 − t)); DanceGRPO, arXiv 2505.07818, constant η.
    """
    check_choice("schedule", schedule, NOISE_SCHEDULES)
    if schedule == "none":
        return torch.zeros_like(sigma)
    if schedule == "dance":
        return torch.full_like(sigma, noise_level)
    sigma_hat = torch.where(sigma == 1, sigma_max, sigma)
    return noise_level * torch.sqrt(sigma / (1 - sigma_hat))


def check_noise(schedule: str, noise_level: float, sigma_max: float = 0.0) -> None:
    """Refuse a noise schedule, or a number of it, that no kernel has."""
    check_choice("schedule", schedule, KERNELS)
    largest = 1.0 if schedule in LAST_IS_EXACT else math.inf
    if schedule != "none" and not (0 <= noise_level <= largest and noise_level < math.inf):
        raise ValueError(f"noise_level of {schedule} must lie in [0, {largest:g}]; got {noise_level}.")
    if schedule == "flow" and not 0 <= sigma_max < 1:
        raise ValueError(
            f"sigma_max stands in for σ = 1 under the root of 1 − σ and must lie in [0, 1); got {sigma_max}."
        )


def _shifted(u: Tensor, shift: float) -> Tensor:
    return shift * u / (1 + (shift - 1) * u)
