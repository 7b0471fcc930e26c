# SPDX-License-Identifier: Apache-2.0
"""Slices of a set with numbers of their own: category, generator, resolution, prompt length, split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 24
"""Most frequent values of one kind that get a slice."""

WORDS = (5, 10, 20, 40)
"""Upper ends of the prompt lengths, in words."""


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


def slice_masks(records: Sequence[Any], generators: Sequence[str]) -> dict[tuple[str, str], NDArray[np.bool_]]:
    """Slice N records: (kind, name) -> mask [N], by kinds of several values; `generators` are fields of names."""
    columns: dict[str, list[tuple[str | None, ...]]] = {
        "category": [(record.category,) for record in records],
        "generator": [tuple(getattr(record, name) for name in generators) for record in records],
        "resolution": [(record.resolution,) for record in records],
        "prompt_length": [(length_name(r.prompt) if r.prompt else None,) for r in records],
        "split": [(record.split,) for record in records],
    }
    masks = {}
    for kind, column in columns.items():
        names = Counter(name for values in column for name in set(values) if name is not None)
        largest = [name for name, _ in names.most_common(LARGEST)]
        ordered = [name for name in _LENGTHS if name in largest] if kind == "prompt_length" else largest
        for name in ordered if len(names) > 1 else ():
            masks[kind, name] = np.array([name in values for values in column])
    return masks
