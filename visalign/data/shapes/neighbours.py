# SPDX-License-Identifier: Apache-2.0
"""Prompts that differ from a given one in a single word: the hard negatives of the shapes world."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .prompts import Record


class Neighbours:
    """For each prompt the others that differ in one word, or that lack one.

    Args:
        records: prompt records; neighbours are looked for among these alone, so a split stays a split.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = list(records)
        self._by_gap: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, record in enumerate(self.records):
            for gap in _gaps(record["prompt"]):
                self._by_gap[gap].append(number)

    def near(self, record: Record, rng: np.random.Generator) -> Record:
        """One neighbour, each word to be changed being equally likely; any other prompt if there is none."""
        gaps = _gaps(record["prompt"])
        for place in rng.permutation(len(gaps)):
            found = [n for n in self._by_gap[gaps[place]] if self.records[n]["prompt"] != record["prompt"]]
            if found:
                return self.records[found[int(rng.integers(len(found)))]]
        return self.records[int(rng.integers(len(self.records)))]


def _gaps(prompt: str) -> list[tuple[str, ...]]:
    """The prompt with each word in turn left open; "a" and "an" are one word."""
    words = ["a" if word == "an" else word for word in prompt.split()]
    return [(*words[:place], "", *words[place + 1 :]) for place in range(len(words))]
