# SPDX-License-Identifier: Apache-2.0
"""A judge of points in the plane and pairs of points, for the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from visalign.core.preference.uncertainty import soft_clamp
from visalign.training.reward.batch import RewardBatch


class ToyJudge(nn.Module):
    """value = v(x), log_std = s(x), both small networks, with dropout that is on while training."""

    def __init__(self, seed: int = 0, dropout: float = 0.1) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.body = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 2))

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.named_parameters())

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        out = self.body(inputs)
        return {"value": out[:, 0], "log_std": soft_clamp(out[:, 1])}


class ToyPairs:
    """Points with utility 2·x₀; a vote sees it with a noise that grows with x₁ (0.1 to 2.1)."""

    def __init__(self, size: int = 64, seed: int = 0, micro: int = 64, votes: int = 9) -> None:
        self.size, self.seed, self.micro, self.votes = size, seed, micro, votes

    def batch(self, number: int, part: tuple[int, int] = (0, 1)) -> Iterator[RewardBatch]:
        rng = np.random.default_rng([self.seed, number])
        points = rng.uniform(-1, 1, size=(self.size, 2, 2))
        points[..., 1] = np.abs(points[..., 1])
        utility, noise = 2 * points[..., 0], 0.1 + 2 * points[..., 1]
        draws = rng.normal(utility[..., None], noise[..., None], size=(self.size, 2, max(self.votes, 1)))
        won = (draws[:, 0] > draws[:, 1]).sum(1)
        chosen = np.arange(self.size)[part[0] :: part[1]]
        for start in range(0, len(chosen), self.micro):
            rows = chosen[start : start + self.micro]
            votes = np.stack([won[rows], self.votes - won[rows], 0 * won[rows]], 1) if self.votes else None
            yield pair_batch(points[rows], label=(utility[rows, 0] > utility[rows, 1]).astype(np.float32), votes=votes)


def pair_batch(points: np.ndarray, *, label: Any, votes: Any = None) -> RewardBatch:
    """Pairs [N, 2, 2] as a batch."""
    count = len(points)
    rows = torch.tensor(points, dtype=torch.float32).transpose(0, 1).reshape(2 * count, 2)
    return RewardBatch(
        inputs=rows, size=count, left=torch.arange(count), right=torch.arange(count, 2 * count),
        label=torch.as_tensor(label, dtype=torch.float32),
        votes=None if votes is None else torch.tensor(votes, dtype=torch.float32),
    )  # fmt: skip
