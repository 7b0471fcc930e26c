# SPDX-License-Identifier: Apache-2.0
"""Models that predict noise, v or the clean latent, seen as flows: the path is the same, its scale another.

x_t = α x0 + s ε with α² + s² = 1, divided by α + s, is the flow x_σ = (1 − σ) x0 + σ ε at σ = s / (α + s).
A deterministic DDIM step between two times is the Euler step of that flow between their σ.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from visalign.core.checks import check_choice
from visalign.interfaces import Prediction


def flow_sigma(alphas_cumprod: Tensor) -> Tensor:
    """Compute the noise levels σ = √(1 − ᾱ) / (√ᾱ + √(1 − ᾱ)) of a variance-preserving schedule.

    >>> flow_sigma(torch.tensor([1.0, 0.5, 0.0])).tolist()
    [0.0, 0.5, 1.0]
    """
    noise = (1 - alphas_cumprod).sqrt()
    return noise / (alphas_cumprod.sqrt() + noise)


def preserving_scale(sigma: Tensor) -> Tensor:
    """Compute √((1 − σ)² + σ²), the std of x_σ where x0 and ε have variance 1; x_t = x_σ / scale."""
    return torch.hypot(1 - sigma, sigma)


def velocity_of_prediction(output: Tensor, x: Tensor, sigma: Tensor, prediction: Prediction) -> Tensor:
    """Compute the velocity dx/dσ = ε − x0 from a network's output.

    With n = √((1 − σ)² + σ²):
    epsilon: (ε − x) / (1 − σ);  x0: (x − x0) / σ;  v: ((2σ − 1) x / n + v) / n.

    x is on the flow, x_σ = (1 − σ) x0 + σ ε (not scaled as the network saw it); σ [B] is below 1 for
    "epsilon", above 0 for "x0". v = α ε − s x0. Source: Salimans and Ho, arXiv 2202.00512 (v); Song et al.,
    DDIM, arXiv 2010.02502, eq. 13.
    """
    dtype = torch.float64 if torch.float64 in (output.dtype, x.dtype) else torch.float32
    output, x = output.to(dtype), x.to(dtype)
    sigma = sigma.to(dtype).reshape(-1, *[1] * (x.ndim - 1))
    if prediction == "velocity":
        return output
    if prediction == "v":
        scale = preserving_scale(sigma)
        return ((2 * sigma - 1) * x / scale + output) / scale
    check_choice("prediction", prediction, get_args(Prediction))
    rest = 1 - sigma if prediction == "epsilon" else sigma
    if not bool((rest > 0).all()):
        raise ValueError(
            f'"{prediction}" leaves the velocity open at σ = {"1" if prediction == "epsilon" else "0"}. '
            "Let the timesteps start at the schedule's largest σ (flow_sigma), the last step at σ > 0."
        )
    return (output - x) / rest if prediction == "epsilon" else (x - output) / rest
