# SPDX-License-Identifier: Apache-2.0
"""Frame of every job that trains: measure, train, measure again, save, write summary and report."""

from __future__ import annotations

import json
import math
import signal
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from visalign.atomic import write_atomic
from visalign.config import flatten
from visalign.errors import UserError
from visalign.evaluation import HeldoutResult, load_heldout, write_report, write_summary
from visalign.evaluation.pages.report import summary_json
from visalign.evaluation.pages.wording import unchanged_note
from visalign.model_files import read_object
from visalign.signals import Stopped
from visalign.training.loop.metrics import read_metrics
from visalign.training.loop.monitor import BEST, best_checkpoint_note, monitor_messages
from visalign.training.loop.progress import POLICY_COLUMNS
from visalign.training.loop.runtime import peak_memory_bytes
from visalign.training.loop.sharding import unsharded_state
from visalign.versions import versions

from .parts import Records, check_alike, code_fingerprints, evenly_spaced, no_loading_bars
from .places import place_of
from .run_folder import RunSummary, check_unchanged, claimed, record_end, resume_command, write_beginning, write_once
from .sections import FREE_KEYS

if TYPE_CHECKING:
    from visalign.training import Trainer, TrainResult

JUDGE = "judge"  # Folder of a trained judge inside the run's folder
GPU_THREADS = 4  # CPU threads beside a GPU: an iteration of shapes_nft takes 1.63 s with 4 and 2.30 with 16 (H200)


class TrainingInterrupted(Stopped):
    """Ctrl-C or SIGTERM: the iteration was finished and saved; the command line says how to go on."""


@dataclass(frozen=True, kw_only=True)
class Job(ABC):
    """Objects of a run; all processes call `before` and `after`."""

    config: Any
    output: Path
    trainer: Trainer
    fingerprints: Mapping[str, str]
    """Data -> SHA-256 of its content: a resume on other content is refused, as on other code."""
    next_command: Sequence[str]  # Command line that uses the result
    batches: Mapping[str, int | None] = field(default_factory=dict)  # Batch that is auto -> its number

    @abstractmethod
    def before(self) -> Any:
        """Measure the model before training, or read what was measured."""

    @abstractmethod
    def after(self, before: Any, result: TrainResult, measuring: float) -> dict[str, Any]:
        """Save the model, measure it again, write the results; `measuring` are the seconds of `before`."""

    def costs(self, result: TrainResult, measuring: float) -> dict[str, Any]:
        """Return the costs of the run for its summary; memory is the GPU's if there is one."""
        counters, peak = result.counters, peak_memory_bytes()
        return {
            "iterations": counters.iteration,
            "updates": counters.updates,
            "updates_skipped": counters.skipped,
            "stopped": result.stopped,
            "seconds": counters.seconds + measuring,
            "training_seconds": counters.seconds,
            "peak_memory_bytes": peak.get("cuda", peak.get("host")),
        }


