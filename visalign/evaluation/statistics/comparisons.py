# SPDX-License-Identifier: Apache-2.0
"""Several judges on the same samples: McNemar's test over prompts, Holm, simultaneous intervals, power."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import signal, special, stats

from .intervals import Interval, cluster_index, cluster_sums, wilson_interval

Array = NDArray[np.float64]

EXACT = 2_000
"""Clusters up to which flips of several sizes are convolved; of more, the normal approximation is taken."""


def mcnemar(
    first: ArrayLike, second: ArrayLike, cluster: Sequence[Hashable] | None = None
) -> dict[str, int | float]:
    """Exact test of whether two judges are right equally often on the same samples.

    D_c = Σ (first − second) over cluster c. If neither judge is better, each D_c is as likely as −D_c, so
    p = P(|Σ ±|D_c|| ≥ |Σ D_c|) over all signs. With one sample per cluster that is McNemar's exact test.

    Args:
        first: [N] credit of one judge: right or not, or ½ where it ties.
        second: [N] of the other.
        cluster: [N] labels; samples of one label (a prompt) are flipped together. None: each for itself.

    Returns:
        `pairs`, N; `first_only` and `second_only`, how often one earns more than the other; `both`, `neither`
        where they earn the same (at least ½, less); `p_value`, two-sided, 1 where they never part.

    Source: McNemar, Psychometrika 12 (1947) 153, in its exact form.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or (cluster is not None and len(cluster) != len(a)):
        raise ValueError(f"needed are two vectors of one length, and their labels; got {a.shape}, {b.shape}.")
    halves = 2 * (a - b)
    if (halves != np.round(halves)).any():
        raise ValueError("a judge earns 0, ½ or 1 of a sample; got something else.")
    if cluster is not None:
        halves = cluster_sums(halves, *cluster_index(cluster))[:, 0]
    same = a == b
    counts = {"pairs": len(a), "first_only": int((a > b).sum()), "second_only": int((a < b).sum())}
    counts |= {"both": int((same & (a >= 0.5)).sum()), "neither": int((same & (a < 0.5)).sum())}
    return counts | {"p_value": _flip_test(halves.astype(np.int64))}


def _flip_test(change: NDArray[np.int64]) -> float:
    """P(|Σ ±|D_c|| ≥ |Σ D_c|) over all signs of the whole numbers D_c."""
    sizes, counts = np.unique(np.abs(change[change != 0]), return_counts=True)
    seen, total = abs(int(change.sum())), int(np.abs(change).sum())
    if not seen:
        return 1.0
    if len(sizes) > 1 and counts.sum() > EXACT:
        return float(2 * stats.norm.sf(seen / math.sqrt(float(np.sum(change.astype(float) ** 2)))))
    chance = np.ones(1)  # of Σ |D_c| over the positive ones, which is (total + Σ ±|D_c|) / 2
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        own = np.zeros(size * count + 1)
        own[::size] = stats.binom.pmf(np.arange(count + 1), count, 0.5)
        chance = signal.convolve(chance, own, method="direct" if len(chance) < 2_000 else "auto")
    beyond = chance[np.abs(2 * np.arange(total + 1) - total) >= seen]
    return float(min(1.0, max(0.0, beyond.sum())))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values that hold for all tests together: the k-th smallest of m times m − k + 1, never falling.

    Source: Holm, Scand. J. Statistics 6 (1979) 65.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    found, largest = [0.0] * len(p_values), 0.0
    for place, k in enumerate(order.tolist()):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[k]))
        found[k] = largest
    return found


