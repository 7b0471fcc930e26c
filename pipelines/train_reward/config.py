# SPDX-License-Identifier: Apache-2.0
"""The configuration of the training of a judge. YAML files hold only what differs from these.

`model.kind` chooses one of the dataclasses of a model; each has the settings that its judge reads, so others
cannot be written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from visalign.data.sets.sources import GENERATED
from visalign.data.shapes.preferences import KINDS, Kind
from visalign.pipelines.shared.sections import (
    ConvexDAConfig,
    Dtype,
    LoraConfig,
    PolicyRunConfig,
)
from visalign.precision import Autocast
from visalign.schema import STRICT
from visalign.settings import Count, Natural, PositiveShare, Share, check_rules
from visalign.training.reward.settings import AnyObjective, RewardOptimizerSettings, UncertaintySettings
from visalign.training.reward.tasks import TASKS

JUDGE_TASKS = {
    "hpsv3": ("uncertainty", "uncertainty_upstream", "upstream_monte_carlo", "bradley_terry"),
    "yes_no": ("yes_no",),
    "pair": ("yes_no",),
    "rating": ("rating", "rating_fidelity"),
    "critique": ("critique",),
    "checklist": ("checklist",),
    "ict": ("ict",),
    "hp": ("hp", "bradley_terry"),
}
"""Kind of judge -> tasks of its objective, the usual one first."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainedModel:
    """Settings of every judge."""

    kind: str
    """Kind of judge; the other settings follow from it."""
    train: str
    """Trained part."""
    path: str = "shapes-vlm"
    """A packaged model, a folder, or a hub id: a vision-language model, or a CLIP model for ict and hp."""
    frozen: list[str] = field(default_factory=list)
    """Beginnings of names of parameters that stay as they are with train=full, e.g. visual.attnpool of
    shapes-clip."""
    autocast: Autocast | None = None
    """Precision of matrix products while training, e.g. bfloat16; heads stay float32. null: that of
    the weights."""
    save_dtype: Dtype = "float16"
    """Dtype of the saved weights."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class IctModel(TrainedModel):
    """The cosine of image and prompt, trained in float32."""

    kind: Literal["ict"] = "ict"
    """ict."""
    train: Literal["full"] = "full"
    """Both towers."""
    path: str = "shapes-clip"
    """A CLIP model."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HpModel(TrainedModel):
    """A new head on the image alone, trained in float32."""

    kind: Literal["hp"] = "hp"
    """hp."""
    train: Literal["head", "full"] = "head"
    """The new head alone, or the image's tower with it."""
    path: str = "shapes-clip"
    """A CLIP model."""
    head: Annotated[list[Count], Field(min_length=4, max_length=4)] | None = None
    """Inner widths of the head; null: the published ones, 1024, 128, 64, 16."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DiversityConfig:
    """Diversity loss of an ensemble's next member: −weight times the mean over the adapted layers of
    `visalign.core.nuclear_diversity` of their LoRA matrices and its own.

    Zhai et al., arXiv 2401.00243, whose members are trained together; here one after another, the earlier
    ones fixed.
    """

    others: Annotated[list[str], Field(min_length=1)]
    """Folders of the members, trained from the same base with adapters of the same layers."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Beside a loss in nats."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SeeingModel(TrainedModel):
    """A judge on a vision-language model."""

    lora: LoraConfig = field(default_factory=lambda: LoraConfig(rank=8, alpha=16.0))
    """The adapters, with train=lora; target_modules null: attention and MLP projections of the language
    part."""
    dtype: Dtype = "float32"
    """Dtype of the weights while training."""
    diversity: DiversityConfig | None = None
    """Adapters unlike those of other members of an ensemble; null: another seed alone."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Hpsv3Model(SeeingModel):
    """Mean and standard deviation of the score, by a new head on a token of its own."""

    kind: Literal["hpsv3"] = "hpsv3"
    """hpsv3."""
    train: Literal["head", "lora", "full"] = "lora"
    """The head alone, adapters in the language part with it, or everything."""
    head: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    """Inner widths of the head; null: the published ones, 1024 and 16."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AnswerModel(SeeingModel):
    """A judge that is read where its answer begins."""

    kind: Literal["yes_no", "pair", "rating", "critique"] = "yes_no"
    """yes_no (log-odds of yes), pair (is the second image better), rating (expectation over score
    tokens), critique (is what a judge wrote of an image right: the meta judge of deepseek_grm)."""
    train: Literal["lora", "full"] = "lora"
    """Adapters in the language part, or all."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChecklistModel(SeeingModel):
    """Weighted answers to many yes/no questions."""

    kind: Literal["checklist"] = "checklist"
    """checklist."""
    train: Literal["head", "lora"] = "lora"
    """The weights of the answers alone, or with adapters in the language part."""
    checklist: str | None = None
    """JSON file of questions, weights to begin with and masks; null: that of the model's folder, else the
    one for the shapes world. Negative weights stay negative: such questions speak of faults."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OffPolicyConfig:
    """OCRM, arXiv 2507.15507: a pair weighs as the policy of today makes its images.

    w = d(left)^m d(right)^m, over their mean, with d the relative density ratio π/(α π + (1 − α) π_made) of
    an image, from the file's columns log_ratio_left and log_ratio_right: ln of π/π_made.
    """

    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """α; d is at most 1/α."""
    multiplier: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.01
    """m: ratios of whole samples are huge."""
    least_effective: Share = 0.1
    """Share of the pairs below which their effective sample size, (Σ w)²/Σ w², is refused."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardDataConfig:
    """The labelled examples."""

    train: str = "shapes:pairs"
    """shapes:pairs, shapes:quality (generated), a file of pairs or of rated images, or LAYOUT:FOLDER; for a
    critique the dataset.jsonl of text_sample."""
    heldout: str | None = "shapes:pairs"
    """The same for what is measured; prompts that also stand in data.train are refused. null: nothing."""
    train_split: str | None = None
    """Rows of data.train with this split, e.g. train; null: all of a file, of a layout its test split."""
    heldout_split: str | None = None
    """The same for data.heldout."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our name of a column -> that of the files, such as mos: score; the command line has --map mos=score."""
    coding: str | None = None
    """Meaning of the labels of files: share, margin, or words such as 1=left,2=right,0=tie (--labels); null:
    left, right, tie, A, B, or shares."""
    size: Count | None = 20000
    """Examples of data.train at most; for generated ones, how many. null: all of a file."""
    heldout_size: Count | None = 1000
    """Examples of data.heldout."""
    kinds: Annotated[list[Kind], Field(min_length=1)] = field(default_factory=lambda: list(KINDS))
    """shapes:pairs: what the images of a pair differ in."""
    heldout_kinds: Annotated[list[Kind], Field(min_length=1)] | None = None
    """The same for data.heldout; null: as kinds."""
    surroundings: Share = 0.0
    """Share of generated training images on other grounds, with specks or on a canvas; a judge that met
    none of them is wrong on them. Held-out ones have none, and images of files stay as they are."""
    labels: Literal["votes", "truth", "probability"] = "votes"
    """shapes:pairs: votes of annotators, truth (who is better), or probability (that a vote says so). Files
    have what they have."""
    annotators: Count = 9
    """Votes per generated pair."""
    off_policy: OffPolicyConfig | None = None
    """Weights of old pairs for a policy that has moved on; null: all alike."""
    convex_da: ConvexDAConfig | None = None
    """More prompts of the same images; {} has the paper's numbers, null: none."""
    batch: Count = 64
    """Examples per update."""
    micro_batch: Count = 64
    """Examples that go through the network together; memory only, but for ict's negatives."""
    theta: PositiveShare = 0.7
    """ict: CLIP score from which an image counts as containing all of its prompt."""
    right: float = 1.0
    """critique: reward from which an answer counts as right."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardEvaluationConfig:
    """Measurement on held-out examples during training."""

    every: Natural = 5
    """Iterations between two evaluations; 0: only before and after."""
    batch: Count = 100
    """Examples that go through the network together."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainRewardConfig:
    """Train a judge on pairs, votes or quality scores."""

    pipeline: ClassVar[str] = "train_reward"

    seed: Natural = 0
    """Random seed of generated data, order, new weights and dropout."""
    model: Annotated[
        Hpsv3Model | AnswerModel | ChecklistModel | IctModel | HpModel, Field(discriminator="kind")
    ] = field(default_factory=Hpsv3Model)
    """The judge."""
    data: RewardDataConfig = field(default_factory=RewardDataConfig)
    """The labels."""
    objective: AnyObjective = field(default_factory=UncertaintySettings)
    """The loss."""
    optimizer: RewardOptimizerSettings = field(default_factory=RewardOptimizerSettings)
    """Optimizer."""
    evaluation: RewardEvaluationConfig = field(default_factory=RewardEvaluationConfig)
    """Evaluation."""
    run: PolicyRunConfig = field(default_factory=PolicyRunConfig)
    """Length, checkpoints, machine."""

    def __post_init__(self) -> None:
        check_rules(self, RULES)

    @property
    def reads(self) -> str:
        """Kind of labels that the task reads: pairs, triples, rows (rated images) or answers."""
        return TASKS[self.objective.task].labels

    @property
    def sources(self) -> dict[str, str | None]:
        """Key of each set -> its source."""
        return {"data.train": self.data.train, "data.heldout": self.data.heldout}

    def from_files(self, *keys: str) -> bool:
        """Return whether one of these sets comes from files of pairs or of rated images."""
        return self.reads != "answers" and any(self.sources[key] not in (None, *GENERATED) for key in keys)


