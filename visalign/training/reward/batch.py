# SPDX-License-Identifier: Apache-2.0
"""What passes between a judge and its trainer: a batch, its outputs, the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from visalign.core.preference.ict import IctLabels

Outputs = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class RewardBatch:
    """Rows for a judge, and what is known of them; every tensor on the CPU.

    Pairs are two rows each; `votes` say more than `label` where they are known.
    """

    inputs: Any
    """What the judge takes: M rows."""
    size: int
    """Examples (pairs, triples, images) in the batch."""
    left: Tensor | None = None
    """[N] int64, row of the left answer of each pair."""
    right: Tensor | None = None
    """[N] int64."""
    label: Tensor | None = None
    """[N] probability that the left one is better; NaN: unknown."""
    votes: Tensor | None = None
    """[N, 3] votes (left, right, equal); NaN rows where only the label is known."""
    weight: Tensor | None = None
    """[N] ≥ 0, how much each pair counts; None: all alike."""
    clear: Tensor | None = None
    """Bool [N], whether the truth of a held-out pair is clear; None: of all."""
    target: Tensor | None = None
    """[M] what "value" is regressed on: a rating in the judge's unit, or the probability of yes."""
    ict: IctLabels | None = None
    """Targets of triples; rows are I1 of all, then I2 of all, then I3 of all."""


class TrainableJudge(Protocol):
    """A judge as the trainer sees it; `train()` and `eval()` are those of torch modules."""

    def trainable_parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        """Names and parameters that move, in a fixed order."""
        ...

    def __call__(self, inputs: Any) -> Outputs:
        """What the judge says of the rows of a batch, with gradient where gradients are on."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Dropout on or off."""
        ...


class RewardData(Protocol):
    """The labelled examples, in batches that are functions of their number."""

    def batch(self, number: int, part: tuple[int, int] = (0, 1)) -> Iterable[RewardBatch]:
        """Batch 0, 1, 2, ... in micro-batches.

        Args:
            number: of the optimizer update.
            part: (i, n): the i-th of n shares of the batch, for n processes.
        """
        ...
