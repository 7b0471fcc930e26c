# SPDX-License-Identifier: Apache-2.0
"""Agreement of heatmaps of faults with the truth, and coverage of their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from visalign.evaluation.statistics.correlations import plcc
from visalign.evaluation.statistics.selective import auroc

THRESHOLD = 0.5
"""Heat from which a cell counts as wrong."""


@dataclass(frozen=True, kw_only=True)
class HeatmapQuality:
    """Agreement of N maps with their truth; NaN where no image is of the kind that is counted."""

    correlation: float
    """Pearson's r of heat and truth over all cells of the images with a wrong cell."""
    auc: float
    """AUROC of wrong against right cells of an image, mean over images that have both."""
    iou: float
    """Cells hot and wrong over cells hot or wrong, mean over the images with a wrong cell."""
    found: float
    """Share of those images with a hot cell."""
    alarms: float
    """Share of the images without a wrong cell that have a hot cell."""
    error: float
    """Mean absolute error over all cells."""


def heatmap_quality(heat: ArrayLike, truth: ArrayLike) -> HeatmapQuality:
    """Compare maps with the truth; a cell is hot, or wrong, from `THRESHOLD` on.

    Args:
        heat: [N, h, w] in [0, 1].
        truth: [N, h, w] in [0, 1], 1 where the image is wrong.
    """
    maps, target = (np.asarray(part, dtype=np.float64) for part in (heat, truth))
    hot, wrong = maps >= THRESHOLD, target >= THRESHOLD
    faulty = wrong.any((1, 2))
    mixed = faulty & ~wrong.all((1, 2))
    areas = [auroc(cells.ravel(), labels.ravel()) for cells, labels in zip(maps[mixed], wrong[mixed], strict=True)]
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
    """Return level p -> share of the cells whose truth lies in the central Laplace interval.

    The interval is heat ± b·ln(1/(1 − p)) with b = s/√2, of centres heat [*] with standard deviations s [*];
    with right deviations the share is p.
    """
    centre, deviation, target = (np.asarray(part, dtype=np.float64) for part in (heat, std, truth))
    error, scale = np.abs(centre - target), deviation / math.sqrt(2)
    return {level: float((error <= -math.log1p(-level) * scale).mean()) for level in levels}
