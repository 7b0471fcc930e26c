# SPDX-License-Identifier: Apache-2.0
"""Training of a process reward model from judged completions or labels of steps.

It is a token classifier, or a language model whose log-ratio to its beginning is the reward (implicit).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from accelerate import Accelerator
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from visalign.adapters.causal_lm.demonstrations import DemonstrationBatches, fitting_demonstrations, tool_spans
from visalign.adapters.causal_lm.loading import context_length, from_pretrained
from visalign.data.assets import resolve_model
from visalign.data.sets.columns import rename_columns
from visalign.data.sets.hub_datasets import find_table
from visalign.data.sets.tables import read_cells
from visalign.errors import UserError
from visalign.interfaces import ToolCompletion, policy_text
from visalign.pipelines.shared.job import JUDGE, JudgeRun, build_trainer, run_job
from visalign.pipelines.shared.parts import build_accelerator, ends_by, load_classifier, name_key, no_loading_bars
from visalign.pipelines.shared.plan import estimate_fit
from visalign.pipelines.shared.run_folder import fingerprint
from visalign.pipelines.shared.sections import ConvexDAConfig, Dtype, PolicyRunConfig
from visalign.schema import STRICT
from visalign.settings import Count, Natural, Positive
from visalign.text.step_tokens import StepLimits
from visalign.text.steps import StepReading
from visalign.training.loop.optimizer import AdamWSettings
from visalign.training.loop.progress import SUPERVISED_COLUMNS
from visalign.training.process.implicit import ImplicitTexts
from visalign.training.process.label_fit import FitSettings, LabelFit
from visalign.training.process.trainer import StepTexts, measure_steps, read_record
from visalign.training.text.sampling_grid import UNREAD

from .config import TextModelConfig
from .parts import build_text_policy, prompt_encoder
from .supervised import split_records

__all__ = ["TextProcessConfig", "estimate", "plan", "run"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StepModelConfig:
    """The language model that becomes a token classifier with a new head, or an implicit process reward."""

    path: str = "tasks-qwen3"
    """A packaged model, a transformers folder, or a hub id."""
    train: Literal["full", "head"] = "full"
    """Trained weights: everything (full), or the new head alone (head)."""
    dtype: Dtype = "float32"
    """Dtype of the weights: float32, bfloat16 or float16."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StepDataConfig:
    """Records of steps."""

    train: str
    """A .jsonl, .json or .parquet file, or a dataset of the hub, owner/name:split: scored completions with prompt,
    completion and reward (with learns=implicit from 0, wrong, to 1, right), such as the dataset.jsonl of text_sample
    with selection.rule=all; or, with learns=labels, prompt, steps and labels."""
    map: dict[str, str] = field(default_factory=dict)
    """Our name of a column -> that of the file."""
    heldout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the prompts whose records are held out."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of records longer than the model's context: refuse, or drop."""
    cut: StepLimits | None = None
    """Lengths that records with labels are cut to; null: none is."""
    separator: Annotated[str, Field(min_length=1)] = "\n"
    """Text that ends a step; give process.separator the same."""
    convex_da: ConvexDAConfig | None = None
    """More prompts of the same steps; {} has the paper's numbers, null: none. Plain prompts alone."""
    batch: Count = 16
    """Records per update."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StepEvaluationConfig:
    """Held-out evaluation."""

    every: Natural = 0
    """Iterations between two evaluations; 0: only before and after."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TextProcessConfig:
    """Train a process reward model on steps of texts."""

    pipeline: ClassVar[str] = "text_process"

    learns: Literal["outcomes", "labels", "implicit"] = "outcomes"
    """Target: outcomes (SPA-RL's progress estimator: contributions of the steps that add up to the reward),
    labels (the probability that a step is right), or implicit (a language model whose β log π/π_before, added up
    over a completion, is the log-odds of being right; arXiv 2412.01981)."""
    beta: Positive = 0.05
    """With learns=implicit, β: log-odds per nat."""
    loss: Literal["cross_entropy", "nca", "kto"] = "cross_entropy"
    """With learns=implicit, the loss on outcomes (arXiv 2412.01981, section 3): cross-entropy, NCA or KTO. DPO is the
    job text_dpo."""
    seed: Natural = 0
    """Seed of the run: the new head, the order and split of the records, dropout."""
    model: StepModelConfig = field(default_factory=StepModelConfig)
    """Model."""
    data: StepDataConfig
    """Records."""
    optimizer: AdamWSettings = field(default_factory=lambda: AdamWSettings(lr=1e-4, eps=1e-8, weight_decay=0.0))
    """Optimizer; updates_per_iteration stays 1: an iteration has an update for each batch."""
    evaluation: StepEvaluationConfig = field(default_factory=StepEvaluationConfig)
    """Held-out evaluation."""
    run: PolicyRunConfig = field(default_factory=lambda: PolicyRunConfig(iterations=3, checkpoint_every=1))
    """Length, checkpoints, machine; an iteration is a pass over the records."""

    def __post_init__(self) -> None:
        if (updates := self.optimizer.updates_per_iteration) != 1:
            raise UserError(f"optimizer.updates_per_iteration is {updates}; an iteration is one pass. Leave it at 1.")
        for name, default in (("loss", "cross_entropy"), ("beta", 0.05)):
            if self.learns != "implicit" and (value := vars(self)[name]) != default:
                raise UserError(
                    f"{name}={value} goes with learns=implicit, and learns is {self.learns}. Leave {name} out."
                )
        if self.learns != "labels" and self.data.cut is not None:
            raise UserError(
                f"data.cut keeps the labels of the first steps, and learns={self.learns} learns one outcome of all. "
                "Leave it out, or use data.too_long=drop."
            )
        if self.learns == "implicit" and (self.model.train == "head" or self.run.sharding):
            key = "model.train=head" if self.model.train == "head" else "run.sharding"
            raise UserError(f"learns=implicit trains a whole language model in each process, without {key}. Drop it.")


