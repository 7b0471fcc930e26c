# SPDX-License-Identifier: Apache-2.0
"""Configurations of Flow-GRPO and Pref-GRPO jobs. YAML files hold only what differs from these."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic.dataclasses import dataclass

from visalign.flow.transitions import Solver
from visalign.memory import AutoCount
from visalign.pipelines.shared.sections import (
    Dtype,
    HeldoutConfig,
    LoraConfig,
    PolicyRunConfig,
    RewardsConfig,
    RewardTerm,
    is_own,
)
from visalign.precision import Autocast
from visalign.schema import STRICT
from visalign.settings import Count, Natural, NonNegative, PositiveShare, Records, Share, Side, Steps, refuse
from visalign.training.diffusion.rollout_settings import (
    RolloutSettings,
    check_more_samples,
    check_sampling,
    check_sharding,
)
from visalign.training.diffusion.settings import DiffusionObjectiveSettings
from visalign.training.loop.dynamic_groups import DynamicSettings
from visalign.training.loop.monitor import MonitorSettings
from visalign.training.loop.optimizer import OptimizerSettings
from visalign.training.policy.winners import ReplaySettings


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The text-to-image model."""

    path: str = "shapes-sd3"
    """A packaged model, the folder of a diffusers pipeline, a hub id, or a .safetensors file as CivitAI has them."""
    config: str | None = None
    """Diffusers folder or hub id of the same family as a model.path of one file: it describes the file, and provides
    parts that the file lacks, such as text encoders. null: a folder beside the file, else the hub's for its family."""
    variant: str | None = None
    """Variant of the weights' files, such as fp16; null: the usual ones, or the only ones that there are."""
    adapter: str | None = None
    """Adapter class: a name (sd3, pipeline), package.module:Class or path/to/file.py:Class, whose code
    runs; null: by the model's index."""
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    """null trains the whole transformer."""
    lora_path: str | list[str] | None = None
    """LoRA to continue from: a run folder, the folder of a LoRA, or a .safetensors file with the keys of diffusers,
    kohya or ComfyUI; several as a list, each PATH or PATH:WEIGHT. Its rank, alpha and layers replace model.lora's."""
    guidance: NonNegative | None = None
    """Guidance scale of training and evaluation, as the pipeline counts it; null: none, or what a model that
    takes the scale as an input is used with. Published Flow-GRPO: 4.5."""
    dtype: Dtype = "float32"
    """Dtype of the frozen weights: float32, bfloat16 or float16. Trained weights are always float32; a fully
    trained transformer is then computed in this dtype."""
    autocast: Autocast | None = None
    """Run the transformer under autocast in this dtype; raise objective.ratio_bound with it. auto: bfloat16
    where the device multiplies it, else none (a processor without that arithmetic is ten times as slow)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, for memory: one forward more for each backward."""
    offload: bool = False
    """Keep text encoders and autoencoder in CPU memory, and copy them to the GPU while they are used."""
    quantization: str | None = None
    """Quantization of the frozen transformer or U-Net under LoRA: torchao_int8 (a quarter of float32, half of
    bfloat16) or bitsandbytes_4bit; null: none."""
    compile: bool | None = None
    """Compile the network's repeated blocks (torch.compile): a minute for each size of batch, then half the time.
    null: on a GPU, compile networks of 100 million parameters or more, and capture passes of an SD3 below 20 million
    as CUDA graphs unless model.attention is set. false: neither."""
    attention: str | None = None
    """The kernel of attention by diffusers' name, such as native, flash, sage, xformers; null: its own."""
    channels_last: bool = False
    """Keep the weights of convolutions with channels last (U-Nets)."""
    use_t5: bool = True
    """false leaves the third text encoder out where the model has one."""
    image_size: Side | tuple[Side, Side] | None = None
    """Pixels per side, or [height, width]; null: the model's own."""
    decode_batch: AutoCount | None = None
    """Latents per pass of the autoencoder; memory only. null: 32 of the adapter sd3, 8 of pipeline; auto: measured
    as rollout.batch_size."""
    max_sequence_length: Count = 256
    """Tokens of the T5 part of the context."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the adapter: negative_prompt, num_frames, decoder_dtype,
    call={...} of pipelines."""

    @property
    def described_by(self) -> Path | str:
        """Folder or hub name whose index describes the model."""
        from visalign.adapters.catalogue import index_source

        return index_source(self.path, self.adapter, self.config)

    def __post_init__(self) -> None:
        if self.lora_path is not None and self.lora is None:
            object.__setattr__(self, "lora", LoraConfig())


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """The prompts, or stored pairs."""

    train: str = "shapes:train"
    """shapes:train, or shapes:composed, with 800 more prompts of pairs; a .txt file (a prompt per line); a table
    (.jsonl, .json, .csv, .tsv, .parquet, .xlsx); a folder of images with captions (cat.png, cat.txt or cat.caption);
    or a dataset of the hub, owner/name:split."""
    map: dict[str, str] = field(default_factory=dict)
    """Our name of a column -> that of the files, such as prompt: caption."""
    pairs: str | None = None
    """Learn from stored pairs of images in place of samples (objective.algorithm diffusion_dpo, diffusion_kto,
    gdro, reward_weighted or rejection): a preference set as `visalign evaluate` reads it (rollout.group_size=2),
    such as `visalign collect --export` writes, or rated images (image, prompt, mos), of which each prompt gives
    groups of rollout.group_size; or LAYOUT:FOLDER of a published set, e.g. pick_a_pic, of which the split train
    is read; for a model that edits with a column "source". Then data.train and rewards are unused;
    evaluation.rewards names what is reported."""
    pairs_size: Records | None = None
    """At most so many of data.pairs; null: all, and 400 of shapes:pairs."""
    images: str | None = None
    """Learn from images with captions in place of samples (objective.algorithm=sft): a folder (cat.png, cat.txt), a
    table with image and prompt, a folder of Parquet or WebDataset tar files, or shapes:images. Each image is trained
    at the nearest shape, then area, of rollout.image_sizes. Then data.train and rewards are unused."""
    images_size: Records | None = None
    """At most so many of data.images; null: all, and 2,000 of shapes:images."""
    cache: str | None = None
    """Folder of encoded images and prompts, for data.images and data.pairs; created, and shared by runs. The prompts
    are encoded before training, after which the text encoders leave memory; where all are there they are not loaded.
    Entries depend on the model's files, dtype, options and image size, and on the content of an image."""
    caption_dropout: Share = 0.0
    """Share of data.images whose caption is left out, so that guidance keeps its meaning."""
    heldout: str | None = None
    """shapes:heldout, or a file; prompts that are trained on as well are counted in the report. null: a tenth of the
    prompts (100 at most), which is then not trained on, with a model and prompts of one's own; else shapes:heldout."""
    balance: bool = False
    """Give every tag the same number of groups, however many prompts it has."""
    cycle: list[str] | None = None
    """Tags that the groups take in turn, repeats allowed; null with balance: each tag once."""

    @property
    def is_stored(self) -> bool:
        """True where images are learnt from that the policy did not sample."""
        return self.pairs is not None or self.images is not None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EvaluationConfig(HeldoutConfig):
    """Held-out evaluation: fixed seeds, ODE sampling, averaged weights."""

    steps: Steps | None = None
    """Denoising steps; null: as many as in training. Published runs train on 10 and evaluate by 40."""
    solver: Solver = "euler"
    """Solver of those steps: "euler" or "dpmpp_2m", DPM-Solver++(2M), of second order: nearer the ODE from
    some 10 steps on, worse with few."""
    guidance: NonNegative | None = None
    """Guidance scale of held-out images; null: model.guidance. A model that learns from captions or stored pairs
    without guidance is often used with it."""
    batch_size: Count = 128
    """Samples at once; memory only."""
    grid: Natural = 8
    """Held-out prompts, evenly spaced, whose image of the first seed goes into samples/ at each evaluation,
    side by side; 0: none."""
    rewards: dict[str, RewardTerm] = field(
        default_factory=lambda: {name: RewardTerm() for name in ("shapes_verifier", "clip_score", "sharpness")}
    )
    """label -> reward to report besides those trained on; weights play no part. Those of the default are left out
    with a model and prompts of one's own."""
    correctness: str | None = "shapes_verifier"
    """The reward that says correct or wrong; null where none does. The default's is left out likewise."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ImageMonitorConfig(MonitorSettings):
    """Limits of the monitored metrics that warn or stop a run."""

    features: str | None = "auto"
    """Image features for distances: the label of a judge with a CLIP image tower, a CLIP model as clip_score takes it,
    or null for none. auto: the first such judge of evaluation.rewards and rewards.terms."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ComparisonConfig:
    """Comparison of the images of a group; each term of rewards.terms gives its own win rates."""

    both_orders: bool = True
    """Ask each pair in both orders and average the log-odds. Published Pref-GRPO: false."""
    hard: bool = False
    """Count a pair as won or lost; false takes the judge's probability. Published Pref-GRPO: true."""
    budget: PositiveShare | None = None
    """Share of a group's pairs that may be asked, in (0, 1]; null: all of them, each once."""
    scores: list[str] = field(default_factory=list)
    """Labels of terms that stay plain scores beside the win rates, e.g. a CLIP score that is only added."""