def run_job(config: Any, output: Path, resume: bool = False, *, build: Callable[[Any, Path], Job]) -> RunSummary:
    """Run a job and return the content of summary.json, which is empty in all processes but the first.

    `build` checks what can be checked, makes the objects and writes nothing. With `resume` the run in `output` goes on
    from its newest whole checkpoint, to the result of an uninterrupted run.
    """
    from visalign.training.loop.processes import report_lost_process

    if config.run.push_to_hub is not None:
        from .model_card import check_push

        check_push(config.run.push_to_hub, then="Or train without run.push_to_hub and upload later: visalign push.")
    with claimed(config, output, resume=resume, free=FREE_KEYS), report_lost_process(), ExitStack() as ending:
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        job = build(config, output)
        trainer, accelerator = job.trainer, job.trainer.accelerator
        if config.run.threads is None and accelerator.device.type == "cuda":
            torch.set_num_threads(min(torch.get_num_threads(), GPU_THREADS))
        prints = {**job.fingerprints, **code_fingerprints(config)}
        if accelerator.num_processes > 1:
            check_alike(gather_object([{"--resume": resume, **prints}]))
        if resume:
            check_unchanged(output, prints)
        if accelerator.is_main_process:
            write_beginning(output, config, prints, job.batches)
            ending.push(partial(record_end, output))
        accelerator.wait_for_everyone()  # the files of the beginning are there for all
        if config.run.trackers:
            accelerator.init_trackers("visalign", config={k: str(v) for k, v in flatten(config).items()})
        policy = getattr(trainer.algorithm, "policy", trainer.algorithm)
        trainer.progress.note(f"Computing on {place_of(policy)}.")
        try:
            begin = time.perf_counter()
            before = job.before()
            measuring = time.perf_counter() - begin
            if resume:  # after `before`, which measures the weights of the beginning if its file is missing
                trainer.resume()
            result = trainer.train()
            if result.stopped == "interrupted":
                raise TrainingInterrupted(result.signal or signal.SIGINT)
            summary = job.after(before, result, measuring)
            if accelerator.is_main_process:
                _publish(job)
            accelerator.wait_for_everyone()
            return RunSummary(summary, job.next_command)
        finally:
            if config.run.trackers:
                accelerator.end_training()


def _publish(job: Job) -> None:
    """Write the model card, and upload the result where the configuration says so; a failure is a warning."""
    from .model_card import push_run, write_card

    run = job.config.run
    try:
        write_card(job.output, license=run.license)
        if run.push_to_hub is not None:
            job.trainer.progress.note(f"Uploaded to {push_run(job.output, run.push_to_hub)}.")
    except UserError as error:
        job.trainer.progress.note(f"Warning: {error}")


def build_trainer(
    config: Any, output: Path, algorithm: Any, evaluate: Callable[[int], Mapping[str, float]], **progress: Any
) -> Trainer:
    """Build the trainer of an algorithm by the sections optimizer, evaluation and run of a configuration."""
    from visalign.training import RunSettings, Trainer, TrainingProgress

    same = ("iterations", "checkpoint_every", "keep_checkpoints", "max_seconds", "best_by", "patience")
    run = RunSettings(
        folder=output,
        evaluate_every=config.evaluation.every,
        monitor=getattr(config, "monitor", None),
        config=asdict(config),
        free_keys=FREE_KEYS,
        **{name: getattr(config.run, name) for name in same},
    )
    progress = {"max_seconds": run.max_seconds, "enabled": algorithm.accelerator.is_main_process, **progress}
    display = TrainingProgress(run.iterations, **progress)
    return Trainer(algorithm, optimizer=config.optimizer, run=run, evaluate=evaluate, progress=display)


def result_folder(config: Any, output: Path) -> Path:
    """Return the folder of the trained adapters, or of the whole model."""
    return output / ("model" if config.model.lora is None else "lora")


Measure = Callable[[Records, Sequence[int]], HeldoutResult]
"""(records, seeds) -> the evaluation of the weights that the policy has."""


