# SPDX-License-Identifier: Apache-2.0
"""A judge on a quality set: correlations with mean opinion scores, with intervals, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from visalign.data.sets.records import QualitySet
from visalign.evaluation.statistics.correlations import (
    LogisticFit,
    RefittedPlcc,
    fit_logistic,
    kendall,
    plcc,
    srcc,
    weighted_kendall,
    weighted_pearson,
    weighted_srcc,
)
from visalign.evaluation.statistics.intervals import (
    Interval,
    bootstrap,
    cluster_index,
    cluster_sums,
    fisher_interval,
    interval,
    jackknife_interval,
    resample_samples,
)
from visalign.evaluation.statistics.selective import risk_coverage

from .agreement import within_groups
from .certainty import finite
from .judged_pairs import IntervalSettings
from .pair_scores import counted_reasons, filled_reasons
from .slices import quality_slices

Array = NDArray[np.float64]

SMALLEST_SLICE = 10
"""Images below which a slice gets no correlation."""
FEW = 30
"""Clusters up to which the interval of an SRCC is the jackknife's."""
FEWEST = 15
"""Clusters below which its coverage is not what it says where the SRCC is near 1."""


@dataclass(frozen=True, kw_only=True)
class QualityScores:
    """One judge on N images; what it could not judge is NaN and has a reason."""

    name: str
    unit: str
    value: Array
    """[N]."""
    reasons: tuple[str | None, ...]
    std: Array | None = None
    """[N] in the same unit."""
    higher_is_better: bool = True

    @property
    def judged(self) -> NDArray[np.bool_]:
        """[N] where there is a value."""
        return np.isfinite(self.value)

    def failures(self) -> dict[str, int]:
        """reason -> how many images, most frequent first."""
        return counted_reasons(self.reasons, self.judged)


def from_values(
    name: str,
    unit: str,
    value: ArrayLike,
    *,
    std: ArrayLike | None = None,
    reasons: Sequence[str | None] | None = None,
    higher_is_better: bool = True,
) -> QualityScores:
    """A judge's scores [N] of the images of a quality set, NaN where it failed, with `reasons` [N] why."""
    values = np.asarray(value, dtype=np.float64)
    return QualityScores(
        name=name,
        unit=unit,
        value=np.where(np.isfinite(values), values, np.nan),
        reasons=filled_reasons(values, reasons),
        std=None if std is None else np.asarray(std, dtype=np.float64),
        higher_is_better=higher_is_better,
    )


def evaluate_quality(
    records: QualitySet, scores: QualityScores, settings: IntervalSettings | None = None
) -> dict[str, Any]:
    """All numbers of one judge on one quality set; what it could not judge is left out, and counted.

    Scores stand in the order of the images; they and the opinions are turned so that higher is better.
    JSON-able: `judge`, `counts`, `correlations`, `fit` (the logistic maps), `certainty`, `slices`, `points`
    (a sample of score and opinion for a plot), `notes`. What the data do not allow is None.
    """
    settings = settings or IntervalSettings()
    if len(scores.value) != len(records):
        raise ValueError(f"{len(scores.value)} scores for {len(records)} images; one each is needed.")
    rows = scores.judged
    if rows.sum() < 2:
        why = next(iter(scores.failures()), "no reason given")
        raise ValueError(
            f"{scores.name} judged {rows.sum()} of {len(records)} images, at least 2 are needed; most often "
            f"because: {why}."
        )
    x = scores.value[rows] * (1 if scores.higher_is_better else -1)
    if np.ptp(x) == 0:
        raise ValueError(
            f"{scores.name} gave all {len(x)} images the score {scores.value[rows][0]:g}: no correlation is "
            "defined. Leave it out, or look why it does not tell them apart."
        )
    y = np.array([record.mos for record in records.records])[rows] * (1 if records.higher_is_better else -1)
    index, clusters = cluster_index(np.array(records.groups)[rows])
    fits = {number: _fit(x, y, number) for number in (4, 5)}
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
        "fit": {
            str(number): {key: value for key, value in fit.items() if key != "fit"}
            for number, fit in fits.items()
        },
        "certainty": _certainty(x, y, fits[5], scores, rows),
        "slices": _slices(x, y, records, rows, index, settings),
        "points": _points(x, y, fits[5], settings),
        "level": settings.level,
    }
    return report | {"notes": _notes(report)}


