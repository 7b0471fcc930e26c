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

from visalign.config import flatten
from visalign.core.surrogates.ratio_check import check_log_ratio
from visalign.errors import UserError
from visalign.locks import LOCK, hold_lock
from visalign.settings import Count, Natural, settings
from visalign.signals import InterruptFlag

from . import checkpoint
from .algorithm import Algorithm, Context, Counters
from .checkpoint import CheckpointError
from .ema import EMA
from .metrics import MetricsFile
from .monitor import BEST, Monitor, MonitorSettings, best_checkpoint_note, update_best
from .optimizer import AdamWSettings, OptimizerSettings, TrainedWeights
from .processes import check_accelerator, report_lost_process
from .progress import TrainingProgress
from .runtime import BOUNDS, PhaseClock, explain_out_of_memory

Evaluate = Callable[[int], Mapping[str, float]]  # Iterations finished -> name -> number

FIRST_LOSS_SCALE = 2.0**16  # Initial loss scale of networks that compute in float16, as in torch's GradScaler
LEAST_LOSS_SCALE = 2.0  # Smallest loss scale; overflows at it have another cause
SCALE_AGAIN_AFTER = 2000
"""Updates in a row without an overflow after which the loss scale doubles, as in torch's GradScaler."""
A = TypeVar("A", bound=Algorithm)


class Diverged(CheckpointError):
    """A trained weight is not finite."""


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
    """Training time after which the run stops, at the end of an iteration."""
    best_by: str | None = None
    """Metric of the evaluations that selects the weights of the result: the highest, or with a "-" in front
    the lowest; None: the last weights."""
    patience: Count | None = None
    """Evaluations without a better `best_by` after which the run stops; None: never."""
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
    stopped: str  # "finished", "interrupted" (Ctrl-C, SIGTERM), "max_seconds", "patience" or "monitor"
    signal: int | None = None  # Signal that interrupted this process


