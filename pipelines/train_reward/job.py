# SPDX-License-Identifier: Apache-2.0
"""Training a judge: measure, learn from labels, measure again, save what `from_pretrained` reads."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from visalign.config import config_to_yaml, flatten
from visalign.pipelines.shared.interrupted import TrainingInterrupted
from visalign.pipelines.shared.parts import build_accelerator
from visalign.pipelines.shared.run_folder import check_same_run
from visalign.pipelines.shared.run_inputs import FINGERPRINTS, check_unchanged, write_once
from visalign.pipelines.shared.sections import FREE_KEYS

from .card import card_notes, first_notes, reward_card
from .config import TrainRewardConfig
from .inputs import RewardInputs, prepare_reward
from .measure import Measure

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
    import torch

    from .judges import build_judge, remembered

    output = Path(output)
    check_same_run(config, output, resume=resume, free=FREE_KEYS)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
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
    if accelerator.is_main_process:
        write_once(output / "config.yaml", "pipeline: train_reward\n" + config_to_yaml(config))
        write_once(output / FINGERPRINTS, json.dumps(dict(inputs.fingerprints), indent=1) + "\n")
    if not config.run.trackers:
        return _work(config, inputs, judge, trainer, measure, output, resume)
    accelerator.init_trackers("visalign", config={k: str(v) for k, v in flatten(config).items()})
    try:
        return _work(config, inputs, judge, trainer, measure, output, resume)
    finally:
        accelerator.end_training()


def _trainer(
    config: TrainRewardConfig,
    inputs: RewardInputs,
    judge: Any,
    measure: Measure,
    accelerator: Any,
    output: Path,
) -> Any:
    from visalign.training.loop.loop import Keeping
    from visalign.training.loop.progress import SHOWN_OF_A_JUDGE, TrainingProgress
    from visalign.training.reward.trainer import RewardTrainer

    from .batches import ExampleBatches

    data, length = config.data, config.run
    keeping = Keeping(
        folder=output,
        iterations=length.iterations,
        checkpoint_every=length.checkpoint_every,
        keep_checkpoints=length.keep_checkpoints,
        evaluate_every=config.evaluation.every,
        max_seconds=length.max_seconds,
        config=asdict(config),
        free_keys=FREE_KEYS,
    )
    return RewardTrainer(
        judge,
        ExampleBatches(inputs.train, judge.encode, size=data.batch, micro=data.micro_batch, seed=config.seed),
        objective=config.objective,
        optimizer=config.optimizer,
        keeping=keeping,
        accelerator=accelerator,
        seed=config.seed,
        evaluate=lambda _: measure(),
        progress=TrainingProgress(
            length.iterations,
            max_seconds=length.max_seconds,
            enabled=accelerator.is_main_process,
            shown=SHOWN_OF_A_JUDGE,
        ),
    )


def _work(
    config: TrainRewardConfig,
    inputs: RewardInputs,
    judge: Any,
    trainer: Any,
    measure: Measure,
    output: Path,
    resume: bool,
) -> dict[str, Any]:
    """Measure, train, measure, write; returns the summary."""
    from visalign.training.loop.runtime import peak_memory_bytes
    from visalign.versions import versions

    begin = time.perf_counter()
    before = _before(trainer, measure, output / "before.json")
    measuring = time.perf_counter() - begin
    if resume:
        trainer.resume()
    with trainer.progress:
        result = trainer.train()
    if result.stopped == "interrupted":
        raise TrainingInterrupted
    begin = time.perf_counter()
    with trainer.ema.applied():
        after = measure(final=True)
        measuring += time.perf_counter() - begin
        if trainer.accelerator.is_main_process:
            judge.save(output / JUDGE)
        notes = card_notes(judge)
    state, peak = result.state, peak_memory_bytes()
    summary = {
        "before": before,
        "after": after,
        "examples": state.examples,
        "epochs": state.examples / len(inputs.train),
        "iterations": state.iteration,
        "updates": state.updates,
        "updates_skipped": state.skipped,
        "stopped": result.stopped,
        "seconds": state.seconds + measuring,
        "training_seconds": state.seconds,
        "trainable_parameters": sum(p.numel() for _, p in trainer.parameters),
        "peak_memory_bytes": peak.get("cuda", peak.get("host")),
        "config": asdict(config),
        "versions": versions(),
    }
    if trainer.accelerator.is_main_process:
        from visalign.atomic import write_atomic

        card = reward_card(config, summary, len(inputs.train), notes)
        write_atomic(output / JUDGE / "README.md", card.encode())
        write_atomic(output / "summary.json", _json(summary).encode())
    trainer.accelerator.wait_for_everyone()
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
