# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals: Wilson's for a share of independent trials, a cluster bootstrap for everything else.

Two seeds of one prompt succeed or fail together, so the bootstrap draws prompts, not images; a drawn prompt
brings all its samples. The ends are percentiles of the draws, widened for few clusters by Hesterberg's
expansion: with K clusters the tail α/2 becomes Φ(√(K/(K−1)) · t_{K−1}⁻¹(α/2)).

Source: Davison and Hinkley, Bootstrap Methods (1997), 3.8; Hesterberg, arXiv 1411.5279, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats

_CHUNK = 4_000_000
"""Weights held in memory at once (float64, so 32 MB)."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its confidence interval; the ends are NaN where the data do not allow one."""

    estimate: float
    low: float = math.nan
    high: float = math.nan
    level: float = 0.95  # Nominal coverage

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise ValueError(f"level is {self.level}; it must lie between 0 and 1.")

    @property
    def excludes_zero(self) -> bool:
        """True where the whole interval lies on one side of zero; False for NaN ends."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, float | None]:
        """Return the four numbers, JSON-able; NaN becomes None."""
        values = {"estimate": self.estimate, "low": self.low, "high": self.high, "level": self.level}
        return {name: finite(value) for name, value in values.items()}


def finite(value: float) -> float | None:
    """Return the number, or None where JSON has none."""
    return float(value) if math.isfinite(value) else None


def wilson_interval(successes: float, trials: int, *, level: float = 0.95) -> Interval:
    """Compute Wilson's score interval of a proportion of independent trials, a tie half a success; NaN without trials.

    centre = (p + z²/2n) / (1 + z²/n),  half = z/(1 + z²/n) · √(p(1−p)/n + z²/4n²)

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927) 209.
    """
    if trials == 0:
        return Interval(estimate=math.nan, level=level)
    p, z = successes / trials, float(stats.norm.ppf((1 + level) / 2))
    centre = (p + z**2 / 2 / trials) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(p * (1 - p) / trials + (z / 2 / trials) ** 2)
    low, high = centre - half if p > 0 else 0.0, centre + half if p < 1 else 1.0
    return Interval(estimate=p, low=low, high=high, level=level)


def share_interval(outcome: ArrayLike, cluster: Sequence[Hashable] | NDArray, *, level: float = 0.95) -> Interval:
    """Compute the interval of a share of outcomes [N] (0 or 1) that come in clusters [N], such as prompts.

    Wilson's where every cluster has one outcome or there is a single cluster; else the bootstrap over
    clusters with a fixed seed.
    """
    outcomes = np.asarray(outcome, dtype=np.float64)
    index, clusters = cluster_index(cluster)
    if clusters == len(outcomes) or clusters < 2:
        return wilson_interval(float(outcomes.sum()), len(outcomes), level=level)
    drawing: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "resamples": 1_000, "level": level}
    return paired_bootstrap(0 * outcomes, outcomes, index, share=True, **drawing)


def paired_bootstrap(
    before: ArrayLike,
    after: ArrayLike,
    cluster: Sequence[Hashable] | NDArray,
    *,
    generator: torch.Generator,
    resamples: int = 10_000,
    level: float = 0.95,
    share: bool = False,
) -> Interval:
    """Compute mean(after) − mean(before) on the same samples [N] with its interval over clusters.

    θ* = Σ_c d_c / Σ_c n_c over the drawn clusters c: samples with one label are drawn together. Pairs with a
    NaN on either side are left out; without any left the estimate is NaN, with fewer than two clusters the
    ends are. The same state of the CPU generator gives the same interval. `share` is as of `RatioTable.add`.
    """
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if not len(first) == len(second) == len(cluster):  # one entry would broadcast
        sizes = len(first), len(second), len(cluster)
        raise ValueError(f"before, after and cluster need one entry per sample; got {sizes}.")
    change = second - first
    valid = np.isfinite(change)
    if not valid.any():
        return Interval(estimate=math.nan, level=level)
    index, clusters = cluster_index(cluster_index(cluster)[0][valid])
    table = RatioTable(index, clusters)
    table.add("change", change[valid], np.ones(int(valid.sum())), share=share)
    return table.intervals(generator=generator, resamples=resamples, level=level)["change"]


def cluster_index(labels: Sequence[Hashable] | NDArray) -> tuple[NDArray[np.int64], int]:
    """Number labels [N] from zero in order of appearance; return the numbers [N] and the count of labels."""
    number: dict[Hashable, int] = {}
    index = np.array([number.setdefault(label, len(number)) for label in labels], dtype=np.int64)
    return index, len(number)


def cluster_sums(values: ArrayLike, index: NDArray[np.int64], count: int) -> Array:
    """Sum rows [N] or [N, M] by the number [N] of their cluster, 0 to `count` − 1: [count, M]."""
    table = np.asarray(values, dtype=np.float64)
    columns = (table[:, None] if table.ndim == 1 else table).T
    sums = [np.bincount(index, weights=column, minlength=count) for column in columns]
    return np.stack(sums, axis=1).astype(np.float64)


def resample_weights(count: int, *, generator: torch.Generator, resamples: int = 1_000) -> Iterator[Array]:
    """Draw `count` clusters with replacement; yield blocks [r, count] of how often each was drawn."""
    rows = max(1, _CHUNK // max(count, 1))
    for start in range(0, resamples, rows):
        block = min(rows, resamples - start)
        drawn = torch.randint(count, (block, count), generator=generator).numpy()
        drawn += np.arange(block)[:, None] * count  # one bincount for all draws of the block
        yield np.bincount(drawn.ravel(), minlength=block * count).reshape(block, count).astype(np.float64)


def bootstrap_samples(
    statistic: Callable[[Array], Array],
    index: NDArray[np.int64],
    count: int,
    *,
    generator: torch.Generator,
    resamples: int = 1_000,
) -> Array:
    """Draw R numbers of whole clusters `index` [N]; `statistic` maps the draws [r, N] of each sample to r."""
    rows = max(1, _CHUNK // max(len(index), 1))
    blocks = resample_weights(count, generator=generator, resamples=resamples)
    parts = (block[start : start + rows, index] for block in blocks for start in range(0, len(block), rows))
    return np.concatenate([statistic(weights) for weights in parts])


def bootstrap(
    sums: Array, statistic: Callable[[Array], Array], *, generator: torch.Generator, resamples: int = 1_000
) -> Array:
    """Draw numbers [R, K]: `statistic` of the column sums [r, M] of [C, M] in each cluster; NaN where undefined."""
    blocks = resample_weights(len(sums), generator=generator, resamples=resamples)
    return np.concatenate([statistic(weights @ sums) for weights in blocks])


def interval(estimate: float, draws: Array, clusters: int, *, level: float = 0.95) -> Interval:
    """Percentile interval of draws [R]; NaN ends with fewer than two clusters, half of the draws undefined, or all
    equal, as of a correlation of 1: no resample says anything about its error.
    """
    valid = draws[np.isfinite(draws)]
    if clusters < 2 or not math.isfinite(estimate) or 2 * len(valid) < len(draws) or are_equal(valid):
        return Interval(estimate=estimate, level=level)
    tail = expanded_tail(clusters, level=level)
    low, high = np.quantile(valid, [tail, 1 - tail])
    return Interval(estimate=estimate, low=float(low), high=float(high), level=level)


def are_equal(values: Array) -> bool:
    """Check that numbers, of which there may be none, differ by rounding alone."""
    return not len(values) or bool(np.ptp(values) <= 1e-9 * np.abs(values).max())


def expanded_tail(clusters: int, *, level: float = 0.95) -> float:
    """Tail probability that makes a percentile interval of few clusters as wide as Student's t would."""
    quantile = float(stats.t.ppf((1 - level) / 2, clusters - 1))
    return float(stats.norm.cdf(math.sqrt(clusters / (clusters - 1)) * quantile))


