# SPDX-License-Identifier: Apache-2.0
"""Rewards that go on learning while a policy is trained: weights, AdamW, checkpoint and sums over processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.training.loop.checkpoint import Checkpoint
from visalign.training.loop.optimizer import AdamWSettings, TrainedWeights
from visalign.training.loop.processes import sum_gradients


class LearningReward:
    """Reward with weights of its own that learn from an iteration's samples; `key` names its file in a checkpoint."""

    key: str
    learn: Callable[..., None]
    """Learn from this process's completions and their rewards [b] (NaN: failed), or its images, and the number of the
    iteration; all processes call it."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], lr: float, accelerator: Accelerator, **options: Any
    ) -> None:
        self.named, self._accelerator, self._metrics = dict(named), accelerator, dict[str, float]()
        settings = AdamWSettings(lr=lr, eps=1e-8, weight_decay=0.0, **options)
        self._weights = TrainedWeights([*self.named.items()], settings)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last pass."""
        return self._metrics

    def state(self) -> dict[str, Tensor]:
        """Return weights and AdamW's moments, for a checkpoint."""
        parts = self._weights.tensors()
        return {f"{part}.{name}": value.clone() for part, values in parts.items() for name, value in values.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint."""
        parts: dict[str, dict[str, Tensor]] = {"trainable": {}, "optimizer": {}}
        for key, value in state.items():
            part, _, name = key.partition(".")
            parts.get(part, {})[name] = value.clone()
        self._weights.restore(Checkpoint(step=0, tensors=parts, state={}))

    def _update(self, max_norm: float = math.inf) -> bool:
        """Take AdamW's step on gradients summed over the processes; False, and no step, where one is not finite."""
        self._weights.gather_gradients(1.0)
        sum_gradients([master for _, master in self._weights.masters], self._accelerator)
        if is_finite := math.isfinite(self._weights.clip(max_norm)):
            self._weights.step()
        self._weights.clear()
        return is_finite

    def _sum(self, *values: float) -> list[float]:
        total: Any = self._accelerator.reduce(torch.tensor(values, device=self._accelerator.device), "sum")
        return total.tolist()
