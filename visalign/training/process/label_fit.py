# SPDX-License-Identifier: Apache-2.0
"""Fit a model to right and wrong labels: shuffled batches for `Trainer`, and a report for each epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from visalign.errors import UserError
from visalign.settings import Count, Natural, NonNegative, Positive, settings
from visalign.training.loop.algorithm import Algorithm, Collected, Context
from visalign.training.loop.optimizer import AdamWSettings
from visalign.training.loop.processes import get_accelerator, sum_gradients
from visalign.training.loop.sharding import ModuleOfFunction, shard, unsharded
from visalign.training.loop.trainer import RunSettings, Trainer


@settings("fit")
class FitSettings:
    """Epochs, batches and AdamW of a fit."""

    epochs: Count = 1
    """Passes over the data."""
    batch_size: Count = 16
    """Rows (texts) per update."""
    learning_rate: Positive = 1e-5
    """AdamW's learning rate, constant."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """L2 norm that gradients are clipped to."""
    seed: Natural = 0
    """Seed of the order of the rows, and of dropout."""


@dataclass(frozen=True, kw_only=True)
class LabelReport:
    """Loss and accuracy on n labels; NaN where there was none of that kind."""

    loss: float  # Mean over the labels, in nats, or in the outcome's unit squared; in training before each update
    accuracy: float  # Share on the right side of even odds
    accuracy_right: float  # The same among rows labelled right (at least ½)
    accuracy_wrong: float  # The same among rows labelled wrong; the telling number where wrong is rare
    labels: int  # n, the number of labels


@dataclass(frozen=True, kw_only=True)
class LabelOutputs:
    """Outputs of a model on the labels of some rows; [n] each."""

    odds: Tensor  # Log-odds of being right, or another number that is above 0 for right
    label: Tensor  # 1 right, 0 wrong, a probability, or an outcome; NaN where there is no label
    loss: Tensor  # Differentiable; 0 where there is no label


