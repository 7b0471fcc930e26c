# SPDX-License-Identifier: Apache-2.0
"""Training of a process reward model: a token classifier on a language model, from judged completions or from
labels of steps; measured on held-out prompts before and after, and saved as `process.model` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from visalign.data.assets import resolve_model
from visalign.data.sets.tables import read_rows
from visalign.errors import UserError
from visalign.pipelines.shared.job import JUDGE, JudgeRun, build_trainer, run_job
from visalign.pipelines.shared.parts import Records, build_accelerator, ends_by, no_loading_bars
from visalign.pipelines.shared.run_folder import fingerprint
from visalign.pipelines.shared.sections import ConvexDAConfig, Dtype, PolicyRunConfig
from visalign.schema import STRICT
from visalign.settings import Count, Natural, check_rules
from visalign.text.steps import StepReading
from visalign.training.loop.optimizer import AdamWSettings

from .dpo import split_records
from .parts import name_key

if TYPE_CHECKING:
    from visalign.training import TrainResult
    from visalign.training.process.trainer import StepTexts

__all__ = ["TextProcessConfig", "plan", "run"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StepModelConfig:
    """The language model that becomes a token classifier, with a new head."""

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
    """A .jsonl, .json or .parquet file: scored completions with prompt, completion and reward, such as the
    dataset.jsonl of text_sample with selection.rule=all; or, with learns=labels, prompt, steps and labels."""
    heldout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the prompts whose records are held out."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """Treatment of records longer than the model's context: refuse, or drop."""
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

    learns: Literal["outcomes", "labels"] = "outcomes"
    """Target: outcomes (SPA-RL's progress estimator: contributions of the steps that add up to the reward) or
    labels (the probability that a step is right)."""
    seed: Natural = 0
    """Seed of the run: the new head, the order and split of the records, dropout."""
    model: StepModelConfig = field(default_factory=StepModelConfig)
    """Model."""
    data: StepDataConfig
    """Records."""
    optimizer: AdamWSettings = field(
        default_factory=lambda: AdamWSettings(lr=1e-4, eps=1e-8, weight_decay=0.0)
    )
    """Optimizer; updates_per_iteration stays 1: an iteration has an update for each batch."""
    evaluation: StepEvaluationConfig = field(default_factory=StepEvaluationConfig)
    """Held-out evaluation."""
    run: PolicyRunConfig = field(default_factory=lambda: PolicyRunConfig(iterations=3, checkpoint_every=1))
    """Length, checkpoints, machine; an iteration is a pass over the records."""

    def __post_init__(self) -> None:
        check_rules(self, PROCESS_RULES)


PROCESS_RULES = (
    (
        lambda s: s.optimizer.updates_per_iteration != 1,
        "optimizer.updates_per_iteration is {s.optimizer.updates_per_iteration}; an iteration is a pass over "
        "the records, with an update for each data.batch of them. Leave it at 1.",
    ),
)


