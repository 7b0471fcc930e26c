# SPDX-License-Identifier: Apache-2.0
"""Timestep schedules from noise to image.

The flow is x_σ = (1 − σ) x0 + σ noise with v = noise − x0 = dx/dσ; sampling walks σ from 1 to 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def _shifted(u: Tensor, shift: float) -> Tensor:
    return shift * u / (1 + (shift - 1) * u)
