# SPDX-License-Identifier: Apache-2.0
"""Certainty of a reward: calibration, and how well its uncertainty predicts its errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.evaluation.statistics.agreement import HEADLINE, policy_credit
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
from visalign.evaluation.statistics.correlations import weighted_srcc
from visalign.evaluation.statistics.intervals import (
    Interval,
    bootstrap,
    bootstrap_samples,
    cluster_index,
    finite,
    interval,
    paired_bootstrap,
    ratio,
)
from visalign.evaluation.statistics.selective import auroc, risk_coverage, weighted_auroc

from .judged_pairs import IntervalSettings, JudgedPairs

Array = NDArray[np.float64]

COVERAGES = (0.25, 0.5, 0.75, 1.0)
FOLDS = 5


def calibration_numbers(
    judged: JudgedPairs, settings: IntervalSettings, *, mean_nll: Interval, mean_brier: Interval, reading: str
) -> dict[str, Any]:
    """Compute NLL, Brier, ECE, the reliability diagram, and the same after scaling, JSON-able.

    The ECE has no interval: noise in the bins only adds to it, so its resamples miss the truth. `ece_noise`
    is the ECE that noise alone would give a calibrated reward on these clusters.
    """
    p, y = both_sides(judged.prob, judged.label)
    curve = reliability(p, y, bins=settings.bins)
    # per cluster: sums of probabilities and of outcomes in each bin, and the number of pairs
    bins, clusters = bin_index(p, settings.bins), np.append(judged.index, judged.index)
    sums = np.zeros((judged.clusters, 2 * settings.bins + 1))
    for first_column, column in ((0, p), (settings.bins, y)):
        np.add.at(sums, (clusters, bins + first_column), column)
    sums[:, -1] = np.bincount(clusters, minlength=judged.clusters)

    def weighted_gaps(totals: Array) -> Array:
        confidence, frequency, count = np.split(totals, [settings.bins, 2 * settings.bins], axis=1)
        return (frequency - confidence) / count

    noise = bootstrap(sums, weighted_gaps, **settings.drawing()) - weighted_gaps(sums.sum(0)[None])
    temperature = fit_temperature(judged.margin, judged.label)
    return {
        "reading": reading,
        "nll": mean_nll.to_dict(),
        "brier": mean_brier.to_dict(),
        "ece": Interval(estimate=curve.ece, level=settings.level).to_dict(),
        "ece_noise": float(np.abs(noise).sum(1).mean()),
        "mce": curve.mce,
        "bins": _bins(curve),
        "temperature": finite(temperature.value),
        "scaled": _scaled(judged, settings.bins),
    }


def _scaled(judged: JudgedPairs, bins: int) -> dict[str, Any] | None:
    p = cross_fitted(judged, judged.std)
    if p is None:
        return None
    curve = reliability(*both_sides(p, judged.label), bins=bins)
    return {
        "by": "margin" if judged.std is None else "margin and std",
        "nll": float(nll(p, judged.label).mean()),
        "brier": float(brier(p, judged.label).mean()),
        "ece": curve.ece,
        "mce": curve.mce,
        "bins": _bins(curve),
    }


def cross_fitted(judged: JudgedPairs, std: Array | None) -> Array | None:
    """Scale probabilities [n] by fits to the prompts of other folds; None where there is a single prompt."""
    if judged.clusters < 2:
        return None
    return cross_fitted_temperature(judged.margin, judged.label, judged.index % FOLDS, std)


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
    """Measure how well margin, std, and both (the scaled probability) predict the reward's errors; None if all tied.

    Signal -> AUROC of errors on the `pairs` that people and reward decided, AURC, risk at some coverages (a tie is
    half an error), and its curve.
    """
    decided = judged.label != 0.5
    if not decided.any():
        return None
    credit = policy_credit(HEADLINE, judged.margin[decided], judged.label[decided])[0]
    signals = {"margin": -np.abs(judged.margin)}
    if judged.std is not None:
        signals["std"] = judged.std
        p = cross_fitted(judged, judged.std)
        if p is not None:
            signals["both"] = -np.abs(p - 0.5)
    return {
        name: _signal_numbers(signal[decided], credit, judged.index[decided], settings)
        for name, signal in signals.items()
    }


def _signal_numbers(
    uncertainty: Array, credit: Array, index: NDArray[np.int64], settings: IntervalSettings
) -> dict[str, Any]:
    decided = credit != 0.5
    wrong, signal = credit[decided] < 0.5, uncertainty[decided]
    area = Interval(estimate=math.nan)
    if decided.any():
        numbers, clusters = cluster_index(index[decided])
        areas = partial(weighted_auroc, signal, wrong)
        draws = bootstrap_samples(areas, numbers, clusters, **settings.drawing())
        area = interval(auroc(signal, wrong), draws, clusters, level=settings.level)
    curve = risk_coverage(uncertainty, 1 - credit)
    step = max(1, len(curve.coverage) // 100)
    points = np.unique(np.append(np.arange(0, len(curve.coverage), step), len(curve.coverage) - 1))
    return {
        "auroc": area.to_dict(),
        "pairs": int(decided.sum()),
        "aurc": curve.area,
        "risk_at": {f"{coverage:.0%}": curve.at(coverage) for coverage in COVERAGES},
        "curve": [[float(curve.coverage[k]), float(curve.risk[k])] for k in points],
    }


def std_numbers(judged: JudgedPairs, settings: IntervalSettings) -> dict[str, Any] | None:
    """Measure whether the std predicts the noise of people's votes, and what it adds to the margin; None without a
    std.

    `srcc_votes` is its rank correlation with the chance that two of a pair's people differ, `srcc_votes_given_margin`
    with |margin| held fixed; `nll_gain` is what scaling by it adds, nats, cross-fitted.
    """
    if judged.std is None:
        return None
    votes = np.array([pair.votes or (0, 0, 0) for pair in judged.pairs], dtype=np.float64)
    total = votes.sum(1)
    repeated = total > 1
    disagreement = 1 - ratio((votes * (votes - 1)).sum(1), total * (total - 1))
    undefined = Interval(estimate=math.nan, level=settings.level)
    numbers = dict.fromkeys(("srcc_votes", "srcc_votes_given_margin", "nll_gain"), undefined)
    sides = [disagreement[repeated], judged.std[repeated], np.abs(judged.margin[repeated])]
    if repeated.sum() > 2 and all(np.ptp(side) > 0 for side in sides[:2]):
        index, clusters = cluster_index(judged.index[repeated])
        correlations = partial(_rank_correlations, sides)
        draws = bootstrap_samples(correlations, index, clusters, **settings.drawing())
        estimates = correlations(np.ones((1, len(index))))[0]
        for k, name in enumerate(("srcc_votes", "srcc_votes_given_margin")):
            numbers[name] = interval(float(estimates[k]), draws[:, k], clusters, level=settings.level)
    by_margin, by_both = (cross_fitted(judged, std) for std in (None, judged.std))
    if by_margin is not None and by_both is not None:
        numbers["nll_gain"] = paired_bootstrap(
            nll(by_both, judged.label),
            nll(by_margin, judged.label),
            judged.index,
            **settings.drawing(),
            level=settings.level,
        )
    return {"pairs": int(repeated.sum())} | {name: number.to_dict() for name, number in numbers.items()}


def _rank_correlations(sides: Sequence[Array], weights: Array) -> Array:
    """Return Spearman's ρ [R, 2] of a and b under weights, and with c held fixed."""
    a, b, c = sides
    ab, ac, bc = (weighted_srcc(x, y, weights) for x, y in ((a, b), (a, c), (b, c)))
    # partial correlation: (ρ_ab − ρ_ac ρ_bc) / √((1 − ρ_ac²)(1 − ρ_bc²))
    return np.stack([ab, ratio(ab - ac * bc, np.sqrt((1 - ac**2) * (1 - bc**2)))], axis=1)
