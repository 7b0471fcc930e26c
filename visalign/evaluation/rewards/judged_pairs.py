# SPDX-License-Identifier: Apache-2.0
"""The scored pairs of a set as arrays, and the settings of intervals over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from visalign.data.sets.records import PreferencePair, PreferenceSet
from visalign.evaluation.statistics.intervals import cluster_index

from .pair_scores import PairScores

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class IntervalSettings:
    """Settings of the bootstrap and of the reliability diagram."""

    seed: int = 0  # Random seed
    resamples: int = 1_000  # Bootstrap draws
    level: float = 0.95  # Confidence level of the intervals
    bins: int = 10  # Number of bins in the reliability diagram

    def drawing(self) -> dict[str, Any]:
        """Return `generator` (fresh, so that numbers do not depend on order) and `resamples` for the bootstrap."""
        return {"generator": torch.Generator().manual_seed(self.seed), "resamples": self.resamples}


@dataclass(frozen=True, kw_only=True)
class JudgedPairs:
    """The pairs of a set that have a score, n of N."""

    pairs: Sequence[PreferencePair]
    margin: Array  # [n]
    label: Array  # [n]
    prob: Array  # [n] probability that the left image is better
    std: Array | None  # [n] of the margin; None where some pair has none
    index: NDArray[np.int64]  # [n] number of each pair's prompt
    clusters: int  # Number of prompts
    rows: NDArray[np.bool_]  # [N of the set] True for these pairs


def judged_pairs(pairs: PreferenceSet, scores: PairScores) -> JudgedPairs:
    """Leave out the pairs of a set that have no score; a ValueError says why none has one."""
    rows = scores.judged
    if not rows.any():
        reason = next(iter(scores.failures()), "no reason given")
        raise ValueError(f"{scores.name} scored none of {len(pairs)} pairs; most often because: {reason}.")
    valid_pairs = [pair for pair, ok in zip(pairs.pairs, rows, strict=True) if ok]
    index, clusters = cluster_index([pair.group for pair in valid_pairs])
    return JudgedPairs(
        pairs=valid_pairs,
        margin=scores.margin[rows],
        label=pair_labels(pairs)[rows],
        prob=scores.prob[rows],
        std=None if scores.std is None else scores.std[rows],
        index=index,
        clusters=clusters,
        rows=rows,
    )


def pair_labels(pairs: PreferenceSet) -> Array:
    """Return the share [N] of the people in favour of each left image."""
    return np.array([pair.label for pair in pairs.pairs], dtype=np.float64)
