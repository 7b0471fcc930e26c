# SPDX-License-Identifier: Apache-2.0
"""Several rewards on the same samples: McNemar's test over prompts, Holm's correction, power."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from .intervals import cluster_index, cluster_sums

EXACT = 2_000
"""Clusters up to which the exact distribution is computed; beyond, the normal approximation."""


def mcnemar(first: ArrayLike, second: ArrayLike, cluster: Sequence[Hashable] | None = None) -> dict[str, int | float]:
    """Test exactly whether two rewards are right equally often on the same samples.

    D_c = Σ (first − second) over cluster c of credits [N] 0, ½ (a tie) or 1. If neither reward is better,
    each D_c is as likely as −D_c, so p = P(|Σ ±|D_c|| ≥ |Σ D_c|) over all signs. Without clusters (prompts)
    each sample is one: McNemar's exact test.

    `first_only` and `second_only` of the N `pairs` count how often one earns more than the other; the two-sided
    `p_value` is 1 where they never differ. Source: McNemar, Psychometrika 12 (1947) 153, in its exact form.
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    halves = 2 * (a - b)
    if cluster is not None:
        halves = cluster_sums(halves, *cluster_index(cluster))[:, 0]
    return {
        "pairs": len(a),
        "first_only": int((a > b).sum()),
        "second_only": int((a < b).sum()),
        "p_value": _sign_flip_test(np.round(halves).astype(np.int64)),
    }


def _sign_flip_test(change: NDArray[np.int64]) -> float:
    """Compute P(|Σ ±|D_c|| ≥ |Σ D_c|) over all signs of the whole numbers D_c."""
    sizes = np.abs(change[change != 0])
    observed, total = abs(int(change.sum())), int(sizes.sum())
    if not observed:
        return 1.0
    if len(sizes) > EXACT:
        return float(2 * stats.norm.sf(observed / math.sqrt(float(np.sum(sizes.astype(float) ** 2)))))
    # distribution of the sum of the |D_c| with a positive sign, which is (total + Σ ±|D_c|) / 2
    chance = np.zeros(total + 1)
    chance[0] = 1.0
    for size in sizes.tolist():
        chance = chance / 2
        chance[size:] += chance[: total + 1 - size].copy()
    beyond = np.abs(2 * np.arange(total + 1) - total) >= observed
    return float(min(1.0, chance[beyond].sum()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct m p-values for multiple tests: the k-th smallest times m − k + 1, never falling, at most 1.

    Source: Holm, Scand. J. Statistics 6 (1979) 65.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, k in enumerate(np.argsort(p_values, kind="stable").tolist()):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[k]))
        corrected[k] = largest
    return corrected


def cluster_std(change: ArrayLike, cluster: Sequence[Hashable]) -> float:
    """Standard deviation of the mean of `change` [N]: √(K/(K−1) · Σ_c (Σ_{i∈c} (d_i − d̄))²) / N."""
    d = np.asarray(change, dtype=np.float64)
    index, count = cluster_index(cluster)
    if count < 2:
        return math.nan
    sums = cluster_sums(d - d.mean(), index, count)[:, 0]
    return float(math.sqrt(count / (count - 1) * np.sum(sums**2)) / len(d))


def power(difference: float, std: float, samples: int, *, level: float = 0.95) -> dict[str, float | int | None]:
    """Compute how many samples a difference needs: n = N · ((z_{1−α/2} + z_chance) · std / difference)².

    The difference and its standard deviation are measured on N = samples; the test has the level 1 − α and
    finds it with the probability `chance`, 0.8. `smallest` is the difference that N samples find so, `needed`
    the samples that find the measured one, None for a difference of zero.
    """
    chance = 0.8  # the usual power of a planned comparison
    smallest = float(stats.norm.ppf((1 + level) / 2) + stats.norm.ppf(chance)) * std
    if not math.isfinite(smallest):
        return {"smallest": None, "needed": None, "chance": chance}
    needed = math.ceil(samples * (smallest / difference) ** 2) if difference else None
    return {"smallest": smallest, "needed": needed, "chance": chance}
