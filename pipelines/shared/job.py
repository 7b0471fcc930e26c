# SPDX-License-Identifier: Apache-2.0
"""The frame of every job that trains: measure, train, measure again, save, write summary and report."""

from __future__ import annotations

import json
import math
import shlex
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visalign.atomic import write_atomic
from visalign.config import flatten
from visalign.signals import Stopped
from visalign.training.loop.best import best_checkpoint_note, best_summary
from visalign.training.loop.metrics import read_metrics
from visalign.training.loop.monitor import monitor_messages
from visalign.training.loop.runtime import peak_memory_bytes
from visalign.versions import versions

from .parts import Records, check_alike, evenly_spaced, heldout_metrics, no_loading_bars
from .run_folder import RunSummary, check_unchanged, claimed, summary_json, write_beginning, write_once
from .sections import FREE_KEYS

if TYPE_CHECKING:
    from visalign.evaluation import HeldoutResult
    from visalign.training import Trainer, TrainResult
    from visalign.training.loop.algorithm import Counters

    from .grids import SampleGrids


class TrainingInterrupted(Stopped):
    """Ctrl-C or SIGTERM: the iteration was finished and saved; the command line says how to go on."""


def resume_command(config: str, overrides: Sequence[str], folder: Path) -> str:
    """The command line that continues a run, quoted for a shell.

    >>> resume_command("shapes_quickstart", ["seed=1"], Path("my runs"))
    "visalign train shapes_quickstart seed=1 --output 'my runs' --resume"
    """
    return shlex.join(["visalign", "train", config, *overrides, "--output", str(folder), "--resume"])


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """The objects of a run; all processes call `before` and `after`."""

    config: Any
    output: Path
    trainer: Trainer
    fingerprints: Mapping[str, str]
    """Input -> SHA-256 of its content: a resume on other content is refused."""
    next_command: Sequence[str]
    """Command line that uses the result."""

    @abstractmethod
    def before(self) -> Any:
        """Measure the model before training, or read what was measured."""

    @abstractmethod
    def after(self, before: Any, result: TrainResult, measuring: float) -> dict[str, Any]:
        """Save the model, measure it again, write the results; `measuring` are the seconds of `before`."""

    def costs(self, result: TrainResult, measuring: float) -> dict[str, Any]:
        """Return the costs of the run for its summary; memory is the GPU's if there is one."""
        state, peak = result.counters, peak_memory_bytes()
        return {
            "iterations": state.iteration,
            "updates": state.updates,
            "updates_skipped": state.skipped,
            "stopped": result.stopped,
            "seconds": state.seconds + measuring,
            "training_seconds": state.seconds,
            "peak_memory_bytes": peak.get("cuda", peak.get("host")),
        }


def run_job(config: Any, output: Path, resume: bool, build: Callable[[Any, Path], Job]) -> RunSummary:
    """Run a job; nothing is written before everything that can be checked has been.

    Args:
        config: the configuration, with a section `run` and the name of its `pipeline`.
        output: run folder; new or empty, or with `resume` that of the run to continue.
        resume: continue from the newest whole checkpoint. The result is that of an uninterrupted run.
        build: makes the objects; reads, writes nothing.

    Returns:
        The content of summary.json; empty in all processes but the first.

    Raises:
        UserError: something in the configuration or the folder cannot be used.
        TrainingInterrupted: after Ctrl-C or SIGTERM.
    """
    from visalign.training.loop.processes import report_lost_process

    output = Path(output)
    with claimed(config, output, resume=resume, free=FREE_KEYS), report_lost_process():
        return _run_claimed(config, output, resume, build)


def _run_claimed(config: Any, output: Path, resume: bool, build: Callable[[Any, Path], Job]) -> RunSummary:
    import torch

    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    job = build(config, output)
    accelerator = job.trainer.accelerator
    if accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        check_alike(gather_object([{"--resume": resume, **job.fingerprints}]))
    if resume:
        check_unchanged(output, job.fingerprints)
    if accelerator.is_main_process:
        write_beginning(output, config, config.pipeline, job.fingerprints)
    accelerator.wait_for_everyone()
    if not config.run.trackers:
        return _work(job, resume)
    accelerator.init_trackers("visalign", config={k: str(v) for k, v in flatten(config).items()})
    try:
        return _work(job, resume)
    finally:
        accelerator.end_training()


def _work(job: Job, resume: bool) -> RunSummary:
    begin = time.perf_counter()
    before = job.before()
    measuring = time.perf_counter() - begin
    if resume:
        job.trainer.resume()
    result = job.trainer.train()
    if result.stopped == "interrupted":
        raise TrainingInterrupted(result.signal or signal.SIGINT)
    summary = job.after(before, result, measuring)
    job.trainer.accelerator.wait_for_everyone()
    return RunSummary(summary, job.next_command)


