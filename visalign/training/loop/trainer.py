# SPDX-License-Identifier: Apache-2.0
"""The training loop of every algorithm: collect -> prepare -> update -> record.

    run = RunSettings(folder=Path("runs/a"), iterations=50)
    trainer = Trainer(FlowGRPO(policy, reward, records), run=run)
    trainer.train()

A `Trainer` owns AdamW, the averages, the counters, the check that the ratio is 1, checkpoints, metrics,
trackers, evaluations during training and the time budget. An `Algorithm` trains on images, texts,
demonstrations or labels; it owns nothing of the run and knows no trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object
from pydantic import Field
from torch import Tensor
from torch.distributed.tensor import DTensor

from visalign.core.surrogates.ratio_check import check_log_ratio
from visalign.errors import UserError
from visalign.locks import LOCK, hold_lock
from visalign.settings import Count, Natural, settings
from visalign.signals import InterruptFlag

from . import checkpoint
from .algorithm import Algorithm, Context, Counters
from .best import BEST, best_checkpoint_note, check_best_by, update_best
from .ema import EMA
from .memory import explain_out_of_memory
from .metrics import MetricsFile
from .monitor import Monitor, MonitorSettings
from .optimizer import AdamWSettings, OptimizerSettings, TrainedWeights
from .processes import check_accelerator, report_lost_process
from .progress import TrainingProgress
from .runtime import PhaseClock, is_out_of_memory

Evaluate = Callable[[int], Mapping[str, float]]
"""Iterations finished -> name -> number."""

FIRST_LOSS_SCALE = 2.0**16
"""Initial loss scale of networks that compute in float16, as in torch's GradScaler."""
LEAST_LOSS_SCALE = 2.0
"""Smallest loss scale; overflows at it have another cause."""
SCALE_AGAIN_AFTER = 2000
"""Updates in a row without an overflow after which the loss scale doubles, as in torch's GradScaler."""
LOW_RESOLUTION = 10.0
"""Median of √v̂/ε below which ε takes a visible part of AdamW's steps."""


A = TypeVar("A", bound=Algorithm)


