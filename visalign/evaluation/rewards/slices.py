# SPDX-License-Identifier: Apache-2.0
"""Slices of a set with numbers of their own: category, generator, resolution, prompt length, split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.data.sets.records import PreferenceSet, QualitySet

LARGEST = 24
"""Most frequent values of one kind that get a slice."""

WORDS = (5, 10, 20, 40)
"""Upper ends of the prompt lengths, in words."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Subset of N records."""

    kind: str
    """ "category", "generator", "resolution", "prompt_length", or "split"."""
    name: str
    rows: NDArray[np.bool_]
    """[N]."""


def pair_slices(pairs: PreferenceSet) -> list[Slice]:
    """Slice a preference set; a kind with a single value is left out.

    A pair belongs to the slice of each of its generators.
    """
    return _slices(pairs.pairs, ("generator_left", "generator_right"))


def quality_slices(records: QualitySet) -> list[Slice]:
    """Slice a quality set; a kind with a single value is left out."""
    return _slices(records.records, ("generator",))


def length_name(prompt: str) -> str:
    """Name the slice of a prompt's length.

    >>> length_name("a red circle"), length_name("word " * 41)
    ('1 to 5 words', 'over 40 words')
    """
    count, low = len(prompt.split()), 1
    for high in WORDS:
        if count <= high:
            return f"{low} to {high} words"
        low = high + 1
    return f"over {WORDS[-1]} words"


_LENGTHS = tuple(length_name("word " * count) for count in (*WORDS, WORDS[-1] + 1))


def _slices(records: Sequence[Any], generators: Sequence[str]) -> list[Slice]:
    columns: dict[str, list[tuple[str | None, ...]]] = {
        "category": [(record.category,) for record in records],
        "generator": [tuple(getattr(record, name) for name in generators) for record in records],
        "resolution": [(record.resolution,) for record in records],
        "prompt_length": [(length_name(r.prompt) if r.prompt else None,) for r in records],
        "split": [(record.split,) for record in records],
    }
    slices = []
    for kind, column in columns.items():
        names = Counter(name for values in column for name in set(values) if name is not None)
        if len(names) < 2:
            continue
        largest = [name for name, _ in names.most_common(LARGEST)]
        for name in (
            [length for length in _LENGTHS if length in largest] if kind == "prompt_length" else largest
        ):
            slices.append(Slice(kind=kind, name=name, rows=np.array([name in values for values in column])))
    return slices
