# SPDX-License-Identifier: Apache-2.0
"""Bootstrap over clusters (prompts) for many numbers at once: all of them see the same resamples."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from .intervals import Interval, expanded_tail, wilson_interval

_CHUNK = 4_000_000
"""Weights held in memory at once (float64, so 32 MB)."""

Array = NDArray[np.float64]


def cluster_index(labels: Sequence[Hashable] | NDArray) -> tuple[NDArray[np.int64], int]:
    """Number labels from zero in order of appearance.

    Args:
        labels: [N].

    Returns:
        [N] numbers, and how many labels there are.
    """
    number: dict[Hashable, int] = {}
    index = np.array([number.setdefault(label, len(number)) for label in labels], dtype=np.int64)
    return index, len(number)


def cluster_sums(values: ArrayLike, index: NDArray[np.int64], count: int) -> Array:
    """Sum rows by cluster.

    Args:
        values: [N] or [N, M], finite.
        index: [N] cluster of each row.
        count: How many clusters there are, C.

    Returns:
        [C, M] (M = 1 for a vector).
    """
    table = np.asarray(values, dtype=np.float64)
    table = table[:, None] if table.ndim == 1 else table
    found = np.zeros((count, table.shape[1]))
    for place, column in enumerate(table.T):
        found[:, place] = np.bincount(index, weights=column, minlength=count)
    return found


def resample_weights(count: int, *, generator: torch.Generator, resamples: int = 1_000) -> Iterator[Array]:
    """How often each cluster is drawn in each resample, in blocks of bounded memory.

    Args:
        count: Clusters, C.
        generator: A CPU generator; the same state gives the same weights.
        resamples: R in all.

    Returns:
        Blocks [r, C] whose rows sum to C.

    Raises:
        ValueError: Fewer than 100 resamples.
    """
    if resamples < 100:
        raise ValueError(f"percentiles need at least 100 resamples; got {resamples}.")
    rows = max(1, _CHUNK // max(count, 1))
    for start in range(0, resamples, rows):
        block = min(rows, resamples - start)
        drawn = torch.randint(count, (block, count), generator=generator).numpy()
        drawn += np.arange(block)[:, None] * count
        yield np.bincount(drawn.ravel(), minlength=block * count).reshape(block, count).astype(np.float64)


def resample_samples(
    index: NDArray[np.int64], count: int, *, generator: torch.Generator, resamples: int = 1_000
) -> Iterator[Array]:
    """How often each sample is drawn when clusters are drawn whole, for numbers that are no ratios of sums.

    Args:
        index: [N] cluster of each sample.
        count: Clusters.
        generator: A CPU generator.
        resamples: R in all.

    Returns:
        Blocks [r, N].
    """
    rows = max(1, _CHUNK // max(len(index), 1))
    for block in resample_weights(count, generator=generator, resamples=resamples):
        for start in range(0, len(block), rows):
            yield block[start : start + rows, index]


def bootstrap(
    sums: Array,
    statistic: Callable[[Array], Array],
    *,
    generator: torch.Generator,
    resamples: int = 1_000,
) -> Array:
    """Draws of any numbers that are functions of sums over the samples.

    Args:
        sums: [C, M] sums of M columns within each cluster.
        statistic: [r, M] column sums of r resamples -> [r, K] numbers.
        generator: A CPU generator.
        resamples: R.

    Returns:
        [R, K] draws; NaN where a resample does not define the number.

    Source: cluster bootstrap: Davison and Hinkley, Bootstrap Methods (1997), 3.8.
    """
    blocks = resample_weights(len(sums), generator=generator, resamples=resamples)
    return np.concatenate([statistic(weights @ sums) for weights in blocks])


def ratio_draws(
    numerator: Array, denominator: Array, *, generator: torch.Generator, resamples: int = 1_000
) -> Array:
    """Draws of θ*_m = Σ_c w_c a_cm / Σ_c w_c b_cm: means, accuracies and shares, clusters drawn whole.

    Args:
        numerator: [C, M] sums within each cluster.
        denominator: [C, M] weights or counts within each cluster.
        generator: A CPU generator.
        resamples: R.

    Returns:
        [R, M]; NaN where a resample holds nothing to divide by.
    """
    columns = numerator.shape[1]

    def divide(sums: Array) -> Array:
        return ratio(sums[:, :columns], sums[:, columns:])

    both = np.concatenate([numerator, denominator], axis=1)
    return bootstrap(both, divide, generator=generator, resamples=resamples)


def interval(estimate: float, draws: Array, clusters: int, *, level: float = 0.95) -> Interval:
    """Percentile interval of one number, widened for few clusters as in `intervals`.

    Args:
        estimate: The number on the whole sample.
        draws: [R]; NaN are left out.
        clusters: How many clusters were resampled.
        level: Nominal coverage in (0, 1).

    Returns:
        The interval; NaN ends with fewer than two clusters or when more than half of the draws are undefined.
    """
    known = draws[np.isfinite(draws)]
    if clusters < 2 or not math.isfinite(estimate) or 2 * len(known) < len(draws) or not len(known):
        return Interval(estimate=estimate, low=math.nan, high=math.nan, level=level)
    tail = expanded_tail(clusters, level=level)
    low, high = np.quantile(known, [tail, 1 - tail])
    return Interval(estimate=estimate, low=float(low), high=float(high), level=level)


class RatioTable:
    """Many ratios Σ a / Σ b over one set of samples, whose intervals come from the same resamples.

    Args:
        index: [N] cluster of each sample.
        count: Clusters, C.
    """

    def __init__(self, index: NDArray[np.int64], count: int) -> None:
        self._index, self._count = index, count
        self._sums: dict[Hashable, tuple[Array, Array]] = {}

    def add(self, key: Hashable, numerator: ArrayLike, denominator: ArrayLike) -> None:
        """Sum samples: numerator [N] and denominator [N] of the ratio called `key`."""
        both = cluster_sums(np.stack([numerator, denominator], axis=1), self._index, self._count)
        self._sums[key] = both[:, 0], both[:, 1]

    def add_macro(self, key: Hashable, numerator: ArrayLike, denominator: ArrayLike) -> None:
        """The mean over clusters of the ratio within each; those with nothing to divide by are left out."""
        both = cluster_sums(np.stack([numerator, denominator], axis=1), self._index, self._count)
        has = both[:, 1] > 0
        self._sums[key] = np.where(has, ratio(both[:, 0], both[:, 1]), 0.0), has.astype(np.float64)

    def intervals(
        self, *, generator: torch.Generator, resamples: int = 1_000, level: float = 0.95
    ) -> dict[Hashable, Interval]:
        """key -> ratio with its interval; a few hundred of them cost one matrix product."""
        if not self._sums:
            return {}
        tops = np.stack([top for top, _ in self._sums.values()], axis=1)
        bottoms = np.stack([bottom for _, bottom in self._sums.values()], axis=1)
        draws = ratio_draws(tops, bottoms, generator=generator, resamples=resamples)
        estimates = ratio(tops.sum(0), bottoms.sum(0))
        clusters = (bottoms > 0).sum(0)
        return {
            key: _interval_of_ratio(float(estimates[k]), draws[:, k], int(clusters[k]), level)
            for k, key in enumerate(self._sums)
        }


def _interval_of_ratio(estimate: float, draws: Array, clusters: int, level: float) -> Interval:
    """The percentile interval; of a share of exactly 0 or 1, which no resample can move, Wilson's over
    clusters."""
    if clusters > 1 and estimate in (0.0, 1.0) and bool((draws[np.isfinite(draws)] == estimate).all()):
        return wilson_interval(clusters * int(estimate), clusters, level=level)
    return interval(estimate, draws, clusters, level=level)


def ratio(numerator: Array, denominator: Array) -> Array:
    """Element by element, NaN where the denominator is zero."""
    found = np.full(np.broadcast(numerator, denominator).shape, np.nan)
    np.divide(numerator, denominator, out=found, where=denominator > 0)
    return found
