# SPDX-License-Identifier: Apache-2.0
"""What differs between trainings, and what an algorithm sees of the run that it is part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .optimizer import AdamWSettings, OptimizerSettings
from .runtime import PhaseClock


@dataclass(kw_only=True)
class Counters:
    """What a run has done; these and the tensors are all that a checkpoint needs."""

    iteration: int = 0
    """Iterations finished."""
    updates: int = 0
    """Optimizer updates, those that were skipped included."""
    skipped: int = 0
    """Updates left out because their gradient was not finite."""
    samples: int = 0
    """Samples made or read for training, all processes."""
    tokens: int = 0
    """Tokens of these; 0 for images."""
    forward_equivalents: int = 0
    seconds: float = 0.0
    """Wall-clock seconds, those before a resume included."""
    loss_scale: float = 1.0
    """Factor of the loss against underflow; above 1 for networks in float16 alone."""
    since_overflow: int = 0
    own: dict[str, Any] = field(default_factory=dict)
    """What the algorithm keeps, JSON values."""


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What an iteration has to learn from."""

    experience: Any
    """For `Algorithm.prepare`; None where there is nothing to learn."""
    samples: int | None = None
    """Made or read, all processes; None where the updates count them, as "samples"."""
    tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Context:
    """What an algorithm sees of the run that it is part of."""

    counters: Counters
    optimizer: AdamWSettings
    clock: PhaseClock
    tensors: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """What the algorithm keeps, file stem -> name -> tensor, put here in `finish`; checkpoints hold it, and
    `restore` finds it here."""

    prefetch_next: bool = False
    """Whether another iteration follows the present one without a checkpoint between them."""

    @property
    def micro_batch(self) -> int:
        """Samples, or pairs of sample and step, that go through the network together; memory only."""
        return getattr(self.optimizer, "micro_batch", OptimizerSettings.micro_batch)


class Algorithm(Protocol):
    """What differs between trainings. A class that inherits it has the plain case: one rate, float32, one
    update for each entry of the experience, no ratio, nothing to count or to hand on."""

    accelerator: Accelerator
    """Device, processes, trackers; without mixed precision, which is the model's own matter."""
    ratio_bound: float | None = None
    """Largest |log r| of a run's first update; None where there is no ratio."""

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Names and parameters that the optimizer moves, in a fixed order."""
        ...

    def rates(self, lr: float) -> Mapping[str, float]:
        """Beginning of a parameter's name -> factor of the learning rate `lr`; the others have 1."""
        return {}

    def compute_dtype(self) -> torch.dtype:
        """In which the network's products run; float16 gets its loss scaled."""
        return torch.float32

    def forward_equivalents(self) -> int:
        """Passes of the network so far in this process; 0 where nobody counts."""
        return 0

    def collect(self, run: Context) -> Collected:
        """Samples made and judged, or read, for one iteration."""
        ...

    def prepare(self, experience: Any, run: Context) -> Sequence[Any]:
        """One entry per optimizer update; statistics are those of the whole update, over all processes."""
        return experience

    def backward(self, experience: Any, step: Any, run: Context) -> Mapping[str, float]:
        """Add the gradient of an update's loss, times `counters.loss_scale`, in any micro-batches.

        Returns:
            Sums over all processes, the same names for each update; with a ratio "largest" (max |log r|) and
            "decisions" among them. The trainer adds "grad_norm", before clipping.
        """
        ...

    def record(self, experience: Any, sums: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        """Metrics of the updates of an iteration."""
        ...

    def wait_for_rewards(self) -> None:
        """Wait for what goes on beside the training, before an evaluation asks the same reward."""

    def release(self) -> None:
        """Put back what an iteration changes of the model beside its weights, also where it failed."""

    def finish(self, run: Context) -> None:
        """End an iteration, of which the counters count already: hand the weights to whoever else has to have
        them, put into `counters.own` what a resume needs."""

    def unsharded(self) -> AbstractContextManager[Any]:
        """Inside, each process has all of a model that is divided among them."""
        return nullcontext()

    def restore(self, run: Context) -> None:
        """Go on from the counters of a checkpoint; the weights are in place."""