def _fit(x: Array, y: Array, parameters: int) -> dict[str, Any]:
    try:
        fit = fit_logistic(x, y, parameters)
    except ValueError as error:
        nothing = dict.fromkeys(("plcc", "rmse", "parameters", "monotone", "fit"))
        return nothing | {"reason": str(error)}
    return {
        "plcc": finite(fit.plcc),
        "rmse": fit.rmse,
        "parameters": list(fit.parameters),
        "monotone": fit.monotone,
        "reason": None,
        "fit": fit,
    }


def _correlations(
    x: Array,
    y: Array,
    fits: dict[int, dict[str, Any]],
    index: NDArray[np.int64],
    clusters: int,
    settings: IntervalSettings,
) -> dict[str, Any]:
    """Each resample gets logistic maps of its own."""
    statistics: dict[str, Callable[[Array], Array]] = {
        "srcc": lambda weights: weighted_srcc(x, y, weights),
        "plcc": lambda weights: weighted_pearson(x, y, weights),
        "kendall": lambda weights: weighted_kendall(x, y, weights),
    }
    draws = _draws(statistics, index, clusters, settings)
    estimates = {"srcc": srcc(x, y), "plcc": plcc(x, y)}
    for place, variant in enumerate("bc"):
        estimates[f"kendall_{variant}"] = kendall(x, y, variant)
        draws[f"kendall_{variant}"] = draws["kendall"][:, place]
    found = {
        name: interval(estimate, draws[name], clusters, level=settings.level)
        for name, estimate in estimates.items()
    }
    if clusters <= FEW:
        found["srcc"] = _srcc_of_few(x, y, index, settings)
    for number, entry in fits.items():
        if entry["plcc"] is not None:
            found[f"plcc_logistic{number}"] = fitted_plcc(x, y, entry["fit"], index, settings)
    if clusters < len(x):
        within, own = within_groups(x, y, index, **settings.drawing())
        found["srcc_within"] = fisher_interval(within, own, clusters, level=settings.level)
    return {name: number.to_dict() for name, number in found.items()}


def fitted_plcc(
    x: Array, y: Array, fit: LogisticFit, index: NDArray[np.int64], settings: IntervalSettings
) -> Interval:
    """PLCC of scores and opinions [N] after the fit, with its interval over the clusters `index` [N]."""
    refit, clusters = RefittedPlcc(x, y, fit), int(index.max()) + 1
    sums = cluster_sums(refit.products, index, clusters)
    return fisher_interval(
        fit.plcc,
        bootstrap(sums, refit.draws, **settings.drawing())[:, 0],
        clusters,
        level=settings.level,
        left_out=refit.draws(sums.sum(0) - sums)[:, 0],
    )


def _srcc_of_few(x: Array, y: Array, index: NDArray[np.int64], settings: IntervalSettings) -> Interval:
    each = np.arange(int(index.max()) + 1)
    left_out = weighted_srcc(x, y, (index != each[:, None]).astype(np.float64))
    return jackknife_interval(srcc(x, y), left_out, level=settings.level)


def _draws(
    statistics: dict[str, Callable[[Array], Array]],
    index: NDArray[np.int64],
    clusters: int,
    settings: IntervalSettings,
) -> dict[str, Array]:
    parts: dict[str, list[Array]] = {name: [] for name in statistics}
    for weights in resample_samples(index, clusters, **settings.drawing()):
        for name, statistic in statistics.items():
            parts[name].append(statistic(weights))
    return {name: np.concatenate(found) for name, found in parts.items()}