class LabelFit(Algorithm):
    """Fits a model to right and wrong; an iteration is a pass over the rows. An `Algorithm` for `Trainer`.

    The loss of an update is the mean over the labels of its batch, which the processes share; dropout alone
    differs between one and several. The data may change between passes, as in PRIME: set `outputs` and
    `rows`. `divided` is the network of these parameters and names, to be divided with its gradients and
    AdamW's moments among the processes (FSDP2); `outputs` uses each of its weights whatever the rows.
    """

    outputs: Callable[[list[int]], LabelOutputs]  # Map rows to losses, with gradient
    rows: Sequence[int]  # Rows with a label

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        settings: FitSettings,
        accelerator: Accelerator | None = None,
        *,
        divided: nn.Module | None = None,
    ) -> None:
        self.named, self.settings = list(parameters), settings
        self.accelerator = get_accelerator(accelerator, next((p for _, p in self.named), torch.zeros(0)))
        self.divided: nn.Module | None = None
        if divided is not None:
            self.divided = ModuleOfFunction(divided, lambda rows: vars(self.outputs(rows)))
            shard(self.divided, self.accelerator)
            sharded = dict(divided.named_parameters())
            self.named = [(name, sharded[name]) for name, _ in self.named]
        self.order = torch.Generator().manual_seed(settings.seed)
        self.recorded: list[LabelOutputs] = []

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        return self.named

    def unsharded(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.divided is None else unsharded(self.divided)

    def collect(self, run: Context) -> Collected:
        """Shuffle the rows and split them into batches."""
        order = [self.rows[i] for i in torch.randperm(len(self.rows), generator=self.order).tolist()]
        size, self.recorded = self.settings.batch_size, []
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        return Collected(experience=batches, samples=len(order))

    def backward(self, experience: Any, step: list[int], run: Context) -> dict[str, float]:
        """Add the gradient of the mean loss over the labels of a batch."""
        process = self.accelerator
        local = step[process.process_index :: process.num_processes]
        devices = sorted({p.device.index or 0 for _, p in self.named if p.device.type == "cuda"})
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.settings.seed + run.counters.updates)  # the same dropout in a resumed run
            outputs = self._outputs(local, step)
        sums = torch.stack([outputs.loss.detach().sum(), torch.isfinite(outputs.label).sum()]).double()
        total, labels = torch.as_tensor(process.reduce(sums.to(process.device), "sum"))
        labels = labels.clamp(min=1)
        loss = float(total / labels)
        if not math.isfinite(loss):
            raise ValueError(
                f"The loss of the texts {sorted(step)[:8]} is {loss}. Lower the learning rate, or check "
                "these texts. The weights are those before the update."
            )
        if outputs.loss.requires_grad:
            # FSDP2 averages gradients over the processes
            scale = run.counters.loss_scale * (1 if self.divided is None else process.num_processes)
            (outputs.loss.sum() / labels.to(outputs.loss) * scale).backward()
        if self.divided is None:
            sum_gradients((parameter for _, parameter in self.named), process)
        self.recorded.append(replace(outputs, odds=outputs.odds.detach(), loss=outputs.loss.detach()))
        return {"loss": loss}

    def _outputs(self, local: list[int], step: list[int]) -> LabelOutputs:
        """Evaluate this process's rows of a batch.

        Without rows, a divided network still runs with a loss of 0, since the others wait for its weights.
        """
        if self.divided is not None:
            outputs = LabelOutputs(**self.divided(local or step[:1]))
            unlabelled = {"label": torch.full_like(outputs.label, math.nan), "loss": outputs.loss * 0.0}
            return outputs if local else replace(outputs, **unlabelled)
        empty = torch.zeros(0)
        return self.outputs(local) if local else LabelOutputs(odds=empty, label=empty, loss=empty)

    def record(self, experience: Any, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        self.recorded = [outputs for process in gather_object([self.recorded]) for outputs in process]
        return {"loss": report_labels(self.recorded).loss}

    def restore(self, run: Context) -> None:
        """Draw the orders of finished iterations, so that the next one is that of an uninterrupted run."""
        for _ in range(run.counters.iteration):
            torch.randperm(len(self.rows), generator=self.order)


def label_trainer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    settings: FitSettings | None = None,
    *,
    divided: nn.Module | None = None,
) -> Trainer[LabelFit]:
    """Create a trainer for one or more calls of `fit_labels`; its arguments are those of `LabelFit`."""
    fit = settings or FitSettings()
    return Trainer(
        LabelFit(parameters, fit, divided=divided),
        run=RunSettings(folder=Path(), iterations=fit.epochs),  # nothing is written
        optimizer=AdamWSettings(
            lr=fit.learning_rate, weight_decay=fit.weight_decay, max_grad_norm=fit.max_grad_norm, eps=1e-8
        ),
    )


def fit_labels(
    outputs: Callable[[list[int]], LabelOutputs], rows: Sequence[int], trainer: Trainer[LabelFit]
) -> list[LabelReport]:
    """Minimise the mean loss over the labels of each batch of labelled `rows`; return one report per epoch."""
    fit = trainer.algorithm
    if not rows:
        raise UserError("There are 0 labelled texts. Give texts with labels.")
    fit.outputs, fit.rows, reports = outputs, rows, []
    for _ in range(fit.settings.epochs):
        trainer.iterate()
        reports.append(report_labels(fit.recorded))
    return reports


def report_labels(batches: Sequence[LabelOutputs]) -> LabelReport:
    odds, label, loss = (
        torch.cat([getattr(batch, name).float().cpu() for batch in batches] or [torch.zeros(0)])
        for name in ("odds", "label", "loss")
    )
    labelled, right = torch.isfinite(label), label >= 0.5
    hit = ((odds > 0) == right).float()
    return LabelReport(
        loss=loss[labelled].mean().item(),
        accuracy=hit[labelled].mean().item(),
        accuracy_right=hit[labelled & right].mean().item(),
        accuracy_wrong=hit[labelled & ~right].mean().item(),
        labels=int(labelled.sum()),
    )