def build_trainer(
    config: Any, output: Path, algorithm: Any, evaluate: Callable[[int], Mapping[str, float]], **progress: Any
) -> Trainer:
    """The trainer of an algorithm by the sections optimizer, evaluation and run of a configuration."""
    from visalign.training import RunSettings, Trainer, TrainingProgress

    length = config.run
    return Trainer(
        algorithm,
        optimizer=config.optimizer,
        run=RunSettings(
            folder=output,
            iterations=length.iterations,
            checkpoint_every=length.checkpoint_every,
            keep_checkpoints=length.keep_checkpoints,
            evaluate_every=config.evaluation.every,
            max_seconds=length.max_seconds,
            best_by=length.best_by,
            monitor=getattr(config, "monitor", None),
            config=asdict(config),
            free_keys=FREE_KEYS,
        ),
        evaluate=evaluate,
        progress=TrainingProgress(
            length.iterations,
            max_seconds=length.max_seconds,
            enabled=algorithm.accelerator.is_main_process,
            **progress,
        ),
    )


def result_folder(config: Any, output: Path) -> Path:
    """Return the folder of the trained adapters, or of the whole model."""
    return output / ("model" if config.model.lora is None else "lora")


Measure = Callable[[Records, Sequence[int]], "HeldoutResult"]
"""(records, seeds) -> the evaluation of the weights that the policy has."""


@dataclass(frozen=True, kw_only=True)
class PolicyRun(Job):
    """A policy that is evaluated on held-out prompts before and after."""

    title: str
    policy: Any
    measure: Measure
    heldout: Records
    samples: str
    """Noun for samples in messages: images, completions."""
    load_code: str
    """Python that loads the result."""
    counts: Callable[[Counters], Mapping[str, Any]]
    """More entries of the summary."""
    seen: int | None = None
    """Held-out prompts that are trained on as well; None where that is not known."""
    grids: SampleGrids | None = None
    """Grids of images to keep at each evaluation; None for texts."""

    def before(self) -> HeldoutResult | None:
        """The evaluation before training, kept in the run folder; None in all processes but the first."""
        from accelerate.utils import broadcast_object_list

        from visalign.evaluation import load_heldout

        path, first = self.output / "before.npz", self.trainer.accelerator.is_main_process
        (is_known,) = broadcast_object_list([path.is_file()])  # as the first process sees it
        if not first:
            if not is_known:
                self._measured()
            return None
        note, count, seeds = self.trainer.progress.note, len(self.heldout), self.config.evaluation.seeds
        if self.seen:
            note(
                f"Warning: {self.seen} of {count} held-out prompts are trained on as well, so the accuracy "
                "is partly one of memory. Take them out of what is trained on or of data.heldout."
            )
        if is_known:
            result = load_heldout(path)
        else:
            note(f"Evaluating {count} held-out prompts × {len(seeds)} {self.samples} before training.")
            result = self._measured()
            result.save(path)
        if self.grids is not None:
            self.grids.keep(0, result)
        return result

    def _measured(self) -> HeldoutResult:
        """The evaluation of all held-out prompts under the present weights; all processes take part."""
        with self.trainer.measuring():
            return self.measure(self.heldout, self.config.evaluation.seeds)

    def after(self, before: HeldoutResult | None, result: TrainResult, measuring: float) -> dict[str, Any]:
        """Save the averaged weights, evaluate them, write summary and report."""
        from visalign.training.loop.sharding import unsharded_state

        begin = time.perf_counter()
        with self.trainer.result():
            with unsharded_state(self.policy.module), no_loading_bars():
                if before is not None:
                    self.policy.save(result_folder(self.config, self.output))
            after = self._measured()
        if before is None:
            return {}
        if self.grids is not None:
            self.grids.keep(result.counters.iteration, after)
        after.save(self.output / "after.npz")
        return self._write(before, after, result, measuring + time.perf_counter() - begin)

    def _write(
        self, before: HeldoutResult, after: HeldoutResult, result: TrainResult, evaluating: float
    ) -> dict[str, Any]:
        """summary.json and report.html, whose curve starts with the accuracy before on the same prompts."""
        from visalign.evaluation import write_report, write_summary

        output, package_versions, way = self.output, versions(), self.config.evaluation
        metrics, phases = read_metrics(output / "metrics.jsonl"), {"evaluation": 0.0}
        for key, value in (entry for record in metrics for entry in record.items()):
            if key.startswith("seconds/") and value is not None:
                name = key.removeprefix("seconds/")
                phases[name] = phases.get(name, 0.0) + value
        phases["evaluation"] += evaluating
        state, by = result.counters.own, self.config.run.best_by
        warnings = monitor_messages(state)
        costs = {
            **self.costs(result, evaluating),
            "phases": phases,
            **self.counts(result.counters),
        }
        spent = costs if self.seen is None else {**costs, "heldout_prompts_trained_on": self.seen}
        spent = {**spent, "warnings": warnings, **best_summary(state)}
        shared: dict[str, Any] = {"config": asdict(self.config), "versions": package_versions}
        path = write_summary(output / "summary.json", before=before, after=after, costs=spent, **shared)
        accuracy = math.nan
        if way.every:
            some = evenly_spaced(range(len(self.heldout)), way.prompts_on_the_way)
            accuracy = before.accuracy_of([number * len(way.seeds) for number in some])
        write_report(
            output,
            before=before,
            after=after,
            metrics=metrics,
            costs=costs,
            title=self.title,
            load_code=self.load_code,
            resume_command=resume_command(str(output / "config.yaml"), [], output),
            start={"heldout/accuracy": accuracy} if math.isfinite(accuracy) else None,
            trained_prompts=self.seen,
            warnings=[*warnings, *best_checkpoint_note(by, state)],
            over_time=() if self.grids is None else self.grids.files(),
            **shared,
        )
        return json.loads(path.read_text(encoding="utf-8"))


