# SPDX-License-Identifier: Apache-2.0
"""The configuration of a Flow-GRPO job. YAML files hold only what differs from these defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from visalign.errors import UserError, suggestion
from visalign.training.sampler import check_batch_algebra
from visalign.training.settings import ObjectiveSettings, OptimiserSettings, RolloutSettings

DTYPES = ("float32", "bfloat16", "float16")


def _dtype(name: str, given: str | None) -> None:
    if given is not None and given not in DTYPES:
        raise UserError(f"{name} is {given!r}. {suggestion(given, DTYPES)}Allowed: {', '.join(DTYPES)}.")


def _at_least(name: str, given: float | None, least: float) -> None:
    if given is not None and not (math.isfinite(given) and given >= least):
        raise UserError(f"{name} is {given}; it must be at least {least} and finite.")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The adapters that are trained."""

    rank: int = 32
    """r, inner width; Flow-GRPO uses 32."""
    alpha: float = 64.0
    """α; an adapter's output is scaled by α / r."""
    target_modules: list[str] | None = None
    """Ends of the names of the layers that get an adapter; null: the attention projections."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The text-to-image model."""

    path: str = "shapes-sd3"
    """A packaged model, a diffusers SD3 folder, or a hub id."""
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    """null trains the whole transformer."""
    guidance: float = 1.0
    """Guidance scale of training and evaluation; 1 is none. Published Flow-GRPO: 4.5."""
    dtype: str = "float32"
    """Of the frozen weights: float32, bfloat16 or float16. Adapters are float32 always."""
    autocast: str | None = None
    """Run the transformer under autocast in this dtype; raise objective.ratio_bound with it."""
    use_t5: bool = True
    """false leaves the third text encoder out where the model has one."""
    image_size: int | None = None
    """Pixels per side; null: the model's own."""
    max_sequence_length: int = 256
    """Tokens of the T5 part of the context."""

    def __post_init__(self) -> None:
        _dtype("model.dtype", self.dtype)
        _dtype("model.autocast", self.autocast)
        _at_least("model.guidance", self.guidance, 1.0)


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
class RewardTerm:
    """One reward of the sum."""

    weight: float = 1.0
    """At least 0; a weight of 0 only records the reward. Direction is the reward's own matter."""
    name: str | None = None
    """Catalogue name, package.module:Name or path/to/file.py:Name; null: the label of the term."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""
    mean: float = 0.0
    """With rewards.normalise=fixed: what is taken off ..."""
    std: float = 1.0
    """... and what divides."""


@dataclass(frozen=True, kw_only=True)
class RewardsConfig:
    """The sum that is optimised."""

    terms: dict[str, RewardTerm] = field(default_factory=lambda: {"shapes_verifier": RewardTerm()})
    """label -> term."""
    normalise: str = "none"
    """none, fixed (each term's mean and std) or batch (z-scores over the batch; one process only)."""
    allow_mixed_units: bool = False
    """Sum raw scores of different units all the same."""

    def __post_init__(self) -> None:
        if self.normalise not in ("none", "fixed", "batch"):
            raise UserError(f"rewards.normalise is {self.normalise!r}; it must be none, fixed or batch.")
        if not self.terms:
            raise UserError(
                "rewards.terms is empty; name at least one reward, e.g. shapes_verifier: {weight: 1}."
            )


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
            _at_least(f"evaluation.{name}", getattr(self, name), least)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, checkpoints, machine."""

    iterations: int = 100
    """Iterations: each samples, judges and updates."""
    max_seconds: float | None = None
    """Stop training at the end of the iteration that reaches this; makes the length depend on the machine.
    A run that has used it up trains on only when it is resumed with more."""
    checkpoint_every: int = 10
    """Iterations between two checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints that are kept."""
    device: str = "auto"
    """auto (an accelerator where there is one) or cpu."""
    threads: int | None = None
    """CPU threads; null: as torch chooses. Another number may change the last bits."""
    trackers: list[str] = field(default_factory=list)
    """Trackers of accelerate besides metrics.jsonl: tensorboard, wandb, ..."""

    def __post_init__(self) -> None:
        for name in ("iterations", "checkpoint_every", "keep_checkpoints", "threads"):
            _at_least(f"run.{name}", getattr(self, name), 1)
        if self.device not in ("auto", "cpu"):
            raise UserError(f"run.device is {self.device!r}; it must be auto or cpu.")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise UserError(
                f"run.max_seconds is {self.max_seconds}; it must be above 0, or null for no limit."
            )


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
    """What is optimised."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """How samples are made."""
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    """The loss."""
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    """How the weights move."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """What is measured before, on the way, and after."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length, checkpoints, machine."""

    def __post_init__(self) -> None:
        check_batch_algebra(self.rollout.prompts_per_iteration, self.rollout.group_size)
        _at_least("seed", self.seed, 0)
        known = {**self.rewards.terms, **self.evaluation.rewards}
        judge = self.evaluation.correctness
        if judge is not None and judge not in known:
            raise UserError(
                f"evaluation.correctness is {judge!r}, which is no label of rewards.terms or "
                f"evaluation.rewards. {suggestion(judge, known)}Labels: {', '.join(known)}; or null."
            )


FREE_KEYS = (
    "run.iterations",
    "run.max_seconds",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.trackers",
)
"""Keys that may differ when a run is resumed: they do not change what an iteration computes."""
