# SPDX-License-Identifier: Apache-2.0
"""Judges on one set against one another: who agrees with people more, by how much, where two part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.evaluation.statistics.comparisons import (
    cluster_std,
    holm,
    mcnemar,
    power,
    simultaneous_intervals,
)
from visalign.evaluation.statistics.correlations import srcc, weighted_srcc
from visalign.evaluation.statistics.intervals import (
    bootstrap,
    cluster_index,
    cluster_sums,
    interval,
    paired_bootstrap,
    ratio,
    resample_samples,
)

from .judged_pairs import IntervalSettings, labels_of
from .pair_scores import PairScores
from .preferences import headline_credit
from .quality import QualityScores

Array = NDArray[np.float64]


def compare_on_preferences(
    pairs: PreferenceSet, first: PairScores, second: PairScores, settings: IntervalSettings | None = None
) -> dict[str, Any]:
    """Two judges on the pairs that both judged and people did not tie, prompt by prompt.

    Returns:
        JSON-able: `difference` (first − second, with its interval), `mcnemar` (the exact test of the same
        difference on the same pairs, prompts flipped whole), `power` (the pairs that the difference needs),
        `pairs`, `same_choice` (share of the pairs where both prefer one image), `parted` (at most 20 pairs on
        which they prefer different images, clearest first).

    Raises:
        ValueError: Lengths differ, or no pair was judged by both.
    """
    settings = settings or IntervalSettings()
    if not len(pairs) == len(first) == len(second):
        raise ValueError(f"{len(first)} and {len(second)} scores for {len(pairs)} pairs; give one per pair.")
    label = labels_of(pairs)
    known = first.judged & second.judged & (label != 0.5)
    if not known.any():
        raise ValueError(f"{first.name} and {second.name} have no judged pair in common that people decided.")
    one, two = (headline_credit(scores, label) for scores in (first, second))
    difference = paired_bootstrap(
        two,
        one,
        [pair.group for pair in pairs.pairs],
        **settings.drawing(),
        level=settings.level,
    )
    groups = [pair.group for pair, ok in zip(pairs.pairs, known, strict=True) if ok]
    std = cluster_std(one[known] - two[known], groups)
    same = np.sign(first.margin[known]) == np.sign(second.margin[known])
    return {
        "first": first.name,
        "second": second.name,
        "pairs": int(known.sum()),
        "difference": difference.to_dict(),
        "mcnemar": mcnemar(one[known], two[known], groups),
        "power": power(difference.estimate, std, int(known.sum()), level=settings.level),
        "same_choice": float(np.mean(same)),
        "parted": _parted(pairs, first, second, known, label),
    }


def compare_on_quality(
    records: QualitySet, first: QualityScores, second: QualityScores, settings: IntervalSettings | None = None
) -> dict[str, Any]:
    """Two judges on the images that both judged.

    Returns:
        JSON-able: `difference` of the SRCC (first − second) with its paired interval, `p_value` (Student's t
        of the difference over the deviation of its draws), `power`, `images`, `agreement` (SRCC of the two
        judges with one another).

    Raises:
        ValueError: fewer than 2 images that both judged, or a judge that says one value of all of them.
    """
    settings = settings or IntervalSettings()
    known = first.judged & second.judged
    if known.sum() < 2:
        raise ValueError(
            f"{first.name} and {second.name} judged {int(known.sum())} images both; 2 are needed."
        )
    a, b = (s.value[known] * (1 if s.higher_is_better else -1) for s in (first, second))
    sign = 1 if records.higher_is_better else -1
    y = np.array([record.mos for record in records.records])[known] * sign
    index, clusters = cluster_index(np.array(records.groups)[known])
    blocks = resample_samples(index, clusters, **settings.drawing())
    draws = np.concatenate([weighted_srcc(a, y, w) - weighted_srcc(b, y, w) for w in blocks])
    estimate = srcc(a, y) - srcc(b, y)
    std = float(np.nanstd(draws))
    p_value = 2 * float(stats.t.sf(abs(estimate) / std, clusters - 1)) if std and clusters > 1 else 1.0
    return {
        "first": first.name,
        "second": second.name,
        "images": int(known.sum()),
        "difference": interval(estimate, draws, clusters, level=settings.level).to_dict(),
        "p_value": p_value,
        "power": power(estimate, std, int(known.sum()), level=settings.level),
        "agreement": srcc(a, b),
    }


def settle(comparisons: Sequence[dict[str, Any]], *, level: float) -> None:
    """Add to each comparison `p_holm`, which holds for all of them together, and whether that is `clear`."""
    found = holm(
        [entry["mcnemar"]["p_value"] if "mcnemar" in entry else entry["p_value"] for entry in comparisons]
    )
    for entry, p_value in zip(comparisons, found, strict=True):
        entry |= {"p_holm": p_value, "clear": p_value < 1 - level}


def leaderboard(
    source: PreferenceSet | QualitySet,
    scores: Sequence[Any],
    comparisons: Sequence[Mapping[str, Any]],
    settings: IntervalSettings,
) -> dict[str, Any] | None:
    """The judges in order, on the records that all of them judged.

    Returns:
        JSON-able: `on` (how many records), `of`, `rows`, best first: `judge`, the headline's `estimate` with
        `low` and `high` that hold for all judges together, and the places that no clear comparison excludes,
        `best_place` to `worst_place`. None for a single judge, or where no record was judged by all.
    """
    if len(scores) < 2:
        return None
    found = (
        _credits(source, scores, settings)
        if isinstance(source, PreferenceSet)
        else _srccs(source, scores, settings)
    )
    if found is None:
        return None
    on, estimates, draws, clusters, bounds, left_out = found
    ends = simultaneous_intervals(
        estimates, draws, clusters, level=settings.level, bounds=bounds, left_out=left_out
    )
    better, worse = ({entry.name: 0 for entry in scores} for _ in range(2))
    for entry in comparisons:
        if entry["clear"]:
            wins = entry["difference"]["estimate"] > 0
            better[entry["second" if wins else "first"]] += 1
            worse[entry["first" if wins else "second"]] += 1
    rows = [
        {"judge": entry.name}
        | end.to_dict()
        | {"best_place": 1 + better[entry.name], "worst_place": len(scores) - worse[entry.name]}
        for entry, end in zip(scores, ends, strict=True)
    ]
    rows.sort(key=lambda row: -(row["estimate"] if row["estimate"] is not None else -np.inf))
    return {"on": on, "of": len(source), "rows": rows}


Joint = tuple[int, Array, Array, int, tuple[float, float], Array | None]
"""Records, estimates [J], draws [R, J], clusters, bounds of the number, estimates without each cluster."""
FEW = 300
"""Clusters up to which the leaderboard of correlations takes the jackknife's deviation."""