_BATCHES = ("rollout.batch_size", "optimizer.micro_batch", "model.decode_batch")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FlowGRPOConfig:
    """A Flow-GRPO job: model, prompts, rewards, and how to train."""

    pipeline: ClassVar[str] = "flow_grpo"

    seed: Natural = 0
    """Random seed of prompts, noise and LoRA weights."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The text-to-image model."""
    data: DataConfig = field(default_factory=DataConfig)
    """The prompts."""
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    """Rewards to optimize."""
    comparison: ComparisonConfig | None = None
    """Optimize win rates inside each group instead of scores (the pipeline pref_grpo); null: the scores."""
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    """Sampling."""
    dynamic: DynamicSettings = field(default_factory=DynamicSettings)
    """Dynamic sampling."""
    self_imitation: ReplaySettings | None = None
    """SPEAR's replay of images that beat their group, for regressions; {} has the paper's numbers, null: none."""
    objective: DiffusionObjectiveSettings = field(default_factory=DiffusionObjectiveSettings)
    """The loss."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    """Optimizer."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """Evaluation before, during and after training."""
    monitor: ImageMonitorConfig = field(default_factory=ImageMonitorConfig)
    """Limits that warn or stop the run."""
    run: PolicyRunConfig = field(default_factory=PolicyRunConfig)
    """Length, checkpoints, machine."""

    def __post_init__(self) -> None:
        if is_own(self.model.path, self.data.pairs or self.data.images or self.data.train):
            object.__setattr__(self, "evaluation", self.evaluation.without_packaged(self.rewarded))
        elif self.data.heldout is None:
            object.__setattr__(self, "data", replace(self.data, heldout="shapes:heldout"))
        refuse(_unfit_images(self))
        stored = self.data.is_stored
        check_sampling(self.objective, self.rollout, stored=stored)
        check_more_samples(self.objective, self.rollout, self.dynamic, self.self_imitation, stored=stored)
        refuse(_broken_rules(self))
        if self.run.sharding:
            check_sharding(self.objective, self.rollout)
        self.evaluation.check_rewards(*self.rewarded)

    @property
    def auto_batches(self) -> list[str]:
        """Settings of batches that are auto."""
        return [key for key in _BATCHES if attrgetter(key)(self) == "auto"]

    def with_batches(self, numbers: Mapping[str, int | None] | None = None) -> Self:
        """Replace each auto by its number, setting -> number; by the setting's default where it has none."""
        config = self
        for key in self.auto_batches:
            part, name = key.split(".")
            section = getattr(config, part)
            number = (numbers or {}).get(key, getattr(type(section), name))
            config = replace(config, **{part: replace(section, **{name: number})})
        return config

    @property
    def rewarded(self) -> Mapping[str, RewardTerm]:
        """label -> reward that samples are given."""
        return {} if self.learns_unrewarded else self.rewards.terms

    @property
    def learns_unrewarded(self) -> bool:
        """True of stored images, and of a student that learns from its teacher alone."""
        few_step = self.objective.few_step
        return self.data.is_stored or (few_step is not None and not few_step.surrogate)


