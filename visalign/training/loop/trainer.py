# SPDX-License-Identifier: Apache-2.0
"""The one run of every training: collect -> prepare -> update -> record, and all that is the same for each.

    run = RunSettings(folder=Path("runs/a"), iterations=50)
    trainer = Trainer(FlowGRPO(policy, reward, records), run=run)
    trainer.train()

A `Trainer` owns AdamW, the averages, the counters, the check that the ratio is 1, checkpoints, metrics,
trackers, the evaluation on the way and the time budget. What is trained, and on what, is an `Algorithm`:
images, texts, demonstrations, labels. It owns nothing of the run and knows no trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor

from visalign.core.surrogates.ratio_check import check_log_ratio
from visalign.errors import UserError
from visalign.locks import LOCK, hold_lock
from visalign.signals import InterruptFlag

from . import checkpoint
from .algorithm import Algorithm, Context, Counters
from .best import BEST, best_checkpoint_note, check_best_by, leads
from .ema import EMA
from .memory import explain_out_of_memory
from .metrics import MetricsFile
from .monitor import Monitor, MonitorSettings
from .optimizer import AdamWSettings, OptimizerSettings, TrainedWeights
from .processes import check_accelerator, report_lost_process
from .progress import TrainingProgress
from .runtime import PhaseClock

Evaluate = Callable[[int], Mapping[str, float]]
"""Iterations finished -> name -> number."""

FIRST_LOSS_SCALE = 2.0**16
"""Of networks that compute in float16, as torch's GradScaler begins."""
LEAST_LOSS_SCALE = 2.0
"""Below which overflows are not the scale's."""
SCALE_AGAIN_AFTER = 2000
"""Updates in a row without an overflow after which the loss scale doubles, as torch's GradScaler does."""
LOW_RESOLUTION = 10.0
"""Below this median of √v̂/ε, ε takes a visible part of AdamW's steps."""


A = TypeVar("A", bound=Algorithm)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How long a run goes on, and what it writes down on the way."""

    folder: Path
    """Run folder; `metrics.jsonl` and `checkpoints/` go there."""
    iterations: int
    checkpoint_every: int = 10
    """Iterations between two checkpoints; one more is written at the end."""
    keep_checkpoints: int = 2
    evaluate_every: int = 0
    """Iterations between two evaluations; 0 for none."""
    max_seconds: float | None = None
    """Stop at the end of the iteration in which the run's training time reaches this; where that is depends
    on the machine, so two such runs may differ in length."""
    best_by: str | None = None
    """A metric of the evaluations on the way: the weights of the highest, or behind "-" the lowest, are the
    result (`Trainer.result`); None: the last ones are."""
    monitor: MonitorSettings | None = None
    """What warns and stops while the policy moves; None: nothing."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration as JSON values; a resume under another one is refused."""
    free_keys: Collection[str] = ()
    """Dotted keys of `config` that may differ on resume."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a call of `train` ended."""

    counters: Counters
    stopped: str
    """"finished", "interrupted" (Ctrl-C, SIGTERM), "max_seconds" or "monitor"."""
    signal: int | None = None
    """That interrupted this process."""


