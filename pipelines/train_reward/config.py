# SPDX-License-Identifier: Apache-2.0
"""The configuration of the training of a judge. YAML files hold only what differs from these."""

from __future__ import annotations

from dataclasses import dataclass, field

from visalign.data.shapes.preferences import KINDS
from visalign.errors import UserError, suggestion
from visalign.pipelines.shared.sections import LoraConfig, RunConfig, at_least, check_dtype
from visalign.training.reward.settings import RewardObjectiveSettings, RewardOptimizerSettings
from visalign.training.reward.tasks import TASKS

from .unused_settings import refuse_unused

TRAINS = {
    "hpsv3": ("head", "lora", "full"),
    "yes_no": ("lora", "full"),
    "pair": ("lora", "full"),
    "rating": ("lora", "full"),
    "checklist": ("head", "lora"),
    "ict": ("full",),
    "hp": ("head", "full"),
}
"""Kind of judge -> what of it can be trained."""

JUDGE_TASKS = {
    "hpsv3": ("uncertainty", "uncertainty_upstream", "upstream_monte_carlo", "bradley_terry"),
    "yes_no": ("yes_no",),
    "pair": ("yes_no",),
    "rating": ("rating", "rating_fidelity"),
    "checklist": ("checklist",),
    "ict": ("ict",),
    "hp": ("hp", "bradley_terry"),
}
"""Kind of judge -> tasks of its objective, the usual one first."""

LABELS = ("votes", "truth", "probability")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """The judge that is trained."""

    kind: str = "hpsv3"
    """hpsv3 (mean and standard deviation from a vision-language model), yes_no (log-odds of yes), pair (is
    the second picture better), rating (expectation over score tokens), checklist (weighted answers to many
    yes/no questions), ict (cosine), hp (head on images)."""
    path: str = "shapes-vlm"
    """A packaged model, a folder, or a hub id: a vision-language model, or a CLIP model for ict and hp."""
    train: str = "lora"
    """head (the new head alone, of a checklist its weights), lora (adapters in the language part, and the
    head), or full."""
    lora: LoraConfig = field(default_factory=lambda: LoraConfig(rank=8, alpha=16.0))
    """The adapters, with train=lora; target_modules null: attention and MLP projections of the language
    part."""
    frozen: list[str] = field(default_factory=list)
    """Beginnings of names of parameters that stay as they are with train=full, e.g. visual.attnpool of
    shapes-clip."""
    head: list[int] | None = None
    """Inner widths of a new head; null: the published ones, 1024 and 16 for hpsv3, 1024, 128, 64, 16
    for hp."""
    checklist: str | None = None
    """checklist: JSON file of questions, weights to begin with and masks; null: that of the model's folder,
    else the one for the shapes world. Negative weights stay negative: such questions speak of faults."""
    dtype: str = "float32"
    """Of the weights while training."""
    autocast: str | None = None
    """Precision of matrix products while training, e.g. bfloat16; heads stay float32. null: that of
    the weights."""
    save_dtype: str = "float16"
    """Of the saved weights."""

    def __post_init__(self) -> None:
        if self.kind not in TRAINS:
            raise UserError(
                f"model.kind is {self.kind!r}. {suggestion(self.kind, TRAINS)}Allowed: {', '.join(TRAINS)}."
            )
        if self.train not in TRAINS[self.kind]:
            raise UserError(
                f"model.train is {self.train!r}; a judge of kind {self.kind} can be trained as "
                f"{', '.join(TRAINS[self.kind])}."
            )
        if self.frozen and self.train != "full":
            raise UserError(
                f"model.frozen is {self.frozen} and model.train is {self.train!r}, which moves none of these "
                "weights. Set train: full, or take frozen out."
            )
        self._refuse_unused()
        if self.checklist is not None and self.kind != "checklist":
            raise UserError(
                f"model.checklist is set, and a judge of kind {self.kind} asks no list of questions. Leave "
                "it out, or set model.kind to checklist."
            )
        for name in ("dtype", "autocast", "save_dtype"):
            check_dtype(f"model.{name}", getattr(self, name))
        inner = {"hpsv3": 2, "hp": 4}.get(self.kind)
        if self.head is not None and (inner is None or len(self.head) != inner or min(self.head) < 1):
            allowed = (
                f"{inner} widths of at least 1" if inner else "null, as this kind has no head of its own"
            )
            raise UserError(f"model.head is {self.head}; allowed for {self.kind}: {allowed}.")

    def _refuse_unused(self) -> None:
        if self.dtype != "float32" and self.kind in ("ict", "hp"):
            raise UserError(
                f"model.dtype is {self.dtype!r}, and a judge of kind {self.kind} is trained in float32. "
                "Leave it out; model.autocast is what makes it faster."
            )
        if self.autocast is not None and (self.kind, self.train) == ("checklist", "head"):
            raise UserError(
                f"model.autocast is {self.autocast!r}, and the answers of a frozen model are read without "
                "it. Leave it out, or set train: lora."
            )