JUDGE = "judge"
"""Folder of a trained judge inside the run's folder."""


@dataclass(frozen=True, kw_only=True)
class JudgeRun(Job):
    """A judge that is measured on held-out labels before and after."""

    measure: Callable[..., dict[str, Any]]
    """(final) -> name -> number, of the weights that the judge has."""
    heldout: int
    """Examples that it measures on."""
    network: Any = None
    """The module whose weights may be divided among the processes; None: none may."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the judge."""

    @abstractmethod
    def counts(self, result: TrainResult) -> dict[str, Any]:
        """More entries of the summary."""

    def notes(self) -> Any:
        """Return lines about the weights for the card, while the judge has those of the result."""

    def write_card(self, summary: Mapping[str, Any], notes: Any, folder: Path) -> None:
        """Beside the judge; by default none."""

    def before(self) -> dict[str, Any]:
        """The numbers before training: those of the file, or measured and written there."""
        path, accelerator = self.output / "before.json", self.trainer.accelerator
        is_known = path.is_file()
        accelerator.wait_for_everyone()  # all have looked before one writes
        if is_known:
            return json.loads(path.read_text(encoding="utf-8"))
        if self.heldout:
            note = f"Measuring on {self.heldout} held-out examples before training."
            self.trainer.progress.note(note)
        with self.trainer.measuring():
            before = self.measure()
        if accelerator.is_main_process:
            write_once(path, summary_json(before))
        return before

    def after(self, before: dict[str, Any], result: TrainResult, measuring: float) -> dict[str, Any]:
        """Measure, save the judge with its card, write the summary."""
        from visalign.training.loop.sharding import unsharded_state

        begin, is_first = time.perf_counter(), self.trainer.accelerator.is_main_process
        with self.trainer.result():
            with self.trainer.measuring():
                after = self.measure(final=True)
            measuring += time.perf_counter() - begin
            with nullcontext() if self.network is None else unsharded_state(self.network):
                if is_first:
                    self.save(self.output / JUDGE)
                notes = self.notes()
        summary = {
            "before": before,
            "after": after,
            **self.costs(result, measuring),
            **self.counts(result),
            **best_summary(result.counters.own),
            "config": asdict(self.config),
            "versions": versions(),
        }
        if is_first:
            self.write_card(summary, notes, self.output / JUDGE)
            write_atomic(self.output / "summary.json", summary_json(summary).encode())
        return json.loads(summary_json(summary))


def on_the_way(
    config: Any,
    measure: Measure,
    heldout: Records,
    keep: Callable[[int, HeldoutResult], None] = lambda *_: None,
    more: Callable[[HeldoutResult], Mapping[str, float]] = lambda _: {},
    before: Path | None = None,
) -> Callable[[int], dict[str, float]]:
    """The evaluation while a policy is trained: some held-out prompts, the first seed; `keep` gets the
    iterations finished and the result, and `more` makes numbers of it. With the file of the evaluation before
    training: what has changed of the accuracy and of rewards of weight 0."""
    numbers = evenly_spaced(range(len(heldout)), config.evaluation.prompts_on_the_way)
    some = [heldout[number] for number in numbers]
    rows = [number * len(config.evaluation.seeds) for number in numbers]
    terms = config.rewards.terms if hasattr(config, "rewards") else {}
    watched = ["accuracy", *(label for label, term in terms.items() if term.weight == 0)]
    first: list[HeldoutResult] = []

    def evaluate(iteration: int) -> dict[str, float]:
        result = measure(some, config.evaluation.seeds[:1])
        keep(iteration, result)
        if before is not None and not first and before.is_file():
            from visalign.evaluation import load_heldout

            first.append(load_heldout(before))
        measured = [label for label in watched if label == "accuracy" or label in result.scores]
        changed = result.changes(first[0], rows, measured) if first else {}
        changed = {f"change/{label}": value for label, value in changed.items()}
        return {**heldout_metrics(result), **changed, **more(result)}

    return evaluate
