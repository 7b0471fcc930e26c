# SPDX-License-Identifier: Apache-2.0
"""Sections that the configurations of several jobs share: adapters, rewards, length and machine."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from visalign.data.assets import PACKAGED
from visalign.errors import UserError, suggestion
from visalign.schema import STRICT
from visalign.settings import MOST_COUNTED, Count, Finite, Natural, NonNegative, Positive, PositiveShare
from visalign.training.loop.monitor import MonitorLimits, MonitorSettings

Dtype = Literal["float32", "bfloat16", "float16"]


def is_own(model: str, prompts: str) -> bool:
    """Return True for the user's own model and prompts: neither a packaged model nor packaged prompts."""
    return Path(model).name not in PACKAGED and not prompts.startswith(("shapes:", "tasks:"))


LICENSES = (
    "apache-2.0 mit openrail openrail++ creativeml-openrail-m bsd-2-clause bsd-3-clause cc0-1.0 cc-by-4.0 "
    "cc-by-sa-4.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 gpl-3.0 agpl-3.0 lgpl-3.0 mpl-2.0 llama2 llama3 gemma "
    "other unknown".split()
)
"""Licence ids that the hub knows."""


def check_license(name: str) -> str:
    """Return a licence id as the hub writes it."""
    if name.lower() not in LICENSES:
        raise UserError(f"The licence is {name!r}. {suggestion(name, LICENSES)}Give one of: {', '.join(LICENSES)}.")
    return name.lower()


