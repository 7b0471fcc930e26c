# SPDX-License-Identifier: Apache-2.0
"""Intervals: Wilson for shares, and a bootstrap over clusters (prompts) for all other numbers.

Two seeds of one prompt succeed or fail together, so prompts are drawn, not images, and a drawn prompt brings
all that it has. Numbers that are asked for together see the same resamples. The ends are percentiles of the
draws, widened for few clusters by Hesterberg's expansion: with K clusters α/2 becomes
Φ(√(K/(K-1)) · t_{K-1}⁻¹(α/2)).

Source: Davison and Hinkley, Bootstrap Methods (1997), 3.8; Hesterberg, arXiv 1411.5279, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats

_CHUNK = 4_000_000
"""Weights held in memory at once (float64, so 32 MB)."""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its confidence interval; NaN ends mean that the data do not allow an interval."""

    estimate: float
    low: float = math.nan
    high: float = math.nan
    level: float = 0.95
    """Nominal coverage."""

    @property
    def excludes_zero(self) -> bool:
        """True where the whole interval lies on one side of zero (False for NaN ends)."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, float | None]:
        """JSON-able; NaN becomes None."""
        values = {"estimate": self.estimate, "low": self.low, "high": self.high, "level": self.level}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


def wilson_interval(successes: int, trials: int, *, level: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion; it stays inside [0, 1] and is usable at 0 and 1.

    centre = (p + z²/2n) / (1 + z²/n),  half = z/(1 + z²/n) · √(p(1-p)/n + z²/4n²); NaN without trials.

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927) 209. It takes the trials as independent; for several seeds
    per prompt there is `clustered_wilson`.
    """
    _check_level(level)
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must lie in 0..trials; got {successes} of {trials}.")
    if trials == 0:
        return Interval(estimate=math.nan, level=level)
    ends = stats.binomtest(successes, trials).proportion_ci(level, method="wilson")
    return Interval(estimate=successes / trials, low=float(ends.low), high=float(ends.high), level=level)


def clustered_wilson(
    outcome: ArrayLike, cluster: Sequence[Hashable] | NDArray, *, level: float = 0.95
) -> Interval:
    """Wilson's interval of a share of outcomes [N] (0 or 1) that come in clusters [N], such as prompts.

    `share_interval` with v the variance of the mean between clusters; n is its most. Where no cluster has two
    outcomes it is `wilson_interval`.
    """
    y = np.asarray(outcome, dtype=np.float64)
    index, clusters = cluster_index(cluster)
    n, hits = len(y), int(y.sum())
    if clusters == n or clusters < 2:
        return wilson_interval(hits, n, level=level)
    between = cluster_sums(y - hits / n, index, clusters)[:, 0]
    v = clusters / (clusters - 1) * float(between @ between) / n**2
    return share_interval(hits / n, v, clusters, level=level, most=n)


def share_interval(
    share: float, variance: float, clusters: int, *, level: float = 0.95, most: float = math.inf
) -> Interval:
    """Wilson's interval of a share p of which only the variance v between K clusters is known.

    n becomes p(1-p) / v, or `most` if that is less, and z becomes t_{K-1}; a share of 0 or 1, which shows no
    variance, counts each cluster once. Any other that shows none has ends that equal it.

    Source: Korn and Graubard, Survey Methodology 24 (1998) 193, for the effective sample size.
    """
    _check_level(level)
    if clusters < 2 or not math.isfinite(share):
        return Interval(estimate=share, level=level)
    if not variance and share not in (0.0, 1.0):
        return Interval(estimate=share, low=share, high=share, level=level)
    size = min(most, share * (1 - share) / variance) if variance > 0 else float(clusters)
    z2 = float(stats.t.ppf((1 - level) / 2, clusters - 1)) ** 2
    centre = (share + z2 / (2 * size)) / (1 + z2 / size)
    half = math.sqrt(z2) / (1 + z2 / size) * math.sqrt(share * (1 - share) / size + z2 / (4 * size**2))
    return Interval(estimate=share, low=max(centre - half, 0.0), high=min(centre + half, 1.0), level=level)


