# SPDX-License-Identifier: Apache-2.0
"""Interface between a reward model and its trainer: batches, outputs, data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from visalign.core.preference.ict import IctLabels

Outputs = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class RewardBatch:
    """Rows for a reward model and their labels; every tensor on the CPU.

    Pairs are two rows each; `votes` take precedence over `label` where they are known.
    """

    inputs: Any  # Input of the model: M rows
    size: int  # Examples (pairs, triples, images) in the batch
    left: Tensor | None = None  # [N] int64, row of the left image of each pair
    right: Tensor | None = None  # [N] int64
    label: Tensor | None = None  # [N] probability that the left one is better; NaN: unknown
    votes: Tensor | None = None  # [N, 3] votes (left, right, equal); NaN rows where only the label is known
    weight: Tensor | None = None  # [N] ≥ 0, weight of each pair (or of P rankings); None: all equal
    margin: Tensor | None = None  # [N] lead that the better one of each pair should have; None: the objective's alone
    example: Tensor | None = None  # [N] int64, number of the example that each pair is of; None: each its own
    rank: Tensor | None = None  # [P, K] rank of each sample of P examples, 0 the best; NaN: absent
    row: Tensor | None = None  # [P, K] int64, row of each; any where absent
    clear: Tensor | None = None  # Bool [N], True where the truth of a held-out pair is clear; None: everywhere
    target: Tensor | None = None  # [M] target of "value": a rating, or the probability of yes; [M, Q] of Q answers
    ict: IctLabels | None = None  # Targets of triples; rows are I1 of all, then I2 of all, then I3 of all


class TrainableJudge(Protocol):
    """A reward model as the trainer sees it; `train` is that of torch modules."""

    def trainable_parameters(self) -> Sequence[tuple[str, nn.Parameter]]: ...

    def __call__(self, inputs: Any) -> Outputs: ...

    def train(self, mode: bool = True) -> Any: ...


class RewardData(Protocol):
    """Labelled examples in batches 0, 1, 2, ... that are functions of their number; `part` (i, n) is the i-th
    of n shares of a batch, for n processes. A batch comes in micro-batches."""

    def batch(self, number: int, part: tuple[int, int] = (0, 1)) -> Iterable[RewardBatch]: ...
