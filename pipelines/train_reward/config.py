# SPDX-License-Identifier: Apache-2.0
"""Configuration of the training of a judge; `model.kind` chooses one of the dataclasses of a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, field, fields
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field
from pydantic.dataclasses import dataclass

from visalign.data.sets.sources import GENERATED
from visalign.data.shapes.preferences import KINDS, Kind
from visalign.pipelines.shared.sections import ConvexDAConfig, Dtype, LoraConfig, PolicyRunConfig
from visalign.precision import Autocast
from visalign.schema import STRICT
from visalign.settings import Count, Finite, Natural, NonNegative, Positive, PositiveShare, Records, Share, refuse
from visalign.training.reward.settings import AnyObjective, RewardOptimizerSettings, UncertaintySettings
from visalign.training.reward.tasks import TASKS


class JudgeKind(NamedTuple):
    tasks: tuple[str, ...]  # Tasks of its objective, the usual one first
    reward: str | None
    """Name in the catalogue of the reward that reads it; None: deepseek_grm does, as its option meta."""


JUDGE_KINDS = {
    "hpsv3": JudgeKind(("uncertainty", "uncertainty_upstream", "upstream_monte_carlo", "bradley_terry"), "hpsv3"),
    "yes_no": JudgeKind(("yes_no",), "reward_dance"),
    "pair": JudgeKind(("yes_no",), "reward_dance_pairs"),
    "rating": JudgeKind(("rating", "rating_fidelity", "rating_distribution"), "visual_quality_r1"),
    "critique": JudgeKind(("critique",), None),
    "checklist": JudgeKind(("checklist", "checklist_answers"), "vision_reward"),
    "heie": JudgeKind(("heie",), "heie"),
    "ict": JudgeKind(("ict",), "ict"),
    "hp": JudgeKind(("hp", "bradley_terry", "ict_hp"), "hp"),
    "artefact": JudgeKind(("bce",), "artefact"),
}


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
    """Beginnings of names of parameters that stay as they are with train=full, e.g. visual.attnpool of shapes-clip."""
    autocast: Autocast | None = None
    """Precision of matrix products while training, e.g. bfloat16; heads stay float32. null: that of the weights."""
    save_dtype: Dtype = "float16"
    """Dtype of the saved weights."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class IctModel(TrainedModel):
    """The cosine of image and prompt, trained in float32."""

    kind: Literal["ict"] = "ict"
    train: Literal["full"] = "full"
    """Both towers."""
    path: str = "shapes-clip"
    """A CLIP model."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HpModel(TrainedModel):
    """A new head on the image alone, trained in float32."""

    kind: Literal["hp", "artefact"] = "hp"
    """hp, or artefact (is an image free of artefacts, from rated images: arXiv 2601.03468)."""
    train: Literal["head", "full"] = "head"
    """The new head alone, or the image's tower with it."""
    path: str = "shapes-clip"
    """A CLIP model."""
    head: Annotated[list[Count], Field(min_length=4, max_length=4)] | None = None
    """Inner widths of the head; null: the published ones, 1024, 128, 64, 16."""
    ict: str | None = None
    """ict_hp: a trained ICT, such as shapes-ict or the folder that train-reward wrote; it stays as it is."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DiversityConfig:
    """−weight · `visalign.core.nuclear_diversity` of the next member's LoRA with the fixed ones (arXiv 2401.00243)."""

    others: Annotated[list[str], Field(min_length=1)]
    """Folders of the members, trained from the same base with adapters of the same layers."""
    weight: Positive = 1.0
    """Beside a loss in nats."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SeeingModel(TrainedModel):
    """A judge on a vision-language model."""

    lora: LoraConfig = field(default_factory=lambda: LoraConfig(rank=8, alpha=16.0))
    """The adapters, with train=lora; target_modules null: attention and MLP projections of the language part."""
    dtype: Dtype = "float32"
    """Dtype of the weights while training."""
    diversity: DiversityConfig | None = None
    """Adapters unlike those of other members of an ensemble; null: another seed alone."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Hpsv3Model(SeeingModel):
    """Mean and standard deviation of the score, by a new head on a token of its own."""

    kind: Literal["hpsv3"] = "hpsv3"
    train: Literal["head", "lora", "full"] = "lora"
    """The head alone, adapters in the language part with it, or everything."""
    head: Annotated[list[Count], Field(min_length=2, max_length=2)] | None = None
    """Inner widths of the head; null: the published ones, 1024 and 16."""
    condition: Count | None = None
    """HPSv3++: width of the layers that condition the head on the generator's capability, which it infers, and on the
    RL iteration, the column iteration of a file of pairs (0 to 1; 0 without it). Published: 256. null: none."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AnswerModel(SeeingModel):
    """A judge that is read where its answer begins."""

    kind: Literal["yes_no", "pair", "rating", "critique"] = "yes_no"
    """yes_no (log-odds of yes), pair (is the second image better), rating (expectation over score
    tokens), critique (is what a judge wrote of an image right: the meta judge of deepseek_grm)."""
    train: Literal["lora", "full"] = "lora"
    """Adapters in the language part, or all."""
    lora_path: str | None = None
    """Judge whose adapters are trained on, a folder of the same base and lora; null: new adapters."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChecklistModel(SeeingModel):
    """Weighted answers to many yes/no questions."""

    kind: Literal["checklist"] = "checklist"
    train: Literal["head", "lora"] = "lora"
    """The weights of the answers alone, or with adapters in the language part."""
    checklist: str | None = None
    """JSON file of questions, weights to begin with and masks; null: that of the model's folder, else the
    one for the shapes world. Negative weights stay negative: such questions speak of faults."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeieModel(TrainedModel):
    """A map of faults and a score of plausibility, by new heads on a frozen Qwen-VL model."""

    kind: Literal["heie"] = "heie"
    train: Literal["head"] = "head"
    """The new heads."""
    tiles: Count = 2
    """n of the n × n enlarged tiles that are read next to the whole image; 1: none."""
    width: Annotated[int, Field(gt=0, multiple_of=4)] = 64
    """Width of the heads."""
    cells: Count = 4
    """Cells of the map on each side of an image token."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OffPolicyConfig:
    """OCRM, arXiv 2507.15507: a pair weighs as the policy of today makes its images.

    w = d(left)^m d(right)^m, over their mean, with d the relative density ratio π/(α π + (1 − α) π_made) of
    an image, from the file's columns log_ratio_left and log_ratio_right: ln of π/π_made. The paper's weights
    are {alpha: 0, multiplier: 1}; the defaults are those of its released code, and nearly equal weights.
    """

    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """α; d is at most 1/α, and with 0 the ratio itself."""
    multiplier: NonNegative = 0.01
    """m: ratios of whole samples are huge, and 0.01 flattens them."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardDataConfig:
    """The labelled examples."""

    train: str = "shapes:pairs"
    """shapes:pairs, shapes:quality (generated), a table of pairs or of rated images (a row per rater too, and exports
    of Label Studio and Argilla), a dataset of the hub (owner/name:split), or LAYOUT:FOLDER; for a critique the
    dataset.jsonl of text_sample; for heie and checklist_answers an export of visalign collect."""
    heldout: str | None = "shapes:pairs"
    """The same for what is measured; prompts that also stand in data.train are refused. null: nothing."""
    train_split: str | None = None
    """Rows of data.train with this split, e.g. train; null: all of a file, of a layout its test split."""
    heldout_split: str | None = None
    """The same for data.heldout."""
    map: dict[str, str] = field(default_factory=dict)
    """Our name of a column -> that of the files, such as mos: score; the command line has --map mos=score."""
    coding: str | None = None
    """Meaning of the labels of files: share, margin, or words such as 1=left,2=right,0=tie (--labels); null:
    left, right, tie, A, B, or shares."""
    size: Records | None = 20000
    """Examples of data.train at most; for generated ones, how many. null: all of a file."""
    heldout_size: Records | None = 1000
    """Examples of data.heldout."""
    kinds: Annotated[list[Kind], Field(min_length=1)] | None = None
    """shapes:pairs: what the images of a pair differ in; null: quality and richness for hp, else everything."""
    heldout_kinds: Annotated[list[Kind], Field(min_length=1)] | None = None
    """The same for data.heldout; null: alignment for ict, else as kinds."""
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
    right: Finite = 1.0
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
        Hpsv3Model | AnswerModel | ChecklistModel | HeieModel | IctModel | HpModel, Field(discriminator="kind")
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
        refuse(_broken_rules(self))

    @property
    def reads(self) -> str:
        """Kind of labels that the task reads: pairs, triples, rows (rated images), answers, faults or checks."""
        return TASKS[self.objective.task].labels

    def pair_kinds(self, side: str) -> list[Kind]:
        """Kinds of the generated pairs of data.train or data.heldout."""
        kinds = self.data.kinds or (["quality", "richness"] if self.model.kind == "hp" else list(KINDS))
        if side == "train":
            return kinds
        return self.data.heldout_kinds or (["alignment"] if self.model.kind == "ict" else kinds)


def _changed(section: Any, name: str, key: str) -> str | None:
    """Return the override that sets a changed setting back; None for one that has its default."""
    item = next(item for item in fields(section) if item.name == name)
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return f"'{key}={json.dumps(default)}'" if getattr(section, name) != default else None


def _readers(s: TrainRewardConfig) -> dict[str, tuple[bool, str]]:
    """Setting of `data` that only some tasks or sources read -> (True if it is read, by what)."""
    data, pairs, kind = s.data, s.reads == "pairs", s.model.kind
    sources = data.train, data.heldout
    files = [s.reads not in ("answers", *MARKS) and source not in (None, *GENERATED) for source in sources]
    pair_file, shapes_pairs = pairs and data.train not in GENERATED, pairs and "shapes:pairs" in sources
    votes = (shapes_pairs and data.labels == "votes") or "shapes:quality" in sources
    return {
        "theta": (s.objective.task == "ict", "the task ict"),
        "right": (s.reads == "answers", "the task critique"),
        "kinds": (pairs and data.train == "shapes:pairs", "tasks on pairs where data.train is shapes:pairs"),
        "heldout_kinds": (data.heldout == "shapes:pairs", "data.heldout=shapes:pairs"),
        "labels": (shapes_pairs, "tasks on pairs with shapes:pairs"),
        "annotators": (votes, "shapes:quality, and shapes:pairs with data.labels=votes"),
        "off_policy": (pair_file and kind != "pair", "tasks that compare two scores, on a file of pairs"),
        "convex_da": (pair_file and kind != "hp", "judges that read the prompt, on a file of pairs"),
        "map": (any(files), "files of pairs or of rated images"),
        "coding": (any(files), "files of pairs"),
        "train_split": (files[0], "a file or layout in data.train"),
        "heldout_split": (files[1], "a file or layout in data.heldout"),
    }


MARKS = ("faults", "checks")  # What is read from an export of visalign collect
_OF_SCORES = ("smoothing", "pair_weight", "likelihood")  # A judge of pairs learns the share of the votes
UNREAD = {("pair", "lora"): _OF_SCORES, ("pair", "full"): _OF_SCORES, ("checklist", "head"): ("mass",)}
"""(kind, trained part) -> settings of the task that the judge does not read."""
_SOURCES = {
    "pairs": ("shapes:pairs", "pairs", "shapes:pairs or a file of pairs"),
    "triples": ("shapes:pairs", "triples", "shapes:pairs or a file of pairs"),
    "rows": ("shapes:quality", "rated images", "shapes:quality or a file with image and mos"),
    "faults": (None, "boxes around faults", "what visalign collect --boxes exported"),
    "checks": (None, "answers to its checklist", "what visalign collect --single -q exported"),
    "answers": (None, "what another one wrote", "text_sample's dataset.jsonl (selection.rule=all, data.question)"),
}
"""What a task reads -> (generated set that it reads, the same in words, what to give)."""


def _broken_rules(s: TrainRewardConfig) -> Iterator[str]:
    data, model, task = s.data, s.model, s.objective.task
    weights_only = model.kind == "checklist" and model.train == "head"
    diverse = isinstance(model, SeeingModel) and model.diversity is not None
    continued = isinstance(model, AnswerModel) and model.lora_path is not None
    tasks = JUDGE_KINDS[model.kind].tasks
    rules = {
        f"model.lora_path names adapters, and model.train is {model.train!r}, which has none. Set train: lora, or "
        "leave it out.": continued and model.train != "lora",
        f"model.frozen is {model.frozen} and model.train is {model.train!r}, which moves none of these weights. "
        "Set train: full, or take frozen out.": model.frozen and model.train != "full",
        f"model.diversity keeps adapters apart, and model.train is {model.train!r}, which has none. Set train: "
        "lora, or leave it out.": diverse and model.train != "lora",
        f"model.autocast is {model.autocast!r}, and the answers of a frozen model are read without it. Leave it "
        "out, or set train: lora.": weights_only and model.autocast,
        f"objective.task is {task!r}; a judge of kind {model.kind} learns by {', '.join(tasks)}. Set "
        "objective.task, or another model.kind.": task not in tasks,
        "model.ict names the judge whose cosine the task ict_hp multiplies by. Give both, or neither.": isinstance(
            model, HpModel
        )
        and (model.ict is None) == (task == "ict_hp"),
        "objective.task is 'checklist_answers', which trains what the model answers, and model.train is 'head'. Set "
        "model.train: lora.": weights_only and task == "checklist_answers",
        "run.sharding goes without model.diversity. Leave one of the two out.": s.run.sharding and diverse,
        "run.sharding divides a network that is trained, and model.train head of a checklist trains the weights of "
        "the answers alone. Set model.train: lora, or leave run.sharding out.": s.run.sharding and weights_only,
    }
    yield from (message for message, is_broken in rules.items() if is_broken)
    for name, (is_read, reader) in _readers(s).items():
        if not is_read and (reset := _changed(data, name, f"data.{name}")):
            value = getattr(data, name)
            yield f"data.{name} is {value!r}, and it is used by {reader}. Leave it out, or add {reset}."
    for name in UNREAD.get((model.kind, model.train), ()):
        if reset := _changed(s.objective, name, f"objective.{name}"):
            reader = f"a judge of kind {model.kind} with model.train {model.train}"
            yield f"objective.{name} is set, and {reader} does not use it. Leave it out, or add {reset}."
    generated, labels, suggestion = _SOURCES[s.reads]
    for key, source in (("data.train", data.train), ("data.heldout", data.heldout)):
        if source in GENERATED and source != generated:
            yield f"{key} is {source}, and a judge of kind {model.kind} learns from {labels}. Give {suggestion}."
