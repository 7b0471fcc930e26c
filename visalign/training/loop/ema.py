# SPDX-License-Identifier: Apache-2.0
"""Exponential moving average of the trained parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from visalign.swapping import distribute_like


class EMA:
    """Average ē ← d·ē + (1 − d)·θ in float32 after every `every`-th optimizer update; d is `decay` in [0, 1).

    Each of the first `every` updates is averaged too (Flow-GRPO's code waits for the first interval), so that a
    run shorter than an interval is not left with its starting weights.

    With `warmup` the decay after n updates is min(d, (1 + n) / (10 + n)), as in TensorFlow's
    ExponentialMovingAverage(num_updates) and in Flow-GRPO's code, so that the starting point does not dominate short
    runs. With decay 0 and every 1 the average is the parameters themselves: nothing is stored or copied.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        decay: float,
        every: int = 1,
        warmup: bool = True,
    ) -> None:
        self.decay, self.every, self.warmup = decay, every, warmup
        self._parameters = list(parameters)
        self._is_identity = decay == 0 and every == 1
        averaged = [] if self._is_identity else self._parameters
        self._average = {name: p.detach().float().clone() for name, p in averaged}

    def decay_at(self, n: int) -> float:
        """Return the decay after n = 1, 2, ... optimizer updates."""
        return min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay

    @torch.no_grad()
    def update(self, updates: int, *, decay: float | None = None) -> None:
        """Average in the parameters after `updates` optimizer updates (1, 2, ...)."""
        if self._is_identity or (updates > self.every and updates % self.every):
            return
        decay = self.decay_at(updates) if decay is None else decay
        for name, parameter in self._parameters:
            self._average[name].lerp_(parameter.float(), 1.0 - decay)

    @contextmanager
    def applied(self, state: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Set the parameters to the average, or an earlier `state` of it, inside the block; undone bit for bit."""
        if self._is_identity and state is None:
            yield
            return
        average = self._average if state is None else state
        saved = [p.detach().clone() for _, p in self._parameters]
        try:
            with torch.no_grad():
                for name, parameter in self._parameters:
                    parameter.copy_(distribute_like(average[name], parameter))
            yield
        finally:
            with torch.no_grad():
                for (_, parameter), value in zip(self._parameters, saved, strict=True):
                    parameter.copy_(value)

    def state(self) -> dict[str, Tensor]:
        """Return name -> average, float32 (not copied)."""
        if self._is_identity:
            return {name: p.detach().float() for name, p in self._parameters}
        return dict(self._average)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a state of the same names."""
        for name, average in self._average.items():
            average.copy_(distribute_like(state[name], average))