def _unfit_images(s: FlowGRPOConfig) -> Iterator[str]:
    row, data = s.objective.regression, s.data
    name, alike = f"objective.algorithm={s.objective.algorithm}", row is not None and row.learns_alike
    if data.images is not None and not alike:
        learns = "samples of its own" if row is None else "what is better"
        yield (
            f"data.images are images with captions, none better than another, and {name} learns from {learns}. "
            "Take objective.algorithm=sft, as pipeline: sft_images does, or leave data.images out."
        )
    if data.pairs is not None and alike:
        yield (
            f"{name} learns every image alike, and data.pairs says which are better. Take diffusion_dpo, or give "
            "images with captions as data.images."
        )
    if data.caption_dropout == 1:
        yield "data.caption_dropout is 1, which leaves no caption to learn. Set it below 1, e.g. 0.1."
    if data.images is None and (data.caption_dropout or data.images_size):
        yield "data.caption_dropout and data.images_size are of data.images, and there are none. Leave them out."
    if data.cache is not None and not data.is_stored:
        yield "data.cache keeps encoded images, of data.images or data.pairs, and there are none. Leave it out."
    if data.cache is not None and Path(data.cache).is_file():
        yield f"data.cache is {data.cache}, a file. Name a folder; it is created."
    if data.cache is not None and ":" in (s.model.adapter or ""):
        yield (
            f"data.cache keeps what diffusers' encoders return, and model.adapter is {s.model.adapter}, one of your "
            "own. Leave data.cache out."
        )
    if data.images is not None and data.balance:
        yield "data.balance orders the prompts of samples, and data.images are images. Leave one of them out."


