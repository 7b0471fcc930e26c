# SPDX-License-Identifier: Apache-2.0
"""The objective core: pure functions of tensors [B, T], alike for tokens and denoising steps. Torch only.

B samples, T decisions, `group` any labels, `weight` 0 for what is absent. Order of use: combine rewards,
advantage, log-ratio, surrogate, KL, aggregation.
"""

from .advantages import clamp_advantages, group_advantages, whiten
from .aggregation import MODES, Counts, aggregate, count_step, row_tokens
from .combine import normalise_then_sum, weighted_sum
from .groups import group_index
from .kl import gaussian_kl
from .ratios import (
    gaussian_log_prob,
    guard_log_ratio,
    guard_step_weight,
    log_ratio,
    sequence_log_ratio,
)
from .surrogates import ClipFractions, RatioStatistics, clip_fractions, ppo_clip, ratio_statistics

__all__ = [
    "MODES",
    "ClipFractions",
    "Counts",
    "RatioStatistics",
    "aggregate",
    "clamp_advantages",
    "clip_fractions",
    "count_step",
    "gaussian_kl",
    "gaussian_log_prob",
    "group_advantages",
    "group_index",
    "guard_log_ratio",
    "guard_step_weight",
    "log_ratio",
    "normalise_then_sum",
    "ppo_clip",
    "ratio_statistics",
    "row_tokens",
    "sequence_log_ratio",
    "weighted_sum",
    "whiten",
]