Numbered = Sequence[tuple[int, Mapping[str, Any]]]  # Records with their row numbers in the file


def read_steps(config: TextProcessConfig) -> tuple[Numbered, Numbered]:
    """Read and check the records, split into (trained, heldout)."""
    path, names = find_table(config.data.train), config.data.map
    numbered = [(number, rename_columns(path, row, names)) for number, row in read_cells(path)]
    if not numbered:
        raise UserError(f"data.train: '{config.data.train}' has no record.")
    reading, outcomes = StepReading(separator=config.data.separator), config.learns != "labels"
    with name_key("data.train"):
        for number, record in numbered:
            read_record(number, record, reading, outcomes=outcomes)
            reward = record.get("reward")
            if config.learns == "implicit" and reward is not None and math.isfinite(reward) and not 0 <= reward <= 1:
                raise UserError(
                    f"Record {number} has the reward {reward}; learns=implicit reads 0, wrong, to 1, right. Scale it."
                )
        if config.learns == "outcomes":  # steps are of what the policy wrote
            spans: Any = [tool_spans(n, r, "completion", UNREAD if r.get(UNREAD) else None) for n, r in numbered]
            texts = [ToolCompletion(r["completion"], s) for (_, r), s in zip(numbered, spans, strict=True)]
            numbered = [(n, {**r, "completion": policy_text(t)}) for (n, r), t in zip(numbered, texts, strict=True)]
    trained, heldout = split_records(numbered, config.data.heldout, config.seed, lambda row: row[1]["prompt"])
    if (settings := config.data.convex_da) is not None:
        variants = settings.variants([record["prompt"] for _, record in trained], config.seed)
        pairs = zip(trained, variants, strict=True)
        trained = [(n, {**record, "prompt": prompt}) for (n, record), prompts in pairs for prompt in prompts]
    return trained, heldout


def _build(config: TextProcessConfig, output: Path) -> JudgeRun:
    trained, measured = read_steps(config)
    accelerator = build_accelerator(config, output)
    load = _implicit if config.learns == "implicit" else _classifier
    parameters, model, save, tokenize = load(config, accelerator)
    texts, heldout = tokenize(trained), tokenize(measured) if measured else None
    if not texts.rows:
        cut = "" if config.data.cut is None else " left by data.cut; raise its lengths"
        need = f"a step and a finite reward or label{cut}"
        raise UserError(f"data.train: none of the {len(trained)} records has {need}.")
    fit = LabelFit(
        parameters,
        FitSettings(batch_size=config.data.batch, seed=config.seed),
        accelerator=accelerator,
        divided=model if config.run.sharding else None,
    )
    fit.outputs, fit.rows = texts.outputs, texts.rows

    def measure(*, final: bool = False) -> dict[str, float]:
        return asdict(measure_steps(heldout, config.data.batch)) if heldout and heldout.rows else {}

    more = {"outcomes": {"replaces": "true"}, "implicit": {"reference": config.model.path, "beta": config.beta}}
    keys = {"model": output / JUDGE, "separator": json.dumps(config.data.separator), **more.get(config.learns, {})}
    return JudgeRun(
        config=config,
        output=output,
        trainer=build_trainer(config, output, fit, lambda _: measure(), columns=SUPERVISED_COLUMNS),
        fingerprints={"data.train": fingerprint([record for _, record in (*trained, *measured)])},
        network=model,
        measure=measure,
        heldout=len(heldout.rows) if heldout else 0,
        save=save,
        counts=lambda result: {
            "records": len(texts.rows),
            "records_left_out": len(trained) - len(texts.rows),
            "samples": result.counters.samples,
        },
        next_command=["visalign", "train", "text_ppo", *(f"process.{k}={v}" for k, v in keys.items())],
    )