def _certainty(
    x: Array, y: Array, fit: dict[str, Any], scores: QualityScores, rows: NDArray[np.bool_]
) -> dict[str, Any] | None:
    """Is the judge less sure where it is further off: SRCC of its std with the error of the fit."""
    if scores.std is None or fit["fit"] is None or not np.isfinite(scores.std[rows]).all():
        return None
    std, error = scores.std[rows], np.abs(fit["fit"].fitted - y)
    if np.ptp(std) == 0 or np.ptp(error) == 0:
        return None
    curve = risk_coverage(std, np.minimum(error / error.max(), 1.0))
    return {
        "srcc_std_error": srcc(std, error),
        "error_at": {f"{c:.0%}": curve.at(c) * float(error.max()) for c in (0.25, 0.5, 0.75, 1.0)},
    }


def _slices(
    x: Array,
    y: Array,
    records: QualitySet,
    rows: NDArray[np.bool_],
    index: NDArray[np.int64],
    settings: IntervalSettings,
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for part in quality_slices(records):
        inside = part.rows[rows]
        entry: dict[str, Any] = {"name": part.name, "images": int(inside.sum()), "srcc": None}
        few = inside.sum() < SMALLEST_SLICE or np.ptp(x[inside]) == 0 or np.ptp(y[inside]) == 0
        if not few:
            _, numbers = np.unique(index[inside], return_inverse=True)
            clusters = int(numbers.max()) + 1
            a, b = x[inside], y[inside]
            if clusters <= FEW:
                number = _srcc_of_few(a, b, numbers, settings)
            else:
                statistics = {"srcc": lambda weights, a=a, b=b: weighted_srcc(a, b, weights)}
                draws = _draws(statistics, numbers, clusters, settings)["srcc"]
                number = interval(srcc(a, b), draws, clusters, level=settings.level)
            entry |= {"srcc": number.to_dict(), "clusters": clusters}
        found.setdefault(part.kind, []).append(entry)
    return found


def _points(x: Array, y: Array, fit: dict[str, Any], settings: IntervalSettings) -> dict[str, Any]:
    """At most 600 images and the fitted curve, for a plot."""
    chosen = np.random.default_rng(settings.seed).permutation(len(x))[:600]
    line = []
    if fit["fit"] is not None:
        order = np.argsort(x)
        places = order[np.linspace(0, len(x) - 1, min(len(x), 60)).astype(int)]
        line = [[float(x[k]), float(fit["fit"].fitted[k])] for k in places]
    return {"sample": [[float(x[k]), float(y[k])] for k in sorted(chosen)], "line": line}


def _notes(report: dict[str, Any]) -> list[str]:
    found = []
    counts = report["counts"]
    if counts["failed"]:
        share = counts["failed"] / counts["images"]
        found.append(
            f"{counts['failed']} of {counts['images']} images ({share:.1%}) could not be judged; they count "
            "nowhere."
        )
    high = report["correlations"]["srcc"]["high"]
    if high is not None and high < 0:
        found.append(
            "The judge runs against the opinions: if lower is better for its scores, say so "
            "(--lower-is-better)."
        )
    slices = [entry["clusters"] for part in report["slices"].values() for entry in part if entry["srcc"]]
    if min([counts["clusters"], *slices]) < FEWEST:
        found.append(
            f"With fewer than {FEWEST} prompts or images, overall or in a slice, the interval of a very "
            "high SRCC is too narrow: with 10 images and a truth of .97 it holds 90 %, not 95 %."
        )
    reasons = {fit["reason"] for fit in report["fit"].values() if fit["reason"]}
    if report["fit"]["5"]["monotone"] is False:
        found.append(
            "The 5-parameter map is not monotone here: it turns within the range of the scores, so its PLCC "
            "and RMSE credit the judge with an order that it does not give. Read the 4-parameter row."
        )
    return found + [f"No logistic fit: {reason}" for reason in sorted(reasons)]