@dataclass(frozen=True, kw_only=True)
class PolicyRun(Job):
    """Run of a policy that is evaluated on held-out prompts before and after."""

    title: str
    policy: Any
    measure: Measure
    heldout: Records
    samples: str  # Noun for samples in messages: images, completions
    load_code: str  # Python that loads the result
    counts: Callable[[Any], Mapping[str, Any]]  # More entries of the summary, by the run's `Counters`
    curve: Sequence[str] = ()  # Rewards whose held-out mean and interval are curves, see `HeldoutConfig.curve`
    heldout_trained_on: int | None = None  # Held-out prompts that are trained on as well; None where that is not known
    grids: Any = None  # `SampleGrids` to keep at each evaluation; None for texts

    def before(self) -> HeldoutResult | None:
        """Evaluate before training, or read the file of it; None in all processes but the first."""
        path, note = self.output / "before.npz", self.trainer.progress.note  # only the first process prints
        (is_stored,) = broadcast_object_list([path.is_file()])  # as the first process sees it
        if self.heldout_trained_on:
            note(
                f"Warning: prompts both held out and trained on: {self.heldout_trained_on} of {len(self.heldout)}, "
                "so the accuracy is partly one of memory. Take them out of the training data or data.heldout."
            )
        result = None
        if not is_stored:
            size = f"{len(self.heldout)} held-out prompts × {len(self.config.evaluation.seeds)} {self.samples}"
            note(f"Evaluating {size} before training.")
            result = self._evaluate()
        if not self.trainer.accelerator.is_main_process:
            return None
        if result is None:
            result = load_heldout(path)
        else:
            result.save(path)
        if self.grids is not None:
            self.grids.keep(0, result)
        return result

    def _evaluate(self) -> HeldoutResult:
        """Evaluate all held-out prompts under the present weights; all processes take part."""
        with self.trainer.measuring():
            return self.measure(self.heldout, self.config.evaluation.seeds)

    def after(self, before: HeldoutResult | None, result: TrainResult, measuring: float) -> dict[str, Any]:
        """Save the averaged weights, evaluate them, write summary and report."""
        begin = time.perf_counter()
        with self.trainer.result():
            with unsharded_state(self.policy.module), no_loading_bars():  # all processes give their share
                if before is not None:
                    self.policy.save(result_folder(self.config, self.output))
            after = self._evaluate()
        if before is None:
            return {}
        if self.grids is not None:
            self.grids.keep(result.counters.iteration, after)
        after.save(self.output / "after.npz")
        return self._write(before, after, result, measuring + time.perf_counter() - begin)

    def _write(self, before: HeldoutResult, after: HeldoutResult, result: TrainResult, took: float) -> dict[str, Any]:
        """Write summary.json, and report.html, whose curve starts with the accuracy before training."""
        output, evaluation, state = self.output, self.config.evaluation, result.counters.own
        metrics, phases = read_metrics(output / "metrics.jsonl"), defaultdict[str, float](float, evaluation=took)
        for key, value in (entry for record in metrics for entry in record.items()):
            if key.startswith("seconds/") and value is not None:
                phases[key.removeprefix("seconds/")] += value
        warnings = monitor_messages(state)
        if note := unchanged_note(before, after):
            warnings.append(note)
            self.trainer.progress.note(f"Warning: {note}")
        costs = {**self.costs(result, took), "phases": dict(phases), **self.counts(result.counters)}
        trained_on = {} if self.heldout_trained_on is None else {"heldout_prompts_trained_on": self.heldout_trained_on}
        best = {BEST: state[BEST]} if BEST in state else {}
        spent = {**costs, **trained_on, "load_code": self.load_code, "warnings": warnings, **best}
        shared: dict[str, Any] = {
            "config": asdict(self.config),
            "versions": versions(),
            "before": before,
            "after": after,
        }
        path = write_summary(output / "summary.json", costs=spent, **shared)
        start = None
        if evaluation.every:
            numbers = evenly_spaced(range(len(self.heldout)), evaluation.prompts_on_the_way)
            rows = [number * len(evaluation.seeds) for number in numbers]
            numbers = {"accuracy": before.accuracy_of(rows), **before.means(self.curve, rows)}
            start = {f"heldout/{name}": value for name, value in numbers.items() if math.isfinite(value)}
        write_report(
            output,
            metrics=metrics,
            costs=costs,
            title=self.title,
            load_code=self.load_code,
            resume_command=resume_command(str(output / "config.yaml"), [], output),
            start=start,
            main_rewards=self.curve,
            trained_prompts=self.heldout_trained_on,
            warnings=[*warnings, *best_checkpoint_note(self.config.run.best_by, state)],
            over_time=() if self.grids is None else self.grids.files(),
            **shared,
        )
        return read_object(path)