def run(config: TextProcessConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; see `visalign.pipelines.shared.job.run_job`."""
    return run_job(config, output, resume, _build)


@plain_dataclass(frozen=True, kw_only=True)
class StepRecords:
    """Records and their row numbers in the file, for messages."""

    rows: Records
    numbers: list[int]

    @classmethod
    def from_pairs(cls, pairs: Sequence[tuple[int, Mapping[str, Any]]]) -> StepRecords:
        """Build from (number, record) pairs."""
        return cls(rows=[record for _, record in pairs], numbers=[number for number, _ in pairs])


def _read(config: TextProcessConfig) -> tuple[StepRecords, StepRecords]:
    """Read and check the records, split into (trained, heldout)."""
    from visalign.training.process.trainer import read_record

    numbered = list(read_rows(config.data.train))
    if not numbered:
        raise UserError(f"data.train: '{config.data.train}' has no record.")
    reading, outcomes = StepReading(separator=config.data.separator), config.learns == "outcomes"
    with name_key("data.train"):
        for number, record in numbered:
            read_record(number, record, reading, outcomes=outcomes)
    indexed = [{"prompt": record["prompt"], "index": index} for index, (_, record) in enumerate(numbered)]
    sides = split_records(indexed, config.data.heldout, config.seed)
    trained, heldout = ([numbered[entry["index"]] for entry in side] for side in sides)
    if (settings := config.data.convex_da) is not None:
        variants = settings.variants([record["prompt"] for _, record in trained], config.seed)
        pairs = zip(trained, variants, strict=True)
        trained = [(n, {**record, "prompt": prompt}) for (n, record), prompts in pairs for prompt in prompts]
    return StepRecords.from_pairs(trained), StepRecords.from_pairs(heldout)


def _build(config: TextProcessConfig, output: Path) -> ProcessRun:
    """Build the objects of a run, without writing anything."""
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    from visalign.adapters.causal_lm.loading import from_pretrained
    from visalign.rewards.weights.checkpoint_files import quiet_loading
    from visalign.training.loop.progress import SUPERVISED_COLUMNS
    from visalign.training.process.label_fit import FitSettings, LabelFit
    from visalign.training.process.trainer import measure_steps

    trained, measured = _read(config)
    accelerator = build_accelerator(config, output)
    folder = str(resolve_model(config.model.path))
    with quiet_loading(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        options = {"num_labels": _labels(config), "dtype": getattr(torch, config.model.dtype)}
        model: Any = from_pretrained(AutoModelForTokenClassification, folder, **options)
        tokenizer = from_pretrained(AutoTokenizer, folder)
    _freeze(config, model)
    model.to(accelerator.device).train()
    texts, heldout = (_texts(config, model, tokenizer, side) for side in (trained, measured))
    if not texts.rows:
        raise UserError(
            f"data.train: none of the {len(trained.rows)} records has a step and a finite reward or label."
        )
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    settings = FitSettings(batch_size=config.data.batch, seed=config.seed)
    divided = model if config.run.sharding else None
    fit = LabelFit(parameters, settings, accelerator=accelerator, divided=divided)
    fit.outputs, fit.rows = texts.outputs, texts.rows

    def measure(*, final: bool = False) -> dict[str, float]:
        return asdict(measure_steps(heldout, config.data.batch)) if heldout.rows else {}

    return ProcessRun(
        config=config,
        output=output,
        trainer=build_trainer(config, output, fit, lambda _: measure(), columns=SUPERVISED_COLUMNS),
        fingerprints={"data.train": fingerprint([*trained.rows, *measured.rows])},
        texts=texts,
        network=model,
        tokenizer=tokenizer,
        measure=measure,
        heldout=len(heldout.rows),
        next_command=_next_command(config, output),
    )


def _next_command(config: TextProcessConfig, output: Path) -> list[str]:
    """Build the command that trains a policy with this judge of steps."""
    keys = {"model": output / JUDGE, "separator": json.dumps(config.data.separator)}
    keys |= {"replaces": "true"} if config.learns == "outcomes" else {}
    return ["visalign", "train", "text_ppo", *(f"process.{key}={value}" for key, value in keys.items())]


def _labels(config: TextProcessConfig) -> int:
    return 1 if config.learns == "outcomes" else 2


def _freeze(config: TextProcessConfig, model: Any) -> None:
    """Freeze the weights that are not trained."""
    for name, parameter in model.named_parameters():
        in_head = not name.startswith(model.base_model_prefix + ".")
        parameter.requires_grad_(config.model.train == "full" or in_head)


def _texts(config: TextProcessConfig, model: Any, tokenizer: Any, side: StepRecords) -> StepTexts:
    """Tokenize records for the model."""
    from visalign.training.process.trainer import StepTexts

    reading = StepReading(separator=config.data.separator)
    options = {"reading": reading, "too_long": config.data.too_long}
    with name_key("data.train"):
        return StepTexts(model, tokenizer, side.rows, numbers=side.numbers, **options)


@plain_dataclass(frozen=True, kw_only=True)
class ProcessRun(JudgeRun):
    """Run of a process reward model."""

    texts: StepTexts
    """Training records."""
    tokenizer: Any

    def save(self, folder: Path) -> None:
        """Save in the format of transformers."""
        with no_loading_bars():
            self.network.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def counts(self, result: TrainResult) -> dict[str, Any]:
        """Count records."""
        count = len(self.texts.rows)
        left_out = len(self.texts.texts) + self.texts.dropped - count
        return {"records": count, "records_left_out": left_out, "samples": result.counters.samples}


def plan(config: TextProcessConfig) -> Mapping[str, Any]:
    """Plan the records and length of a job, in groups of entries."""
    train, heldout = (len(side.rows) for side in _read(config))
    batches = -(-train // config.data.batch)
    return {
        "records": {"train": train, "heldout": heldout, "per_update": config.data.batch},
        "length": {
            "iterations": config.run.iterations,
            "updates_at_most": config.run.iterations * batches,
            "ends_by": ends_by(config.run),
        },
    }
