# SPDX-License-Identifier: Apache-2.0
"""How well heatmaps of faults agree with the truth, and whether their uncertainty covers their errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .correlations import plcc
from .selective import auroc

THRESHOLD = 0.5
"""Heat from which a cell counts as wrong."""


@dataclass(frozen=True, kw_only=True)
class HeatmapQuality:
    """Agreement of N maps with their truth; NaN where no image is of the kind that is counted."""

    correlation: float
    """Pearson's r of heat and truth over all cells of the images with a wrong cell together; NaN where one
    of the two is the same everywhere."""
    auc: float
    """Probability that a wrong cell is hotter than a right one of its image, mean over the images that
    have both."""
    iou: float
    """Cells hot and wrong over cells hot or wrong, mean over the images with a wrong cell."""
    found: float
    """Share of those images with a hot cell."""
    alarms: float
    """Share of the images without a wrong cell in which some cell is hot."""
    error: float
    """Mean absolute error over all cells."""


def heatmap_quality(heat: ArrayLike, truth: ArrayLike) -> HeatmapQuality:
    """Compare maps with what is wrong in truth; a cell is hot, or wrong, from `THRESHOLD` on.

    Args:
        heat: [N, h, w] in [0, 1].
        truth: [N, h, w] in [0, 1], 1 where it is wrong.
    """
    maps, target = _maps(heat, truth)
    hot, wrong = maps >= THRESHOLD, target >= THRESHOLD
    faulty = wrong.any((1, 2))
    mixed = faulty & ~wrong.all((1, 2))
    areas = [auroc(one.ravel(), two.ravel()) for one, two in zip(maps[mixed], wrong[mixed], strict=True)]
    some = bool(faulty.any())
    varies = some and all(np.ptp(side[faulty]) > 0 for side in (maps, target))
    both, either = (hot & wrong)[faulty].sum((1, 2)), (hot | wrong)[faulty].sum((1, 2))
    return HeatmapQuality(
        correlation=plcc(maps[faulty].ravel(), target[faulty].ravel()) if varies else math.nan,
        auc=float(np.mean(areas)) if areas else math.nan,
        iou=float((both / either).mean()) if some else math.nan,
        found=float(hot[faulty].any((1, 2)).mean()) if some else math.nan,
        alarms=math.nan if faulty.all() else float(hot[~faulty].any((1, 2)).mean()),
        error=float(np.abs(maps - target).mean()),
    )


def laplace_coverage(
    heat: ArrayLike, std: ArrayLike, truth: ArrayLike, levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95)
) -> dict[float, float]:
    """Share of the cells whose truth lies in the central interval of a Laplace distribution, by its level p.

    The interval is heat ± b·ln(1/(1 − p)) with b = s/√2; p itself is the share if the deviations are right.

    Args:
        heat: [*] centres.
        std: [*] standard deviations s.
        truth: [*].
        levels: p of each interval, in (0, 1).
    """
    centre, deviation, target = (np.asarray(part, dtype=np.float64) for part in (heat, std, truth))
    if centre.shape != target.shape or deviation.shape != target.shape or not target.size:
        raise ValueError(
            f"heat, std and truth must have one shape with at least one cell; got {centre.shape}, "
            f"{deviation.shape} and {target.shape}."
        )
    if not np.isfinite([centre, deviation, target]).all() or not all(0 < level < 1 for level in levels):
        raise ValueError(f"All cells must be finite and levels between 0 and 1; the levels are {levels}.")
    off, scale = np.abs(centre - target), deviation / math.sqrt(2)
    return {level: float((off <= -math.log1p(-level) * scale).mean()) for level in levels}


def _maps(heat: ArrayLike, truth: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    maps, target = (np.asarray(part, dtype=np.float64) for part in (heat, truth))
    if maps.ndim != 3 or maps.shape != target.shape or not maps.size:
        raise ValueError(f"Maps and truth must be [N, h, w] alike; got {maps.shape} and {target.shape}.")
    if not np.isfinite([maps, target]).all():
        raise ValueError("Maps and truth must be finite; leave out the rows that could not be judged.")
    return maps, target
