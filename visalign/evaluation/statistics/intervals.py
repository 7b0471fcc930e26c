# SPDX-License-Identifier: Apache-2.0
"""Intervals for held-out numbers: Wilson for one proportion, a paired bootstrap over prompts for a change."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats

_CHUNK = 4_000_000
"""Cluster draws held in memory at once (int64, so 32 MB)."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An estimate with its confidence interval; NaN ends mean that the data do not allow an interval."""

    estimate: float
    low: float
    high: float
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

    centre = (p + z²/2n) / (1 + z²/n),  half = z/(1 + z²/n) · √(p(1-p)/n + z²/4n²)

    Args:
        successes: How many of the trials succeeded.
        trials: How many there were; 0 gives NaN throughout.
        level: Nominal coverage in (0, 1).

    Returns:
        The proportion and its interval.

    Raises:
        ValueError: If successes lie outside 0..trials or the level outside (0, 1).

    Source: Wilson, J. Am. Stat. Assoc. 22 (1927) 209. It takes the trials as independent: with several seeds
    per prompt it is somewhat too narrow, which `paired_bootstrap` is not.
    """
    _check_level(level)
    if not 0 <= successes <= trials:
        raise ValueError(f"successes must lie in 0..trials; got {successes} of {trials}.")
    if trials == 0:
        return Interval(estimate=math.nan, low=math.nan, high=math.nan, level=level)
    z = float(stats.norm.ppf((1 + level) / 2))
    p = successes / trials
    shrink = 1 + z * z / trials
    centre = (p + z * z / (2 * trials)) / shrink
    half = z / shrink * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == trials else centre + half
    return Interval(estimate=p, low=low, high=high, level=level)


def paired_bootstrap(
    before: ArrayLike,
    after: ArrayLike,
    cluster: Sequence[Hashable] | NDArray,
    *,
    generator: torch.Generator,
    resamples: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """Interval of mean(after) - mean(before) on the same samples, resampling whole clusters (prompts).

    Two seeds of one prompt succeed or fail together, so prompts are drawn, not images; a drawn prompt brings
    all its differences: θ* = Σ_c d_c / Σ_c n_c. The ends are percentiles of θ*, widened for few clusters by
    Hesterberg's expansion: with K clusters α/2 becomes Φ(√(K/(K-1)) · t_{K-1}⁻¹(α/2)).

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

    Raises:
        ValueError: If the lengths differ, the level is outside (0, 1), or there are fewer than 100 resamples.

    Source: cluster bootstrap: Davison and Hinkley, Bootstrap Methods (1997), 3.8; expansion: Hesterberg,
    arXiv 1411.5279, section 4.
    """
    _check_level(level)
    if resamples < 100:
        raise ValueError(f"percentiles need at least 100 resamples; got {resamples}.")
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if first.ndim != 1 or first.shape != second.shape or len(cluster) != first.shape[0]:
        raise ValueError(
            f"before, after and cluster need one entry per sample in the same order; "
            f"got shapes {first.shape}, {second.shape} and {len(cluster)} labels."
        )
    change, size = _per_cluster(second - first, cluster)
    nowhere = Interval(estimate=math.nan, low=math.nan, high=math.nan, level=level)
    if size.shape[0] == 0:
        return nowhere
    estimate = float(change.sum() / size.sum())
    count = size.shape[0]
    if count < 2:
        return Interval(estimate=estimate, low=math.nan, high=math.nan, level=level)
    draws = _resample(change, size, resamples, generator)
    tail = expanded_tail(count, level=level)
    low, high = np.quantile(draws, [tail, 1 - tail])
    return Interval(estimate=estimate, low=float(low), high=float(high), level=level)


def expanded_tail(clusters: int, *, level: float = 0.95) -> float:
    """Tail probability that makes a percentile interval of few clusters as wide as Student's t would.

    Source: Hesterberg, arXiv 1411.5279, section 4 ("expanded percentile").
    """
    quantile = float(stats.t.ppf((1 - level) / 2, clusters - 1))
    return float(stats.norm.cdf(math.sqrt(clusters / (clusters - 1)) * quantile))


def _per_cluster(difference: NDArray, cluster: Sequence[Hashable] | NDArray) -> tuple[NDArray, NDArray]:
    """Sum and count of the finite differences of each cluster, clusters without any left out."""
    number: dict[Hashable, int] = {}
    index = np.array([number.setdefault(label, len(number)) for label in cluster], dtype=np.int64)
    finite = np.isfinite(difference)
    change = np.bincount(index[finite], weights=difference[finite], minlength=len(number))
    size = np.bincount(index[finite], minlength=len(number)).astype(np.float64)
    return change[size > 0], size[size > 0]


def _resample(change: NDArray, size: NDArray, resamples: int, generator: torch.Generator) -> NDArray:
    """[resamples] ratios Σ change / Σ size over clusters drawn with replacement, in bounded memory."""
    count = size.shape[0]
    rows = max(1, _CHUNK // count)
    draws = []
    for start in range(0, resamples, rows):
        shape = (min(rows, resamples - start), count)
        pick = torch.randint(count, shape, generator=generator).numpy()
        draws.append(change[pick].sum(1) / size[pick].sum(1))
    return np.concatenate(draws)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level is a coverage between 0 and 1, e.g. 0.95; got {level}.")
