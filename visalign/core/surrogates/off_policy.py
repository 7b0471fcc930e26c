# SPDX-License-Identifier: Apache-2.0
"""Correction for rollouts drawn by another policy: an older one, or the same one in an inference engine.

Three policies: the rollout's μ, the π_old from which the clip range is measured, and π. The log-ratio here is
log π_old − log μ (or log π − log μ where π_old is not recomputed), without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_choice, check_same
from visalign.core.precision import float32

from .ppo import bounded_ratio
from .ratios import Level, ratio_level

Correction = Literal["truncate", "mask"]


@dataclass(frozen=True)
class ImportanceWeights:
    """Weight of each decision and what is left of the batch; no gradient."""

    value: Tensor
    """[B, T] ω; multiply the loss per decision with it. 0 where nothing is, or where it was rejected."""
    keep: Tensor
    """[B, T] bool. Multiply the aggregation's weight with it to leave the rejected out of the counts."""


def importance_weights(
    log_ratio: Tensor,
    weight: Tensor,
    *,
    level: Level,
    mode: Correction,
    high: float,
    low: float = 0.0,
) -> ImportanceWeights:
    """Truncated (TIS) or masked (MIS) importance weights of the rollout.

    ω = clip(r, low, high) for "truncate"; ω = r · 1[low ≤ r ≤ high] for "mask". r is the ratio of the token,
    the geometric mean of the sequence's ("sequence"), or the ratio of the whole sequence ("sequence_sum").
    The last is the unbiased one; its spread grows with the length, so a fixed bound rejects the long
    completions first.

    Args:
        log_ratio: [B, T], log π_old − log μ; detached here.
        weight: [B, T], 0 for absent decisions.
        level: "token", "sequence" or "sequence_sum"; public trainers call the last one "sequence".
        mode: "truncate" or "mask".
        high: largest ratio C; 2 in TIS.
        low: smallest ratio; 0 in TIS, above 0 in two-sided masks (IcePop).

    Returns:
        The weights, float32 or better.

    Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025 (TIS); Liu et
    al., "When speed kills stability", 2025 (MIS, sequence level).
    """
    check_choice("mode", mode, get_args(Correction))
    if level == "sequence_token":
        raise ValueError(
            "level 'sequence_token' differs from 'sequence' by its gradient only, and weights have none: "
            "give 'sequence'."
        )
    if not 0 <= low <= high:
        raise ValueError(f"the bounds are ratios with 0 ≤ low ≤ high; got low={low}, high={high}.")
    ratio = bounded_ratio(ratio_level(log_ratio.detach(), weight, level))
    keep = weight != 0
    if mode == "mask":
        keep = keep & (ratio >= low) & (ratio <= high)
    return ImportanceWeights(value=torch.where(keep, ratio.clamp(low, high), 0.0), keep=keep)


def off_policy_mask(log_ratio: Tensor, advantage: Tensor, weight: Tensor, *, delta: float) -> Tensor:
    """Leave out bad sequences that the current policy would hardly draw.

    M_i = 0 where A < 0 and −(1/n_i) Σ_t log r_it > δ, else 1.

    Args:
        log_ratio: [B, T], log π − log μ of the rollout; detached here.
        advantage: [B] or [B, T].
        weight: [B, T], 0 for absent decisions.
        delta: δ in nats per decision, ≥ 0.

    Returns:
        bool, the shape of advantage: what to keep. Sequences without a present decision are kept.

    DeepSeek-V3.2, arXiv 2512.02556, off-policy sequence masking.
    """
    if not delta >= 0:
        raise ValueError(f"delta must be ≥ 0; got {delta}.")
    if advantage.shape not in (log_ratio.shape, log_ratio.shape[:1]):
        raise ValueError(
            f"advantage must be [B] or [B, T] for log_ratio {tuple(log_ratio.shape)}; got "
            f"{tuple(advantage.shape)}."
        )
    own = ratio_level(log_ratio.detach(), weight, "token")
    scale = weight.to(own.dtype)
    total = scale.sum(1)
    away = -(own * scale).sum(1) / torch.where(total == 0, 1.0, total) > delta
    return ~((advantage < 0) & (away if advantage.ndim == 1 else away[:, None]))


def effective_sample_size(log_weight: Tensor, weight: Tensor | None = None) -> Tensor:
    """Kish's effective sample size of importance weights: (Σ ω)² / Σ ω².

    Between 1 and the number of weights; at that number all are equal. Free of the weights' scale, and without
    overflow.

    Args:
        log_weight: any shape, log ω; −∞ for a weight of 0. Per token, or [B] per sequence.
        weight: the same shape; decisions of weight 0 are not counted, the others count once.

    Returns:
        0-dim, float32 or better, without gradient; 0 when every weight is 0 or none is present.

    Kish, Survey Sampling, 1965; Kong, A note on importance sampling, 1992.
    """
    value = float32(log_weight.detach())
    if weight is not None:
        check_same(log_weight=value, weight=weight)
        value = torch.where(weight != 0, value, float("-inf"))
    first, second = value.flatten().logsumexp(0), (2 * value).flatten().logsumexp(0)
    return torch.where(second == float("-inf"), 0.0, torch.exp(2 * first - second))
