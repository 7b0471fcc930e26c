# SPDX-License-Identifier: Apache-2.0
"""Two judges on one set: who agrees with people more, by how much, and where they part."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.evaluation.statistics.correlations import srcc, weighted_srcc
from visalign.evaluation.statistics.intervals import (
    cluster_index,
    interval,
    mcnemar,
    paired_bootstrap,
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
        JSON-able: `difference` (first − second, with its interval), `mcnemar` (on the pairs
        that neither judge ties), `pairs`, `same_choice` (share
        of the pairs where both prefer one image), `parted` (at most 20 pairs on which they prefer different
        images, clearest first).

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
    decided = known & (first.margin != 0) & (second.margin != 0)
    same = np.sign(first.margin[known]) == np.sign(second.margin[known])
    return {
        "first": first.name,
        "second": second.name,
        "pairs": int(known.sum()),
        "difference": difference.to_dict(),
        "mcnemar": mcnemar(one[decided] == 1, two[decided] == 1),
        "same_choice": float(np.mean(same)),
        "parted": _parted(pairs, first, second, known, label),
    }


def compare_on_quality(
    records: QualitySet, first: QualityScores, second: QualityScores, settings: IntervalSettings | None = None
) -> dict[str, Any]:
    """Two judges on the images that both judged.

    Returns:
        JSON-able: `difference` of the SRCC (first − second) with its paired interval, `images`, `agreement`
        (SRCC of the two judges with one another).
    """
    settings = settings or IntervalSettings()
    known = first.judged & second.judged
    a, b = (s.value[known] * (1 if s.higher_is_better else -1) for s in (first, second))
    sign = 1 if records.higher_is_better else -1
    y = np.array([record.mos for record in records.records])[known] * sign
    index, clusters = cluster_index(np.array(records.groups)[known])
    blocks = resample_samples(index, clusters, **settings.drawing())
    draws = np.concatenate([weighted_srcc(a, y, w) - weighted_srcc(b, y, w) for w in blocks])
    estimate = srcc(a, y) - srcc(b, y)
    return {
        "first": first.name,
        "second": second.name,
        "images": int(known.sum()),
        "difference": interval(estimate, draws, clusters, level=settings.level).to_dict(),
        "agreement": srcc(a, b),
    }


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
