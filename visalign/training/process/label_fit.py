# SPDX-License-Identifier: Apache-2.0
"""Fitting a judge to right and wrong: shuffled batches for `Trainer`, and what each pass over them did."""

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
from visalign.training.loop.algorithm import Algorithm, Collected, Context
from visalign.training.loop.optimizer import AdamWSettings
from visalign.training.loop.processes import get_accelerator, sum_gradients
from visalign.training.loop.sharding import ModuleOfFunction, shard, unsharded
from visalign.training.loop.trainer import RunSettings, Trainer


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How a judge is fitted.

    Raises:
        UserError: a number out of range.
    """

    epochs: int = 1
    """Passes over the data."""
    batch_size: int = 16
    """Rows (texts) per update."""
    learning_rate: float = 1e-5
    """Of AdamW, constant."""
    weight_decay: float = 0.0
    """Of AdamW, decoupled."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    seed: int = 0
    """Of the order of the rows, and of dropout."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("learning_rate", "max_grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it must be positive and finite.")
        if not 0 <= self.weight_decay < math.inf:
            raise UserError(f"weight_decay is {self.weight_decay}; it must be finite and at least 0.")


@dataclass(frozen=True, kw_only=True)
class LabelReport:
    """How a judge did on n labels; NaN where there was none of that kind."""

    loss: float
    """Mean over the labels, in nats, or of outcomes in their unit squared; in training each counted before
    the update that it leads to."""
    accuracy: float
    """Share judged on the right side of even odds."""
    accuracy_right: float
    """The same among what is labelled right (at least ½)."""
    accuracy_wrong: float
    """The same among what is labelled wrong. Where wrong is rare, look here."""
    labels: int
    """n."""


@dataclass(frozen=True, kw_only=True)
class LabelOutputs:
    """What a judge says of the labels of some rows; [n] each."""

    odds: Tensor
    """Log-odds of being right, or whatever else is above 0 for what is judged right."""
    label: Tensor
    """1 right, 0 wrong, a probability, or an outcome; NaN where there is no label."""
    loss: Tensor
    """Differentiable; 0 where there is no label."""


class LabelFit(Algorithm):
    """Fits a judge to right and wrong; an iteration is a pass over the rows, an `Algorithm` for `Trainer`.

    The loss of an update is the mean over the labels of its batch, which the processes share; dropout alone
    differs between one and several. What is judged may change between passes, as in PRIME: set `judge` and
    `rows`.

    Args:
        parameters: names and parameters to train.
        settings: batches and seed.
        accelerator: processes; None makes one on the parameters' device.
        divided: the network of these parameters and names, to be divided with its gradients and AdamW's
            moments among the processes (FSDP2); the judge uses each of its weights whatever the rows.
    """

    judge: Callable[[list[int]], LabelOutputs]
    """Rows to losses, with gradient."""
    rows: Sequence[int]
    """What there is to learn from."""

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
            self.divided = ModuleOfFunction(divided, lambda rows: vars(self.judge(rows)))
            shard(self.divided, self.accelerator)
            now = dict(divided.named_parameters())
            self.named = [(name, now[name]) for name, _ in self.named]
        self.order = torch.Generator().manual_seed(settings.seed)
        self.seen: list[LabelOutputs] = []

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """What moves."""
        return self.named

    def unsharded(self) -> AbstractContextManager[Any]:
        """Inside, each process has all of the network."""
        return nullcontext() if self.divided is None else unsharded(self.divided)

    def collect(self, run: Context) -> Collected:
        """The rows in a new order, in batches."""
        order = [self.rows[place] for place in torch.randperm(len(self.rows), generator=self.order).tolist()]
        size, self.seen = self.settings.batch_size, []
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        return Collected(experience=batches, samples=len(order))

    def backward(self, experience: Any, step: list[int], run: Context) -> dict[str, float]:
        """The mean loss over the labels of a batch."""
        process = self.accelerator
        own = step[process.process_index :: process.num_processes]
        devices = sorted({p.device.index or 0 for _, p in self.named if p.device.type == "cuda"})
        with torch.random.fork_rng(devices):  # dropout is that of the update, so a resumed run has it too
            torch.manual_seed(self.settings.seed + run.counters.updates)
            judged = self._outputs(own, step)
        sums = torch.stack([judged.loss.detach().sum(), torch.isfinite(judged.label).sum()]).double()
        total, labels = torch.as_tensor(process.reduce(sums.to(process.device), "sum"))
        labels = labels.clamp(min=1)
        loss = float(total / labels)
        if not math.isfinite(loss):
            raise ValueError(
                f"The loss of the texts {sorted(step)[:8]} is {loss}; a log-odds or log-prob is not "
                "finite. Lower the learning rate, or look at these texts. The weights are as before them."
            )
        if judged.loss.requires_grad:
            # what is divided gets the mean over the processes
            scale = run.counters.loss_scale * (1 if self.divided is None else process.num_processes)
            (judged.loss.sum() / labels.to(judged.loss) * scale).backward()
        if self.divided is None:
            sum_gradients((parameter for _, parameter in self.named), process)
        self.seen.append(replace(judged, odds=judged.odds.detach(), loss=judged.loss.detach()))
        return {"loss": loss}

    def _outputs(self, own: list[int], step: list[int]) -> LabelOutputs:
        """What is said of this process's rows of a batch; of none, a loss of 0 through the network where it
        is divided, since the others wait for its weights."""
        if self.divided is not None:
            said = LabelOutputs(**self.divided(own or step[:1]))
            nothing = {"label": torch.full_like(said.label, math.nan), "loss": said.loss * 0.0}
            return said if own else replace(said, **nothing)
        none = torch.zeros(0)
        return self.judge(own) if own else LabelOutputs(odds=none, label=none, loss=none)

    def record(self, experience: Any, sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """The mean loss over the labels."""
        self.seen = [one for seen in gather_object([self.seen]) for one in seen]
        return {"loss": report_labels(self.seen).loss}

    def restore(self, run: Context) -> None:
        """The next order is that of an uninterrupted run on the same rows."""
        for _ in range(run.counters.iteration):
            torch.randperm(len(self.rows), generator=self.order)


def label_trainer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    settings: FitSettings | None = None,
    *,
    divided: nn.Module | None = None,
) -> Trainer[LabelFit]:
    """A trainer of a judge, which several calls of `fit_labels` can go on with; its arguments are those of
    `LabelFit`.

    Raises:
        UserError: nothing is trainable, or a network that cannot be divided.
    """
    given = settings or FitSettings()
    return Trainer(
        LabelFit(parameters, given, divided=divided),
        run=RunSettings(folder=Path(), iterations=given.epochs),  # nothing written
        optimizer=AdamWSettings(
            lr=given.learning_rate,
            weight_decay=given.weight_decay,
            max_grad_norm=given.max_grad_norm,
            eps=1e-8,
        ),
    )


def fit_labels(
    judge: Callable[[list[int]], LabelOutputs], rows: Sequence[int], trainer: Trainer[LabelFit]
) -> list[LabelReport]:
    """Minimise the mean loss over the labels of each batch.

    Args:
        judge: rows to losses, with gradient.
        rows: what there is to learn from.
        trainer: of `label_trainer`; its optimizer and order go on where they are.

    Returns:
        One report per epoch.

    Raises:
        UserError: no rows.
        ValueError: a loss that is not finite, before it moves anything.
    """
    fit = trainer.algorithm
    if not rows:
        raise UserError(
            f"There are 0 labelled texts and {len(fit.named)} parameters to train; both must be there. Give "
            "labelled texts and a model with requires_grad."
        )
    fit.judge, fit.rows, reports = judge, rows, []
    for _ in range(fit.settings.epochs):
        trainer.iterate()
        reports.append(report_labels(fit.seen))
    return reports


def report_labels(judged: Sequence[LabelOutputs]) -> LabelReport:
    """Loss and accuracies over several batches."""
    odds, label, loss = (
        torch.cat([getattr(one, name).float().cpu() for one in judged] or [torch.zeros(0)])
        for name in ("odds", "label", "loss")
    )
    known = torch.isfinite(label)
    right = label >= 0.5
    hit = ((odds > 0) == right).float()

    def mean(values: Tensor, among: Tensor) -> float:
        return values[among].mean().item()

    return LabelReport(
        loss=mean(loss, known),
        accuracy=mean(hit, known),
        accuracy_right=mean(hit, known & right),
        accuracy_wrong=mean(hit, known & ~right),
        labels=int(known.sum()),
    )
