# SPDX-License-Identifier: Apache-2.0
"""How the weights move: AdamW, its learning rate, clipping, averages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from visalign.errors import UserError


def _at_least(name: str, given: float, least: float) -> None:
    if not (math.isfinite(given) and given >= least):
        raise UserError(f"{name} is {given}; it must be a finite number of at least {least}.")


def _above_zero(name: str, given: float) -> None:
    if not (math.isfinite(given) and given > 0):
        raise UserError(f"{name} is {given}; it must be above 0 and finite.")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """How the weights move."""

    lr: float = 3e-4
    """AdamW learning rate after the warm-up."""
    warmup_updates: int = 0
    """Updates over which the learning rate rises linearly."""
    decay_updates: int | None = None
    """The learning rate falls linearly to `lr_end` of itself until this update, and stays; null: constant."""
    lr_end: float = 0.1
    """Share of the learning rate that is left after `decay_updates`."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW β₁ and β₂."""
    eps: float = 1e-8
    """AdamW ε."""
    weight_decay: float = 1e-4
    """AdamW decoupled weight decay."""
    max_grad_norm: float = 1.0
    """The gradient's L2 norm is clipped to this."""
    updates_per_iteration: int = 2
    """Optimizer updates per iteration; each sees its own part of the samples."""
    micro_batch: int = 64
    """(image, step) pairs that go through the network together; memory only, no effect on the update."""
    ema_decay: float = 0.9
    """Decay of the averaged weights, which are evaluated and saved as the result; 0 switches averaging
    off."""
    ema_every: int = 8
    """Updates between two averages."""
    ema_warmup: bool = True
    """Average number n uses min(decay, (1 + n)/(10 + n)), as Flow-GRPO's code does."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps"):
            _above_zero(f"optimizer.{name}", getattr(self, name))
        if not self.max_grad_norm > 0:  # infinity switches clipping off
            raise UserError(f"optimizer.max_grad_norm is {self.max_grad_norm}; it must be above 0.")
        for name in ("updates_per_iteration", "micro_batch", "ema_every"):
            _at_least(f"optimizer.{name}", getattr(self, name), 1)
        for name in ("warmup_updates", "weight_decay"):
            _at_least(f"optimizer.{name}", getattr(self, name), 0)
        if len(self.betas) != 2 or not all(0 <= b < 1 for b in self.betas):
            raise UserError(
                f"optimizer.betas is {self.betas}; give two numbers in [0, 1), e.g. [0.9, 0.999]."
            )
        if self.decay_updates is not None:
            _at_least("optimizer.decay_updates", self.decay_updates, 1)
        if not 0 <= self.lr_end <= 1:
            raise UserError(f"optimizer.lr_end is {self.lr_end}; it is a share of the rate, from 0 to 1.")
        if not 0 <= self.ema_decay < 1:
            raise UserError(f"optimizer.ema_decay is {self.ema_decay}; it must be in [0, 1).")

    def lr_at(self, update: int) -> float:
        """Learning rate of optimizer update 0, 1, 2, ..."""
        rise = min(1.0, (update + 1) / (self.warmup_updates + 1))
        gone = 0.0 if self.decay_updates is None else min(1.0, update / self.decay_updates)
        return self.lr * rise * (1.0 - (1.0 - self.lr_end) * gone)
