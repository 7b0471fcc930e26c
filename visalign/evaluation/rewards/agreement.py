# SPDX-License-Identifier: Apache-2.0
"""How far rewards agree on one set: rank correlations over all and within prompts, and where they part.

Over all images a correlation may come from prompts that every reward finds easy; an optimizer that compares
answers to one prompt sees only what is left within prompts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
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
    cluster_index,
    cluster_sums,
    fisher_interval,
    interval,
    ratio,
    resample_weights,
)

RESAMPLES = 400
LEVEL = 0.95
FEWEST_PROMPTS = 8
"""With fewer prompts nothing is said of how sure the number within is; of one alone, images are resampled."""
MOST_IMAGES = 4_000
"""More images than this are thinned out, evenly, for the bootstrap of the overall correlation."""

Array = NDArray[np.float64]


def agreement(
    names: Sequence[str],
    values: ArrayLike,
    prompts: Sequence[Hashable],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> list[dict[str, Any]]:
    """Every two rewards.

    Args:
        names: M rewards.
        values: [M, N] scores, higher better, NaN where a reward did not judge.
        prompts: [N], what groups the images.
        seed: Of the bootstrap over prompts.
        resamples: Its draws.

    Returns:
        Per pair: `first`, `second`, `images` (judged by both), `overall` and `within` (Spearman with the ends
        of its interval), `kendall_b`, `same_choice` (share of the pairs of one prompt that both put in the
        same order), `pairs`, `note` where something is not defined.
    """
    table = np.asarray(values, dtype=np.float64)
    if table.shape != (len(names), len(prompts)):
        raise ValueError(
            f"values are {table.shape}; needed are {len(names)} rewards × {len(prompts)} images."
        )
    if len(names) < 2:
        raise ValueError("agreement takes two rewards or more.")
    groups, _ = cluster_index(prompts)
    return [
        {"first": names[a], "second": names[b], **_two(table[a], table[b], groups, seed, resamples)}
        for a, b in combinations(range(len(names)), 2)
    ]


def _two(x: Array, y: Array, groups: NDArray[np.int64], seed: int, resamples: int) -> dict[str, Any]:
    known = np.isfinite(x) & np.isfinite(y)
    x, y, groups = x[known], y[known], cluster_index(groups[known])[0]
    nothing = {"estimate": None, "low": None, "high": None}
    report: dict[str, Any] = {"images": len(x), "overall": nothing, "within": nothing, "kendall_b": None}
    report |= {"same_choice": None, "pairs": 0, "note": None}
    if len(x) < 3:
        return report | {"note": f"{len(x)} images were judged by both; 3 are needed"}
    flat = [side for side, values in (("first", x), ("second", y)) if np.ptp(values) == 0]
    if flat:
        return report | {"note": f"the {flat[0]} gives all {len(x)} images the same score"}
    count = int(groups.max()) + 1
    clusters, draws = _overall_draws(x, y, groups, seed, resamples)
    of_few = fisher_interval if count < FEWEST_PROMPTS else interval
    report["overall"] = _ends(of_few(srcc(x, y), draws, clusters, level=LEVEL))
    report["kendall_b"] = kendall(x, y)
    generator = torch.Generator().manual_seed(seed)
    within, draws = within_groups(x, y, groups, generator=generator, resamples=resamples)
    known_within = draws if count >= FEWEST_PROMPTS else draws[:0]
    report["within"] = _ends(fisher_interval(within, known_within, count, level=LEVEL))
    same, report["pairs"] = same_order(x, y, groups)
    report["same_choice"] = same
    if report["within"]["estimate"] is None:
        report["note"] = (
            "no prompt has two images that both rewards tell apart, so nothing is said within prompts"
        )
    return report


def within_ranks(values: ArrayLike, groups: NDArray[np.int64]) -> Array:
    """Average ranks within each group, centred and divided by its size: a group of one gives 0."""
    table = np.asarray(values, dtype=np.float64)
    found = np.zeros(len(table))
    order = np.argsort(groups, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        found[rows] = (stats.rankdata(table[rows]) - (len(rows) + 1) / 2) / len(rows)
    return found


def same_order(x: Array, y: Array, groups: NDArray[np.int64]) -> tuple[float | None, int]:
    """Share of the pairs of images of one group that both sides order alike, and how many pairs there are.

    Pairs that a side finds equal are left out.
    """
    same = decided = 0
    order = np.argsort(groups, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        signs = [np.sign(side[rows][:, None] - side[rows][None]) for side in (x, y)]
        product = np.triu(signs[0] * signs[1], 1)
        same += int((product > 0).sum())
        decided += int((product != 0).sum())
    return (same / decided if decided else None), decided


def _overall_draws(
    x: Array, y: Array, groups: NDArray[np.int64], seed: int, resamples: int
) -> tuple[int, Array]:
    """How many clusters are drawn, prompts or of a single prompt the images, and the draws."""
    if not groups.any():
        groups = np.arange(len(x))
    if len(x) > MOST_IMAGES:
        rows = np.linspace(0, len(x) - 1, MOST_IMAGES).astype(int)
        x, y, groups = x[rows], y[rows], cluster_index(groups[rows])[0]
    generator, clusters = torch.Generator().manual_seed(seed), int(groups.max()) + 1
    blocks = resample_weights(clusters, generator=generator, resamples=resamples)
    return clusters, np.concatenate([weighted_srcc(x, y, block[:, groups]) for block in blocks])


def _ends(number: Interval) -> dict[str, float | None]:
    return {name: value for name, value in number.to_dict().items() if name != "level"}


def within_groups(
    x: ArrayLike,
    y: ArrayLike,
    groups: NDArray[np.int64],
    *,
    generator: torch.Generator,
    resamples: int = RESAMPLES,
) -> tuple[float, Array]:
    """Pearson's r of the ranks within groups [N], pooled, and its draws [resamples] over whole groups.

    NaN, and no draws, where no group has two samples that both sides tell apart.
    """
    a, b = (within_ranks(side, groups) for side in (x, y))
    sums = cluster_sums(np.stack([a * b, a * a, b * b], axis=1), groups, int(groups.max()) + 1)

    def pearson(totals: Array) -> Array:
        cross, xx, yy = totals.T
        return ratio(cross, np.sqrt(xx * yy))[:, None]

    estimate = float(pearson(sums.sum(0)[None])[0, 0])
    if not math.isfinite(estimate):
        return math.nan, np.zeros(0)
    return estimate, bootstrap(sums, pearson, generator=generator, resamples=resamples)[:, 0]


def percentiles(values: ArrayLike) -> Array:
    """Where each image stands among the judged, 0 (worst) to 1 (best); ties share the middle, NaN stays."""
    table = np.asarray(values, dtype=np.float64)
    known = np.isfinite(table)
    found = np.full(len(table), np.nan)
    if known.sum() > 1:
        found[known] = (stats.rankdata(table[known]) - 1) / (known.sum() - 1)
    elif known.any():
        found[known] = 0.5
    return found


def parted(x: ArrayLike, y: ArrayLike, *, most: int = 12) -> list[tuple[int, float, float]]:
    """Images on which two rewards [N] part most: (row, percentile by the first, by the second), widest first.

    The two directions take turns, so that both are seen.
    """
    known = np.isfinite(np.asarray(x, dtype=float)) & np.isfinite(np.asarray(y, dtype=float))
    first, second = (percentiles(np.where(known, side, np.nan)) for side in (x, y))
    gap = np.where(known, first - second, 0.0)
    up = [row for row in np.argsort(-gap, kind="stable") if gap[row] > 0]
    down = [row for row in np.argsort(gap, kind="stable") if gap[row] < 0]
    turns = [row for pair in zip(up, down, strict=False) for row in pair]
    turns += up[len(down) :] + down[len(up) :]
    return [(int(row), float(first[row]), float(second[row])) for row in turns[:most]]


def prompts_apart(x: ArrayLike, y: ArrayLike, prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Prompts [N] within which two rewards' scores [N] order the images least alike, at most ten.

    Returns `prompt`, `same_choice` (share of its pairs in the same order), `pairs`; the least alike first.
    """
    sides = [np.asarray(side, dtype=np.float64) for side in (x, y)]
    known = np.isfinite(sides[0]) & np.isfinite(sides[1])
    rows_of: dict[str, list[int]] = {}
    for row in np.flatnonzero(known):
        rows_of.setdefault(prompts[int(row)], []).append(int(row))
    found = []
    for prompt, rows in rows_of.items():
        same, pairs = same_order(sides[0][rows], sides[1][rows], np.zeros(len(rows), dtype=np.int64))
        if same is not None and same < 1:
            found.append({"prompt": prompt, "same_choice": same, "pairs": pairs})
    return sorted(found, key=lambda row: (row["same_choice"], -row["pairs"]))[:10]
