# SPDX-License-Identifier: Apache-2.0
"""Training loops: sample, judge, compare, update; with exact resume."""

from .checkpoint import CheckpointError
from .collect import RewardFailure
from .cost import forward_equivalents_per_image
from .ema import EMA
from .flow_grpo import FlowGRPOTrainer
from .loop import Keeping, Loop, TrainResult
from .metrics import METRICS, MetricsFile, read_metrics
from .progress import TrainingProgress
from .runtime import peak_memory_bytes
from .sampler import Batch, PromptSampler, check_batch_algebra
from .settings import ObjectiveSettings, OptimiserSettings, RolloutSettings

__all__ = [
    "EMA",
    "METRICS",
    "Batch",
    "CheckpointError",
    "FlowGRPOTrainer",
    "Keeping",
    "Loop",
    "MetricsFile",
    "ObjectiveSettings",
    "OptimiserSettings",
    "PromptSampler",
    "RewardFailure",
    "RolloutSettings",
    "TrainResult",
    "TrainingProgress",
    "check_batch_algebra",
    "forward_equivalents_per_image",
    "peak_memory_bytes",
    "read_metrics",
]