def _task_of_another_kind(s: TrainRewardConfig) -> str:
    tasks = JUDGE_TASKS[s.model.kind]
    return "" if s.objective.task in tasks else ", ".join(tasks)


def _source(*sources: str, reads: Callable[[str], bool]) -> Callable[[TrainRewardConfig], str]:
    """Name the first set with one of these sources, under a task whose kind of labels does not fit it."""

    def find(s: TrainRewardConfig) -> str:
        names = (f"{key} is {source}" for key, source in s.sources.items() if source in sources)
        return next(names, "") if reads(s.reads) else ""

    return find


def _reads_shapes_pairs(s: TrainRewardConfig) -> bool:
    return s.reads == "pairs" and "shapes:pairs" in s.sources.values()


def _reads_pair_file(s: TrainRewardConfig) -> bool:
    return s.reads == "pairs" and s.data.train not in GENERATED


READ: dict[str, tuple[Callable[[TrainRewardConfig], bool], str]] = {
    "theta": (lambda s: s.objective.task == "ict", "by the task ict alone"),
    "right": (lambda s: s.reads == "answers", "by the task critique alone"),
    "kinds": (
        lambda s: s.reads == "pairs" and s.data.train == "shapes:pairs",
        "where data.train is shapes:pairs and the task learns from pairs (data.heldout has heldout_kinds)",
    ),
    "heldout_kinds": (lambda s: s.data.heldout == "shapes:pairs", "where data.heldout is shapes:pairs"),
    "labels": (
        _reads_shapes_pairs,
        "where data.train or data.heldout is shapes:pairs and the task learns from pairs",
    ),
    "annotators": (
        lambda s: (
            (_reads_shapes_pairs(s) and s.data.labels == "votes") or "shapes:quality" in s.sources.values()
        ),
        "by shapes:quality, and by shapes:pairs where data.labels is votes and the task learns from pairs",
    ),
    "off_policy": (
        lambda s: _reads_pair_file(s) and s.model.kind != "pair",
        "where data.train is a file of pairs and the task compares what the judge says of either image",
    ),
    "convex_da": (
        lambda s: _reads_pair_file(s) and s.model.kind != "hp",
        "where data.train is a file of pairs and the judge reads the prompt",
    ),
    "columns": (
        lambda s: s.from_files("data.train", "data.heldout"),
        "where data.train or data.heldout is a file of pairs or of rated images",
    ),
    "coding": (
        lambda s: s.from_files("data.train", "data.heldout"),
        "where data.train or data.heldout is a file of pairs",
    ),
    "train_split": (
        lambda s: s.from_files("data.train"),
        "where data.train is a file or layout of pairs or of rated images",
    ),
    "heldout_split": (
        lambda s: s.from_files("data.heldout"),
        "where data.heldout is a file or layout of pairs or of rated images",
    ),
}
"""Setting of `data` that only some tasks or sources read -> (when it is read, the same in words)."""

