# SPDX-License-Identifier: Apache-2.0
"""The judged pairs of a set as arrays, and how intervals over them are made."""

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
    """How intervals are made."""

    seed: int = 0
    resamples: int = 1_000
    level: float = 0.95
    bins: int = 10
    """Of the reliability diagram."""

    def generator(self) -> torch.Generator:
        """A fresh one, so that a number does not depend on what was computed before it."""
        return torch.Generator().manual_seed(self.seed)

    def drawing(self) -> dict[str, Any]:
        """What the functions of `visalign.evaluation.statistics.intervals` draw by."""
        return {"generator": self.generator(), "resamples": self.resamples}


@dataclass(frozen=True, kw_only=True)
class JudgedPairs:
    """The pairs of a set that a judge judged, n of N."""

    pairs: Sequence[PreferencePair]
    margin: Array
    """[n]."""
    label: Array
    """[n]."""
    prob: Array
    """[n] probability that the left image is better."""
    std: Array | None
    """[n] of the margin."""
    index: NDArray[np.int64]
    """[n] number of each pair's prompt."""
    clusters: int
    """How many prompts there are."""
    rows: NDArray[np.bool_]
    """[N of the set] which pairs these are."""


def judged_pairs(pairs: PreferenceSet, scores: PairScores) -> JudgedPairs:
    """Leave out the pairs of a set that the judge could not judge; `std` stays only where all have one.

    Raises:
        ValueError: Lengths differ, or no pair was judged.
    """
    if len(scores) != len(pairs):
        raise ValueError(f"{len(scores)} scores for {len(pairs)} pairs; one entry per pair is needed.")
    rows = scores.judged
    if not rows.any():
        why = next(iter(scores.failures()), "no reason given")
        raise ValueError(f"{scores.name} judged none of {len(pairs)} pairs; most often because: {why}.")
    kept = [pair for pair, ok in zip(pairs.pairs, rows, strict=True) if ok]
    index, clusters = cluster_index([pair.group for pair in kept])
    return JudgedPairs(
        pairs=kept,
        margin=scores.margin[rows],
        label=labels_of(pairs)[rows],
        prob=scores.prob[rows],
        std=_known(scores.std, rows),
        index=index,
        clusters=clusters,
        rows=rows,
    )


def _known(std: Array | None, rows: NDArray[np.bool_]) -> Array | None:
    """The standard deviations, if all judged pairs have one."""
    return std[rows] if std is not None and np.isfinite(std[rows]).all() else None


def labels_of(pairs: PreferenceSet) -> Array:
    """[N] share of the people in favour of each left image."""
    return np.array([pair.label for pair in pairs.pairs], dtype=np.float64)
