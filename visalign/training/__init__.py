# SPDX-License-Identifier: Apache-2.0
"""Training loops: sample, judge, compare, update; with exact resume.

It needs a policy and a reward handed in; no model family and no judge comes in.
"""

from visalign.training.diffusion.cost import forward_equivalents_per_image
from visalign.training.diffusion.settings import ObjectiveSettings, RolloutSettings
from visalign.training.diffusion.trainer import FlowGRPOTrainer
from visalign.training.loop.checkpoint import CheckpointError
from visalign.training.loop.ema import EMA
from visalign.training.loop.judging import RewardFailure
from visalign.training.loop.loop import Keeping, Loop, TrainResult
from visalign.training.loop.metrics import METRICS, MetricsFile, read_metrics
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.progress import TrainingProgress
from visalign.training.loop.runtime import peak_memory_bytes
from visalign.training.loop.sampler import Batch, PromptSampler, check_batch_algebra

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
    "OptimizerSettings",
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