class Trainer(Generic[A]):
    """Runs an algorithm's iterations and keeps what they leave behind.

    Args:
        algorithm: what is trained, and on what.
        run: length, checkpoints, evaluation.
        optimizer: how the weights move; None takes Flow-GRPO's published numbers.
        evaluate: called by all processes with the iterations finished while the averaged weights are in
            place; its numbers are logged as `heldout/...`.
        progress: where the records are shown.

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
                f"run.best_by is {run.best_by!r}, and nothing is evaluated on the way. Set evaluation.every "
                f"to the iterations between two evaluations, of {run.iterations} at most (run.iterations), "
                "or leave best_by out."
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
        low = algorithm.compute_dtype() == torch.float16
        counters = Counters(loss_scale=FIRST_LOSS_SCALE if low else 1.0)
        self.context = Context(counters=counters, optimizer=settings, clock=PhaseClock())
        self._checked = self._warned = False

    @property
    def counters(self) -> Counters:
        """What the run has done so far."""
        return self.context.counters

    @property
    def clock(self) -> PhaseClock:
        """Seconds by phase of the iteration that runs."""
        return self.context.clock

    def train(self) -> TrainResult:
        """Run to the last iteration, the budget, a monitor's limit, Ctrl-C or SIGTERM; save the last state.

        A resumed run whose budget is spent does nothing, as one that has reached its last iteration.

        Raises:
            CheckpointError: a checkpoint could not be written, or its weights are not finite.
            FolderInUse: another process works in the run's folder.
            OutOfMemory: too much went through the network together; the message names the setting.
            ProcessLost: another process of the run has ended.
            RatioError: the ratio is not 1 at the first update.
            RewardFailure: too many samples could not be judged; and what else the algorithm raises.
        """
        counters, folder = self.counters, self.run.folder
        own = hold_lock(folder / LOCK, what=f"The run's folder '{folder}'", instead="give another folder")
        first = self.accelerator.is_main_process
        held = own if first else nullcontext()
        with (
            report_lost_process(),
            self._memory_named(),
            held,
            InterruptFlag(self.progress.note) as interrupt,
        ):
            metrics = MetricsFile(folder / "metrics.jsonl", after=counters.iteration) if first else None
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
        if stopped != "interrupted" and counters.iteration and counters.updates == counters.skipped:
            self.progress.note(
                f"Warning: {counters.iteration} iterations made no update: the weights are as at the start. "
                + ("Every gradient was infinite or NaN." if counters.skipped else "No sample had a signal.")
            )
        for said in () if stopped == "interrupted" else best_checkpoint_note(self.run.best_by, counters.own):
            self.progress.note(said)
        return TrainResult(counters=counters, stopped=stopped, signal=interrupt.by)

    def iterate(self) -> dict[str, Any]:
        """One iteration: collect, prepare, update, record; returns its record."""
        counters, algorithm = self.counters, self.algorithm
        number = counters.iteration + 1
        self.context.prefetch_next = number < self.run.iterations and number % self.run.checkpoint_every > 0
        spent = algorithm.forward_equivalents()
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
            samples = int(sum(each["samples"] for each in sums))
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
            **self._passes(algorithm.forward_equivalents() - spent, samples),
        }
        evaluated = self._evaluated()
        if evaluated is not None:
            record |= evaluated
            self._keep_best(evaluated)
        return {**record, **self.monitor.follow(record, counters.own), **self._timed(samples)}

    def _update(self, experience: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
        """The optimizer updates of an iteration: their metrics, and the sums of each."""
        sums: list[dict[str, float]] = []
        lr = math.nan
        steps = self.algorithm.prepare(experience, self.context)
        for step in steps:
            lr = self.context.optimizer.lr_at(self.counters.updates)
            self.weights.begin(lr)
            found = self.algorithm.backward(experience, step, self.context)
            self.weights.gather_gradients(self.counters.loss_scale)
            norm = self.weights.clip(self.context.optimizer.max_grad_norm)
            sums.append({**found, "grad_norm": norm})
            self._check_ratio(found)
            self._step(math.isfinite(norm))
        self.weights.clear()
        record = dict(self.algorithm.record(experience, sums))
        if sums:
            known = [each["grad_norm"] for each in sums if math.isfinite(each["grad_norm"])]
            record |= {"grad_norm": float(np.mean(known)) if known else math.nan, "lr": lr}
            record |= self._resolution()
            if self.counters.loss_scale != 1:
                record["loss_scale"] = self.counters.loss_scale
        return record, sums

    def _step(self, finite: bool) -> None:
        """Move the weights, or leave the update out; float16's loss scale falls where it overflowed."""
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
        """At the first update of this process's life the weights are those of the rollout: r must be 1."""
        bound = self.algorithm.ratio_bound
        if bound is not None and not self._checked and sums["decisions"]:
            check_log_ratio(torch.tensor([sums["largest"]]), bound=bound)
            self._checked = True

    def _resolution(self) -> dict[str, float]:
        found = self.weights.resolution()
        if found < LOW_RESOLUTION and not self._warned:
            self._warned = True
            self.progress.note(
                f"Warning: the median of √v/ε is {found:.2g}: ε of AdamW takes a visible part of its steps. "
                f"Lower optimizer.eps ({self.context.optimizer.eps:g}), for example to 1e-15."
            )
        return {} if math.isnan(found) else {"adam_resolution": found}

    def _passes(self, own: int, samples: int) -> dict[str, float]:
        total = int(self.accelerator.reduce(torch.tensor([own], device=self.accelerator.device), "sum"))  # type: ignore[arg-type]
        self.counters.forward_equivalents += total
        return {"forward_equivalents_per_image": total / samples} if total and samples else {}

    def _evaluated(self) -> dict[str, float] | None:
        """The evaluation on the way; None where the iteration just finished is not due for one."""
        every, iteration = self.run.evaluate_every, self.counters.iteration
        if self.evaluate is None or not every or iteration % every:
            return None
        found: Mapping[str, float] = {}
        with self.clock.phase("evaluation"):
            self.algorithm.wait_for_rewards()
            with self.averaged(), self.algorithm.unsharded():
                found = self.evaluate(iteration)
        return {f"heldout/{name}": value for name, value in found.items()}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Around an evaluation before or after the training; each process has all of the model.

        Raises:
            OutOfMemory: as in `train`.
        """
        with self._memory_named(), self.clock.phase("evaluation"), self.algorithm.unsharded():
            yield

    def _memory_named(self) -> AbstractContextManager[None]:
        return explain_out_of_memory(self.clock, self.run.config, self.run.free_keys)

    def _keep_best(self, evaluated: Mapping[str, Any]) -> None:
        """Keep the averaged weights where this evaluation is the best so far, as the first process sees it:
        some of an evaluation's numbers are known there alone."""
        by, counters = self.run.best_by, self.counters
        if by is None:
            return
        led = False
        if self.accelerator.is_main_process:
            check_best_by(by, evaluated)
            led = leads(by, evaluated, counters.iteration, counters.own)
        if self._agreed(led):
            kept = {name: value.detach().clone() for name, value in self.ema.state().items()}
            self.context.tensors[BEST] = kept

    def _forget_other_best(self) -> None:
        """Of a checkpoint whose run went by another number: its best weights are no result of this one."""
        own, by = self.counters.own, self.run.best_by
        if BEST in own and own[BEST]["by"] != by:
            self.progress.note(
                f"run.best_by was {own[BEST]['by']} and is {'null' if by is None else by}: the weights of "
                f"iteration {own[BEST]['iteration']} are not kept."
            )
            del own[BEST], self.context.tensors[BEST]

    def _timed(self, samples: int) -> dict[str, float]:
        """Seconds of the iteration that ends now, in all and by phase; they are added to the counters."""
        seconds = self.clock.take()
        total = seconds.pop("total")
        training = total - seconds.get("evaluation", 0.0) - seconds.get("checkpoint", 0.0)
        self.counters.seconds += total
        other = max(0.0, total - sum(seconds.values()))
        phases = {f"seconds/{name}": value for name, value in {**seconds, "other": other}.items()}
        return {"seconds": total, **phases, "samples_per_second": samples / max(training, 1e-9)}

    def _why_stop(self, interrupt: InterruptFlag) -> str:
        """What all processes agree on: "finished" means go on."""
        if self._agreed(interrupt.raised):
            return "interrupted"
        if self._agreed(self.monitor.stops(self.counters.own)):
            return "monitor"
        return "max_seconds" if self._agreed(self._is_over_budget()) else "finished"

    def _is_over_budget(self) -> bool:
        budget = self.run.max_seconds
        return budget is not None and self.counters.seconds >= budget

    def _agreed(self, own: bool) -> bool:
        """Whether any process says so: all of them have to stop at the same iteration."""
        said = torch.tensor([int(own)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(said, "sum").any())  # type: ignore[union-attr]

    @contextmanager
    def averaged(self, state: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Inside the block the model has the averaged weights, or those of `state`; afterwards its own again,
        bit for bit."""
        try:
            with self.ema.applied(state):
                self.weights.round()
                yield
        finally:
            self.weights.round()

    def result(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that the run leaves: the averaged ones, with `best_by` those of
        the best evaluation."""
        return self.averaged(self.context.tensors.get(BEST))

    def save(self) -> None:
        """Write a checkpoint of the present state: the main process alone, or each its part of what is
        divided.

        Raises:
            CheckpointError: it could not be written, or the weights are not finite: the last one stands.
        """
        tensors = {**self.context.tensors, **self.weights.tensors(), "ema": self.ema.state()}
        odd = gather_object(checkpoint.not_finite(tensors["trainable"]))
        checkpoint.check_finite(odd, self.counters.iteration)
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
        """Parameters that are divided among the processes."""
        return {name: master for name, master in self.weights.masters if isinstance(master, DTensor)}

    def resume(self) -> bool:
        """Take up the newest whole checkpoint; says so, and why a newer one was passed over.

        Returns:
            Whether there was one; if not, the run starts at iteration 0.

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
        own = loaded.tensors.keys() - {*self.weights.tensors(), "ema"}
        self.context.tensors = {stem: loaded.tensors[stem] for stem in own}
        self._forget_other_best()
        self.algorithm.restore(self.context)
        self.progress.go_on(self.counters.iteration, self.counters.seconds)
        self.progress.note(f"Resumed from {folder} after iteration {loaded.step}.")
        return True
