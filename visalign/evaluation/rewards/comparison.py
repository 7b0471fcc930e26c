# SPDX-License-Identifier: Apache-2.0
"""Comparison of rewards on one set: which agrees more with people, by how much, and where two differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.evaluation.statistics.agreement import HEADLINE
from visalign.evaluation.statistics.comparisons import cluster_std, holm, mcnemar, power
from visalign.evaluation.statistics.correlations import srcc, weighted_srcc
from visalign.evaluation.statistics.intervals import (
    Interval,
    RatioTable,
    bootstrap_samples,
    cluster_index,
    interval,
    paired_bootstrap,
)

from .judged_pairs import IntervalSettings, pair_labels
from .pair_scores import PairScores
from .preferences import headline_credit
from .quality import QualityScores, opinions

Array = NDArray[np.float64]

WORST = 6
"""Pairs or images on which a reward is furthest from people that a report keeps."""


def compare_on_preferences(
    pairs: PreferenceSet, first: PairScores, second: PairScores, settings: IntervalSettings | None = None
) -> dict[str, Any]:
    """Compare two rewards on the pairs that both scored and people did not tie; ValueError if there is none.

    JSON-able: `difference` (first − second, with its interval), `mcnemar` (its exact test), `power`, `pairs`.
    """
    settings = settings or IntervalSettings()
    label = pair_labels(pairs)
    shared = first.judged & second.judged & (label != 0.5)
    if not shared.any():
        raise ValueError(f"{first.name} and {second.name} have no scored pair in common that people decided.")
    credits = [headline_credit(scores, label)[shared] for scores in (first, second)]
    groups = [pair.group for pair, ok in zip(pairs.pairs, shared, strict=True) if ok]
    difference = paired_bootstrap(credits[1], credits[0], groups, **settings.drawing(), level=settings.level)
    std = cluster_std(credits[0] - credits[1], groups)
    return {
        "first": first.name,
        "second": second.name,
        "pairs": int(shared.sum()),
        "difference": difference.to_dict(),
        "mcnemar": mcnemar(credits[0], credits[1], groups),
        "power": power(difference.estimate, std, int(shared.sum()), level=settings.level),
    }


def compare_on_quality(
    records: QualitySet, first: QualityScores, second: QualityScores, settings: IntervalSettings | None = None
) -> dict[str, Any]:
    """Compare two rewards on the images that both scored; ValueError where no correlation is defined.

    JSON-able: `difference` of the SRCC (first − second, paired interval), `p_value` (Student's t), `power`, `images`,
    `agreement` (SRCC of the two).
    """
    settings = settings or IntervalSettings()
    shared = first.judged & second.judged
    a, b, y = first.oriented[shared], second.oriented[shared], opinions(records)[shared]
    index, clusters = cluster_index(np.array(records.groups)[shared])
    estimate = srcc(a, y) - srcc(b, y)  # refuses constant scores and fewer than 2 images

    def difference(weights: Array) -> Array:
        return weighted_srcc(a, y, weights) - weighted_srcc(b, y, weights)

    draws = bootstrap_samples(difference, index, clusters, **settings.drawing())
    std = float(np.nanstd(draws))
    return {
        "first": first.name,
        "second": second.name,
        "images": int(shared.sum()),
        "difference": interval(estimate, draws, clusters, level=settings.level).to_dict(),
        "p_value": 2 * float(stats.t.sf(abs(estimate) / std, clusters - 1)) if std and clusters > 1 else 1.0,
        "power": power(estimate, std, int(shared.sum()), level=settings.level),
        "agreement": srcc(a, b),
    }


def add_holm(comparisons: Sequence[dict[str, Any]], *, level: float) -> None:
    """Add to each comparison `p_holm`, which holds for all of them together, and `clear`, p < 1 − level."""
    p_values = [(entry.get("mcnemar") or entry)["p_value"] for entry in comparisons]
    for entry, p_value in zip(comparisons, holm(p_values), strict=True):
        entry |= {"p_holm": p_value, "clear": p_value < 1 - level}


def leaderboard(
    source: PreferenceSet | QualitySet,
    scores: Sequence[Any],
    comparisons: Sequence[Mapping[str, Any]],
    settings: IntervalSettings,
) -> dict[str, Any] | None:
    """Rank rewards on the records that all of them scored; None for one reward, or without such a record.

    JSON-able: `on` so many, `of`, `rows`, best first, with `judge`, `estimate`, `low` and `high` for all together
    (Bonferroni), `best_place` to `worst_place`.
    """
    if len(scores) < 2:
        return None
    single = 1 - (1 - settings.level) / len(scores)
    measured = (
        _accuracies(source, scores, settings, single)
        if isinstance(source, PreferenceSet)
        else _srccs(source, scores, settings, single)
    )
    if measured is None:
        return None
    records, numbers = measured
    rows = [
        {"judge": entry.name} | number.to_dict() | {"level": settings.level}
        for entry, number in zip(scores, numbers, strict=True)
    ]
    return {"on": records, "of": len(source), "rows": _in_order(rows, comparisons)}


def _in_order(rows: Sequence[dict[str, Any]], comparisons: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sort rows, best first, and add `best_place` and `worst_place`, which no clear comparison excludes."""
    better, worse = ({row["judge"]: 0 for row in rows} for _ in range(2))
    for entry in comparisons:
        if entry["clear"]:
            wins = entry["difference"]["estimate"] > 0
            better[entry["second" if wins else "first"]] += 1
            worse[entry["first" if wins else "second"]] += 1
    for row in rows:
        row |= {"best_place": 1 + better[row["judge"]], "worst_place": len(rows) - worse[row["judge"]]}
    return sorted(rows, key=lambda row: -(row["estimate"] if row["estimate"] is not None else -np.inf))


def leaderboard_of_sets(results: Mapping[str, Mapping[str, Any]], *, level: float) -> dict[str, Any]:
    """Rank rewards with a report on every set (the others are `unranked`) by the mean of their headlines.

    Sets are independent: the deviation of a mean follows from their intervals. Intervals hold for all rewards
    together.
    """
    numbers = {
        name: {judge["judge"]["name"]: headline(judge) for judge in result["judges"]}
        for name, result in results.items()
    }
    kind = next(iter(results.values()))["set"]["kind"]
    smallest = 0.0 if kind == "preferences" else -1.0  # of a share, of a correlation
    judges = list(dict.fromkeys(judge for by_judge in numbers.values() for judge in by_judge))
    ranked = [judge for judge in judges if all(judge in by_judge for by_judge in numbers.values())]
    single = 1 - (1 - level) / max(len(ranked), 1)
    rows = []
    for judge in ranked:
        by_set = {name: by_judge[judge] for name, by_judge in numbers.items()}
        estimate, std = _mean_of_sets([*by_set.values()])
        reach = float(stats.norm.ppf((1 + single) / 2)) * std if std is not None else None
        ends = {"low": None, "high": None}
        if reach is not None:
            ends = {"low": max(estimate - reach, smallest), "high": min(estimate + reach, 1.0)}
        rows.append({"judge": judge, "estimate": estimate, **ends, "level": level, "sets": by_set})
    by_pair = [{(c["first"], c["second"]): c["difference"] for c in r["comparisons"]} for r in results.values()]
    comparisons: list[dict[str, Any]] = []
    for first, second in combinations(ranked, 2):
        if all((first, second) in differences for differences in by_pair):
            estimate, std = _mean_of_sets([differences[first, second] for differences in by_pair])
            p_value = 2 * float(stats.norm.sf(abs(estimate) / std)) if std else 1.0
            entry = {"first": first, "second": second, "difference": {"estimate": estimate}, "p_value": p_value}
            comparisons.append(entry)
    add_holm(comparisons, level=level)
    unranked = [judge for judge in judges if judge not in ranked]
    return {"kind": kind, "sets": [*results], "rows": _in_order(rows, comparisons), "unranked": unranked}


def headline(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of a reward's report that a leaderboard is of: agreement under our tie policy, or SRCC."""
    return report["agreement"][HEADLINE]["micro"] if "agreement" in report else report["correlations"]["srcc"]


def _mean_of_sets(numbers: Sequence[Mapping[str, Any]]) -> tuple[float, float | None]:
    """Return mean and standard deviation of independent numbers with intervals; None where one has no interval."""
    estimate = float(np.mean([number["estimate"] for number in numbers]))
    if any(number["low"] is None for number in numbers):
        return estimate, None
    reach = [(number["high"] - number["low"]) / 2 / stats.norm.ppf((1 + number["level"]) / 2) for number in numbers]
    return estimate, float(np.linalg.norm(reach)) / len(numbers)


def _accuracies(
    pairs: PreferenceSet, scores: Sequence[PairScores], settings: IntervalSettings, level: float
) -> tuple[int, list[Interval]] | None:
    credit = np.stack([headline_credit(entry, pair_labels(pairs)) for entry in scores])
    shared = np.asarray(np.isfinite(credit).all(0), dtype=bool)
    if not shared.any():
        return None
    table = RatioTable(*cluster_index([p.group for p, ok in zip(pairs.pairs, shared, strict=True) if ok]))
    for k, row in enumerate(credit[:, shared]):
        table.add(k, row, np.ones_like(row))
    return int(shared.sum()), list(table.intervals(**settings.drawing(), level=level).values())


def _srccs(
    records: QualitySet, scores: Sequence[QualityScores], settings: IntervalSettings, level: float
) -> tuple[int, list[Interval]] | None:
    shared = np.asarray(np.stack([entry.judged for entry in scores]).all(0), dtype=bool)
    if shared.sum() < 2:
        return None
    y, values = opinions(records)[shared], [entry.oriented[shared] for entry in scores]
    if any(np.ptp(column) == 0 for column in (y, *values)):
        return None  # no rank correlation
    index, clusters = cluster_index(np.array(records.groups)[shared])

    def correlations(weights: Array) -> Array:
        return np.stack([weighted_srcc(x, y, weights) for x in values], axis=1)

    draws = bootstrap_samples(correlations, index, clusters, **settings.drawing())
    numbers = [interval(srcc(x, y), draws[:, k], clusters, level=level) for k, x in enumerate(values)]
    return int(shared.sum()), numbers


def worst_records(source: PreferenceSet | QualitySet, scores: PairScores | QualityScores) -> list[dict[str, Any]]:
    """Find at most six records on which a reward is furthest from people, worst first, JSON-able.

    Pairs: the wrong side, by margin in root mean squares times how clear people were. Images: place by score against
    place by opinion (`place`, `place_mos`, shares of the images below).
    """
    if isinstance(scores, PairScores):
        assert isinstance(source, PreferenceSet)
        scale = float(np.sqrt(np.nanmean(scores.margin**2))) or 1.0
        wrong = np.nan_to_num((1 - 2 * pair_labels(source)) * scores.margin / scale)
        rows = [int(row) for row in np.argsort(-wrong, kind="stable")[:WORST] if wrong[row] > 0]
        return [
            _fields(source.pairs[row], "prompt", "image_left", "image_right")
            | {"label": float(source.pairs[row].label), "margin": float(scores.margin[row])}
            for row in rows
        ]
    assert isinstance(source, QualitySet)
    valid = np.flatnonzero(scores.judged)
    rank, place_mos = ((stats.rankdata(x[valid]) - 0.5) / len(valid) for x in (scores.oriented, opinions(source)))
    order = np.argsort(-np.abs(rank - place_mos), kind="stable")[:WORST]
    return [
        _fields(source.records[valid[k]], "prompt", "image", "mos")
        | {"score": float(scores.value[valid[k]]), "place": float(rank[k]), "place_mos": float(place_mos[k])}
        for k in order.tolist()
    ]


def _fields(record: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}