def _credits(pairs: PreferenceSet, scores: Sequence[PairScores], settings: IntervalSettings) -> Joint | None:
    credit = np.stack([headline_credit(entry, labels_of(pairs)) for entry in scores], axis=1)
    known = np.asarray(np.isfinite(credit).all(1), dtype=bool)
    if not known.any():
        return None
    index, clusters = cluster_index([p.group for p, ok in zip(pairs.pairs, known, strict=True) if ok])
    own = credit[known]
    sums = cluster_sums(np.column_stack([own, np.ones(len(own))]), index, clusters)
    draws = bootstrap(sums, lambda total: ratio(total[:, :-1], total[:, -1:]), **settings.drawing())
    return len(own), np.asarray(own.mean(0), dtype=np.float64), draws, clusters, (0.0, 1.0), None


def _srccs(records: QualitySet, scores: Sequence[QualityScores], settings: IntervalSettings) -> Joint | None:
    known = np.asarray(np.stack([entry.judged for entry in scores]).all(0), dtype=bool)
    if known.sum() < 2:
        return None
    y = np.array([record.mos for record in records.records])[known] * (1 if records.higher_is_better else -1)
    values = [entry.value[known] * (1 if entry.higher_is_better else -1) for entry in scores]
    if any(np.ptp(column) == 0 for column in (y, *values)):
        return None  # no rank correlation
    index, clusters = cluster_index(np.array(records.groups)[known])
    blocks = resample_samples(index, clusters, **settings.drawing())
    draws = np.concatenate([np.stack([weighted_srcc(x, y, w) for x in values], axis=1) for w in blocks])
    left_out = None
    if clusters <= FEW:
        others = (index != np.arange(clusters)[:, None]).astype(np.float64)
        left_out = np.stack([weighted_srcc(x, y, others) for x in values], axis=1)
        left_out = left_out if np.isfinite(left_out).all() else None
    estimates = np.array([srcc(x, y) for x in values])
    return int(known.sum()), estimates, draws, clusters, (-1.0, 1.0), left_out


