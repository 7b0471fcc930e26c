# SPDX-License-Identifier: Apache-2.0
"""Sets of tokens that could be drawn at each decision of a truncated rollout, stored by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenSets:
    """Sets [B, T] of token ids per decision: a nucleus is a few dozen tokens, a mask the whole vocabulary."""

    ids: Tensor  # [M] int32, set after set, row by row; M is the sum of `count`
    count: Tensor  # [B, T] int64, the size of each set

    @classmethod
    def from_lists(cls, sets: Sequence[Sequence[Tensor]], length: int) -> TokenSets:
        """Build from B lists of at most `length` 1-D id tensors, one for each decision."""
        count = torch.zeros(len(sets), length, dtype=torch.int64)
        for row, sample in enumerate(sets):
            count[row, : len(sample)] = torch.tensor([len(ids) for ids in sample], dtype=torch.int64)
        flat = [ids.to(torch.int32) for sample in sets for ids in sample]
        return cls(torch.cat(flat) if flat else torch.zeros(0, dtype=torch.int32), count)

    def lists(self) -> list[list[Tensor]]:
        """Split into B lists of T sets."""
        sets = iter(self.ids.split(self.count.flatten().tolist()))
        return [[next(sets) for _ in row] for row in self.count]

    def rows(self, index: Tensor) -> TokenSets:
        """Select the samples `index` [b] (repeats allowed)."""
        samples = self.ids.split(self.count.sum(1).tolist())
        chosen = [samples[i] for i in index.tolist()]
        return TokenSets(torch.cat(chosen) if chosen else self.ids[:0], self.count[index])

    def mask(self, row: Tensor, column: Tensor, vocabulary: int) -> Tensor:
        """Return the sets of decisions `column` [n] of samples `row` [n] as bool masks [n, V]."""
        ends = self.count.flatten().cumsum(0).view_as(self.count)[row, column]
        sizes = self.count[row, column]
        number = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        within = torch.arange(len(number)) - (sizes.cumsum(0) - sizes)[number]
        mask = torch.zeros(len(sizes), vocabulary, dtype=torch.bool)
        mask[number, self.ids[(ends - sizes)[number] + within].long()] = True
        return mask