run = partial(run_job, build=_build)


Learner = tuple[Any, nn.Module, Callable[[Path], None], Callable[[Numbered], Any]]
"""Trained parameters by name, the module, a function that saves it, and one from records to its texts."""


def _classifier(config: TextProcessConfig, accelerator: Accelerator) -> Learner:
    model, tokenizer = _load(config)
    model.to(accelerator.device).train()

    def save(folder: Path) -> None:
        with no_loading_bars():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    parameters = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    return parameters, model, save, partial(_texts, config, model, tokenizer)


def _implicit(config: TextProcessConfig, accelerator: Accelerator) -> Learner:
    model = TextModelConfig(path=config.model.path, dtype=config.model.dtype, score_batch=config.data.batch)
    policy = build_text_policy(model, accelerator.device, config.seed, reference=False)

    def tokenize(records: Numbered) -> ImplicitTexts:
        with name_key("data.train"):
            fitting = fitting_demonstrations(policy, [row for _, row in records], too_long=config.data.too_long)
            rollout = DemonstrationBatches(policy, fitting, size=1, seed=0).rows(range(len(fitting)))
        label = [math.nan if row["reward"] is None else row["reward"] for row in fitting]
        options: dict[str, Any] = {"beta": config.beta, "form": config.loss}
        return ImplicitTexts(policy, rollout, label, reference=policy, **options)  # not trained yet

    return policy.trainable_parameters(), policy.module, policy.save, tokenize


def _load(config: TextProcessConfig, *, hollow: bool = False) -> tuple[Any, Any]:
    """Load the classifier, partly frozen, and its tokenizer; `hollow`: without weights."""
    model, tokenizer = load_classifier(
        AutoModelForTokenClassification,
        str(resolve_model(config.model.path)),
        seed=config.seed,
        hollow=hollow,
        dtype=getattr(torch, config.model.dtype),
        num_labels=1 if config.learns == "outcomes" else 2,
    )
    for name, parameter in model.named_parameters():
        in_head = not name.startswith(model.base_model_prefix + ".")
        parameter.requires_grad_(config.model.train == "full" or in_head)
    return model, tokenizer


def _texts(config: TextProcessConfig, model: Any, tokenizer: Any, records: Numbered) -> StepTexts:
    with name_key("data.train"):
        return StepTexts(
            model,
            tokenizer,
            [record for _, record in records],
            numbers=[number for number, _ in records],
            reading=StepReading(separator=config.data.separator),
            too_long=config.data.too_long,
            cut=config.data.cut,
        )


def plan(config: TextProcessConfig) -> dict[str, Any]:
    """Plan the records and length of a job, in groups of entries."""
    train, heldout = (len(side) for side in read_steps(config))
    return {
        "records": {"train": train, "heldout": heldout, "per_update": config.data.batch},
        "length": {
            "iterations": config.run.iterations,
            "updates_at_most": config.run.iterations * math.ceil(train / config.data.batch),
            "ends_by": ends_by(config.run),
        },
    }


def estimate(config: TextProcessConfig) -> dict[str, Any]:
    """Extend the plan by memory and hours by device, each text as long as the longest that is read."""
    records, _ = read_steps(config)
    if config.learns == "implicit":
        folder, dtype = str(resolve_model(config.model.path)), getattr(torch, config.model.dtype)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(from_pretrained(AutoConfig, folder), dtype=dtype)
        tokenizer = from_pretrained(AutoTokenizer, folder)
        prompts = prompt_encoder(TextModelConfig(path=folder), tokenizer).encode([row["prompt"] for _, row in records])
        texts = tokenizer([row["completion"] for _, row in records], add_special_tokens=False)["input_ids"]
        lengths = [1 + len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True)]
        if config.data.too_long == "drop":
            lengths = [length for length in lengths if length <= (context_length(model) or math.inf)]
    else:
        model, tokenizer = _load(config, hollow=True)
        lengths = [len(tokens.ids) for tokens, _ in _texts(config, model, tokenizer, records).texts]
    if not lengths:
        raise UserError(f"data.train: each of {len(records)} records is longer than the model reads. Shorten them.")
    rows, count = min(config.data.batch, len(lengths)), len(lengths) * config.run.iterations
    frozen = config.model.train == "head"
    fit = estimate_fit(model, config, rows=rows, longest=max(lengths), texts=count, frozen=frozen)
    return {**plan(config), **fit}