WORST = 6
"""Pairs or images on which a judge is furthest from people that a report keeps."""


def worst_records(
    source: PreferenceSet | QualitySet, scores: PairScores | QualityScores
) -> list[dict[str, Any]]:
    """Where a judge is furthest from people.

    Returns:
        JSON-able, at most six, worst first. Of pairs those where it prefers the side that people did not, by
        its margin in root mean squares times how clear people were: `prompt`, `image_left`, `image_right`,
        `label`, `margin`. Of images those whose place by score is furthest from that by opinion: `prompt`,
        `image`, `mos`, `score`, `place` and `place_mos` (shares of the images below).
    """
    if isinstance(scores, PairScores):
        assert isinstance(source, PreferenceSet)
        side = 2 * labels_of(source) - 1
        scale = float(np.sqrt(np.nanmean(scores.margin**2))) or 1.0
        wrong = np.nan_to_num(-side * scores.margin / scale)
        rows = [int(row) for row in np.argsort(-wrong, kind="stable")[:WORST] if wrong[row] > 0]
        return [
            {
                **{
                    name: getattr(source.pairs[row], name) for name in ("prompt", "image_left", "image_right")
                },
                "label": float(source.pairs[row].label),
                "margin": float(scores.margin[row]),
            }
            for row in rows
        ]
    assert isinstance(source, QualitySet)
    known = np.flatnonzero(scores.judged)
    mos = np.array([source.records[row].mos for row in known]) * (1 if source.higher_is_better else -1)
    places = [
        (stats.rankdata(x) - 0.5) / len(known)
        for x in (scores.value[known] * (1 if scores.higher_is_better else -1), mos)
    ]
    order = np.argsort(-np.abs(places[0] - places[1]), kind="stable")[:WORST]
    return [
        {
            **{name: getattr(source.records[known[k]], name) for name in ("prompt", "image", "mos")},
            "score": float(scores.value[known[k]]),
            "place": float(places[0][k]),
            "place_mos": float(places[1][k]),
        }
        for k in order.tolist()
    ]


def _parted(
    pairs: PreferenceSet, first: PairScores, second: PairScores, known: NDArray[np.bool_], label: Array
) -> list[dict[str, Any]]:
    """Pairs on which the judges prefer different images, those first where both margins are large."""
    apart = known & (np.sign(first.margin) * np.sign(second.margin) < 0)
    size = np.zeros(len(pairs))
    for scores in (first, second):
        spread = float(np.std(scores.margin[known])) or 1.0
        size += np.abs(np.nan_to_num(scores.margin)) / spread
    rows = [int(k) for k in np.argsort(-np.where(apart, size, -1.0), kind="stable")[:20] if apart[k]]
    return [
        {
            "pair": row,
            "prompt": pairs.pairs[row].prompt,
            "image_left": pairs.pairs[row].image_left,
            "image_right": pairs.pairs[row].image_right,
            "label": float(label[row]),
            "first": float(first.margin[row]),
            "second": float(second.margin[row]),
        }
        for row in rows
    ]