class RatioTable:
    """Many ratios Σ a / Σ b over samples in `count` clusters, whose intervals share the resamples."""

    def __init__(self, index: NDArray[np.int64], count: int) -> None:
        self._index, self._count = index, count
        self._sums: dict[Hashable, tuple[Array, Array, bool]] = {}

    def add(
        self, key: Hashable, numerator: ArrayLike, denominator: ArrayLike, *, share: bool = True, macro: bool = False
    ) -> None:
        """Add the ratio `key` of numerator [N] and denominator [N]; `share` marks a ratio within [0, 1].

        `macro` is the mean over clusters of the ratio within each, those with a zero denominator left out.
        """
        top, bottom = cluster_sums(np.stack([numerator, denominator], axis=1), self._index, self._count).T
        if macro:
            top, bottom = np.where(bottom > 0, ratio(top, bottom), 0.0), (bottom > 0).astype(float)
        self._sums[key] = top, bottom, share

    def intervals(
        self, *, generator: torch.Generator, resamples: int = 1_000, level: float = 0.95
    ) -> dict[Hashable, Interval]:
        """Return key -> ratio with its interval: Wilson's, by clusters, for a share that no draw moves."""
        if not self._sums:
            return {}
        size = len(self._sums)
        tops, bottoms = (np.stack([entry[k] for entry in self._sums.values()], axis=1) for k in (0, 1))
        estimates, clusters = ratio(tops.sum(0), bottoms.sum(0)), (bottoms > 0).sum(0)
        draws = bootstrap(
            np.concatenate([tops, bottoms], axis=1),
            lambda sums: ratio(sums[:, :size], sums[:, size:]),
            generator=generator,
            resamples=resamples,
        )
        intervals: dict[Hashable, Interval] = {}
        for k, (key, (*_, share)) in enumerate(self._sums.items()):
            estimate, count = float(estimates[k]), int(clusters[k])
            if count < 2 or not are_equal(draws[np.isfinite(draws[:, k]), k]):
                intervals[key] = interval(estimate, draws[:, k], count, level=level)
            elif share:
                intervals[key] = wilson_interval(count * estimate, count, level=level)
            else:  # such as the change from a policy to itself
                intervals[key] = Interval(estimate=estimate, low=estimate, high=estimate, level=level)
        return intervals


def ratio(numerator: Array, denominator: Array) -> Array:
    """Divide element by element; NaN where the denominator is zero."""
    quotient = np.full(np.broadcast(numerator, denominator).shape, np.nan)
    np.divide(numerator, denominator, out=quotient, where=denominator > 0)
    return quotient
