# SPDX-License-Identifier: Apache-2.0
"""The frame of every job that trains: measure, train, measure again, save, summarise."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.config import config_to_yaml, flatten

from .interrupted import TrainingInterrupted
from .parts import Records, evenly_spaced, no_loading_bars
from .results import costs_of, write_results
from .run_folder import check_same_run
from .run_inputs import FINGERPRINTS, check_unchanged, write_once
from .sections import FREE_KEYS

if TYPE_CHECKING:
    from visalign.evaluation import HeldoutResult
    from visalign.training import RunSettings, Trainer, TrainResult
    from visalign.training.loop.trainer import Counters


@dataclass(frozen=True, kw_only=True)
class Job:
    """The objects of a run."""

    trainer: Trainer
    fingerprints: Mapping[str, str]
    """What was read -> SHA-256 of its content: a resume on other content is refused."""
    before: Callable[[], Any]
    """Measures the model before training, or reads what was measured; called in all processes."""
    after: Callable[[Any, TrainResult, float], dict[str, Any]]
    """(what `before` returned, result, seconds of `before`) -> summary; saves the model, measures it again,
    writes the results; called in all processes."""


def run_job(
    config: Any, output: Path, resume: bool, *, pipeline: str, build: Callable[[Any, Path], Job]
) -> dict[str, Any]:
    """Run a job; nothing is written before everything that can be checked has been.

    Args:
        config: the configuration, with a section `run`.
        output: run folder; new or empty, or with `resume` that of the run to continue.
        resume: continue from the newest whole checkpoint. The result is that of an uninterrupted run.
        pipeline: name under which the run's own copy of the configuration can be run again.
        build: makes the objects; reads, writes nothing.

    Returns:
        The content of summary.json; empty in all processes but the first.

    Raises:
        UserError: something in the configuration or the folder cannot be used.
        TrainingInterrupted: after Ctrl-C.
    """
    import torch

    output = Path(output)
    check_same_run(config, output, resume=resume, free=FREE_KEYS)
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    job = build(config, output)
    accelerator = job.trainer.accelerator
    if resume:
        check_unchanged(output, job.fingerprints)
    if accelerator.is_main_process:
        write_once(output / "config.yaml", f"pipeline: {pipeline}\n" + config_to_yaml(config))
        prints = json.dumps(dict(job.fingerprints), indent=1, sort_keys=True)
        write_once(output / FINGERPRINTS, prints + "\n")
    accelerator.wait_for_everyone()
    if not config.run.trackers:
        return _work(job, resume)
    accelerator.init_trackers("visalign", config={k: str(v) for k, v in flatten(config).items()})
    try:
        return _work(job, resume)
    finally:
        accelerator.end_training()


def _work(job: Job, resume: bool) -> dict[str, Any]:
    begin = time.perf_counter()
    before = job.before()
    measuring = time.perf_counter() - begin
    if resume:
        job.trainer.resume()
    with job.trainer.progress:
        result = job.trainer.train()
    if result.stopped == "interrupted":
        raise TrainingInterrupted
    summary = job.after(before, result, measuring)
    job.trainer.accelerator.wait_for_everyone()
    return summary


def run_settings(config: Any, output: Path) -> RunSettings:
    """Length, checkpoints and evaluations of a run, from its sections run and evaluation."""
    from visalign.training import RunSettings

    return RunSettings(
        folder=output,
        iterations=config.run.iterations,
        checkpoint_every=config.run.checkpoint_every,
        keep_checkpoints=config.run.keep_checkpoints,
        evaluate_every=config.evaluation.every,
        max_seconds=config.run.max_seconds,
        config=asdict(config),
        free_keys=FREE_KEYS,
    )


def result_folder(config: Any, output: Path) -> Path:
    """Where a run leaves what it trained: the adapters, or the whole model."""
    return output / ("model" if config.model.lora is None else "lora")


@dataclass(frozen=True, kw_only=True)
class PolicyRun:
    """A policy that is evaluated on held-out prompts before and after; makes the ends of a `Job`."""

    config: Any
    output: Path
    title: str
    policy: Any
    trainer: Trainer
    measure: Callable[[Records, Sequence[int]], HeldoutResult]
    """Evaluates the weights that the policy has."""
    heldout: Records
    samples: str
    """What is made of a prompt, in messages: pictures, completions."""
    load_code: str
    """Python that loads the result."""
    counts: Callable[[Counters], Mapping[str, Any]]
    """More entries of the summary."""
    prompt_text: Callable[[Any], str] = str
    seen: int | None = None
    """Held-out prompts that are trained on as well; None where that is not known."""

    def before(self) -> HeldoutResult | None:
        """The evaluation before training, kept in the run folder; None in all processes but the first."""
        from visalign.evaluation import load_heldout

        if not self.trainer.accelerator.is_main_process:
            return None
        note, count, seeds = self.trainer.progress.note, len(self.heldout), self.config.evaluation.seeds
        if self.seen:
            note(
                f"Warning: {self.seen} of {count} held-out prompts are trained on as well, so the accuracy "
                "is partly one of memory. Take them out of data.train or data.heldout."
            )
        path = self.output / "before.npz"
        if path.is_file():
            return load_heldout(path)
        note(f"Evaluating {count} held-out prompts × {len(seeds)} {self.samples} before training.")
        result = self.measure(self.heldout, seeds)
        result.save(path)
        return result

    def after(self, before: HeldoutResult | None, result: TrainResult, measuring: float) -> dict[str, Any]:
        """Save the averaged weights, evaluate them, write summary and report."""
        if before is None:
            return {}
        config, output, begin = self.config, self.output, time.perf_counter()
        with self.trainer.averaged():
            with no_loading_bars():
                self.policy.save(result_folder(config, output))
            after = self.measure(self.heldout, config.evaluation.seeds)
        after.save(output / "after.npz")
        way = config.evaluation
        some = [self.prompt_text(r["prompt"]) for r in evenly_spaced(self.heldout, way.prompts_on_the_way)]
        spent = measuring + time.perf_counter() - begin
        return write_results(
            output,
            before,
            after,
            title=self.title,
            config=asdict(config),
            costs=costs_of(output, result, spent, self.counts(result.counters)),
            load_code=self.load_code,
            on_the_way=(some, way.seeds[:1]) if way.every else None,
            seen=self.seen,
        )
