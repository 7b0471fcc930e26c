# SPDX-License-Identifier: Apache-2.0
"""Divergences between two policies, exact where they have a closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from .ratios import EventNorm, expand_over_event, reduce_event


def gaussian_kl(mean: Tensor, mean_ref: Tensor, std: Tensor, *, event_norm: EventNorm) -> Tensor:
    """Compute the exact KL(N(μ, std²) ‖ N(μ_ref, std²)) = Σ_d (μ_d − μ_ref,d)²/(2 std²), over D for "mean".

    Zero variance, and its gradient is the gradient of the divergence. Published code often leaves √(−dt) out
    of std; then early denoising steps count too little (Flow-GRPO's paper has it: ‖Δμ‖²/(2 s² Δt)).

    Args:
        mean: [*N, *event] μ, differentiable.
        mean_ref: [*N, *event] μ of the reference; detached here.
        std: [*N] total standard deviation of the step, with the √(−dt), > 0; detached here.
        event_norm: "mean" or "sum" over the event; the same as in the log-prob, or β changes its meaning.

    Returns:
        [*N] nats (per element for "mean"), float32 or better, ≥ 0.

    Raises:
        ValueError: shapes that do not fit, or an unknown event_norm.

    Liu et al., Flow-GRPO, arXiv 2505.05470, section 4.
    """
    dtype = torch.promote_types(mean.dtype, torch.float32)
    difference = mean.to(dtype) - mean_ref.detach().to(dtype)
    scale = expand_over_event(std.detach().to(dtype), mean, mean_ref)
    return reduce_event((difference / scale).square() / 2, std.ndim, event_norm)
