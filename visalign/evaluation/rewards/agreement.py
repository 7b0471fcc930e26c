# SPDX-License-Identifier: Apache-2.0
"""Agreement of rewards on one set: rank correlations over all images and within prompts, and disagreements.

Over all images a correlation may come from prompts that every reward finds easy; an optimizer that compares
answers to one prompt sees only what is left within prompts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from visalign.evaluation.statistics.correlations import kendall, srcc, weighted_srcc
from visalign.evaluation.statistics.intervals import (
    Interval,
    bootstrap,
    bootstrap_samples,
    cluster_index,
    cluster_sums,
    interval,
    ratio,
)

RESAMPLES = 400
LEVEL = 0.95
FEWEST_PROMPTS = 8
"""Prompts below which the correlation within prompts has no interval."""
MOST_IMAGES = 4_000
"""Images beyond which an evenly spaced subset is used for the bootstrap of the overall correlation."""

Array = NDArray[np.float64]


def agreement(
    names: Sequence[str], values: ArrayLike, prompts: Sequence[Hashable], *, seed: int = 0, resamples: int = RESAMPLES
) -> list[dict[str, Any]]:
    """Measure the agreement of every two of M ≥ 2 rewards by scores [M, N], higher better, NaN where one failed.

    The bootstrap draws `prompts` [N]. Per pair: `first`, `second`, `images`, `overall` and `within` (Spearman, with
    its interval), `kendall_b`, `same_choice` (share of `pairs` of one prompt in the same order), `note`.
    """
    rows, (groups, _) = np.asarray(values, dtype=np.float64), cluster_index(prompts)
    pairs = combinations(zip(names, rows, strict=True), 2)
    return [
        {"first": first, "second": second, **_pair_agreement(x, y, groups, seed, resamples)}
        for (first, x), (second, y) in pairs
    ]


def _pair_agreement(x: Array, y: Array, groups: NDArray[np.int64], seed: int, resamples: int) -> dict[str, Any]:
    valid = np.isfinite(x) & np.isfinite(y)
    x, y, (groups, count) = x[valid], y[valid], cluster_index(groups[valid])
    undefined = {"estimate": None, "low": None, "high": None}
    report: dict[str, Any] = {"images": len(x), "overall": undefined, "within": undefined, "kendall_b": None}
    report |= {"same_choice": None, "pairs": 0, "note": None}
    if len(x) < 3:
        return report | {"note": f"{len(x)} images were scored by both; 3 are needed"}
    constant = [side for side, scores in (("first", x), ("second", y)) if np.ptp(scores) == 0]
    if constant:
        return report | {"note": f"the {constant[0]} gives all {len(x)} images the same score"}
    clusters, draws = _overall_draws(x, y, groups, seed, resamples)
    report["overall"] = _ends(interval(srcc(x, y), draws, clusters, level=LEVEL))
    report["kendall_b"] = kendall(x, y)
    generator = torch.Generator().manual_seed(seed)
    within, draws = within_groups(x, y, groups, generator=generator, resamples=resamples)
    enough = count if count >= FEWEST_PROMPTS else 1
    report["within"] = _ends(interval(within, draws, enough, level=LEVEL))
    report["same_choice"], report["pairs"] = same_order(x, y, groups)
    if report["within"]["estimate"] is None:
        report["note"] = "no prompt has two images that both rewards tell apart"
    return report


def _overall_draws(x: Array, y: Array, groups: NDArray[np.int64], seed: int, resamples: int) -> tuple[int, Array]:
    """Return the number of clusters drawn (prompts; of a single prompt, images), and the draws."""
    if not groups.any():
        groups = np.arange(len(x))
    if len(x) > MOST_IMAGES:
        rows = np.linspace(0, len(x) - 1, MOST_IMAGES).astype(int)
        x, y, groups = x[rows], y[rows], cluster_index(groups[rows])[0]
    generator, clusters = torch.Generator().manual_seed(seed), int(groups.max()) + 1
    draw = partial(weighted_srcc, x, y)
    return clusters, bootstrap_samples(draw, groups, clusters, generator=generator, resamples=resamples)


def _ends(number: Interval) -> dict[str, float | None]:
    return {name: value for name, value in number.to_dict().items() if name != "level"}


def _rows_by_group(groups: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    order = np.argsort(groups, kind="stable")
    yield from np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)


def same_order(x: Array, y: Array, groups: NDArray[np.int64]) -> tuple[float | None, int]:
    """Share and number of pairs of a group's images that both sides order alike; a side's equal pairs are left out."""
    same = decided = 0
    for rows in _rows_by_group(groups):
        signs = [np.sign(side[rows][:, None] - side[rows][None]) for side in (x, y)]
        product = np.triu(signs[0] * signs[1], 1)
        same += int((product > 0).sum())
        decided += int((product != 0).sum())
    return (same / decided if decided else None), decided


def within_groups(
    x: ArrayLike, y: ArrayLike, groups: NDArray[np.int64], *, generator: torch.Generator, resamples: int = RESAMPLES
) -> tuple[float, Array]:
    """Pearson's r of ranks within groups [N], pooled, and its draws over groups; NaN, none without a usable one."""
    a, b = (_within_ranks(np.asarray(side, dtype=np.float64), groups) for side in (x, y))
    sums = cluster_sums(np.stack([a * b, a * a, b * b], axis=1), groups, int(groups.max()) + 1)

    def pearson(totals: Array) -> Array:
        cross, xx, yy = totals.T
        return ratio(cross, np.sqrt(xx * yy))[:, None]

    estimate = float(pearson(sums.sum(0)[None])[0, 0])
    if not math.isfinite(estimate):
        return math.nan, np.zeros(0)
    return estimate, bootstrap(sums, pearson, generator=generator, resamples=resamples)[:, 0]


def _within_ranks(values: Array, groups: NDArray[np.int64]) -> Array:
    """Return average ranks within each group, centred and divided by its size: a group of one gives 0."""
    ranks = np.zeros(len(values))
    for rows in _rows_by_group(groups):
        ranks[rows] = (stats.rankdata(values[rows]) - (len(rows) + 1) / 2) / len(rows)
    return ranks


def percentiles(values: ArrayLike) -> Array:
    """Rank images among the scored, 0 (worst) to 1 (best); ties share the middle, NaN stays."""
    scores = np.asarray(values, dtype=np.float64)
    valid = np.isfinite(scores)
    ranks = np.full(len(scores), np.nan)
    ranks[valid] = (stats.rankdata(scores[valid]) - 1) / (valid.sum() - 1) if valid.sum() > 1 else 0.5
    return ranks


def largest_disagreements(x: ArrayLike, y: ArrayLike, *, most: int = 12) -> list[tuple[int, float, float]]:
    """Find the images on which two rewards [N] disagree most: (row, percentile by each), alternating directions."""
    valid = np.isfinite(np.asarray(x, dtype=float)) & np.isfinite(np.asarray(y, dtype=float))
    first, second = (percentiles(np.where(valid, side, np.nan)) for side in (x, y))
    gap = np.where(valid, first - second, 0.0)
    up = [row for row in np.argsort(-gap, kind="stable") if gap[row] > 0]
    down = [row for row in np.argsort(gap, kind="stable") if gap[row] < 0]
    turns = [row for pair in zip(up, down, strict=False) for row in pair]
    turns += up[len(down) :] + down[len(up) :]
    return [(int(row), float(first[row]), float(second[row])) for row in turns[:most]]
