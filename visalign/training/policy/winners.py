# SPDX-License-Identifier: Apache-2.0
"""Self-imitation (SPEAR): samples that beat their group are stored, and replayed while they beat the median."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from visalign.core.advantages.rules import replay_advantages, replay_weight
from visalign.core.groups.group_statistics import group_mean
from visalign.core.groups.labels import Labels, group_index
from visalign.seeds import sample_seed
from visalign.settings import Count, NonNegative, settings

KEY = "self_imitation"  # File stem of the buffer in a checkpoint
HISTORY = 10240  # Groups whose mean rewards are stored, the newest; as SPEAR's scripts


@settings("self_imitation")
class ReplaySettings:
    """Self-imitation (SPEAR, arXiv 2509.22601): samples with A > 0 are stored, and replayed while they beat the
    median of the groups' mean rewards. The defaults are those of its scripts."""

    capacity: Count = 2048
    """Samples stored, the newest."""
    max_age: Count = 10
    """Iterations after which a sample is dropped."""
    batch: Count | None = None
    """Samples replayed in an iteration, drawn at random; null: as many as it has of its own."""
    weight: NonNegative = 1.0
    """c₀ of the loss's factor c(s) = c₀ (1 − cos(π min(s, T)/T))/2, s iterations."""
    warmup: Count = 200
    """T."""


@dataclass(frozen=True, kw_only=True)
class StoredSample:
    """A winner; each field of it is a tensor with one axis."""

    reward: Tensor  # [1] float32
    born: Tensor  # [1] int32, iterations before the one that sampled it


Stored = TypeVar("Stored", bound=StoredSample)


class WinnerBuffer(Generic[Stored]):
    """The newest samples with A > 0 and the mean rewards of the newest groups, the same in all processes.

    Ã = R − median of the means; samples with Ã > 0 are replayed. SPEAR, arXiv 2509.22601.
    """

    def __init__(self, kind: type[Stored], chosen: ReplaySettings, seed: int) -> None:
        self._kind, self._settings, self._seed = kind, chosen, seed
        self.samples: deque[Stored] = deque(maxlen=chosen.capacity)
        self._means: deque[float] = deque(maxlen=HISTORY)
        self._metrics: dict[str, float] = {}

    def draw_winners(
        self, means: Iterable[float], iteration: int, count: int
    ) -> tuple[Tensor, Tensor, torch.Generator]:
        """Draw what an iteration replays, `batch` or `count` samples, after adding the `means` of its own groups.

        Returns (positions [n] in the buffer, shuffled; Ã [N] of all that are stored; generator of further draws).
        """
        self._means.extend(means)
        while self.samples and iteration - int(self.samples[0].born) > self._settings.max_age:
            self.samples.popleft()
        weight = float(replay_weight(iteration, warmup=self._settings.warmup, ceiling=self._settings.weight))
        self._metrics = {"replay/size": float(len(self.samples)), "replay/weight": weight}
        generator = torch.Generator().manual_seed(sample_seed(self._seed, KEY, iteration))
        if not (weight and self.samples and self._means):
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0), generator
        rewards = torch.cat([stored.reward for stored in self.samples])
        advantage, keep = replay_advantages(rewards, torch.tensor(list(self._means), dtype=torch.float64))
        index = keep.nonzero()[:, 0]
        index = index[torch.randperm(len(index), generator=generator)[: self._settings.batch or count]]
        baseline = float(rewards[0] - advantage[0])  # the median is the same for all
        self._metrics |= {"replay/baseline": baseline, "replay/samples": len(index)}
        return index, advantage, generator

    @property
    def weight(self) -> float:
        """c(s) of the last draw."""
        return self._metrics["replay/weight"]

    def metrics(self) -> dict[str, float]:
        """Return metrics of the iteration's replay."""
        return self._metrics

    def state(self) -> dict[str, Tensor]:
        """Return both buffers, for a checkpoint."""
        state = {"means": torch.tensor(list(self._means), dtype=torch.float64)}
        for name in self._names:
            parts = [getattr(stored, name) for stored in self.samples]
            state[name] = torch.cat(parts) if parts else torch.zeros(0)
            state[f"{name}_length"] = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        return state

    def load(self, state: Any) -> None:
        """Continue from a checkpoint's buffers."""
        self._means.extend(state["means"].tolist())
        columns = [state[name].split(state[f"{name}_length"].tolist()) for name in self._names]
        rows = (dict(zip(self._names, row, strict=True)) for row in zip(*columns, strict=True))
        self.samples.extend(self._kind(**row) for row in rows)

    @property
    def _names(self) -> Sequence[str]:
        return [item.name for item in fields(self._kind)]


def group_means(reward: Tensor, valid: Tensor, group: Labels) -> list[float]:
    """Compute the mean reward of each group with a valid sample."""
    index, groups = group_index(group, len(reward))
    return group_mean(reward, valid, index, groups)[index[valid].unique()].tolist()
