# SPDX-License-Identifier: Apache-2.0
"""Fitting a judge to right and wrong: AdamW over shuffled batches, and what each pass over the data did."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from visalign.errors import UserError


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
    """Mean over the labels, in nats; in training each counted before the update that it leads to."""
    accuracy: float
    """Share judged on the right side of even odds."""
    accuracy_right: float
    """The same among what is labelled right (at least ½)."""
    accuracy_wrong: float
    """The same among what is labelled wrong. Where wrong is rare, look here."""
    labels: int
    """n."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What a judge says of the labels of some rows; [n] each."""

    odds: Tensor
    """Log-odds of being right."""
    label: Tensor
    """1 right, 0 wrong, or a probability; NaN where there is no label."""
    loss: Tensor
    """Differentiable; 0 where there is no label."""


def fit_labels(
    judge: Callable[[list[int]], Judged],
    rows: Sequence[int],
    parameters: Sequence[nn.Parameter],
    settings: FitSettings,
    *,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[LabelReport]:
    """Minimise the mean loss over the labels of each batch.

    Args:
        judge: rows to losses, with gradient.
        rows: what there is to learn from.
        parameters: that move.
        settings: order, length and rate.
        optimizer: one to go on with, in place of a new AdamW; its rate and decay are its own.

    Returns:
        One report per epoch.

    Raises:
        UserError: no rows or parameters.
        ValueError: a loss that is not finite, before it moves anything.
    """
    if not rows or not parameters:
        raise UserError(
            f"There are {len(rows)} labelled texts and {len(parameters)} parameters to train; both must be "
            "there. Give labelled texts and a model with requires_grad."
        )
    generator = torch.Generator().manual_seed(settings.seed)
    moved = optimizer or torch.optim.AdamW(
        parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    devices = sorted({p.device.index or 0 for p in parameters if p.device.type == "cuda"})
    reports = []
    with torch.random.fork_rng(devices):
        torch.manual_seed(settings.seed)
        for _ in range(settings.epochs):
            order = [rows[place] for place in torch.randperm(len(rows), generator=generator).tolist()]
            seen = []
            for start in range(0, len(order), settings.batch_size):
                batch = order[start : start + settings.batch_size]
                seen.append(_update(judge(batch), batch, parameters, moved, settings.max_grad_norm))
            reports.append(report_labels(seen))
    return reports


def _update(
    judged: Judged,
    batch: list[int],
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
) -> Judged:
    """One step of the optimizer."""
    loss = judged.loss.sum() / torch.isfinite(judged.label).sum().clamp(min=1)
    if not torch.isfinite(loss):
        raise ValueError(
            f"The loss of the texts {sorted(batch)[:8]} is {loss.item()}; a log-odds or log-prob is not "
            "finite. Lower the learning rate, or look at these texts. The weights are as before them."
        )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Judged(odds=judged.odds.detach(), label=judged.label, loss=judged.loss.detach())


def report_labels(judged: Sequence[Judged]) -> LabelReport:
    """Loss and accuracies over several batches.

    Args:
        judged: the batches.
    """
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