def _broken_rules(s: FlowGRPOConfig) -> Iterator[str]:
    for label, term in s.rewarded.items():
        if term.options.get("over") == "sets" and s.rollout.group_size % 2:
            yield (
                f"rewards.terms.{label}.options.over is sets, which parts the pairs of a group, and "
                f"rollout.group_size is {s.rollout.group_size}. Set it to an even number."
            )
    if s.auto_batches and s.run.sharding:
        yield f"{s.auto_batches[0]} is auto, which is measured without run.sharding. Give a number."
    if s.auto_batches and (s.objective.ascent or s.objective.few_step):
        yield (
            f"{s.auto_batches[0]} is auto, which measures a forward and a backward of one network, and "
            f"objective.algorithm={s.objective.algorithm} holds more. Give a number."
        )
    if s.data.cycle is not None and not s.data.balance:
        yield "data.cycle orders the tags of a balanced set; set data.balance=true with it."
    if s.comparison is not None and s.comparison.budget is not None and s.comparison.hard:
        yield (
            "comparison.budget and comparison.hard are both set; a budget estimates the win rates by a fit, "
            "which has no hard wins. Leave one of them out."
        )
    if s.data.is_stored and s.comparison is not None:
        yield (
            "data.pairs are compared already, and comparison says how samples are. Leave one of them out "
            "(pipeline: flow_grpo)."
        )
    if s.rollout.keep_images and (s.learns_unrewarded or s.objective.ascent is not None):
        reason = (
            "stored images are" if s.data.is_stored else f"those of objective.algorithm={s.objective.algorithm} are"
        )
        yield f"rollout.keep_images keeps samples as they are scored, and {reason} not. Set rollout.keep_images=false."
    if (few_step := s.objective.few_step) is not None and few_step.warmup >= s.run.iterations:
        yield (
            f"objective.changes.warmup is {few_step.warmup}, and run.iterations is {s.run.iterations}, so the student "
            "would never learn. Raise run.iterations, or lower warmup."
        )
    teacher, is_custom = s.objective.teacher, ":" in (s.model.adapter or "")
    if teacher is not None and (is_custom or s.model.quantization is not None):
        other = f"adapter={s.model.adapter}, one of your own" if is_custom else f"quantization={s.model.quantization}"
        yield (
            f"objective.teacher is {teacher}, whose weights diffusers loads in the place of model.path's, which does "
            f"not work with model.{other}. Leave one of the two out."
        )
    sizes = len(s.rollout.image_sizes or [0])
    if s.data.images is None and s.monitor.window % sizes:
        yield (
            f"monitor.window is {s.monitor.window} and rollout.image_sizes has {sizes}: iterations would be "
            f"compared with another mix of sizes. Set monitor.window to a multiple of {sizes}."
        )
    every = s.objective.balance_every
    if every is not None and math.gcd(every, sizes) > 1:
        yield (
            f"objective.balance_every is {every} and rollout.image_sizes has {sizes}: rewards would be measured at "
            "some of the sizes only. Set objective.balance_every to a number without a common divisor."
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PrefGRPOConfig(FlowGRPOConfig):
    """A Pref-GRPO job (arXiv 2508.20751): Flow-GRPO on win rates inside each group instead of scores.

    Differs from the published code, on purpose: each pair is asked in both orders and the log-odds are
    averaged; a judge's probability counts as it is, neither rounded nor cut at one half; a failed comparison
    is left out and is no tie; an image without a valid comparison leaves its group's statistics and the loss.
    `comparison.hard` and `comparison.both_orders=false` give the published rule.
    """

    pipeline: ClassVar[str] = "pref_grpo"

    rewards: RewardsConfig = field(default_factory=lambda: RewardsConfig(terms={"reward_dance_pairs": RewardTerm()}))
    """The judges, pairwise or pointwise; the sum is over their win rates."""
    objective: DiffusionObjectiveSettings = field(
        default_factory=lambda: DiffusionObjectiveSettings(algorithm="pref_grpo")
    )
    """The loss; the publication's row where none is named."""
    comparison: ComparisonConfig = field(default_factory=ComparisonConfig)
    """Comparison of the images of a group."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SFTImagesConfig(FlowGRPOConfig):
    """Fine-tuning of an image model on images with captions, `data.images`."""

    pipeline: ClassVar[str] = "sft_images"

    rollout: RolloutSettings = field(default_factory=lambda: RolloutSettings(prompts_per_iteration=64, group_size=1))
    """Images of an iteration, prompts_per_iteration of them, their sizes, and the steps of evaluations."""
    objective: DiffusionObjectiveSettings = field(default_factory=lambda: DiffusionObjectiveSettings(algorithm="sft"))
    """The loss; levels, density and weighting are objective.changes."""
