# SPDX-License-Identifier: Apache-2.0
"""Protocol of a training algorithm, and the run state that it sees."""

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
    """Progress of a run; these and the tensors are the whole checkpoint."""

    iteration: int = 0  # Iterations finished
    updates: int = 0  # Optimizer updates, skipped ones included
    skipped: int = 0  # Updates left out because their gradient was not finite
    samples: int = 0  # Samples generated or read for training, all processes
    tokens: int = 0  # Tokens of these; 0 for images
    forward_equivalents: int = 0
    seconds: float = 0.0  # Wall-clock seconds, those before a resume included
    loss_scale: float = 1.0  # Factor of the loss against underflow; above 1 only for networks in float16
    since_overflow: int = 0
    own: dict[str, Any] = field(default_factory=dict)  # State of the algorithm and of the monitor, JSON values


@dataclass(frozen=True, kw_only=True)
class Collected:
    """Training data of an iteration."""

    experience: Any  # For `Algorithm.prepare`; None where there is nothing to learn from
    samples: int | None = None  # Generated or read, all processes; None where the updates count them, as "samples"
    tokens: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(kw_only=True)
class Context:
    """Run state that an algorithm sees."""

    counters: Counters
    optimizer: AdamWSettings
    clock: PhaseClock
    tensors: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """State of the algorithm, file stem -> name -> tensor: set in `finish`, saved in checkpoints, read in
    `restore`."""
    prefetch_next: bool = False  # True where another iteration follows this one without a checkpoint between them

    @property
    def micro_batch(self) -> int:
        """Samples, or (sample, step) pairs, that go through the network together; bounds memory only."""
        return getattr(self.optimizer, "micro_batch", int(OptimizerSettings.micro_batch))


class Algorithm(Protocol):
    """Kind of training. The inherited methods are the simple case: one learning rate, float32, one update for
    each entry of the experience, no ratio, no state."""

    accelerator: Accelerator  # Device, processes, trackers; without mixed precision, which is the model's own
    ratio_bound: float | None = None  # Largest |log r| of a run's first update; None where there is no ratio

    def parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Return names and trained parameters, in a fixed order."""
        ...

    def rates(self, lr: float) -> Mapping[str, float]:
        """Map prefixes of parameter names to factors of the learning rate `lr`; other names have 1."""
        return {}

    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of the network's products; float16 gets its loss scaled."""
        return torch.float32

    def forward_equivalents(self) -> int:
        """Count this process's passes of the network so far; 0 where they are not counted."""
        return 0

    def collect(self, run: Context) -> Collected:
        """Generate and score samples, or read them, for one iteration."""
        ...

    def prepare(self, experience: Any, run: Context) -> Sequence[Any]:
        """Return one entry per optimizer update; statistics cover the whole update, over all processes."""
        return experience

    def backward(self, experience: Any, step: Any, run: Context) -> Mapping[str, float]:
        """Add the gradient of an update's loss, times `counters.loss_scale`, in any micro-batches.

        Returns sums over all processes, the same names for each update; with a ratio "largest" (max |log r|)
        and "decisions" among them. The trainer adds "grad_norm", before clipping.
        """
        ...

    def record(self, experience: Any, sums: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        """Compute metrics of an iteration's updates."""
        ...

    def wait_for_rewards(self) -> None:
        """Wait for rewards in threads, before an evaluation uses the same reward."""

    def release(self) -> None:
        """Undo an iteration's changes of the model other than weights, also after a failure."""

    def finish(self, run: Context) -> None:
        """End an iteration that the counters include; store in `counters.own` and `tensors` what a resume needs."""

    def unsharded(self) -> AbstractContextManager[Any]:
        """Hold the whole of a divided model in each process inside the block."""
        return nullcontext()

    def restore(self, run: Context) -> None:
        """Continue from the counters of a checkpoint; the weights are already loaded."""
