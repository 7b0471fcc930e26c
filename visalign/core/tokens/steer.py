# SPDX-License-Identifier: Apache-2.0
"""STEER: weigh each token's loss by the entropy change that its update causes.

Two phases, as in `selection`: `steer_thresholds` over the whole optimizer step, then any part of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visalign.core.checks import check_choice, check_same
from visalign.core.surrogates.ppo import LOG_RATIO_LIMIT

from .statistics import present_decisions, token_terms

Decay = Literal["linear", "exponential"]


def steer_change(
    log_prob: Tensor, old_log_prob: Tensor, entropy: Tensor, advantage: Tensor, weight: Tensor
) -> Tensor:
    """First-order entropy change that a token's update causes: Ω = (A/π_old) π (1 − π)(log π + H).

    Args:
        log_prob: [B, T], log π of the sampled token.
        old_log_prob: the shape of log_prob, under the rollout policy.
        entropy: the shape of log_prob, H in nats.
        advantage: [B], or the shape of log_prob.
        weight: the shape of log_prob, 0 for absent decisions.

    Returns:
        The shape of log_prob, float64, no gradient; 0 where absent, NaN where a present number is missing.

    STEER, Rethinking Entropy Interventions, arXiv 2510.10150. Deviation from the released code: π is not
    clamped away from 0 and 1, the ratio is held at e^20.
    """
    check_same(log_prob=log_prob, old_log_prob=old_log_prob, entropy=entropy)
    value = log_prob.detach().double().clamp(min=-1e3)
    _, gain, inside = token_terms(value, advantage, weight)
    ratio = (value - old_log_prob.detach().double()).clamp(max=LOG_RATIO_LIMIT).exp()
    change = gain * ratio * -torch.expm1(value) * (value + entropy.detach().double())
    return torch.where(weight != 0, torch.where(inside, change, float("nan")), 0.0)


@dataclass(frozen=True)
class SteerThresholds:
    """Scale of `steer_weights`; 0-dim float64."""

    smallest: Tensor
    """min |Ω| of the whole step."""
    largest: Tensor
    """max |Ω|."""
    w_min: Tensor
    """Weight of the largest |Ω|."""
    w_max: Tensor
    """Weight of the smallest |Ω| in the linear form."""
    decay: Tensor
    """k = −log(w_min)/max(max |Ω|, 0.02) of the exponential form."""


def steer_thresholds(
    change: Tensor, weight: Tensor, *, w_min: float = 0.8, w_max: float = 1.2
) -> SteerThresholds:
    """Take the range of |Ω| over the whole optimizer step.

    Args:
        change: Ω [B, T] from `steer_change`.
        weight: the same shape; 0 for absent decisions.
        w_min: smallest weight, in (0, 1].
        w_max: largest weight of the linear form, ≥ w_min. w_min = w_max = 1 is no weighting.

    Returns:
        Thresholds for `steer_weights`.

    STEER, arXiv 2510.10150.
    """
    if not 0 < w_min <= 1 or not w_min <= w_max < float("inf"):
        raise ValueError(f"w_min must lie in (0, 1] and w_max be ≥ w_min; got w_min={w_min}, w_max={w_max}.")
    inside = present_decisions(change, weight)
    size = change.detach().double().abs()
    held = torch.where(inside, size, 0.0)
    largest = torch.cat([held.flatten(), held.new_zeros(1)]).max()
    smallest = torch.cat([torch.where(inside, size, largest).flatten(), largest.reshape(1)]).min()
    return SteerThresholds(
        smallest=smallest,
        largest=largest,
        w_min=size.new_tensor(w_min),
        w_max=size.new_tensor(w_max),
        decay=-math.log(w_min) / largest.clamp(min=0.02),
    )


def steer_weights(
    change: Tensor, weight: Tensor, thresholds: SteerThresholds, *, decay: Decay = "linear"
) -> Tensor:
    """Weigh a token the less, the more it moves the entropy, in either direction.

    linear: w = w_max − (w_max − w_min)(|Ω| − min)/(max − min), and 1 when all |Ω| are equal;
    exponential: w = clip(e^(−k |Ω|), w_min, 1), k = −log(w_min)/max(max |Ω|, 0.02).
    Multiply the loss per token with it and keep the counts of the old weight.

    Args:
        change: Ω [B, T] of any micro-batch.
        weight: the same shape.
        thresholds: of the whole step.
        decay: "linear" or "exponential".

    Returns:
        The shape of change, float64, no gradient; 0 where absent, NaN where Ω is missing.

    STEER, arXiv 2510.10150. Deviation from the released code: the range is that of the step, not of a
    micro-batch.
    """
    check_choice("decay", decay, ("linear", "exponential"))
    check_same(change=change, weight=weight)
    size = change.detach().double().abs()
    if decay == "linear":
        width = thresholds.largest - thresholds.smallest
        place = (size - thresholds.smallest) / torch.where(width > 0, width, 1.0)
        result = thresholds.w_max - (thresholds.w_max - thresholds.w_min) * place
        result = torch.where((width > 0) | size.isnan(), result, 1.0)
    else:
        result = (-thresholds.decay * size).exp().clamp(thresholds.w_min, torch.ones_like(thresholds.w_min))
    return torch.where(weight != 0, result, 0.0)
