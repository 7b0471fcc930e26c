# SPDX-License-Identifier: Apache-2.0
"""What a judge's certainty is worth: calibration, and whether it knows its errors, for the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    scaled_nll,
)
from visalign.evaluation.statistics.correlations import weighted_srcc
from visalign.evaluation.statistics.generator_control import FOLDS
from visalign.evaluation.statistics.intervals import (
    Interval,
    bootstrap,
    cluster_index,
    cluster_sums,
    drawn_share,
    interval,
    ratio,
    resample_samples,
)
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
    """NLL, Brier, ECE, the reliability diagram, and the same after scaling (margin, and std), JSON-able.

    `reading` says how the probability was read from what the judge said. The ECE has no interval: noise in
    the bins only adds to it, so that its resamples miss the truth; `ece_noise` is what noise alone, with the
    clusters of this set, would show of a judge that is calibrated.
    """
    p, y = both_sides(judged.prob, judged.label)
    curve = reliability(p, y, bins=settings.bins)
    place = bin_index(p, settings.bins)
    sums = np.zeros((judged.clusters, 2 * settings.bins + 1))
    both = np.append(judged.index, judged.index)
    for k, column in enumerate((p, y)):
        np.add.at(sums, (both, place + k * settings.bins), column)
    np.add.at(sums, (both, np.full_like(place, 2 * settings.bins)), 1.0)

    def apart(totals: Array) -> Array:
        confidence, frequency, count = np.split(totals, [settings.bins, 2 * settings.bins], axis=1)
        return (frequency - confidence) / count

    noise = bootstrap(sums, apart, **settings.drawing()) - apart(sums.sum(0)[None])
    temperature = fit_temperature(judged.margin, judged.label)
    return {
        "reading": reading,
        "nll": mean_nll.to_dict(),
        "brier": mean_brier.to_dict(),
        "ece": Interval(estimate=curve.ece, level=settings.level).to_dict(),
        "ece_noise": float(np.abs(noise).sum(1).mean()),
        "mce": curve.mce,
        "bins": _bins(curve),
        "temperature": temperature.value if math.isfinite(temperature.value) else None,
        "scaled": _scaled(judged, settings.bins),
    }


def _scaled(judged: JudgedPairs, bins: int) -> dict[str, Any] | None:
    """NLL, Brier and ECE after scaling by margin and std, each prompt with the scaling of other prompts."""
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
    """[n] scaled probabilities, folds by prompt; None where a single prompt leaves nothing to fit them on."""
    fold = judged.index % FOLDS
    if len(np.unique(fold)) < 2:
        return None
    return cross_fitted_temperature(judged.margin, judged.label, fold, std)


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
    """Does the judge know when it is wrong: by the size of its margin, by its std, and by both together.

    Pairs that people tied are left out. Returns signal -> AUROC of the errors on the `pairs` that the judge
    decided (a predicted tie is no error and no hit), AURC and risk at some coverages with half an error for a
    predicted tie, the curve; None where people tied all. "both" orders by the scaled probability.
    """
    known = judged.label != 0.5
    if not known.any():
        return None
    credit = credits_of(HEADLINE, judged.margin[known], judged.label[known])[0]
    signals = {"margin": -np.abs(judged.margin)}
    if judged.std is not None:
        signals["std"] = judged.std
        p = cross_fitted(judged, judged.std)
        if p is not None:
            signals["both"] = -np.abs(p - 0.5)
    return {
        name: _one_signal(signal[known], credit, judged.index[known], settings)
        for name, signal in signals.items()
    }


def _one_signal(
    uncertainty: Array, credit: Array, index: NDArray[np.int64], settings: IntervalSettings
) -> dict[str, Any]:
    decided = credit != 0.5
    wrong, value = credit[decided] < 0.5, uncertainty[decided]
    area = Interval(estimate=math.nan)
    if decided.any():
        numbers, clusters = cluster_index(index[decided])
        blocks = resample_samples(numbers, clusters, **settings.drawing())
        draws = np.concatenate([weighted_auroc(value, wrong, weights) for weights in blocks])
        area = drawn_share(auroc(value, wrong), draws, clusters, level=settings.level)
    curve = risk_coverage(uncertainty, 1 - credit)
    step = max(1, len(curve.coverage) // 100)
    places = np.unique(np.append(np.arange(0, len(curve.coverage), step), len(curve.coverage) - 1))
    return {
        "auroc": area.to_dict(),
        "pairs": int(decided.sum()),
        "aurc": curve.area,
        "risk_at": {f"{coverage:.0%}": curve.at(coverage) for coverage in COVERAGES},
        "curve": [[float(curve.coverage[k]), float(curve.risk[k])] for k in places],
    }


def std_numbers(judged: JudgedPairs, settings: IntervalSettings) -> dict[str, Any] | None:
    """Does the std say how noisy people's votes are, and what does it add to the margin?

    Returns `pairs` with two votes or more; `srcc_votes`, rank correlation of the std with the chance that two
    people vote differently; `srcc_votes_given_margin`, the same with the ranks of |margin| held fixed;
    `nll_gain`, by how many nats a pair scaling by margin and std beats scaling by the margin alone, both
    cross-fitted. None for a judge without a std.
    """
    if judged.std is None:
        return None
    votes = np.array([pair.votes or (0, 0, 0) for pair in judged.pairs], dtype=np.float64)
    many = votes.sum(1) > 1
    total = votes.sum(1)
    differ = 1 - ratio((votes * (votes - 1)).sum(1), total * (total - 1))
    found: dict[str, Any] = {"pairs": int(many.sum())}
    sides = [differ[many], judged.std[many], np.abs(judged.margin[many])]
    nothing = Interval(estimate=math.nan, level=settings.level).to_dict()
    found |= {"srcc_votes": nothing, "srcc_votes_given_margin": nothing, "nll_gain": nothing}
    if many.sum() > 2 and all(np.ptp(side) > 0 for side in sides[:2]):
        index, clusters = cluster_index(judged.index[many])
        blocks = resample_samples(index, clusters, **settings.drawing())
        draws = np.concatenate([_rank_correlations(sides, weights) for weights in blocks])
        own = _rank_correlations(sides, np.ones((1, len(index))))[0]
        for place, name in enumerate(("srcc_votes", "srcc_votes_given_margin")):
            number = interval(float(own[place]), draws[:, place], clusters, level=settings.level)
            found[name] = number.to_dict()
    p = [cross_fitted(judged, std) for std in (None, judged.std)]
    if p[0] is not None and p[1] is not None:
        gain = float(np.mean(nll(p[0], judged.label) - nll(p[1], judged.label)))
        draws = _gain_draws(judged, judged.std, settings)
        number = interval(gain, draws + gain, judged.clusters, level=settings.level)
        found["nll_gain"] = number.to_dict()
    return found


def _gain_draws(judged: JudgedPairs, std: Array, settings: IntervalSettings) -> Array:
    """[R] deviations of the cross-fitted gain, both scalings searched anew on a grid in every resample."""
    shares, places = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.99]), np.geomspace(0.05, 20.0, 20)
    unit = float(np.std(judged.margin)) or 1.0
    table = np.concatenate(
        [scaled_nll(judged.margin, std, judged.label, r, unit * places) for r in shares], 1
    )
    sums = cluster_sums(table, judged.index, judged.clusters)
    fold = np.arange(judged.clusters) % FOLDS
    blocks = [np.where((fold == number)[:, None], sums, 0.0) for number in range(FOLDS)]
    count = cluster_sums(np.ones(len(judged.margin)), judged.index, judged.clusters)

    def gain(totals: Array) -> Array:
        inside = totals[:, :-1].reshape(len(totals), FOLDS, -1)
        outside = inside.sum(1, keepdims=True) - inside
        alone = outside[:, :, : len(places) + 1].argmin(2)[:, :, None]
        both = outside.argmin(2)[:, :, None]
        won = np.take_along_axis(inside, alone, 2) - np.take_along_axis(inside, both, 2)
        return won.sum((1, 2))[:, None] / totals[:, -1:]

    whole = np.concatenate([*blocks, count], axis=1)
    return bootstrap(whole, gain, **settings.drawing())[:, 0] - gain(whole.sum(0)[None])[0, 0]


def _rank_correlations(sides: Sequence[Array], weights: Array) -> Array:
    """[R, 2] Spearman's ρ of the first two under weights, and with the third held fixed:
    (ρ_ab − ρ_ac ρ_bc) / √((1 − ρ_ac²)(1 − ρ_bc²))."""
    a, b, c = sides
    ab, ac, bc = (weighted_srcc(x, y, weights) for x, y in ((a, b), (a, c), (b, c)))
    left = (1 - ac**2) * (1 - bc**2)
    return np.stack([ab, ratio(ab - ac * bc, np.sqrt(left))], axis=1)


def finite(value: float) -> float | None:
    """The number, or None for what JSON does not have."""
    return float(value) if math.isfinite(value) else None
