# SPDX-License-Identifier: Apache-2.0
"""The loop round an algorithm's iterations: metrics, checkpoints, budget, Ctrl-C, exact resume."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor

from . import checkpoint
from .ema import EMA
from .metrics import MetricsFile
from .progress import TrainingProgress
from .runtime import InterruptFlag, PhaseClock

Evaluate = Callable[[int], Mapping[str, float]]
"""Iterations finished -> name -> number."""


class Algorithm(Protocol):
    """What a loop drives."""

    @property
    def state(self) -> Any:
        """Counters: a dataclass of JSON values with `iteration` (finished) and `seconds` (wall clock, those
        before a resume included)."""
        ...

    def iterate(self) -> dict[str, Any]:
        """One iteration; moves the counters and returns the record of `visalign.training.loop.metrics`."""
        ...

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """The tensors of a checkpoint: file stem -> name -> tensor."""
        ...

    def restore(self, loaded: checkpoint.Checkpoint) -> None:
        """Take up a checkpoint's tensors and counters."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a call of `train` ended."""

    state: Any
    """The algorithm's counters."""
    stopped: str
    """"finished", "interrupted" (Ctrl-C) or "max_seconds"."""


@dataclass(frozen=True, kw_only=True)
class Keeping:
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
    config: Mapping[str, Any]
    """The run's configuration as JSON values; a resume under another one is refused."""
    free_keys: Collection[str] = ()
    """Dotted keys of `config` that may differ on resume."""


class Loop:
    """Runs an algorithm's iterations and keeps what they leave behind.

    Args:
        algorithm: what is run.
        keeping: length, checkpoints.
        accelerator: its processes, all of which stop and save at the same iteration.
        clock: of the algorithm; the checkpoint's time is added to it.
        progress: where the records are shown.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        keeping: Keeping,
        accelerator: Accelerator,
        clock: PhaseClock,
        progress: TrainingProgress,
    ) -> None:
        self.algorithm, self.keeping, self.accelerator = algorithm, keeping, accelerator
        self.clock, self.progress = clock, progress

    def train(self) -> TrainResult:
        """Run until the last iteration, the time budget, or Ctrl-C; the last state is always saved.

        A resumed run whose budget is spent does nothing, as one that has reached its last iteration.

        Raises:
            CheckpointError: a checkpoint could not be written; and what the algorithm raises.
        """
        metrics = None
        if self.accelerator.is_main_process:
            metrics = MetricsFile(self.keeping.folder / "metrics.jsonl", after=self.algorithm.state.iteration)
        saved = self.algorithm.state.iteration
        self.clock.take()
        with InterruptFlag(self.progress.note) as interrupt:
            stopped = "max_seconds" if self._agreed(self._is_over_budget()) else "finished"
            while stopped == "finished" and self.algorithm.state.iteration < self.keeping.iterations:
                record = self.algorithm.iterate()
                if metrics is not None:
                    metrics.write(record)
                self.accelerator.log(record, step=self.algorithm.state.iteration)
                self.progress.update(record)
                stopped = self._why_stop(interrupt)
                due = self.algorithm.state.iteration % self.keeping.checkpoint_every == 0
                if stopped != "finished" or due:
                    with self.clock.phase("checkpoint"):
                        self.save()
                    saved = self.algorithm.state.iteration
            if saved != self.algorithm.state.iteration:
                self.save()
        return TrainResult(state=self.algorithm.state, stopped=stopped)

    def _why_stop(self, interrupt: InterruptFlag) -> str:
        """What all processes agree on: "finished" means go on."""
        if self._agreed(interrupt.raised):
            return "interrupted"
        return "max_seconds" if self._agreed(self._is_over_budget()) else "finished"

    def _is_over_budget(self) -> bool:
        budget = self.keeping.max_seconds
        return budget is not None and self.algorithm.state.seconds >= budget

    def _agreed(self, own: bool) -> bool:
        """Whether any process says so: all of them have to stop at the same iteration."""
        said = torch.tensor([int(own)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(said, "sum").any())  # type: ignore[union-attr]

    def save(self) -> None:
        """Write a checkpoint of the present state (main process; the others wait).

        Raises:
            CheckpointError: it could not be written.
        """
        if self.accelerator.is_main_process:
            checkpoint.save(
                self.keeping.folder / "checkpoints",
                self.algorithm.state.iteration,
                self.algorithm.tensors(),
                asdict(self.algorithm.state),
                self.keeping.config,
                keep=self.keeping.keep_checkpoints,
            )
        self.accelerator.wait_for_everyone()

    def resume(self) -> bool:
        """Take up the newest whole checkpoint; says so, and why a newer one was passed over.

        Returns:
            Whether there was one; if not, the run starts at iteration 0.

        Raises:
            CheckpointError: every checkpoint is damaged, or it belongs to another configuration.
        """
        root = self.keeping.folder / "checkpoints"
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
        loaded = checkpoint.load(folder, self.keeping.config, free=self.keeping.free_keys)
        self.algorithm.restore(loaded)
        self.progress.go_on(self.algorithm.state.iteration, self.algorithm.state.seconds)
        self.progress.note(f"Resumed from {folder} after iteration {loaded.step}.")
        return True

    def evaluated(self, evaluate: Evaluate | None, ema: EMA, *, together: bool = False) -> dict[str, float]:
        """The evaluation on the way, where the iteration just finished is due for one.

        Args:
            evaluate: called with the iterations finished.
            ema: the averages that are in place meanwhile.
            together: all processes call `evaluate`, which shares the work; else the main process alone does,
                for which the others wait.

        Returns:
            `heldout/...`, empty where none is due and in processes that did not evaluate.
        """
        every, iteration = self.keeping.evaluate_every, self.algorithm.state.iteration
        if evaluate is None or not every or iteration % every:
            return {}
        found: Mapping[str, float] = {}
        with self.clock.phase("evaluation"):
            if together or self.accelerator.is_main_process:
                with ema.applied():
                    found = evaluate(iteration)
            self.accelerator.wait_for_everyone()
        return {f"heldout/{name}": value for name, value in found.items()}

    def timed(self, samples: int) -> dict[str, float]:
        """Seconds of the iteration that ends now, in all and by phase; they are added to the counters.

        Args:
            samples: made for training in the iteration.
        """
        seconds = self.clock.take()
        total = seconds.pop("total")
        training = total - seconds.get("evaluation", 0.0) - seconds.get("checkpoint", 0.0)
        self.algorithm.state.seconds += total
        other = max(0.0, total - sum(seconds.values()))
        phases = {f"seconds/{name}": value for name, value in {**seconds, "other": other}.items()}
        return {"seconds": total, **phases, "samples_per_second": samples / max(training, 1e-9)}