UNREAD = {
    ("pair", "lora"): ("smoothing", "pair_weight", "likelihood", "model.kind is yes_no"),
    ("pair", "full"): ("smoothing", "pair_weight", "likelihood", "model.kind is yes_no"),
    ("checklist", "head"): ("mass", "model.train is lora"),
}
"""(kind, trained part) -> settings of the task that the judge does not read, then where they are read. A
judge of kind pair learns the share of the votes."""


def _changed(section: Any, name: str) -> bool:
    item = next(item for item in fields(section) if item.name == name)
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return getattr(section, name) != default


def _unread_data(s: TrainRewardConfig) -> str:
    """Describe a changed setting of `data` that the job would not read."""
    for name, (is_read, where) in READ.items():
        if _changed(s.data, name) and not is_read(s):
            return (
                f"data.{name} is {getattr(s.data, name)!r}, and the task {s.objective.task} on data.train "
                f"{s.data.train} and data.heldout {s.data.heldout} does not read it: it is used {where}"
            )
    return ""


def _unread_objective(s: TrainRewardConfig) -> str:
    """Describe a changed setting of the objective that the judge would not read."""
    *names, where = UNREAD.get((s.model.kind, s.model.train), ("",))
    for name in names:
        if _changed(s.objective, name):
            return (
                f"objective.{name} is {getattr(s.objective, name)!r}, and a judge of kind {s.model.kind} "
                f"with model.train {s.model.train} does not use it: the task {s.objective.task} uses it "
                f"where {where}"
            )
    return ""