@dataclass(frozen=True, kw_only=True)
class RewardDataConfig:
    """The labelled examples."""

    train: str = "shapes:pairs"
    """shapes:pairs, shapes:quality (generated), a file of pairs or of rated pictures, or LAYOUT:FOLDER."""
    heldout: str | None = "shapes:pairs"
    """The same for what is measured; prompts that also stand in data.train are refused. null: nothing."""
    train_split: str | None = None
    """Rows of data.train with this split, e.g. train; null: all of a file, of a layout its test split."""
    heldout_split: str | None = None
    """The same for data.heldout."""
    size: int | None = 20000
    """Examples of data.train at most; for generated ones, how many. null: all of a file."""
    heldout_size: int | None = 1000
    """Examples of data.heldout."""
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    """shapes:pairs: what the pictures of a pair differ in."""
    heldout_kinds: list[str] | None = None
    """The same for data.heldout; null: as kinds."""
    labels: str = "votes"
    """shapes:pairs: votes of annotators, truth (who is better), or probability (that a vote says so). Files
    have what they have."""
    annotators: int = 9
    """Votes per generated pair."""
    batch: int = 64
    """Examples per update."""
    micro_batch: int = 64
    """Examples that go through the network together; memory only, but for ict's negatives."""
    theta: float = 0.7
    """ict: CLIP score from which a picture counts as containing all of its prompt."""

    def __post_init__(self) -> None:
        for name in ("size", "heldout_size", "batch", "micro_batch", "annotators"):
            at_least(f"data.{name}", getattr(self, name), 1)
        if self.labels not in LABELS:
            raise UserError(
                f"data.labels is {self.labels!r}. {suggestion(self.labels, LABELS)}Allowed: "
                f"{', '.join(LABELS)}."
            )
        for name in ("kinds", "heldout_kinds"):
            given = getattr(self, name)
            if given is not None and (not given or not set(given) <= set(KINDS)):
                raise UserError(f"data.{name} is {given}; give one or more of {', '.join(KINDS)}.")
        if not 0 < self.theta <= 1:
            raise UserError(f"data.theta is {self.theta}; a cosine threshold lies above 0, at most at 1.")


@dataclass(frozen=True, kw_only=True)
class RewardEvaluationConfig:
    """What is measured on held-out examples while the judge trains."""

    every: int = 5
    """Iterations between two evaluations; 0: only before and after."""
    batch: int = 100
    """Examples that go through the network together."""

    def __post_init__(self) -> None:
        at_least("evaluation.every", self.every, 0)
        at_least("evaluation.batch", self.batch, 1)


@dataclass(frozen=True, kw_only=True)
class TrainRewardConfig:
    """Train a judge on pairs, votes or quality scores."""

    seed: int = 0
    """Of the run: generated data, order, new weights, dropout."""
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The judge."""
    data: RewardDataConfig = field(default_factory=RewardDataConfig)
    """The labels."""
    objective: RewardObjectiveSettings = field(default_factory=RewardObjectiveSettings)
    """The loss."""
    optimizer: RewardOptimizerSettings = field(default_factory=RewardOptimizerSettings)
    """How the weights move."""
    evaluation: RewardEvaluationConfig = field(default_factory=RewardEvaluationConfig)
    """What is measured."""
    run: RunConfig = field(default_factory=RunConfig)
    """Length, checkpoints, machine."""

    def __post_init__(self) -> None:
        at_least("seed", self.seed, 0)
        allowed = JUDGE_TASKS[self.model.kind]
        if self.objective.task not in allowed:
            raise UserError(
                f"objective.task is {self.objective.task!r}; a judge of kind {self.model.kind} learns by "
                f"{', '.join(allowed)}. Set objective.task, or another model.kind."
            )
        refuse_unused(self)
        learns = TASKS[self.objective.task].labels
        for name in ("data.train", "data.heldout"):
            source = getattr(self.data, name.removeprefix("data."))
            if source == "shapes:quality" and learns != "rows":
                raise UserError(
                    f"{name} is shapes:quality, which holds single rated pictures, and {self.objective.task} "
                    f"learns from {learns}. Give shapes:pairs or a file of pairs."
                )
            if source == "shapes:pairs" and learns == "rows":
                raise UserError(
                    f"{name} is shapes:pairs, and a judge of kind {self.model.kind} learns from rated "
                    "pictures. Give shapes:quality or a file with image and mos."
                )
