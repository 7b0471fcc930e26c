# SPDX-License-Identifier: Apache-2.0
"""SPEAR: which stored samples are worth learning from again, and how much they count."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visalign.core.checks import check_axes
from visalign.core.precision import float32


def replay_advantages(reward: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """SPEAR: judge replayed samples by today's standard, A = R − median(history), and keep those with A > 0.

    Args:
        reward: [B] of stored samples, any unit; what is not finite is missing.
        history: [H] recent mean rewards of groups, same unit; what is not finite is left out.

    Returns:
        (advantage [B], float32 or better, 0 where missing; keep [B] bool, the samples to replay). No std.

    Raises:
        ValueError: not vectors, or an empty history.

    SPEAR, arXiv 2509.22601 (capacity 10240 means, 2048 samples of age ≤ 10 steps).
    """
    check_axes(reward=(reward, "B"))
    if history.ndim != 1 or not len(history):
        raise ValueError(
            f"history must be [H] with at least one mean; got shape {tuple(history.shape)}. Skip the replay "
            "until there is one."
        )
    past = history.detach().double()
    median = torch.where(torch.isfinite(past), past, float("nan")).nanquantile(0.5)
    centred = reward.detach().double() - median
    advantage = torch.where(torch.isfinite(centred), centred, 0.0).to(float32(reward).dtype)
    return advantage, advantage > 0


def replay_weight(step: Tensor | float, *, warmup: float = 200.0, ceiling: float = 1.0) -> Tensor:
    """SPEAR's weight of the replay loss, c(s) = c₀ (1 − cos(π min(s, T)/T))/2: from 0 to c₀ in T steps.

    Args:
        step: s ≥ 0, optimizer steps so far, any shape.
        warmup: T > 0, in steps.
        ceiling: c₀.

    Returns:
        The shape of step, float64.

    SPEAR, arXiv 2509.22601 (T = 200, c₀ = 1 in the released scripts).
    """
    if not warmup > 0:
        raise ValueError(f"warmup must be positive; got {warmup}.")
    part = torch.as_tensor(step, dtype=torch.float64).clamp(0, warmup) / warmup
    return ceiling * (1 - torch.cos(math.pi * part)) / 2
