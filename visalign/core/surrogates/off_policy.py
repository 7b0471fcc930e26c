# SPDX-License-Identifier: Apache-2.0
"""Correct for rollouts of another policy: an older one, or the same one in an inference engine.

Three policies: μ of the rollout, π_old at the center of the clip range, and π. The log-ratio here is
log π_old − log μ (log π − log μ where π_old is not recomputed), [B, T] without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_advantage, check_choice, check_same
from visalign.core.precision import float32

from .ppo import bounded_ratio
from .ratios import Level, ratio_level

Correction = Literal["truncate", "mask"]


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weight of each decision and the decisions kept; no gradient."""

    value: Tensor
    """[B, T] ω, factor of the loss per decision; 0 for absent and rejected ones."""
    keep: Tensor
    """[B, T] bool, factor of the aggregation's weight that leaves rejected decisions out of the counts."""


def importance_weights(
    log_ratio: Tensor, weight: Tensor, *, level: Level, mode: Correction, high: float, low: float = 0.0
) -> ImportanceWeights:
    """Compute truncated (TIS) or masked (MIS) importance weights of a rollout.

    ω = clip(r, low, high) for "truncate"; ω = r · 1[low ≤ r ≤ high] for "mask". TIS has high 2 and low 0,
    two-sided masks (IcePop) low above 0. r is the ratio of the token, the geometric mean over the sequence
    ("sequence"), or the product over it ("sequence_sum", which public trainers call "sequence"). Only the
    last is unbiased; its spread grows with the length, so a fixed bound rejects long completions first. Yao
    et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025 (TIS); Liu et al.,
    "When speed kills stability", 2025 (MIS, sequence level).
    """
    check_choice("mode", mode, get_args(Correction))
    ratio = bounded_ratio(ratio_level(log_ratio.detach(), weight, level))
    keep = weight != 0
    if mode == "mask":
        keep = keep & (ratio >= low) & (ratio <= high)
    return ImportanceWeights(value=torch.where(keep, ratio.clamp(low, high), 0.0), keep=keep)


def off_policy_mask(log_ratio: Tensor, advantage: Tensor, weight: Tensor, *, delta: float) -> Tensor:
    """Mask bad sequences that the current policy is unlikely to generate: what to keep, in the advantage's shape.

    M_i = 0 where A < 0 and −(1/n_i) Σ_t log r_it > δ (nats per decision), else 1, r = π/μ of the rollout.
    DeepSeek-V3.2, arXiv 2512.02556, off-policy sequence masking.
    """
    check_advantage(advantage, log_ratio)
    log_r = ratio_level(log_ratio.detach(), weight, "token")
    scale = weight.to(log_r.dtype)
    total = scale.sum(1)
    distant = -(log_r * scale).sum(1) / torch.where(total == 0, 1.0, total) > delta
    return ~((advantage < 0) & (distant if advantage.ndim == 1 else distant[:, None]))


def effective_sample_size(log_weight: Tensor, weight: Tensor | None = None) -> Tensor:
    """Compute Kish's effective sample size of importance weights from log ω, (Σ ω)² / Σ ω²; a number.

    It lies between 1 and the number of weights (all equal), and is free of their scale; 0 if every ω is 0.
    Kish, Survey Sampling, 1965; Kong, A note on importance sampling, 1992.
    """
    check_same(log_weight=log_weight, weight=weight)
    value = float32(log_weight.detach())
    if weight is not None:
        value = torch.where(weight != 0, value, float("-inf"))
    first, second = value.flatten().logsumexp(0), (2 * value).flatten().logsumexp(0)
    return torch.where(second == float("-inf"), 0.0, torch.exp(2 * first - second))
