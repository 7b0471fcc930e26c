# SPDX-License-Identifier: Apache-2.0
"""Two rewards on the same pairs: McNemar's test, and the difference of two numbers with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from .bootstrap import cluster_sums, interval, ratio_draws
from .intervals import Interval

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """Where two judges part: how often each alone is right."""

    first_only: int
    second_only: int
    both: int
    neither: int
    p_value: float
    """Two-sided exact binomial test of `first_only` against `second_only`; 1 where they never part."""


def mcnemar(first: ArrayLike, second: ArrayLike) -> McNemar:
    """Exact test of whether two judges are right equally often.

    It takes pairs as independent; where many pairs share a prompt, trust the clustered interval of
    `accuracy_difference` rather than this p-value.

    Args:
        first: [N] bool, whether the first judge is right.
        second: [N] bool of the same pairs.

    Returns:
        The four counts and the p-value.

    Raises:
        ValueError: Lengths differ.

    Source: McNemar, Psychometrika 12 (1947) 153, in its exact form.
    """
    a, b = np.asarray(first, dtype=bool), np.asarray(second, dtype=bool)
    if a.ndim != 1 or a.shape != b.shape:
        raise ValueError(f"needed are two vectors of one length; got {a.shape} and {b.shape}.")
    one, two = int((a & ~b).sum()), int((~a & b).sum())
    p_value = stats.binomtest(one, one + two).pvalue if one + two else 1.0
    return McNemar(
        first_only=one,
        second_only=two,
        both=int((a & b).sum()),
        neither=int((~a & ~b).sum()),
        p_value=float(p_value),
    )


def accuracy_difference(
    first: ArrayLike,
    second: ArrayLike,
    cluster: NDArray[np.int64],
    *,
    generator: torch.Generator,
    resamples: int = 1_000,
    level: float = 0.95,
) -> Interval:
    """mean(first − second) over pairs that both judged, with prompts resampled whole.

    Args:
        first: [N] credit of the first judge in [0, 1]; NaN where it does not count.
        second: [N] of the second.
        cluster: [N] number of each pair's prompt.
        generator: A CPU generator.
        resamples: Bootstrap draws.
        level: Nominal coverage.

    Returns:
        The difference and its interval; NaN where no pair counts for both.
    """
    change = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    known = np.isfinite(change)
    if not known.any():
        return Interval(estimate=math.nan, low=math.nan, high=math.nan, level=level)
    _, index = np.unique(cluster[known], return_inverse=True)
    count = int(index.max()) + 1
    sums = cluster_sums(change[known], index, count)
    size = cluster_sums(np.ones(int(known.sum())), index, count)
    draws = ratio_draws(sums, size, generator=generator, resamples=resamples)[:, 0]
    return interval(float(change[known].mean()), draws, count, level=level)