@dataclass(frozen=True, kw_only=True)
class JudgeRun(Job):
    """Run of a judge that is measured on held-out labels before and after."""

    measure: Callable[..., dict[str, Any]]  # (final) -> name -> number, of the weights that the judge has
    heldout: int  # Examples that it measures on
    save: Callable[[Path], Any]  # Write the judge into a folder; returns lines about its weights for the card
    counts: Callable[[TrainResult], Mapping[str, Any]]  # More entries of the summary
    network: Any  # The module whose weights may be divided among the processes
    card: Callable[[Mapping[str, Any], Any], str] | None = None
    """(summary, lines of `save`) -> text of README.md beside the judge; None writes none."""

    def before(self) -> dict[str, Any]:
        path, accelerator = self.output / "before.json", self.trainer.accelerator
        is_stored = path.is_file()
        accelerator.wait_for_everyone()  # all have looked before the first writes
        if is_stored:
            return read_object(path)
        if self.heldout:
            self.trainer.progress.note(f"Measuring on {self.heldout} held-out examples before training.")
        with self.trainer.measuring():
            before = self.measure()
        if accelerator.is_main_process:
            write_once(path, summary_json(before))
        return before

    def after(self, before: dict[str, Any], result: TrainResult, measuring: float) -> dict[str, Any]:
        begin, is_first = time.perf_counter(), self.trainer.accelerator.is_main_process
        with self.trainer.result():
            with self.trainer.measuring():
                after = self.measure(final=True)
            measuring += time.perf_counter() - begin
            with unsharded_state(self.network):
                notes = self.save(self.output / JUDGE) if is_first else None
        summary = {"before": before, "after": after, **self.costs(result, measuring), **self.counts(result)}
        summary |= {BEST: best} if (best := result.counters.own.get(BEST)) else {}
        summary |= {"config": asdict(self.config), "versions": versions()}
        text = summary_json(summary)
        if is_first:
            if self.card is not None:
                write_atomic(self.output / JUDGE / "README.md", self.card(summary, notes))
            write_atomic(self.output / "summary.json", text)
        return json.loads(text)


def policy_run(
    config: Any,
    output: Path,
    algorithm: Any,
    *,
    measure: Measure,
    heldout: Records,
    more: Callable[[int, HeldoutResult], Mapping[str, float]],
    notes: Sequence[str],
    recorded: Sequence[str] = (),
    optimized: Sequence[str] = (),
    columns: Any = POLICY_COLUMNS,
    **fields: Any,
) -> PolicyRun:
    """Build the run of a policy, which is evaluated on the way on some held-out prompts with the first seed.

    Of rewards there are intervals, and of accuracy and those `recorded` changes since before training; `more` gets the
    iterations finished and the result, and adds metrics. `fields` are those of `PolicyRun`.
    """
    evaluation, before = config.evaluation, output / "before.npz"
    curve = evaluation.curve(optimized)
    numbers = evenly_spaced(range(len(heldout)), evaluation.prompts_on_the_way)
    records, rows = [heldout[number] for number in numbers], [number * len(evaluation.seeds) for number in numbers]
    start: list[HeldoutResult] = []

    def evaluate(iteration: int) -> dict[str, float]:
        result = measure(records, evaluation.seeds[:1])
        if not start and before.is_file():
            start.append(load_heldout(before))
        compared = ["accuracy", *(label for label in recorded if label in result.scores)]
        changes = result.changes(start[0], rows, compared) if start else {}
        ends = result.interval()  # a tag may be "low", so these keys have no dot
        verdicts = {"accuracy": result.accuracy, "accuracy_low": ends.low, "accuracy_high": ends.high}
        verdicts |= {f"accuracy.{tag}": value for tag, value in result.by_category.items()}
        return {
            **(verdicts if evaluation.correctness is not None else {}),
            **{name: result.mean(name) for name in result.scores},
            **result.means(curve),
            **{f"change/{label}": value for label, value in changes.items()},
            **more(iteration, result),
        }

    trainer = build_trainer(config, output, algorithm, evaluate, columns=columns)
    for note in notes:
        trainer.progress.note(note)
    measuring: dict[str, Any] = {"measure": measure, "heldout": heldout, "curve": curve}
    return PolicyRun(config=config, output=output, trainer=trainer, **measuring, **fields)
