# SPDX-License-Identifier: Apache-2.0
"""STEER: weigh each token's loss by the entropy change that its update causes.

Rethinking Entropy Interventions, arXiv 2510.10150. Two phases, as in `selection`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visalign.core.checks import check_same
from visalign.core.surrogates.ppo import LOG_RATIO_LIMIT

from .statistics import present_decisions, token_terms

Decay = Literal["linear", "exponential"]


def steer_change(log_prob: Tensor, old_log_prob: Tensor, entropy: Tensor, advantage: Tensor, weight: Tensor) -> Tensor:
    """Compute the first-order entropy change of a token's update: Ω = (A/π_old) π (1 − π)(log π + H).

    NaN where a present number is missing. `old_log_prob` is under the rollout policy. STEER, arXiv 2510.10150.
    Deviation from the released code: π is not clamped away from 0 and 1, the ratio is held at e^20.
    """
    check_same(log_prob=log_prob, old_log_prob=old_log_prob, entropy=entropy)
    value = log_prob.detach().double().clamp(min=-1e3)
    _, gain, inside = token_terms(value, advantage, weight)
    ratio = (value - old_log_prob.detach().double()).clamp(max=LOG_RATIO_LIMIT).exp()
    change = gain * ratio * -torch.expm1(value) * (value + entropy.detach().double())
    return torch.where(weight != 0, torch.where(inside, change, float("nan")), 0.0)


@dataclass(frozen=True)
class SteerThresholds:
    """Range of |Ω| over the whole step, range of the weights, and k of the exponential form; 0-dim."""

    smallest: Tensor
    largest: Tensor
    w_min: Tensor
    w_max: Tensor
    decay: Tensor


def steer_thresholds(change: Tensor, weight: Tensor, *, w_min: float = 0.8, w_max: float = 1.2) -> SteerThresholds:
    """Take the range of |Ω| over the whole optimizer step.

    `w_min` in (0, 1] is the smallest weight, `w_max` ≥ w_min the largest of the linear form; both 1 is no weighting.
    """
    inside = present_decisions(change, weight)
    size = change.detach().double().abs()
    largest = torch.cat([torch.where(inside, size, 0.0).flatten(), size.new_zeros(1)]).max()
    smallest = torch.cat([torch.where(inside, size, largest).flatten(), largest.reshape(1)]).min()
    return SteerThresholds(
        smallest=smallest,
        largest=largest,
        w_min=size.new_tensor(w_min),
        w_max=size.new_tensor(w_max),
        decay=-math.log(w_min) / largest.clamp(min=0.02),
    )


def steer_weights(change: Tensor, weight: Tensor, thresholds: SteerThresholds, *, decay: Decay = "linear") -> Tensor:
    """Weigh a token the less, the more it moves the entropy, in either direction.

    linear: w = w_max − (w_max − w_min)(|Ω| − min)/(max − min), and 1 when all |Ω| are equal; exponential: w =
    clip(e^(−k |Ω|), w_min, 1), k = −log(w_min)/max(max |Ω|, 0.02). Multiply the loss per token with it and
    keep the counts of the old weight. NaN where Ω is missing. STEER, arXiv 2510.10150. Deviation from the
    released code: the range is that of the step, not of a micro-batch.
    """
    check_same(change=change, weight=weight)
    size = change.detach().double().abs()
    if decay == "linear":
        width = thresholds.largest - thresholds.smallest
        position = (size - thresholds.smallest) / torch.where(width > 0, width, 1.0)
        result = thresholds.w_max - (thresholds.w_max - thresholds.w_min) * position
        result = torch.where((width > 0) | size.isnan(), result, 1.0)
    else:
        result = (-thresholds.decay * size).exp().clamp(thresholds.w_min, torch.ones_like(thresholds.w_min))
    return torch.where(weight != 0, result, 0.0)