_SYNONYMS = TypeAdapter(dict[str, list[str]])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig:
    """The adapters that are trained."""

    rank: Count = 32
    """r, inner width; Flow-GRPO uses 32."""
    alpha: Positive = 64.0
    """α; an adapter's output is scaled by α / r."""
    target_modules: list[str] | None = None
    """Ends of the names of the layers that get an adapter; null: the attention projections."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReferencesConfig:
    """Reference images of each prompt, drawn while training, with which a pairwise judge compares (RewardDance)."""

    count: Annotated[int, Field(ge=2, le=MOST_COUNTED)] = 16
    """Images drawn of a prompt; the judge ranks them by the others that each beats."""
    keep: Count = 2
    """The best of them, which are kept as references; the reward is the mean over them."""
    every: Count | None = None
    """Iterations after which the present policy draws a prompt's references again. null: the model before training
    draws them, once, as published."""
    value: Literal["log_odds", "prob"] = "log_odds"
    """The reward: log-odds that the image beats a reference, or as published the probability."""

    def __post_init__(self) -> None:
        if self.keep > self.count:
            raise UserError(
                f"references.keep is {self.keep} and references.count {self.count}: no more are kept than drawn."
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class WeightSchedule:
    """A weight that changes over the run."""

    start: NonNegative = 1.0
    """Weight of the first iteration."""
    end: NonNegative = 0.0
    """Weight after `iterations` of them, and from then on."""
    iterations: Count
    """T, iterations in which it changes."""
    shape: Literal["linear", "cosine"] = "linear"
    """linear, or cosine: end + (start − end)(1 + cos(πs/T))/2 after s iterations, as SPEAR (arXiv 2509.22601) takes
    a reward of tool calls back."""

    def __post_init__(self) -> None:
        if not max(self.start, self.end):
            raise UserError("rewards.terms: a weight's start and end are 0. Give weight=0, which only records it.")

    def at(self, iteration: int) -> float:
        share = min(iteration / self.iterations, 1.0)
        share = share if self.shape == "linear" else (1 - math.cos(math.pi * share)) / 2
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardTerm:
    """A reward of the sum."""

    weight: Finite | WeightSchedule = 1.0
    """At least 0; a weight of 0 only records the reward, and how far it agrees with what is optimised. In trainings
    also a schedule, {start, end, iterations, shape}. Direction is the reward's own matter."""
    name: str | None = None
    """Catalogue name, package.module:Name or path/to/file.py:Name, whose code runs; null: the label of the term."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""
    where: dict[str, Any] = field(default_factory=dict)
    """Records that the reward is for: field -> value, or a list of values, e.g. {task: ocr}; {}: all. Other samples
    are scored by the other terms."""
    mean: Finite = 0.0
    """With rewards.normalise=fixed: what is taken off ..."""
    std: Finite = 1.0
    """... and what divides."""
    uncertainty: Literal["none", "lower_bound", "weight", "bhattacharyya", "advantage"] = "none"
    """Use of the standard deviation σ that a judge gives: lower_bound (μ − λ σ), weight (Ctrl-U's exp(−λ σ)
    on what it says beyond `reference`), bhattacharyya (PURM's μ − λ u, u the mean overlap of N(μ, σ²) with
    those of the iteration's other samples; one process only) or, in trainings of texts, advantage (Ctrl-U's
    weight adapted: advantages times exp(−λ σ/σ₀), σ₀ the iteration's median)."""
    strength: Finite = 1.0
    """λ."""
    bound: Finite | None = None
    """A constraint in place of a wish, in trainings of images: hold the reward's mean at least here, in its
    own unit (at most, where lower is better), and maximise the terms without a bound. What it takes is
    learnt, see `objective.multiplier_rate`; `weight` is then its unit alone. null: none."""
    references: ReferencesConfig | None = None
    """For a judge that compares two images, such as reward_dance_pairs, in trainings of images: compare with
    reference images of the prompt, {count, keep, every}; the term is then a score. null: none."""
    reference: Finite = 0.0
    """For the weight: the value of a judge that knows nothing, in its unit."""

    def __post_init__(self) -> None:
        if self.bound is not None and isinstance(self.weight, WeightSchedule):
            raise UserError("A term with a bound has a constant weight, which is its unit. Give a number.")

    @property
    def weights(self) -> tuple[float, float]:
        is_fixed = not isinstance(self.weight, WeightSchedule)
        return (self.weight, self.weight) if is_fixed else (self.weight.start, self.weight.end)

    @property
    def largest_weight(self) -> float:
        return max(self.weights)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardsConfig:
    """The sum that is optimized."""

    terms: dict[str, RewardTerm] = field(default_factory=lambda: {"shapes_verifier": RewardTerm()})
    """label -> term."""
    normalise: Literal["none", "fixed", "batch"] = "none"
    """none, fixed (each term's mean and std) or batch (z-scores over the batch; one process only)."""
    allow_mixed_units: bool = False
    """Sum raw scores of different units all the same."""
    allow_missing: bool = False
    """Sum the rewards that scored a sample, also where one of them failed; false: a sample that one of them could not
    score is left out. (None of a function means "not for this one" in either case.) Advantages of each reward by
    itself (gdpo) leave it out in either case."""

    @property
    def recorded(self) -> list[str]:
        return [label for label, term in self.terms.items() if term.largest_weight == 0]

    @property
    def optimized(self) -> list[str]:
        return [label for label, term in self.terms.items() if term.largest_weight > 0]

    def check_monitor(self, monitor: MonitorSettings, evaluation: HeldoutConfig, **more: tuple[bool, str]) -> None:
        """Refuse a monitor that would stop by what is not measured; `more` as `MonitorSettings.check`."""
        remedy = "Hold a reward out with rewards.terms.LABEL.weight=0, or leave it null."
        recorded = bool(self.recorded)
        paired = evaluation.every > 0 and (recorded or evaluation.correctness is not None)
        names = ("agreement", "agreement_change", "recorded_change")
        measured: dict[str, Any] = dict.fromkeys(names, (recorded, remedy))
        measured["heldout_change"] = paired, f"Set evaluation.every above 0. {remedy}"
        monitor.check({**measured, **more})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class HeldoutConfig:
    """Held-out evaluation: fixed seeds, averaged weights."""

    seeds: Annotated[list[Natural], Field(min_length=1)] = field(default_factory=lambda: [0, 1])
    """Samples per prompt, one for each seed."""
    every: Natural = 0
    """Iterations between two evaluations on the way; 0: only before and after."""
    prompts_on_the_way: Count | None = 96
    """Held-out prompts of those, evenly spaced, with the first seed; null: all."""
    rewards: dict[str, RewardTerm] = field(default_factory=dict)
    """label -> reward to report besides those trained on; weights play no part."""
    correctness: str | None = None
    """The reward that says right or wrong; null where none does."""

    def without_packaged(self, trained: Collection[str]) -> Self:
        """Leave out the packaged rewards of the defaults, which say nothing about a model and prompts of one's own."""
        default = type(self)()
        rewards = {} if self.rewards == default.rewards else self.rewards
        is_left_out = self.correctness == default.correctness and self.correctness not in {*rewards, *trained}
        return replace(self, rewards=rewards, correctness=None if is_left_out else self.correctness)

    def curve(self, optimized: Sequence[str]) -> list[str]:
        """Return the rewards that have a held-out curve next to the accuracy: those optimized, else the others."""
        return [label for label in optimized or self.rewards if label != self.correctness]

    def check_rewards(self, *trained: str) -> None:
        """Refuse seeds or labels that repeat, and a correctness that is no reward here or `trained` on."""
        if len(set(self.seeds)) != len(self.seeds):
            raise UserError(f"evaluation.seeds is {self.seeds}; give different numbers, e.g. [0, 1].")
        for label in (label for label, term in self.rewards.items() if term.references):
            raise UserError(
                f"evaluation.rewards.{label}.references are of trainings. Give rewards.terms.{label}.references."
            )
        labels, judge = {**dict.fromkeys(trained), **self.rewards}, self.correctness
        if "accuracy" in labels:
            raise UserError(
                "A reward's label is 'accuracy', the name of the verdicts. Give {my_accuracy: {name: REWARD}}."
            )
        if judge is not None and judge not in labels:
            allowed = f"{suggestion(judge, labels)}Labels: {', '.join(labels)}; or null."
            raise UserError(f"evaluation.correctness is {judge!r}, which is no label of a reward. {allowed}")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ConvexDAConfig:
    """ConvexDA, arXiv 2309.16155: of copies of a prompt with changed words those at the rim of what they span
    are learnt from in its place."""

    copies: Count = 5
    """Changed copies of each prompt."""
    share: PositiveShare = 0.05
    """Share of the words that change, at least one."""
    synonyms: str | None = None
    """JSON file {word: [others], ...}, words in lower case; only these change. null: two letters within a
    word change places."""

    def variants(self, prompts: Sequence[Any], seed: int) -> list[list[str]]:
        """Return the texts that replace each prompt, at least one for each."""
        from visalign.text.neighbours import convex_variants

        words: dict[str, list[str]] | None = None
        if self.synonyms is not None:
            try:
                words = _SYNONYMS.validate_json(Path(self.synonyms).read_bytes())
            except (OSError, ValidationError) as error:
                remedy = 'Give a JSON file such as {"big": ["large", "huge"]}.'
                raise UserError(
                    f"data.convex_da.synonyms: '{self.synonyms}' cannot be read ({error}). {remedy}"
                ) from error
        if any(not isinstance(prompt, str) for prompt in prompts):
            raise UserError("data.convex_da changes words of prompts, and a prompt is a conversation.")
        options: dict[str, Any] = {"count": self.copies, "share": self.share, "synonyms": words, "seed": seed}
        texts = {prompt: convex_variants(prompt, **options) for prompt in dict.fromkeys(prompts)}
        return [texts[prompt] for prompt in prompts]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MachineConfig:
    """Device and threads."""

    device: Literal["auto", "cpu"] = "auto"
    """auto (an accelerator if there is one) or cpu."""
    threads: Count | None = None
    """CPU threads; null: as torch chooses, and at most 4 beside a GPU. Another number may change the last bits."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RunConfig(MachineConfig):
    """Length, checkpoints, machine."""

    iterations: Count = 100
    """Iterations: each samples, judges and updates."""
    max_seconds: Positive | None = None
    """Stop training at the end of the iteration that reaches this; makes the length depend on the machine.
    A run that has used it up trains on only when it is resumed with more."""
    checkpoint_every: Count = 10
    """Iterations between two checkpoints."""
    keep_checkpoints: Count = 2
    """Newest checkpoints that are kept."""
    best_by: str | None = None
    """A metric of the evaluations on the way, such as heldout/accuracy or heldout/REWARD: the weights of the
    highest, or behind "-" the lowest, are the run's result. Of a reward that is not trained on: one judge
    is learnt from, another decides. Where a resume changes it, what was best before is forgotten. null: the
    last ones are the result."""
    patience: Count | None = None
    """Evaluations without a better run.best_by after which training stops (early stopping); null: never."""
    trackers: list[str] = field(default_factory=list)
    """Trackers of accelerate besides metrics.jsonl: tensorboard, wandb, ..."""
    push_to_hub: str | None = None
    """Name on the Hugging Face hub, owner/name, that the result is uploaded to at the end, with its model card."""
    license: Annotated[str, AfterValidator(check_license)] | None = None
    """Licence in the model card, such as apache-2.0; null: the one in the card of the base model."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PolicyRunConfig(RunConfig):
    """A run whose network several processes may divide."""

    sharding: bool = False
    """Divide the network, its gradients and AdamW's moments among the processes (FSDP2); without, each has
    them whole (DDP)."""


FREE_KEYS = (
    *("run.iterations", "run.max_seconds", "run.checkpoint_every", "run.keep_checkpoints", "run.best_by"),
    *("run.patience", "run.trackers", "run.sharding", "run.push_to_hub", "run.license"),
    *("model.gradient_checkpointing", "model.offload"),
    *("rollout.batch_size", "model.decode_batch", "model.generate_batch", "model.score_batch"),
    *("optimizer.micro_batch", "optimizer.fused", "evaluation.batch_size", "server.patience"),
    *(f"monitor.{rule}.{limit.name}" for rule in ("warn", "stop") for limit in fields(MonitorLimits)),
)
"""Keys that may differ when a run is resumed: they do not change what an iteration computes, those of batches
but for rounding."""