class Trainer(Generic[A]):
    """Runs an algorithm's iterations; writes metrics and checkpoints.

    The default optimizer has Flow-GRPO's published numbers. All processes call `evaluate` under the averaged weights;
    its numbers are logged as `heldout/...`.
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
        if run.patience is not None and run.best_by is None:
            raise UserError(
                f"run.patience is {run.patience}, and run.best_by names no metric that could stop improving. Set it, "
                "e.g. run.best_by=-heldout/nll, or leave run.patience out."
            )
        settings = OptimizerSettings() if optimizer is None else optimizer
        if getattr(settings, "micro_batch", 1) == "auto":
            raise UserError("optimizer.micro_batch is auto, which `visalign train` measures. In Python give a number.")
        parameters = list(algorithm.parameters())
        if not parameters:
            raise UserError("The model has no trainable parameter. Train its head, its adapters, or all of it.")
        self.weights = TrainedWeights(parameters, settings, rates=algorithm.rates(settings.lr))
        self.ema = EMA(
            self.weights.masters,
            decay=settings.ema_decay,
            every=settings.ema_every if settings.ema_decay else 1,
            warmup=settings.ema_warmup,
        )
        self.progress = progress or TrainingProgress(run.iterations, enabled=False)
        self.monitor = Monitor(run.monitor, self.progress)
        self.clock = PhaseClock()
        bounding = {key for _, keys in BOUNDS.values() for key in keys}
        self._memory_settings = {key: value for key, value in flatten(run.config).items() if key in bounding}
        counters = Counters(loss_scale=FIRST_LOSS_SCALE if algorithm.compute_dtype() == torch.float16 else 1.0)
        self.context = Context(counters=counters, optimizer=settings, clock=self.clock)
        self._has_moved = False

    @property
    def counters(self) -> Counters:
        """Progress of the run."""
        return self.context.counters

    def train(self) -> TrainResult:
        """Run to the last iteration, the budget, a monitor's limit, Ctrl-C or SIGTERM; save the last state.

        A resumed run whose budget or iterations are used up does nothing. The errors that end a run are
        `CheckpointError`, `FolderInUse`, `OutOfMemory`, `ProcessLost`, `RatioError` and `RewardFailure`.
        """
        counters, folder = self.counters, self.run.folder
        is_first, lock = self.accelerator.is_main_process, nullcontext()
        if is_first:
            lock = hold_lock(folder / LOCK, what=f"The run's folder '{folder}'", instead="give another folder")
        with report_lost_process(), self._explain_memory(), lock, InterruptFlag(self.progress.note) as interrupt:
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
                if stopped != "finished" or counters.iteration % self.run.checkpoint_every == 0:
                    with self.clock.phase("checkpoint"):
                        self.save()
                    saved = counters.iteration
            if saved != counters.iteration:
                self.save()
        if stopped != "interrupted":
            if counters.iteration and counters.updates == counters.skipped:
                why = "Every gradient was infinite or NaN." if counters.skipped else "No sample had a signal."
                self.progress.note(
                    f"Warning: {counters.iteration} iterations made no update: the weights are as at the start. {why}"
                )
            elif self.ema.decay:
                self.progress.note(
                    f"Evaluated and saved are the averaged weights (optimizer.ema_decay={self.ema.decay:g}, "
                    f"ema_every={self.ema.every}), not those of the last update."
                )
            for note in best_checkpoint_note(self.run.best_by, counters.own):
                self.progress.note(note)
        return TrainResult(counters=counters, stopped=stopped, signal=interrupt.by)

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
        passes = self._sum(algorithm.forward_equivalents() - passes)
        counters.forward_equivalents += passes
        record: dict[str, Any] = {
            "iteration": counters.iteration,
            "samples": counters.samples,
            **({"tokens": counters.tokens} if counters.tokens else {}),
            "updates": counters.updates,
            "updates_skipped": counters.skipped,
            **collected.metrics,
            **updated,
            **({"forward_equivalents_per_image": passes / samples} if passes and samples else {}),
        }
        every = self.run.evaluate_every
        if self.evaluate is not None and every and counters.iteration % every == 0:
            record |= self._evaluate(self.evaluate)
        return {**record, **self.monitor.follow(record, counters.own), **self._times(samples)}

    def _update(self, experience: Any) -> tuple[dict[str, float], list[dict[str, float]]]:
        """Run the optimizer updates of an iteration; return their metrics, and the sums of each."""
        sums: list[dict[str, float]] = []
        counters, settings, bound = self.counters, self.context.optimizer, self.algorithm.ratio_bound
        lr = math.nan
        for step in self.algorithm.prepare(experience, self.context):
            lr = settings.lr_at(counters.updates)
            self.weights.begin(lr)
            update = self.algorithm.backward(experience, step, self.context)
            self.weights.gather_gradients(counters.loss_scale)
            norm = self.weights.clip(settings.max_grad_norm)
            sums.append({**update, "grad_norm": norm})
            # until this process's first step the weights are those of the rollout, so r must be 1
            if bound is not None and not self._has_moved and update["decisions"]:
                check_log_ratio(torch.tensor([update["largest"]]), bound=bound)
            self._has_moved |= norm > 0
            self._step(math.isfinite(norm))
        self.weights.clear()
        record = dict(self.algorithm.record(experience, sums))
        if sums:
            norms = [update["grad_norm"] for update in sums if math.isfinite(update["grad_norm"])]
            record |= {"grad_norm": float(np.mean(norms)) if norms else math.nan, "lr": lr}
            resolution = self.weights.resolution()
            record |= {} if math.isnan(resolution) else {"adam_resolution": resolution}
            if counters.loss_scale != 1:
                record["loss_scale"] = counters.loss_scale
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

    def _evaluate(self, evaluate: Evaluate) -> dict[str, float]:
        """Evaluate the averaged weights; keep them where the evaluation is the best so far."""
        counters, by = self.counters, self.run.best_by
        with self.clock.phase("evaluation"):
            self.algorithm.wait_for_rewards()
            with self.averaged(), self.algorithm.unsharded():
                metrics = evaluate(counters.iteration)
        evaluated = {f"heldout/{name}": value for name, value in metrics.items()}
        if by is not None:
            # the first process decides, as it alone has all numbers of an evaluation
            is_first = self.accelerator.is_main_process
            if self._sum(is_first and update_best(by, evaluated, counters.iteration, counters.own)):
                self.context.tensors[BEST] = {name: value.detach().clone() for name, value in self.ema.state().items()}
        return evaluated

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Time an evaluation before or after the training; each process holds the whole model inside."""
        with self._explain_memory(), self.clock.phase("evaluation"), self.algorithm.unsharded():
            yield

    def _explain_memory(self) -> AbstractContextManager[None]:
        return explain_out_of_memory(self.clock, self._memory_settings, self.run.free_keys)

    def _times(self, samples: int) -> dict[str, float]:
        seconds = self.clock.take()
        total = seconds.pop("total")
        training = total - seconds.get("evaluation", 0.0) - seconds.get("checkpoint", 0.0)
        self.counters.seconds += total
        other = max(0.0, total - sum(seconds.values()))
        phases = {f"seconds/{name}": value for name, value in {**seconds, "other": other}.items()}
        return {"seconds": total, **phases, "samples_per_second": samples / max(training, 1e-9)}

    def _why_stop(self, interrupt: InterruptFlag) -> str:
        """Agree among all processes why to stop; "finished" means continue."""
        budget = self.run.max_seconds
        if self._sum(interrupt.raised):
            return "interrupted"
        if self._sum(self.monitor.stops(self.counters.own)):
            return "monitor"
        if self.run.patience is not None and (best := self.counters.own.get(BEST)):
            if self._sum(self.counters.iteration - best["iteration"] >= self.run.patience * self.run.evaluate_every):
                return "patience"
        return "max_seconds" if self._sum(budget is not None and self.counters.seconds >= budget) else "finished"

    def _sum(self, value: int) -> int:
        """Sum over the processes, which so decide alike; all of them call it."""
        local = torch.tensor([value], dtype=torch.int64, device=self.accelerator.device)
        return int(self.accelerator.reduce(local, "sum"))  # type: ignore[arg-type]

    @contextmanager
    def averaged(self, state: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Set the model to the averaged weights, or those of `state`, inside the block; exactly undone."""
        try:
            with self.ema.applied(state):
                self.weights.round()
                yield
        finally:
            self.weights.round()

    def result(self) -> AbstractContextManager[None]:
        """Set the model to the run's result inside the block: the averaged weights, or those `best_by` selected."""
        return self.averaged(self.context.tensors.get(BEST))

    def save(self) -> None:
        """Write a checkpoint: the main process, or each process its part of divided tensors."""
        iteration = self.counters.iteration
        tensors = {**self.context.tensors, **self.weights.tensors(), "ema": self.ema.state()}
        if names := gather_object(checkpoint.not_finite(tensors["trainable"])):
            raise Diverged(
                f"after iteration {iteration} the weight {names[0]} is not finite: the run has diverged, and "
                "no checkpoint of it is kept. Continue from the last whole one with a lower optimizer.lr, or "
                "compute in bfloat16 or float32 where the model is in float16."
            )
        if self.accelerator.is_main_process or self._divided():
            root, state = self.run.folder / "checkpoints", asdict(self.counters)
            checkpoint.save(root, iteration, tensors, state, self.run.config, keep=self.run.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _divided(self) -> dict[str, Tensor]:
        return {name: master for name, master in self.weights.masters if isinstance(master, DTensor)}

    def resume(self) -> bool:
        """Load the newest whole checkpoint and print which; return False where there is none yet."""
        root, by = self.run.folder / "checkpoints", self.run.best_by
        folder, passed = checkpoint.newest_intact(root)
        for reason in passed:
            self.progress.note(f"Passing over a checkpoint: {reason}")
        if folder is None:
            if passed:
                raise CheckpointError(
                    f"none of the {len(passed)} checkpoints in {root} is whole: {passed[0]} Start a new run "
                    f"in another output folder, or delete {root} and resume to train this one from the start."
                )
            self.progress.note("No checkpoint yet: starting at iteration 0.")
            return False
        loaded = checkpoint.load(folder, self.run.config, free=self.run.free_keys, divided=self._divided())
        self.weights.restore(loaded)
        self.ema.load(loaded.tensors["ema"])
        counters = self.context.counters = Counters(**loaded.state)
        stems = loaded.tensors.keys() - {*self.weights.tensors(), "ema"}
        self.context.tensors = {stem: loaded.tensors[stem] for stem in stems}
        if BEST in counters.own and counters.own[BEST]["by"] != by:  # another metric selected these weights
            best = counters.own.pop(BEST)
            del self.context.tensors[BEST]
            self.progress.note(
                f"run.best_by was {best['by']} and is {'null' if by is None else by}: the weights of "
                f"iteration {best['iteration']} are not kept."
            )
        self.algorithm.restore(self.context)
        self.progress.go_on(counters.iteration, counters.seconds)
        self.progress.note(f"Resumed from {folder} after iteration {loaded.step}.")
        return True