RULES = (
    (
        lambda s: s.model.frozen and s.model.train != "full",
        "model.frozen is {s.model.frozen} and model.train is {s.model.train!r}, which moves none of these "
        "weights. Set train: full, or take frozen out.",
    ),
    (
        lambda s: isinstance(s.model, SeeingModel) and s.model.diversity and s.model.train != "lora",
        "model.diversity keeps adapters apart, and model.train is {s.model.train!r}, which has none. Set "
        "train: lora, or leave it out.",
    ),
    (
        lambda s: s.model.kind == "checklist" and s.model.train == "head" and s.model.autocast,
        "model.autocast is {v!r}, and the answers of a frozen model are read without it. Leave it out, or "
        "set train: lora.",
    ),
    (
        _task_of_another_kind,
        "objective.task is {s.objective.task!r}; a judge of kind {s.model.kind} learns by {v}. Set "
        "objective.task, or another model.kind.",
    ),
    (
        lambda s: s.run.sharding and isinstance(s.model, SeeingModel) and s.model.diversity,
        "run.sharding goes without model.diversity. Leave one of the two out.",
    ),
    (
        lambda s: s.run.sharding and s.model.kind == "checklist" and s.model.train == "head",
        "run.sharding divides a network that is trained, and model.train head of a checklist trains the "
        "weights of the answers alone. Set model.train: lora, or leave run.sharding out.",
    ),
    (_unread_data, "{v}. Leave it out."),
    (_unread_objective, "{v}. Leave it out."),
    (
        _source(*GENERATED, reads=lambda labels: labels == "answers"),
        "{v}, and a judge of kind {s.model.kind} learns from what another one wrote. Give the "
        "dataset.jsonl of text_sample (selection.rule=all, with data.question).",
    ),
    (
        _source("shapes:quality", reads=lambda labels: labels != "rows"),
        "{v}, which holds single rated images, and {s.objective.task} learns from "
        "{s.reads}. Give shapes:pairs or a file of pairs.",
    ),
    (
        _source("shapes:pairs", reads=lambda labels: labels == "rows"),
        "{v}, and a judge of kind {s.model.kind} learns from rated images. Give "
        "shapes:quality or a file with image and mos.",
    ),
)