def simultaneous_intervals(
    estimates: ArrayLike,
    draws: Array,
    clusters: int,
    *,
    level: float = 0.95,
    bounds: tuple[float, float] = (0.0, 1.0),
    left_out: Array | None = None,
) -> list[Interval]:
    """Intervals that hold for all numbers together with the nominal coverage: z_k ± c·s_k.

    z_k is the logit of where a number lies between its bounds, s_k the standard deviation of its draws there,
    c the quantile of max_k |z*_k − z_k| / s_k. With `left_out` the ends take the jackknife's deviation for
    s_k, and c grows as Student's t of K − 1 does: rank correlations of 60 prompts need both. Simulated
    without it: 96.7, 96.0, 95.7 % with 15, 40, 150 clusters.

    Args:
        estimates: [K].
        draws: [R, K] of one bootstrap.
        clusters: How many clusters were drawn from.
        level: Nominal coverage of all intervals together.
        bounds: Smallest and largest value that the numbers can have.
        left_out: [clusters, K], the numbers without each cluster.

    Returns:
        [K]; a share of exactly 0 or 1, which no draw moves, gets Wilson's interval over clusters by
        Bonferroni.

    Source: Davison and Hinkley, Bootstrap Methods (1997), 4.2; Westfall and Young (1993).
    """
    values, known = np.asarray(estimates, dtype=np.float64), draws[np.isfinite(draws).all(1)]
    if clusters < 2 or 2 * len(known) < len(draws):
        return [Interval(estimate=float(value), level=level) for value in values]
    (least, most), edge = bounds, 1 / (4 * clusters)

    def logit(value: Array) -> Array:
        return special.logit(np.clip((value - least) / (most - least), edge, 1 - edge))

    centre, known = logit(values), logit(known)
    std = known.std(0)
    moves = std > 0
    reach = 0.0
    if moves.any():
        farthest = (np.abs(known[:, moves] - centre[moves]) / std[moves]).max(1)
        reach = float(np.quantile(farthest, level))
    if left_out is not None:
        std = logit(left_out).std(0) * math.sqrt(clusters - 1)
        reach *= float(stats.t.ppf((1 + level) / 2, clusters - 1) / stats.norm.ppf((1 + level) / 2))
    found = []
    for value, place, spread in zip(values.tolist(), centre.tolist(), std.tolist(), strict=True):
        if not spread and value in (0.0, 1.0) and bounds == (0.0, 1.0):
            each = 1 - (1 - level) / len(values)
            one = wilson_interval(clusters * int(value), clusters, level=each)
            found.append(Interval(estimate=value, low=one.low, high=one.high, level=level))
            continue
        ends = special.expit(np.array([place - reach * spread, place + reach * spread]))
        low, high = least + (most - least) * ends
        found.append(Interval(estimate=value, low=min(low, value), high=max(high, value), level=level))
    return found


def cluster_std(change: ArrayLike, cluster: Sequence[Hashable]) -> float:
    """Standard deviation of the mean of `change` [N]: √(K/(K−1) · Σ_c (Σ_{i∈c} (d_i − d̄))²) / N."""
    d = np.asarray(change, dtype=np.float64)
    index, count = cluster_index(cluster)
    if count < 2:
        return math.nan
    sums = cluster_sums(d - d.mean(), index, count)[:, 0]
    return float(math.sqrt(count / (count - 1) * np.sum(sums**2)) / len(d))


def power(
    difference: float, std: float, samples: int, *, level: float = 0.95, chance: float = 0.8
) -> dict[str, float | int | None]:
    """How many samples a difference needs.

    n = N · ((z_{1−α/2} + z_chance) · std / difference)²

    Args:
        difference: As measured on N samples.
        std: Its standard deviation there.
        samples: N.
        level: 1 − α of the test that is to find it.
        chance: How likely it should find it.

    Returns:
        `smallest`: the difference that N samples find with that chance; `needed`: samples that find the
        measured one, None for a difference of zero; `chance`.
    """
    reach = float(stats.norm.ppf((1 + level) / 2) + stats.norm.ppf(chance)) * std
    needed = math.ceil(samples * (reach / difference) ** 2) if difference and math.isfinite(reach) else None
    return {"smallest": reach if math.isfinite(reach) else None, "needed": needed, "chance": chance}
