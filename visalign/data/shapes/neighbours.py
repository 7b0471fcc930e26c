# SPDX-License-Identifier: Apache-2.0
"""Prompts that differ from a given one in a single word: the hard negatives of the shapes world."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .prompts import Record


class Neighbours:
    """Index of prompts that differ in one word, or that lack one, among these records: so splits stay apart."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = list(records)
        self._by_gap: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, record in enumerate(self.records):
            for gap in _gaps(record["prompt"]):
                self._by_gap[gap].append(number)

    def near(self, record: Record, rng: np.random.Generator) -> Record:
        """Draw a neighbour with each word equally likely to change; any other prompt if there is none."""
        gaps = _gaps(record["prompt"])
        for index in rng.permutation(len(gaps)):
            candidates = [n for n in self._by_gap[gaps[index]] if self.records[n]["prompt"] != record["prompt"]]
            if candidates:
                return self.records[candidates[int(rng.integers(len(candidates)))]]
        return self.records[int(rng.integers(len(self.records)))]


def _gaps(prompt: str) -> list[tuple[str, ...]]:
    """Leave each word of a prompt open in turn; "a" and "an" are one word."""
    words = ["a" if word == "an" else word for word in prompt.split()]
    return [(*words[:index], "", *words[index + 1 :]) for index in range(len(words))]
