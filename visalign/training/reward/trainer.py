# SPDX-License-Identifier: Apache-2.0
"""Training a judge on labels: AdamW over batches that are functions of their number, with exact resume.

The loss of an update is Σ w ℓ / Σ w over its whole batch: micro-batches and processes change memory and time,
not the update. Exceptions are what looks across a batch, such as ICT's negatives, which see their own
micro-batch, and draws (dropout, Monte Carlo): those of update n come from (seed, n, process) alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.errors import UserError
from visalign.training.loop.checkpoint import Checkpoint
from visalign.training.loop.ema import EMA
from visalign.training.loop.loop import Evaluate, Keeping, Loop, TrainResult
from visalign.training.loop.progress import TrainingProgress
from visalign.training.loop.runtime import PhaseClock
from visalign.training.loop.state import restore_tensors, tensors_of

from .batch import RewardData, TrainableJudge
from .settings import RewardObjectiveSettings, RewardOptimizerSettings
from .tasks import TASKS


@dataclass(kw_only=True)
class RewardState:
    """The counters of a run; they and the tensors are all that a checkpoint needs."""

    iteration: int = 0
    """Iterations finished."""
    updates: int = 0
    """Optimizer updates, those that were skipped included; also the number of the next batch."""
    skipped: int = 0
    examples: int = 0
    """Labelled examples read, repeats included."""
    seconds: float = 0.0
    """Wall-clock seconds, those before a resume included."""


class RewardTrainer:
    """Trains a judge on labelled pairs, triples or pictures.

    Args:
        judge: on its device.
        data: the batches; process i of n takes share i of each.
        objective: what is optimized.
        optimizer: how the weights move.
        keeping: length, checkpoints, evaluation.
        accelerator: processes and trackers.
        seed: of dropout and of sampled losses.
        evaluate: called with the iteration while the averaged weights are in place, by all processes
            together; logged as `heldout/...`.
        progress: where the records are shown.

    Raises:
        UserError: nothing of the judge is trainable.
    """

    def __init__(
        self,
        judge: TrainableJudge,
        data: RewardData,
        *,
        objective: RewardObjectiveSettings,
        optimizer: RewardOptimizerSettings,
        keeping: Keeping,
        accelerator: Accelerator,
        seed: int = 0,
        evaluate: Evaluate | None = None,
        progress: TrainingProgress | None = None,
    ) -> None:
        self.judge, self.data, self.seed = judge, data, seed
        self.objective, self.optimizer_settings, self.accelerator = objective, optimizer, accelerator
        self.keeping, self.evaluate = keeping, evaluate
        self.parameters = list(judge.trainable_parameters())
        if not self.parameters:
            raise UserError("The judge has no trainable parameter. Train its head, adapters, or all of it.")
        self.optimizer = torch.optim.AdamW(
            [parameter for _, parameter in self.parameters],
            lr=optimizer.lr,
            betas=(optimizer.betas[0], optimizer.betas[1]),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        every = optimizer.ema_every if optimizer.ema_decay else 1
        self.ema = EMA(self.parameters, decay=optimizer.ema_decay, every=every)
        self.clock = PhaseClock()
        self.progress = progress or TrainingProgress(keeping.iterations, enabled=False)
        self.loop = Loop(self, keeping, accelerator, self.clock, self.progress)
        self.state = RewardState()

    def train(self) -> TrainResult:
        """Run until the last iteration, the time budget, or Ctrl-C; the last state is always saved.

        Raises:
            UserError: a batch without any label.
            CheckpointError: a checkpoint could not be written.
        """
        return self.loop.train()

    def resume(self) -> bool:
        """Take up the newest whole checkpoint; see `Loop.resume`."""
        return self.loop.resume()

    def iterate(self) -> dict[str, Any]:
        """One iteration: updates, perhaps an evaluation; returns its record."""
        state = self.state
        with self.clock.phase("update"):
            steps = [self._update() for _ in range(self.optimizer_settings.updates_per_iteration)]
        self.optimizer.zero_grad(set_to_none=True)
        examples = sum(step.examples for step in steps)
        state.iteration += 1
        state.examples += examples
        norms = [step.norm for step in steps if math.isfinite(step.norm)]
        if not norms:
            raise UserError(
                f"None of the {len(steps)} updates of iteration {state.iteration} had a finite gradient; "
                f"their mean loss is {np.mean([step.loss for step in steps]):.3g}. Start again with a lower "
                "optimizer.lr or, if model.autocast or model.dtype is float16, in bfloat16 or float32."
            )
        record = {
            "iteration": state.iteration,
            "updates": state.updates,
            "updates_skipped": state.skipped,
            "samples": state.examples,
            "loss": float(np.mean([step.loss for step in steps])),
            "grad_norm": float(np.mean(norms)),
            "lr": steps[-1].lr,
        }
        self.judge.train(False)
        measured = self.loop.evaluated(self.evaluate, self.ema, together=True)
        return {**record, **measured, **self.loop.timed(examples)}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """What a checkpoint holds: weights, averages, AdamW's moments."""
        return tensors_of(self.parameters, self.ema, self.optimizer)

    def restore(self, loaded: Checkpoint) -> None:
        """Take up a checkpoint.

        Raises:
            CheckpointError: it has other parameters than the judge.
        """
        restore_tensors(loaded, self.parameters, self.ema, self.optimizer)
        self.state = RewardState(**loaded.state)

    def _update(self) -> _Step:
        """One optimizer step on batch `updates`; left out where its gradient is not finite."""
        state, pace, accelerator = self.state, self.optimizer_settings, self.accelerator
        lr = pace.lr_at(state.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        sums = self._accumulate()
        parameters = [parameter for _, parameter in self.parameters]
        _add_up(parameters, accelerator)
        loss, weight, examples = accelerator.reduce(sums, "sum").tolist()  # type: ignore[union-attr]
        if not weight > 0:
            raise UserError(
                f"Batch {state.updates} has {int(examples)} examples and none with a label to learn from: "
                "all are ties or unknown. Leave such examples out, or take larger batches."
            )
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        norm = float(nn.utils.clip_grad_norm_(parameters, pace.max_grad_norm))
        state.updates += 1
        if math.isfinite(norm):
            self.optimizer.step()
            self.ema.update(state.updates)
        else:
            state.skipped += 1
        return _Step(loss=loss / weight, norm=norm, lr=lr, examples=int(examples))

    def _accumulate(self) -> Tensor:
        """Add this process's gradient of Σ w ℓ; returns [Σ w ℓ, Σ w, examples] in float64."""
        accelerator, number = self.accelerator, self.state.updates
        part = (accelerator.process_index, accelerator.num_processes)
        sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
        task = TASKS[self.objective.task]
        self.judge.train(True)
        with _drawn_from(self.seed, number, part[0]) as generator:
            for batch in self.data.batch(number, part):
                total, weight = task.loss(self.judge(batch.inputs), batch, self.objective, generator)
                total.backward()
                found = torch.stack([total.detach().double(), weight.detach().double()])
                sums[:2] += found.to(sums.device)
                sums[2] += batch.size
        return sums


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What one optimizer step did."""

    loss: float
    norm: float
    lr: float
    examples: int


@contextmanager
def _drawn_from(seed: int, number: int, process: int) -> Iterator[torch.Generator]:
    """Within the block dropout draws from (seed, number, process); yields a generator of the same origin."""
    value = int(np.random.SeedSequence([seed, number, process]).generate_state(1, np.uint64)[0]) >> 1
    with torch.random.fork_rng():
        torch.manual_seed(value)
        yield torch.Generator().manual_seed(value + 1)


def _add_up(parameters: list[nn.Parameter], accelerator: Accelerator) -> None:
    """Sum the gradients over the processes, in one message."""
    if accelerator.num_processes == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([p.grad.flatten().float() for p in parameters if p.grad is not None])
    total = accelerator.reduce(flat, "sum")
    at = 0
    for parameter in parameters:
        assert parameter.grad is not None
        part = total[at : at + parameter.numel()]  # type: ignore[index]
        parameter.grad.copy_(part.view_as(parameter))
        at += parameter.numel()
