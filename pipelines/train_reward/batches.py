# SPDX-License-Identifier: Apache-2.0
"""Batches of labelled examples: number n is a function of (seed, n) alone, each epoch in a new order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visalign.training.reward.batch import RewardBatch

from .examples import Example, Examples

Encode = Callable[[Sequence[Example]], RewardBatch]
"""Examples -> rows for a judge and their labels."""


class ExampleBatches:
    """The stream that a trainer reads: epoch after epoch, every example once in each.

    Args:
        examples: the set.
        encode: of the judge.
        size: examples per batch.
        micro: examples per micro-batch.
        seed: of the order.
    """

    def __init__(self, examples: Examples, encode: Encode, *, size: int, micro: int, seed: int) -> None:
        self.examples, self.encode, self.size, self.micro, self.seed = examples, encode, size, micro, seed

    def numbers(self, number: int) -> list[int]:
        """Which examples stand in batch `number`."""
        total = len(self.examples)
        places = range(number * self.size, (number + 1) * self.size)
        return [int(_order(self.seed, place // total, total)[place % total]) for place in places]

    def batch(self, number: int, part: tuple[int, int] = (0, 1)) -> Iterator[RewardBatch]:
        """The micro-batches of share `part` of batch `number`, made when they are asked for."""
        numbers = self.numbers(number)[part[0] :: part[1]]
        for start in range(0, len(numbers), self.micro):
            yield self.encode([self.examples[i] for i in numbers[start : start + self.micro]])


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, total: int) -> np.ndarray:
    return np.random.default_rng([seed, 51, epoch]).permutation(total)


def in_order(
    examples: Examples, encode: Encode, *, size: int, part: tuple[int, int] = (0, 1)
) -> Iterator[tuple[int, RewardBatch]]:
    """(number, batch) of all examples once, as they stand.

    Args:
        examples: the set.
        encode: of the judge.
        size: examples per batch.
        part: (i, n): every n-th batch from the i-th on, for n processes.
    """
    for number in range(part[0], -(-len(examples) // size), part[1]):
        last = min((number + 1) * size, len(examples))
        yield number, encode([examples[i] for i in range(number * size, last)])


def pair_batch(inputs: Any, examples: Sequence[Example], *, heldout: bool) -> RewardBatch:
    """Pairs whose rows are all the left ones, then all the right ones.

    Args:
        inputs: the rows, or None.
        examples: the pairs.
        heldout: whether they are measured on, not learnt; the label is then the truth.
    """
    count, votes = len(examples), None
    if any(example.votes is not None for example in examples):
        unknown = (float("nan"),) * 3
        votes = torch.tensor([example.votes or unknown for example in examples], dtype=torch.float32)
    label = [example.truth if heldout else example.label for example in examples]
    return RewardBatch(
        inputs=inputs,
        size=count,
        left=torch.arange(count),
        right=torch.arange(count, 2 * count),
        label=torch.tensor(label, dtype=torch.float32),
        votes=votes,
        clear=torch.tensor([example.clear for example in examples]),
    )


def pair_images(examples: Sequence[Example]) -> list[Tensor]:
    """All first pictures, then all second ones, ..."""
    return [example.images[side] for side in range(len(examples[0].images)) for example in examples]