def paired_bootstrap(
    before: ArrayLike,
    after: ArrayLike,
    cluster: Sequence[Hashable] | NDArray,
    *,
    generator: torch.Generator,
    resamples: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """Interval of mean(after) - mean(before) on the same samples: θ* = Σ_c d_c / Σ_c n_c.

    Args:
        before: [N] outcomes (0/1 or any score); a pair with a NaN on either side is left out.
        after: [N] outcomes of the same samples in the same order.
        cluster: [N] labels; samples of one label are drawn together.
        generator: A CPU generator; the same state gives the same interval.
        resamples: Bootstrap draws.
        level: Nominal coverage in (0, 1).

    Returns:
        The change and its interval, in the unit of the input. The estimate is NaN without a complete pair;
        the ends are NaN with fewer than two clusters.
    """
    _check_level(level)
    _check_resamples(resamples)
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if first.ndim != 1 or first.shape != second.shape or len(cluster) != first.shape[0]:
        raise ValueError(
            f"before, after and cluster need one entry per sample in the same order; "
            f"got shapes {first.shape}, {second.shape} and {len(cluster)} labels."
        )
    change = second - first
    known = np.isfinite(change)
    if not known.any():
        return Interval(estimate=math.nan, level=level)
    _, index = np.unique(cluster_index(cluster)[0][known], return_inverse=True)
    table = RatioTable(index, int(index.max()) + 1)
    table.add("change", change[known], np.ones(int(known.sum())), share=False)
    return table.intervals(generator=generator, resamples=resamples, level=level)["change"]


def cluster_index(labels: Sequence[Hashable] | NDArray) -> tuple[NDArray[np.int64], int]:
    """Number labels [N] from zero in order of appearance: the numbers [N], and how many labels there are."""
    number: dict[Hashable, int] = {}
    index = np.array([number.setdefault(label, len(number)) for label in labels], dtype=np.int64)
    return index, len(number)


def cluster_sums(values: ArrayLike, index: NDArray[np.int64], count: int) -> Array:
    """Sums [C, M] of rows [N] or [N, M] by the number [N] of their cluster, 0 to `count` − 1."""
    table = np.asarray(values, dtype=np.float64)
    columns = (table[:, None] if table.ndim == 1 else table).T
    sums = [np.bincount(index, weights=column, minlength=count) for column in columns]
    return np.stack(sums, axis=1).astype(np.float64)


def resample_weights(count: int, *, generator: torch.Generator, resamples: int = 1_000) -> Iterator[Array]:
    """How often each of C clusters is drawn in each of R resamples: blocks [r, C] whose rows sum to C.

    The same state of the CPU generator gives the same weights; memory is bounded.
    """
    _check_resamples(resamples)
    rows = max(1, _CHUNK // max(count, 1))
    for start in range(0, resamples, rows):
        block = min(rows, resamples - start)
        drawn = torch.randint(count, (block, count), generator=generator).numpy()
        drawn += np.arange(block)[:, None] * count
        yield np.bincount(drawn.ravel(), minlength=block * count).reshape(block, count).astype(np.float64)


def resample_samples(
    index: NDArray[np.int64], count: int, *, generator: torch.Generator, resamples: int = 1_000
) -> Iterator[Array]:
    """Blocks [r, N]: how often each sample is drawn when its cluster `index` [N] is drawn whole."""
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
    """Draws [R, K] of numbers that are functions of sums over the samples; NaN where undefined.

    `sums` [C, M] are those of M columns within each cluster; `statistic` takes the column sums [r, M] of r
    resamples.
    """
    blocks = resample_weights(len(sums), generator=generator, resamples=resamples)
    return np.concatenate([statistic(weights @ sums) for weights in blocks])


def interval(estimate: float, draws: Array, clusters: int, *, level: float = 0.95) -> Interval:
    """Percentile interval of one number from its draws [R], widened for few clusters; NaN draws are left out.

    The ends are NaN with fewer than two clusters, or where more than half of the draws are undefined.
    """
    known = draws[np.isfinite(draws)]
    if clusters < 2 or not math.isfinite(estimate) or 2 * len(known) < len(draws) or not len(known):
        return Interval(estimate=estimate, level=level)
    tail = expanded_tail(clusters, level=level)
    low, high = np.quantile(known, [tail, 1 - tail])
    return Interval(estimate=estimate, low=float(low), high=float(high), level=level)


def drawn_share(estimate: float, draws: Array, clusters: int, *, level: float = 0.95) -> Interval:
    """`share_interval` with K/(K−1) times the variance of the draws [R], for an area under a curve.

    Percentiles of an AUROC hold it too seldom, as those of a share. Ends are NaN where `interval` has none.
    """
    known = draws[np.isfinite(draws)]
    if clusters < 2 or 2 * len(known) < len(draws):
        return Interval(estimate=estimate, level=level)
    return share_interval(estimate, float(known.var()) * clusters / (clusters - 1), clusters, level=level)


def fisher_interval(
    estimate: float, draws: Array, clusters: int, *, level: float = 0.95, left_out: Array | None = None
) -> Interval:
    """Interval of a correlation that grows with what is fitted in each of its draws [R].

    tanh(z − b ± t_{K−1} s) with z = artanh(estimate) and b the shift of the draws' median artanh from z: a
    fit to a resample looks better than the fit to the data by as much as that looks better than the truth. s
    is the deviation of the draws' artanh times √(K/(K−1)); or, as a fit to a resample with its repetitions
    varies too little, the jackknife's √((K−1)/K Σ_c (z_c − z̄)²) of the artanh of `left_out` [K], the
    estimates without each cluster. Ends are NaN where `interval` has none, and where s is 0, as it is of a
    perfect fit, which says nothing of its error.

    Source: Efron and Stein, Annals of Statistics 9 (1981) 586, for the jackknife.
    """
    known = draws[np.isfinite(draws)]
    if clusters < 2 or not math.isfinite(estimate) or 2 * len(known) < len(draws) or not len(known):
        return Interval(estimate=estimate, level=level)
    most = 1 - 1e-9
    z, found = (np.arctanh(np.clip(part, -most, most)) for part in (estimate, known))
    if left_out is None:
        s = found.std() * math.sqrt(clusters / (clusters - 1))
    else:
        s = np.arctanh(np.clip(left_out, -most, most)).std() * math.sqrt(clusters - 1)
    if s < 1e-12:
        return Interval(estimate=estimate, level=level)
    half = -float(stats.t.ppf((1 - level) / 2, clusters - 1)) * s
    middle = 2 * z - np.median(found)
    low, high = np.tanh([middle - half, middle + half])
    return Interval(estimate=estimate, low=float(low), high=float(high), level=level)


def jackknife_interval(estimate: float, left_out: Array, *, level: float = 0.95) -> Interval:
    """Interval of a correlation r from its values without each of the K clusters, `left_out` [K].

    tanh(artanh r ± t_{K−1} s / (1 − r²)) with s² = (K−1)/K Σ_c (r_c − r̄)². For few clusters: a resample that
    repeats half of ten images has ties, which widen percentiles of a rank correlation too much. The ends
    are NaN with fewer than three clusters, where a value is undefined, or where all are equal, as those of a
    perfect order are: they say nothing of its error.

    Source: Efron and Stein, Annals of Statistics 9 (1981) 586.
    """
    clusters = len(left_out)
    if clusters < 3 or not (math.isfinite(estimate) and np.isfinite(left_out).all()):
        return Interval(estimate=estimate, level=level)
    s = float(left_out.std()) * math.sqrt(clusters - 1)
    if np.ptp(left_out) < 1e-12 or abs(estimate) > 1 - 1e-12:
        return Interval(estimate=estimate, level=level)
    half = -float(stats.t.ppf((1 - level) / 2, clusters - 1)) * s / (1 - estimate**2)
    z = math.atanh(estimate)
    return Interval(estimate=estimate, low=math.tanh(z - half), high=math.tanh(z + half), level=level)


def expanded_tail(clusters: int, *, level: float = 0.95) -> float:
    """Tail probability that makes a percentile interval of few clusters as wide as Student's t would."""
    quantile = float(stats.t.ppf((1 - level) / 2, clusters - 1))
    return float(stats.norm.cdf(math.sqrt(clusters / (clusters - 1)) * quantile))


class RatioTable:
    """Many ratios Σ a / Σ b over samples in `count` clusters, whose intervals share the resamples."""

    def __init__(self, index: NDArray[np.int64], count: int) -> None:
        self._index, self._count = index, count
        self._sums: dict[Hashable, tuple[Array, Array]] = {}
        self._others: set[Hashable] = set()

    def add(self, key: Hashable, numerator: ArrayLike, denominator: ArrayLike, *, share: bool = True) -> None:
        """Sum samples: numerator [N] and denominator [N] of the ratio called `key`; `share` says that it is
        the share of something, which has its own interval.
        """
        both = cluster_sums(np.stack([numerator, denominator], axis=1), self._index, self._count)
        self._sums[key] = both[:, 0], both[:, 1]
        if not share:
            self._others.add(key)

    def add_macro(self, key: Hashable, numerator: ArrayLike, denominator: ArrayLike) -> None:
        """The mean over clusters of the ratio within each; those with nothing to divide by are left out."""
        both = cluster_sums(np.stack([numerator, denominator], axis=1), self._index, self._count)
        has = both[:, 1] > 0
        self._sums[key] = np.where(has, ratio(both[:, 0], both[:, 1]), 0.0), has.astype(np.float64)

    def intervals(
        self,
        *,
        generator: torch.Generator,
        resamples: int = 1_000,
        level: float = 0.95,
    ) -> dict[Hashable, Interval]:
        """key -> ratio with its interval.

        That of a share is `share_interval`'s, as percentiles of resamples hold a share too seldom and reach
        1 too early; one that is more than all of its denominator in some cluster, as a published way to count
        can make it, is none. Other ratios get percentiles; a few hundred cost one matrix product.
        """
        if not self._sums:
            return {}
        tops = np.stack([top for top, _ in self._sums.values()], axis=1)
        bottoms = np.stack([bottom for _, bottom in self._sums.values()], axis=1)
        estimates, clusters = ratio(tops.sum(0), bottoms.sum(0)), (bottoms > 0).sum(0)
        said = np.array([key not in self._others for key in self._sums], dtype=bool)
        shares = said & np.asarray(((tops >= 0) & (tops <= bottoms)).all(0), dtype=bool)
        rest = np.flatnonzero(~shares)
        draws = np.empty((0, 0))
        if len(rest):
            draws = bootstrap(
                np.concatenate([tops[:, rest], bottoms[:, rest]], axis=1),
                lambda sums: ratio(sums[:, : len(rest)], sums[:, len(rest) :]),
                generator=generator,
                resamples=resamples,
            )
        found: dict[Hashable, Interval] = {}
        for k, key in enumerate(self._sums):
            estimate, count = float(estimates[k]), int(clusters[k])
            if shares[k]:
                apart = tops[:, k] - estimate * bottoms[:, k]
                v = count / max(count - 1, 1) * float(apart @ apart) / max(bottoms[:, k].sum(), 1) ** 2
                found[key] = share_interval(estimate, v, count, level=level)
            else:
                own = draws[:, int(np.searchsorted(rest, k))]
                found[key] = interval(estimate, own, count, level=level)
        return found


def ratio(numerator: Array, denominator: Array) -> Array:
    """Element by element, NaN where the denominator is zero."""
    found = np.full(np.broadcast(numerator, denominator).shape, np.nan)
    np.divide(numerator, denominator, out=found, where=denominator > 0)
    return found


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is a coverage between 0 and 1, e.g. 0.95; got {level}.")


def _check_resamples(resamples: int) -> None:
    if resamples < 100:
        raise ValueError(f"percentiles need at least 100 resamples; got {resamples}.")
