# SPDX-License-Identifier: Apache-2.0
"""Families of metrics by the trainings that log them, and records without their times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT_ONLY = (
    "tokens", "length_mean", "repetition", "truncated_share", "entropy", "engine_gap", "groups/*",
    "tools/*", "latent_flow/*", "replay/*", "penalty", "value_explained", "perplexity", "rewards/*",
    "logps/*", "label_mean", "entropy_token", "entropy_answer", "entropy_drop", "entropy_drop_foreseen",
    "covariance/*", "process_reward/*",
)  # fmt: skip
"""Keys of text policies only."""

REGRESSION_ONLY = ("match_error", "anchor_distance", "scout_agreement", "surrogate_stopped", "teacher_distance")
"""Keys of image regressions and few-step students only."""

ASCENT_ONLY = ("reward_gradient",)
"""Keys of training through the reward's gradient only."""

MONITOR_ONLY = (
    "agreement/*", "recorded/*", "recorded_std/*", "agreement_change/*", "recorded_change/*",
    "group_std_ratio", "judge_std_ratio/*", "gradient_ratio", "diversity", "diversity_ratio", "discriminator/*",
)  # fmt: skip
"""Keys that need a reward of weight 0 or one that learns, or the run's monitor."""

TIMES = ("seconds", "samples_per_second")
"""Families that differ between two runs with the same seed; all others are reproducible on CPU."""


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the times from a record, which leaves its reproducible part."""
    return {key: value for key, value in record.items() if key.split("/", 1)[0] not in TIMES}
