# SPDX-License-Identifier: Apache-2.0
"""Training a judge: measure, learn from labels, measure again, save what `from_pretrained` reads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.pipelines.shared.job import Job, run_job, run_settings
from visalign.pipelines.shared.parts import build_accelerator
from visalign.pipelines.shared.run_inputs import check_unchanged, write_once

from .card import card_notes, first_notes, reward_card
from .config import TrainRewardConfig
from .inputs import RewardInputs, prepare_reward
from .measure import Measure

if TYPE_CHECKING:
    from visalign.training import Trainer, TrainResult

__all__ = ["JUDGE", "TrainRewardConfig", "plan", "run"]

JUDGE = "judge"
"""Folder of the trained judge inside the run's folder."""


def run(config: TrainRewardConfig, output: Path, resume: bool = False) -> dict[str, Any]:
    """Run the job; nothing is written before everything that can be checked has been.

    Args:
        config: the configuration.
        output: run folder; new or empty, or with `resume` that of the run to continue.
        resume: continue from the newest whole checkpoint. The result is that of an uninterrupted run.

    Returns:
        The content of summary.json.

    Raises:
        UserError: something in the configuration, the data or the folder cannot be used.
        TrainingInterrupted: after Ctrl-C.
    """
    return run_job(config, output, resume, pipeline="train_reward", build=partial(_build, resume))


def _build(resume: bool, config: TrainRewardConfig, output: Path) -> Job:
    """Everything a run needs; reads, writes nothing."""
    from .judges import build_judge, remembered

    inputs = prepare_reward(config)
    if resume:
        check_unchanged(output, inputs.fingerprints)
    accelerator = build_accelerator(config.run, output)
    judge = build_judge(config, accelerator.device)
    inputs = replace(inputs, train=remembered(judge, inputs.train))
    heldout = None if inputs.heldout is None else remembered(judge, inputs.heldout)
    processes = (accelerator.process_index, accelerator.num_processes)
    measure = Measure(config, judge, heldout, processes)
    trainer = _trainer(config, inputs, judge, measure, accelerator, output)
    for note in (*inputs.notes, *first_notes(judge)):
        trainer.progress.note(note)
    return Job(
        trainer=trainer,
        fingerprints=inputs.fingerprints,
        before=lambda: _before(trainer, measure, output / "before.json"),
        after=partial(_after, config, inputs, judge, trainer, measure, output),
    )


def _trainer(
    config: TrainRewardConfig,
    inputs: RewardInputs,
    judge: Any,
    measure: Measure,
    accelerator: Any,
    output: Path,
) -> Trainer:
    from visalign.training import RewardModeling, Trainer
    from visalign.training.loop.progress import SHOWN_OF_A_JUDGE, TrainingProgress

    from .batches import ExampleBatches
    from .weights import compute_dtype

    data, length = config.data, config.run
    batches = ExampleBatches(
        inputs.train, judge.encode, size=data.batch, micro=data.micro_batch, seed=config.seed
    )
    return Trainer(
        RewardModeling(
            judge,
            batches,
            objective=config.objective,
            accelerator=accelerator,
            seed=config.seed,
            compute_dtype=compute_dtype(config.model),
        ),
        optimizer=config.optimizer,
        run=run_settings(config, output),
        evaluate=lambda _: measure(),
        progress=TrainingProgress(
            length.iterations,
            max_seconds=length.max_seconds,
            enabled=accelerator.is_main_process,
            shown=SHOWN_OF_A_JUDGE,
        ),
    )


def _after(
    config: TrainRewardConfig,
    inputs: RewardInputs,
    judge: Any,
    trainer: Trainer,
    measure: Measure,
    output: Path,
    before: dict[str, Any],
    result: TrainResult,
    measuring: float,
) -> dict[str, Any]:
    """Measure, save the judge with its card, write the summary."""
    from visalign.training import peak_memory_bytes
    from visalign.versions import versions

    begin = time.perf_counter()
    with trainer.averaged():
        after = measure(final=True)
        measuring += time.perf_counter() - begin
        if trainer.accelerator.is_main_process:
            judge.save(output / JUDGE)
        notes = card_notes(judge)
    done, peak = result.counters, peak_memory_bytes()
    summary = {
        "before": before,
        "after": after,
        "examples": done.samples,
        "epochs": done.samples / len(inputs.train),
        "iterations": done.iteration,
        "updates": done.updates,
        "updates_skipped": done.skipped,
        "stopped": result.stopped,
        "seconds": done.seconds + measuring,
        "training_seconds": done.seconds,
        "trainable_parameters": sum(p.numel() for _, p in trainer.weights.named),
        "peak_memory_bytes": peak.get("cuda", peak.get("host")),
        "config": asdict(config),
        "versions": versions(),
    }
    if trainer.accelerator.is_main_process:
        from visalign.atomic import write_atomic

        card = reward_card(config, summary, len(inputs.train), notes)
        write_atomic(output / JUDGE / "README.md", card.encode())
        write_atomic(output / "summary.json", _json(summary).encode())
    return json.loads(_json(summary))


def _before(trainer: Any, measure: Measure, path: Path) -> dict[str, Any]:
    """The numbers before training: those of the file, or measured and written there."""
    is_known = path.is_file()
    trainer.accelerator.wait_for_everyone()  # all have looked before one writes
    if is_known:
        return json.loads(path.read_text(encoding="utf-8"))
    trainer.progress.note(f"Measuring on {measure.size} held-out examples before training.")
    before = measure()
    if trainer.accelerator.is_main_process:
        write_once(path, _json(before))
    return before


def _json(value: Any) -> str:
    """As JSON text; what is not a finite number is null."""
    from visalign.pipelines.shared.json_values import finite

    return json.dumps(finite(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def plan(config: TrainRewardConfig) -> Mapping[str, Any]:
    """What a job would learn from.

    Args:
        config: the configuration.

    Returns:
        Groups of entries: examples, length.

    Raises:
        UserError: something in the configuration or the data cannot be used.
    """
    inputs = prepare_reward(config)
    updates = config.run.iterations * config.optimizer.updates_per_iteration
    seen = updates * config.data.batch
    return {
        "examples": {
            "train": len(inputs.train),
            "heldout": 0 if inputs.heldout is None else len(inputs.heldout),
            "per_update": config.data.batch,
        },
        "length": {
            "iterations": config.run.iterations,
            "updates": updates,
            "examples_seen": seen,
            "epochs": seen / len(inputs.train),
        },
    }
