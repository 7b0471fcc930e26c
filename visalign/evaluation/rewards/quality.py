# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a reward on a quality set: correlations with mean opinion scores, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from visalign.data.sets.records import QualitySet
from visalign.evaluation.statistics.correlations import (
    LogisticFit,
    fit_logistic,
    kendall,
    plcc,
    srcc,
    weighted_kendall,
    weighted_pearson,
    weighted_srcc,
)
from visalign.evaluation.statistics.intervals import bootstrap_samples, cluster_index, finite, interval
from visalign.evaluation.statistics.selective import risk_coverage

from .agreement import within_groups
from .certainty import COVERAGES
from .judged_pairs import IntervalSettings
from .pair_scores import count_reasons, fill_reasons
from .slices import slice_masks

Array = NDArray[np.float64]

SMALLEST_SLICE = 10
"""Images below which a slice gets no correlation."""
FEWEST = 15
"""Clusters below which intervals of correlations are rough."""


@dataclass(frozen=True, kw_only=True)
class QualityScores:
    """Scores of one reward on N images; a failed image is NaN and has a reason."""

    name: str
    unit: str
    value: Array  # [N]
    reasons: tuple[str | None, ...]
    std: Array | None = None  # [N] in the same unit
    higher_is_better: bool = True

    @property
    def judged(self) -> NDArray[np.bool_]:
        """[N] True where there is a value."""
        return np.isfinite(self.value)

    @property
    def oriented(self) -> Array:
        """[N] values turned so that higher is better."""
        return self.value if self.higher_is_better else -self.value

    def failures(self) -> dict[str, int]:
        """Return reason -> number of images, most frequent first."""
        return count_reasons(self.reasons, self.judged)


def from_values(
    name: str,
    unit: str,
    value: ArrayLike,
    *,
    std: ArrayLike | None = None,
    reasons: Sequence[str | None] | None = None,
    higher_is_better: bool = True,
) -> QualityScores:
    """Build quality scores from values [N], NaN where the reward failed, with `reasons` [N] why."""
    values = np.asarray(value, dtype=np.float64)
    return QualityScores(
        name=name,
        unit=unit,
        value=np.where(np.isfinite(values), values, np.nan),
        reasons=fill_reasons(values, reasons),
        std=None if std is None else np.asarray(std, dtype=np.float64),
        higher_is_better=higher_is_better,
    )


def opinions(records: QualitySet) -> Array:
    """Return mean opinion scores [N] turned so that higher is better."""
    return np.array([record.mos for record in records.records]) * (1 if records.higher_is_better else -1)


def evaluate_quality(
    records: QualitySet, scores: QualityScores, settings: IntervalSettings | None = None
) -> dict[str, Any]:
    """Compute all numbers of one reward on one quality set; images without a score are left out, and counted.

    Scores are in the order of the images; they and the opinions are turned so that higher is better. JSON-able:
    `judge`, `counts`, `correlations`, `fit` (the logistic maps), `certainty`, `slices`, `points` (a sample of score
    and opinion for a plot), `notes`. Undefined numbers are None. A ValueError says why no correlation is defined.
    """
    settings = settings or IntervalSettings()
    rows = scores.judged
    if len(np.unique(scores.value[rows])) < 2:
        reason = next(iter(scores.failures()), "they are equal")
        raise ValueError(
            f"{scores.name} scored {rows.sum()} of {len(records)} images, and a correlation needs 2 "
            f"different scores; most often because: {reason}."
        )
    x, y = scores.oriented[rows], opinions(records)[rows]
    index, clusters = cluster_index(np.array(records.groups)[rows])
    fits = {parameters: _fit(x, y, parameters) for parameters in (4, 5)}
    report = {
        "kind": "quality",
        "judge": {"name": scores.name, "unit": scores.unit, "gives_std": scores.std is not None},
        "counts": {
            "images": len(records),
            "judged": int(rows.sum()),
            "failed": int((~rows).sum()),
            "failures": scores.failures(),
            "clusters": clusters,
        },
        "correlations": _correlations(x, y, fits, index, clusters, settings),
        "fit": {str(parameters): _fit_record(fit) for parameters, fit in fits.items()},
        "certainty": _certainty(y, fits[5], scores.std, rows),
        "slices": _slices(x, y, records, rows, index, settings),
        "points": _points(x, y, fits[5], settings),
        "level": settings.level,
    }
    return report | {"notes": _notes(report)}


def _fit(x: Array, y: Array, parameters: Any) -> LogisticFit | str:
    try:
        return fit_logistic(x, y, parameters)
    except ValueError as error:
        return str(error)


def _fit_record(fit: LogisticFit | str) -> dict[str, Any]:
    if isinstance(fit, str):
        return dict.fromkeys(("plcc", "rmse", "parameters", "monotone")) | {"reason": fit}
    numbers = {"plcc": finite(fit.plcc), "rmse": fit.rmse, "parameters": list(fit.parameters)}
    return numbers | {"monotone": fit.monotone, "reason": None}