@settings("run")
class RunSettings:
    """Length of a run, and what it writes."""

    folder: Path
    """Run folder; `metrics.jsonl` and `checkpoints/` go there."""
    iterations: Natural
    checkpoint_every: Count = 10
    """Iterations between two checkpoints; one more is written at the end."""
    keep_checkpoints: Count = 2
    """Newest checkpoints to keep."""
    evaluate_every: Natural = 0
    """Iterations between two evaluations; 0 for none."""
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    """Stop at the end of the iteration in which the run's training time reaches this; the number of
    iterations then depends on the machine."""
    best_by: str | None = None
    """Metric of the evaluations during training that selects the weights of the result (`Trainer.result`):
    the highest, or with a "-" in front the lowest; None: the last weights."""
    monitor: MonitorSettings | None = None
    """Limits that warn and stop while the policy changes; None: no monitor."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the run as JSON values; a resume with another one is refused."""
    free_keys: tuple[str, ...] = ()
    """Dotted keys of `config` that may differ on resume."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """End of a call of `train`."""

    counters: Counters
    stopped: str
    """"finished", "interrupted" (Ctrl-C, SIGTERM), "max_seconds" or "monitor"."""
    signal: int | None = None
    """Signal that interrupted this process."""


class Trainer(Generic[A]):
    """Runs an algorithm's iterations; writes metrics and checkpoints.

    Args:
        algorithm: model and data.
        run: length, checkpoints, evaluation.
        optimizer: AdamW's settings; None takes Flow-GRPO's published numbers.
        evaluate: called by all processes with the iterations finished while the averaged weights are in
            place; its numbers are logged as `heldout/...`.
        progress: prints the records.

    Raises:
        UserError: nothing is trainable, accelerate is set to divide gradients or to another precision, or
            `best_by` has no evaluations to go by.
    """

    def __init__(
        self,
        algorithm: A,
        *,
        run: RunSettings,
        optimizer: AdamWSettings | None = None,
        evaluate: Evaluate | None = None,
        progress: TrainingProgress | None = None,
    ) -> None:
        self.algorithm, self.run, self.evaluate = algorithm, run, evaluate
        self.accelerator = algorithm.accelerator
        check_accelerator(self.accelerator)
        if run.best_by is not None and (evaluate is None or not 0 < run.evaluate_every <= run.iterations):
            raise UserError(
                f"run.best_by is {run.best_by!r}, and nothing is evaluated during training. Set "
                f"evaluation.every to the iterations between two evaluations, at most {run.iterations} "
                "(run.iterations), or leave best_by out."
            )
        settings = OptimizerSettings() if optimizer is None else optimizer
        named = list(algorithm.parameters())
        if not named:
            raise UserError(
                "The model has no trainable parameter. Train its head, its adapters, or all of it."
            )
        self.weights = TrainedWeights(named, settings, rates=algorithm.rates(settings.lr))
        every = settings.ema_every if settings.ema_decay else 1
        self.ema = EMA(
            self.weights.masters, decay=settings.ema_decay, every=every, warmup=settings.ema_warmup
        )
        self.progress = progress or TrainingProgress(run.iterations, enabled=False)
        self.monitor = Monitor(run.monitor, self.progress)
        needs_scale = algorithm.compute_dtype() == torch.float16
        counters = Counters(loss_scale=FIRST_LOSS_SCALE if needs_scale else 1.0)
        self.context = Context(counters=counters, optimizer=settings, clock=PhaseClock())
        self._ratio_checked = self._resolution_warned = False

    @property
    def counters(self) -> Counters:
        """Progress of the run."""
        return self.context.counters

    @property
    def clock(self) -> PhaseClock:
        """Seconds by phase of the current iteration."""
        return self.context.clock

    def train(self) -> TrainResult:
        """Run to the last iteration, the budget, a monitor's limit, Ctrl-C or SIGTERM; save the last state.

        A resumed run whose budget or iterations are used up does nothing.

        Raises:
            CheckpointError: a checkpoint could not be written, or its weights are not finite.
            FolderInUse: another process works in the run's folder.
            OutOfMemory: too much went through the network together; the message names the setting.
            ProcessLost: another process of the run has ended.
            RatioError: the ratio is not 1 at the first update.
            RewardFailure: too many samples could not be scored.
        """
        counters, folder = self.counters, self.run.folder
        is_first = self.accelerator.is_main_process
        lock = nullcontext()
        if is_first:
            lock = hold_lock(
                folder / LOCK, what=f"The run's folder '{folder}'", instead="give another folder"
            )
        with (
            report_lost_process(),
            self._explain_memory(),
            lock,
            InterruptFlag(self.progress.note) as interrupt,
        ):
            metrics = MetricsFile(folder / "metrics.jsonl", after=counters.iteration) if is_first else None
            saved = counters.iteration
            self.clock.take()
            stopped = self._why_stop(interrupt)
            while stopped == "finished" and counters.iteration < self.run.iterations:
                record = self.iterate()
                if metrics is not None:
                    metrics.write(record)
                self.accelerator.log(record, step=counters.iteration)
                self.progress.update(record)
                stopped = self._why_stop(interrupt)
                due = counters.iteration % self.run.checkpoint_every == 0
                if stopped != "finished" or due:
                    with self.clock.phase("checkpoint"):
                        self.save()
                    saved = counters.iteration
            if saved != counters.iteration:
                self.save()
        if stopped != "interrupted":
            self._print_notes()
        return TrainResult(counters=counters, stopped=stopped, signal=interrupt.by)

    def _print_notes(self) -> None:
        """Print a warning where no weight moved, and which weights are the result."""
        counters = self.counters
        if counters.iteration and counters.updates == counters.skipped:
            self.progress.note(
                f"Warning: {counters.iteration} iterations made no update: the weights are as at the start. "
                + ("Every gradient was infinite or NaN." if counters.skipped else "No sample had a signal.")
            )
        for note in best_checkpoint_note(self.run.best_by, counters.own):
            self.progress.note(note)

    def iterate(self) -> dict[str, Any]:
        """Run one iteration (collect, prepare, update, record) and return its record."""
        counters, algorithm = self.counters, self.algorithm
        number = counters.iteration + 1
        self.context.prefetch_next = number < self.run.iterations and number % self.run.checkpoint_every > 0
        passes = algorithm.forward_equivalents()
        updated, sums = {}, []
        try:
            collected = algorithm.collect(self.context)
            if collected.experience is not None:
                with self.clock.phase("update"):
                    updated, sums = self._update(collected.experience)
        finally:
            algorithm.release()
        samples = collected.samples
        if samples is None:
            samples = int(sum(update["samples"] for update in sums))
        counters.iteration += 1
        counters.samples += samples
        counters.tokens += collected.tokens
        algorithm.finish(self.context)
        record: dict[str, Any] = {
            "iteration": counters.iteration,
            "samples": counters.samples,
            **({"tokens": counters.tokens} if counters.tokens else {}),
            "updates": counters.updates,
            "updates_skipped": counters.skipped,
            **collected.metrics,
            **updated,
            **self._count_passes(algorithm.forward_equivalents() - passes, samples),
        }
        evaluated = self._evaluate()
        if evaluated is not None:
            record |= evaluated
            self._keep_best(evaluated)
        return {**record, **self.monitor.follow(record, counters.own), **self._times(samples)}

    def _update(self, experience: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Run the optimizer updates of an iteration; return their metrics, and the sums of each."""
        sums: list[dict[str, float]] = []
        lr = math.nan
        steps = self.algorithm.prepare(experience, self.context)
        for step in steps:
            lr = self.context.optimizer.lr_at(self.counters.updates)
            self.weights.begin(lr)
            update = self.algorithm.backward(experience, step, self.context)
            self.weights.gather_gradients(self.counters.loss_scale)
            norm = self.weights.clip(self.context.optimizer.max_grad_norm)
            sums.append({**update, "grad_norm": norm})
            self._check_ratio(update)
            self._step(math.isfinite(norm))
        self.weights.clear()
        record = dict(self.algorithm.record(experience, sums))
        if sums:
            norms = [update["grad_norm"] for update in sums if math.isfinite(update["grad_norm"])]
            record |= {"grad_norm": float(np.mean(norms)) if norms else math.nan, "lr": lr}
            record |= self._resolution()
            if self.counters.loss_scale != 1:
                record["loss_scale"] = self.counters.loss_scale
        return record, sums

    def _step(self, finite: bool) -> None:
        """Move the weights, or skip the update; lower float16's loss scale after an overflow."""
        counters = self.counters
        counters.updates += 1
        if finite:
            self.weights.step()
            self.ema.update(counters.updates)
            counters.since_overflow += 1
        else:
            counters.skipped += 1
            counters.since_overflow = 0
        if counters.loss_scale != 1:
            if not finite:
                counters.loss_scale = max(LEAST_LOSS_SCALE, counters.loss_scale / 2)
            elif counters.since_overflow % SCALE_AGAIN_AFTER == 0:
                counters.loss_scale *= 2

    def _check_ratio(self, sums: Mapping[str, float]) -> None:
        """Check that r is 1 at this process's first update, when the weights are those of the rollout."""
        bound = self.algorithm.ratio_bound
        if bound is not None and not self._ratio_checked and sums["decisions"]:
            check_log_ratio(torch.tensor([sums["largest"]]), bound=bound)
            self._ratio_checked = True

    def _resolution(self) -> dict[str, float]:
        resolution = self.weights.resolution()
        if resolution < LOW_RESOLUTION and not self._resolution_warned:
            self._resolution_warned = True
            self.progress.note(
                f"Warning: the median of √v/ε is {resolution:.2g}: ε of AdamW takes a visible part of its "
                f"steps. Lower optimizer.eps ({self.context.optimizer.eps:g}), for example to 1e-15."
            )
        return {} if math.isnan(resolution) else {"adam_resolution": resolution}

    def _count_passes(self, passes: int, samples: int) -> dict[str, float]:
        local = torch.tensor([passes], device=self.accelerator.device)
        total = int(self.accelerator.reduce(local, "sum"))  # type: ignore[arg-type]
        self.counters.forward_equivalents += total
        return {"forward_equivalents_per_image": total / samples} if total and samples else {}

    def _evaluate(self) -> dict[str, float] | None:
        """Evaluate the averaged weights; None where the iteration just finished is not due for it."""
        every, iteration = self.run.evaluate_every, self.counters.iteration
        if self.evaluate is None or not every or iteration % every:
            return None
        metrics: Mapping[str, float] = {}
        with self.clock.phase("evaluation"):
            self.algorithm.wait_for_rewards()
            with self.averaged(), self.algorithm.unsharded():
                metrics = self.evaluate(iteration)
        return {f"heldout/{name}": value for name, value in metrics.items()}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Time an evaluation before or after the training; each process holds the whole model inside.

        Raises:
            OutOfMemory: as in `train`.
        """
        with self._explain_memory(), self.clock.phase("evaluation"), self.algorithm.unsharded():
            yield

    @contextmanager
    def _explain_memory(self) -> Iterator[None]:
        """Raise `OutOfMemory` with the setting to change where memory runs out in the block."""
        self.clock.out_of_memory = None
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            config, free = self.run.config, self.run.free_keys
            explained = explain_out_of_memory(error, self.clock.out_of_memory, config, free)
            if explained is None:
                raise
            raise explained from error

    def _keep_best(self, evaluated: Mapping[str, Any]) -> None:
        """Keep the averaged weights where this evaluation is the best so far.

        The first process decides, as it alone has all numbers of an evaluation.
        """
        by, counters = self.run.best_by, self.counters
        if by is None:
            return
        is_best = False
        if self.accelerator.is_main_process:
            check_best_by(by, evaluated)
            is_best = update_best(by, evaluated, counters.iteration, counters.own)
        if self._any_process(is_best):
            average = self.ema.state().items()
            self.context.tensors[BEST] = {name: value.detach().clone() for name, value in average}

    def _forget_other_best(self) -> None:
        """Drop the best weights of a checkpoint that another metric selected."""
        own, by = self.counters.own, self.run.best_by
        if BEST in own and own[BEST]["by"] != by:
            self.progress.note(
                f"run.best_by was {own[BEST]['by']} and is {'null' if by is None else by}: the weights of "
                f"iteration {own[BEST]['iteration']} are not kept."
            )
            del own[BEST], self.context.tensors[BEST]

    def _times(self, samples: int) -> dict[str, float]:
        """Return the seconds of the iteration, total and by phase; add them to the counters."""
        seconds = self.clock.take()
        total = seconds.pop("total")
        training = total - seconds.get("evaluation", 0.0) - seconds.get("checkpoint", 0.0)
        self.counters.seconds += total
        other = max(0.0, total - sum(seconds.values()))
        phases = {f"seconds/{name}": value for name, value in {**seconds, "other": other}.items()}
        return {"seconds": total, **phases, "samples_per_second": samples / max(training, 1e-9)}

    def _why_stop(self, interrupt: InterruptFlag) -> str:
        """Agree among all processes why to stop; "finished" means continue."""
        if self._any_process(interrupt.raised):
            return "interrupted"
        if self._any_process(self.monitor.stops(self.counters.own)):
            return "monitor"
        budget = self.run.max_seconds
        is_over = budget is not None and self.counters.seconds >= budget
        return "max_seconds" if self._any_process(is_over) else "finished"

    def _any_process(self, value: bool) -> bool:
        """Return True in all processes where it is True in any: they stop at the same iteration."""
        local = torch.tensor([int(value)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(local, "sum").any())  # type: ignore[union-attr]

    @contextmanager
    def averaged(self, state: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Set the model to the averaged weights, or those of `state`, inside the block; afterwards its own
        again, bit for bit."""
        try:
            with self.ema.applied(state):
                self.weights.round()
                yield
        finally:
            self.weights.round()

    def result(self) -> AbstractContextManager[None]:
        """Set the model to the run's result inside the block: the averaged weights, with `best_by` those of
        the best evaluation."""
        return self.averaged(self.context.tensors.get(BEST))

    def save(self) -> None:
        """Write a checkpoint of the current state: the main process, or each process its part of divided
        tensors.

        Raises:
            CheckpointError: it could not be written, or the weights are not finite; earlier ones are kept.
        """
        tensors = {**self.context.tensors, **self.weights.tensors(), "ema": self.ema.state()}
        not_finite = gather_object(checkpoint.not_finite(tensors["trainable"]))
        checkpoint.check_finite(not_finite, self.counters.iteration)
        if self.accelerator.is_main_process or self._divided():
            checkpoint.save(
                self.run.folder / "checkpoints",
                self.counters.iteration,
                tensors,
                asdict(self.counters),
                self.run.config,
                keep=self.run.keep_checkpoints,
            )
        self.accelerator.wait_for_everyone()

    def _divided(self) -> dict[str, Tensor]:
        """Return the parameters that are divided among the processes."""
        return {name: master for name, master in self.weights.masters if isinstance(master, DTensor)}

    def resume(self) -> bool:
        """Load the newest whole checkpoint; print which, and why a newer one was passed over.

        Returns:
            True where there was one; otherwise the run starts at iteration 0.

        Raises:
            CheckpointError: every checkpoint is damaged, or it belongs to another configuration or model.
        """
        root = self.run.folder / "checkpoints"
        folder, passed = checkpoint.newest_intact(root)
        for reason in passed:
            self.progress.note(f"Passing over a checkpoint: {reason}")
        if folder is None:
            if passed:
                raise checkpoint.CheckpointError(
                    f"none of the {len(passed)} checkpoints in {root} is whole: {passed[0]} Start a new run "
                    f"in another output folder, or delete {root} and resume to train this one from the start."
                )
            self.progress.note("No checkpoint yet: starting at iteration 0.")
            return False
        loaded = checkpoint.load(folder, self.run.config, free=self.run.free_keys, divided=self._divided())
        self.weights.restore(loaded)
        self.ema.load(loaded.tensors["ema"])
        self.context.counters = Counters(**loaded.state)
        stems = loaded.tensors.keys() - {*self.weights.tensors(), "ema"}
        self.context.tensors = {stem: loaded.tensors[stem] for stem in stems}
        self._forget_other_best()
        self.algorithm.restore(self.context)
        self.progress.go_on(self.counters.iteration, self.counters.seconds)
        self.progress.note(f"Resumed from {folder} after iteration {loaded.step}.")
        return True
