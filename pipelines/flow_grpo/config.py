# SPDX-License-Identifier: Apache-2.0
"""The configuration of a Flow-GRPO job. YAML files hold only what differs from these defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from visalign.errors import UserError
from visalign.pipelines.shared.sections import (
    LoraConfig,
    RewardsConfig,
    RewardTerm,
    RunConfig,
    at_least,
    check_correctness,
    check_dtype,
)
from visalign.training.diffusion.settings import DiffusionObjectiveSettings, RolloutSettings
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.loop.sampler import check_batch_algebra

from .win_rates import ComparisonConfig


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The text-to-image model."""

    path: str = "shapes-sd3"
    """A packaged model, the folder of a diffusers pipeline, or a hub id."""
    adapter: str | None = None
    """What makes it a policy: a name (sd3, pipeline), package.module:Class or path/to/file.py:Class; null: by
    its model_index.json."""
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    """null trains the whole transformer."""
    guidance: float | None = None
    """Guidance scale of training and evaluation, as the pipeline counts it; null: none, or what a model that
    takes the scale as an input is used with. Published Flow-GRPO: 4.5."""
    dtype: str = "float32"
    """Of the frozen weights: float32, bfloat16 or float16. What is trained is float32 always; the whole
    transformer is then computed in this dtype."""
    autocast: str | None = None
    """Run the transformer under autocast in this dtype; raise objective.ratio_bound with it."""
    use_t5: bool = True
    """false leaves the third text encoder out where the model has one."""
    image_size: int | tuple[int, int] | None = None
    """Pixels per side, or [height, width]; null: the model's own."""
    max_sequence_length: int = 256
    """Tokens of the T5 part of the context."""
    options: dict[str, Any] = field(default_factory=dict)
    """What else the adapter takes: negative_prompt, lora_path, num_frames, gradient_checkpointing,
    decoder_dtype, call={...} of pipelines."""

    def __post_init__(self) -> None:
        check_dtype("model.dtype", self.dtype)
        check_dtype("model.autocast", self.autocast)
        if self.guidance is not None:
            at_least("model.guidance", self.guidance, 0.0)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The prompts."""

    train: str = "shapes:train"
    """shapes:train, or a .txt or .jsonl file."""
    heldout: str = "shapes:heldout"
    """shapes:heldout, or a file; prompts that are trained on as well are counted in the report."""
    balance: bool = False
    """Give every tag the same number of groups, however many prompts it has."""
    cycle: list[str] | None = None
    """Tags that the groups take in turn, repeats allowed; null with balance: each tag once."""

    def __post_init__(self) -> None:
        if self.cycle is not None and not self.balance:
            raise UserError("data.cycle orders the tags of a balanced set; set data.balance=true with it.")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Held-out evaluation: fixed seeds, ODE sampling, averaged weights."""

    seeds: list[int] = field(default_factory=lambda: [0, 1])
    """Pictures per prompt, one for each seed."""
    steps: int | None = None
    """Denoising steps; null: as many as in training."""
    batch_size: int = 128
    """Samples at once; memory only."""
    every: int = 0
    """Iterations between two evaluations on the way; 0: only before and after."""
    prompts_on_the_way: int | None = 96
    """Held-out prompts of those, evenly spaced, with the first seed; null: all."""
    rewards: dict[str, RewardTerm] = field(
        default_factory=lambda: {
            name: RewardTerm() for name in ("shapes_verifier", "clip_score", "sharpness")
        }
    )
    """label -> reward to report besides those trained on; weights play no part."""
    correctness: str | None = "shapes_verifier"
    """The reward that says correct or wrong; null where none does."""

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise UserError(
                f"evaluation.seeds is {self.seeds}; give different numbers from 0 up, e.g. [0, 1]."
            )
        for name, least in (("steps", 1), ("batch_size", 1), ("every", 0), ("prompts_on_the_way", 1)):
            at_least(f"evaluation.{name}", getattr(self, name), least)


@dataclass(frozen=True, kw_only=True)
class FlowGRPOConfig:
    """A Flow-GRPO job: model, prompts, rewards, and how to train."""

    seed: int = 0
    """Of the run: prompts, noise, LoRA start."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The text-to-image model."""
    data: DataConfig = field(default_factory=DataConfig)
    """The prompts."""
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    """What is optimized."""
    comparison: ComparisonConfig | None = None
    """Optimize win rates inside each group instead of scores (the pipeline pref_grpo); null: the scores."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """How samples are made."""
    objective: DiffusionObjectiveSettings = field(default_factory=DiffusionObjectiveSettings)
    """The loss."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """How the weights move."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """What is measured before, on the way, and after."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length, checkpoints, machine."""

    def __post_init__(self) -> None:
        check_batch_algebra(self.rollout.prompts_per_iteration, self.rollout.group_size)
        at_least("seed", self.seed, 0)
        check_correctness(self.evaluation.correctness, self.rewards, self.evaluation.rewards)
