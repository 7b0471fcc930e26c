# SPDX-License-Identifier: Apache-2.0
"""What a judge's certainty is worth: calibration, and whether it knows its errors, for the report."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.evaluation.statistics.agreement import HEADLINE, credits_of
from visalign.evaluation.statistics.calibration import (
    Reliability,
    bin_index,
    both_sides,
    brier,
    cross_fitted_temperature,
    fit_temperature,
    nll,
    reliability,
)
from visalign.evaluation.statistics.generator_control import FOLDS
from visalign.evaluation.statistics.intervals import Interval, bootstrap, interval, resample_samples
from visalign.evaluation.statistics.selective import auroc, risk_coverage, weighted_auroc

from .judged_pairs import IntervalSettings, JudgedPairs

Array = NDArray[np.float64]

COVERAGES = (0.25, 0.5, 0.75, 1.0)


def calibration_numbers(
    judged: JudgedPairs,
    settings: IntervalSettings,
    *,
    mean_nll: Interval,
    mean_brier: Interval,
    reading: str,
) -> dict[str, Any]:
    """NLL, Brier, ECE, the reliability diagram, and the same after temperature scaling, JSON-able.

    `reading` says how the probability was read from what the judge said. The interval of the ECE lies rather
    high: sampling noise in the bins only adds to it.
    """
    p, y = both_sides(judged.prob, judged.label)
    curve = reliability(p, y, bins=settings.bins)
    place = bin_index(p, settings.bins)
    sums = np.zeros((judged.clusters, 3 * settings.bins))
    both = np.append(judged.index, judged.index)
    for k, column in enumerate((np.ones_like(p), p, y)):
        np.add.at(sums, (both, place + k * settings.bins), column)

    def ece(totals: Array) -> Array:
        count, confidence, frequency = np.split(totals, 3, axis=1)
        return (np.abs(frequency - confidence).sum(1) / count.sum(1))[:, None]

    draws = bootstrap(sums, ece, **settings.drawing())[:, 0]
    temperature = fit_temperature(judged.margin, judged.label)
    return {
        "reading": reading,
        "nll": mean_nll.to_dict(),
        "brier": mean_brier.to_dict(),
        "ece": interval(curve.ece, draws, judged.clusters, level=settings.level).to_dict(),
        "mce": curve.mce,
        "bins": _bins(curve),
        "temperature": temperature.value if math.isfinite(temperature.value) else None,
        "scaled": _scaled(judged, settings.bins),
    }


def _scaled(judged: JudgedPairs, bins: int) -> dict[str, Any] | None:
    """NLL, Brier and ECE after temperature scaling, each prompt with the temperature of other prompts."""
    fold = judged.index % FOLDS
    if len(np.unique(fold)) < 2:
        return None
    p = cross_fitted_temperature(judged.margin, judged.label, fold)
    curve = reliability(*both_sides(p, judged.label), bins=bins)
    return {
        "nll": float(nll(p, judged.label).mean()),
        "brier": float(brier(p, judged.label).mean()),
        "ece": curve.ece,
        "mce": curve.mce,
        "bins": _bins(curve),
    }


def _bins(curve: Reliability) -> list[dict[str, float | None]]:
    return [
        {
            "low": float(curve.edges[k]),
            "high": float(curve.edges[k + 1]),
            "count": float(curve.count[k]) / 2,
            "confidence": finite(curve.confidence[k]),
            "frequency": finite(curve.frequency[k]),
        }
        for k in range(len(curve.count))
    ]


def selective_numbers(judged: JudgedPairs, settings: IntervalSettings) -> dict[str, Any] | None:
    """Does the judge know when it is wrong: by its std where it gives one, and by the size of its margin.

    Pairs that people tied are left out. Returns signal -> AUROC of the errors, AURC, risk at some coverages,
    the curve; None where people tied all.
    """
    known = judged.label != 0.5
    if not known.any():
        return None
    credit = credits_of(HEADLINE, judged.margin[known], judged.label[known])[0]
    found = {"margin": _one_signal(-np.abs(judged.margin[known]), credit, judged.index[known], settings)}
    if judged.std is not None:
        found["std"] = _one_signal(judged.std[known], credit, judged.index[known], settings)
    return found


def _one_signal(
    uncertainty: Array, credit: Array, index: NDArray[np.int64], settings: IntervalSettings
) -> dict[str, Any]:
    wrong = credit < 0.5
    _, numbers = np.unique(index, return_inverse=True)
    clusters = int(numbers.max()) + 1
    blocks = resample_samples(numbers, clusters, **settings.drawing())
    draws = np.concatenate([weighted_auroc(uncertainty, wrong, weights) for weights in blocks])
    curve = risk_coverage(uncertainty, 1 - credit)
    step = max(1, len(curve.coverage) // 100)
    places = np.unique(np.append(np.arange(0, len(curve.coverage), step), len(curve.coverage) - 1))
    return {
        "auroc": interval(auroc(uncertainty, wrong), draws, clusters, level=settings.level).to_dict(),
        "aurc": curve.area,
        "risk_at": {f"{coverage:.0%}": curve.at(coverage) for coverage in COVERAGES},
        "curve": [[float(curve.coverage[k]), float(curve.risk[k])] for k in places],
    }


def finite(value: float) -> float | None:
    """The number, or None for what JSON does not have."""
    return float(value) if math.isfinite(value) else None
