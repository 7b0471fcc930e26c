# SPDX-License-Identifier: Apache-2.0
"""Training: one `Trainer`, and what differs between pictures, texts, demonstrations and labels.

It needs a policy and a reward handed in; no model family and no judge comes in.
"""

from .diffusion.branching import BranchSettings
from .diffusion.cost import forward_equivalents_per_image
from .diffusion.flow_grpo import FlowGRPO
from .diffusion.regression import VelocityRegression
from .diffusion.reward_gradient import RewardGradient
from .diffusion.rollout_settings import RolloutSettings
from .diffusion.settings import DiffusionObjectiveSettings
from .loop.algorithm import Algorithm, Counters
from .loop.checkpoint import CheckpointError
from .loop.judging import RewardFailure
from .loop.metrics import METRICS, read_metrics
from .loop.monitor import MonitorLimits, MonitorSettings
from .loop.optimizer import AdamWSettings, OptimizerSettings
from .loop.progress import TrainingProgress
from .loop.runtime import end_processes, peak_memory_bytes
from .loop.sampler import PromptSampler, check_batch_algebra
from .loop.trainer import RunSettings, Trainer, TrainResult
from .policy.settings import ObjectiveSettings
from .reward.settings import RewardObjectiveSettings, RewardOptimizerSettings
from .reward.trainer import RewardModeling
from .text.dpo import DPO, DPOSettings
from .text.rl import TextRL
from .text.settings import (
    DynamicSettings,
    LatentFlowSettings,
    SelfImitationSettings,
    TextObjectiveSettings,
    TextRolloutSettings,
)
from .text.sft import SFT

__all__ = [
    "DPO",
    "METRICS",
    "SFT",
    "AdamWSettings",
    "Algorithm",
    "BranchSettings",
    "CheckpointError",
    "Counters",
    "DPOSettings",
    "DiffusionObjectiveSettings",
    "DynamicSettings",
    "FlowGRPO",
    "LatentFlowSettings",
    "MonitorLimits",
    "MonitorSettings",
    "ObjectiveSettings",
    "OptimizerSettings",
    "PromptSampler",
    "RewardFailure",
    "RewardGradient",
    "RewardModeling",
    "RewardObjectiveSettings",
    "RewardOptimizerSettings",
    "RolloutSettings",
    "RunSettings",
    "SelfImitationSettings",
    "TextObjectiveSettings",
    "TextRL",
    "TextRolloutSettings",
    "TrainResult",
    "Trainer",
    "TrainingProgress",
    "VelocityRegression",
    "check_batch_algebra",
    "end_processes",
    "forward_equivalents_per_image",
    "peak_memory_bytes",
    "read_metrics",
]