def _correlations(
    x: Array,
    y: Array,
    fits: dict[int, LogisticFit | str],
    index: NDArray[np.int64],
    clusters: int,
    settings: IntervalSettings,
) -> dict[str, Any]:
    """Compute correlations with intervals; those after a fit hold the fitted map fixed in every resample."""
    estimates = {"srcc": srcc(x, y), "plcc": plcc(x, y), "kendall_b": kendall(x, y)}
    statistics: dict[str, Callable[[Array], Array]] = {
        "srcc": partial(weighted_srcc, x, y),
        "plcc": partial(weighted_pearson, x, y),
        "kendall_b": partial(weighted_kendall, x, y),
    }
    for parameters, fit in fits.items():
        if isinstance(fit, LogisticFit) and np.isfinite(fit.plcc):
            name = f"plcc_logistic{parameters}"
            estimates[name] = fit.plcc
            statistics[name] = partial(weighted_pearson, fit.fitted, y)

    def all_statistics(weights: Array) -> Array:
        return np.stack([statistic(weights) for statistic in statistics.values()], axis=1)

    table = bootstrap_samples(all_statistics, index, clusters, **settings.drawing())
    draws = dict(zip(statistics, table.T, strict=True))
    if clusters < len(x):
        estimates["srcc_within"], draws["srcc_within"] = within_groups(x, y, index, **settings.drawing())
    return {
        name: interval(estimate, draws[name], clusters, level=settings.level).to_dict()
        for name, estimate in estimates.items()
    }


def _certainty(y: Array, fit: LogisticFit | str, std: Array | None, rows: NDArray[np.bool_]) -> dict[str, Any] | None:
    if std is None or isinstance(fit, str) or not np.isfinite(std[rows]).all():
        return None
    error = np.abs(fit.fitted - y)
    if np.ptp(std[rows]) == 0 or np.ptp(error) == 0:
        return None
    curve = risk_coverage(std[rows], error)
    return {
        "srcc_std_error": srcc(std[rows], error),
        "error_at": {f"{coverage:.0%}": curve.at(coverage) for coverage in COVERAGES},
    }


def _slices(
    x: Array,
    y: Array,
    records: QualitySet,
    rows: NDArray[np.bool_],
    index: NDArray[np.int64],
    settings: IntervalSettings,
) -> dict[str, list[dict[str, Any]]]:
    slices: dict[str, list[dict[str, Any]]] = {}
    for (kind, name), slice_rows in slice_masks(records.records, ("generator",)).items():
        inside = slice_rows[rows]
        a, b = x[inside], y[inside]
        entry: dict[str, Any] = {"name": name, "images": len(a), "srcc": None}
        if len(a) >= SMALLEST_SLICE and np.ptp(a) > 0 and np.ptp(b) > 0:
            numbers, clusters = cluster_index(index[inside])
            draws = bootstrap_samples(partial(weighted_srcc, a, b), numbers, clusters, **settings.drawing())
            number = interval(srcc(a, b), draws, clusters, level=settings.level)
            entry |= {"srcc": number.to_dict(), "clusters": clusters}
        slices.setdefault(kind, []).append(entry)
    return slices


def _points(x: Array, y: Array, fit: LogisticFit | str, settings: IntervalSettings) -> dict[str, Any]:
    """Return at most 600 images and the fitted curve, for a plot."""
    sample = np.random.default_rng(settings.seed).permutation(len(x))[:600]
    line = []
    if isinstance(fit, LogisticFit):
        rows = np.argsort(x)[np.linspace(0, len(x) - 1, min(len(x), 60)).astype(int)]
        line = [[float(x[k]), float(fit.fitted[k])] for k in rows]
    return {"sample": [[float(x[k]), float(y[k])] for k in sorted(sample)], "line": line}


def _notes(report: dict[str, Any]) -> list[str]:
    notes, counts = [], report["counts"]
    if counts["failed"]:
        share = counts["failed"] / counts["images"]
        notes.append(f"{counts['failed']} of {counts['images']} images ({share:.1%}) have no score.")
    overall = report["correlations"]["srcc"]
    if overall["estimate"] < -0.999 or (overall["high"] is not None and overall["high"] < 0):
        notes.append(
            "The reward runs against the opinions: check whether a lower score is better (--lower-is-better)."
        )
    slices = [entry["clusters"] for part in report["slices"].values() for entry in part if entry["srcc"]]
    if min([counts["clusters"], *slices]) < FEWEST:
        notes.append(
            f"Fewer than {FEWEST} prompts or images, overall or in a slice: intervals of correlations are rough."
        )
    if report["fit"]["5"]["monotone"] is False:
        notes.append(
            "The 5-parameter map is not monotone here: its PLCC and RMSE credit the reward with an order "
            "that it does not give. Read the 4-parameter row."
        )
    reasons = {fit["reason"] for fit in report["fit"].values() if fit["reason"]}
    return notes + [f"No logistic fit: {reason}" for reason in sorted(reasons)]
