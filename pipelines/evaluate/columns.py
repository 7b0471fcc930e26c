# SPDX-License-Identifier: Apache-2.0
"""Scores for an evaluation from the columns of the set itself."""

from __future__ import annotations

import math
from typing import Any

from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.sets.tables import listed
from visalign.errors import UserError
from visalign.evaluation.rewards.pair_scores import PairScores, from_probabilities, from_scores
from visalign.evaluation.rewards.quality import QualityScores, from_values


def column_scores(pairs: PreferenceSet, name: str, *, higher_is_better: bool = True) -> PairScores:
    """Precomputed scores of a preference set.

    Args:
        pairs: The set.
        name: Of the columns: NAME_left and NAME_right (scores; NAME_std_left, NAME_std_right too), or
            NAME_prob, the probability that the left image is better (with NAME_prob_swapped, that of the
            right image when it stood on the left, i.e. what the judge said of the left side then).
        higher_is_better: Direction of scores.

    Returns:
        What the columns say; a row without a number counts as failed.
    """
    known = {column for pair in pairs.pairs for column in pair.extra}
    if {f"{name}_left", f"{name}_right"} <= known:
        has_std = {f"{name}_std_left", f"{name}_std_right"} <= known
        stds = [_column(pairs, f"{name}_std_{side}") if has_std else None for side in ("left", "right")]
        left, right = (_column(pairs, f"{name}_{side}") for side in ("left", "right"))
        return from_scores(
            name,
            f"column {name}",
            left,
            right,
            std_left=stds[0],
            std_right=stds[1],
            reasons=["no number in the column"] * len(pairs),
            higher_is_better=higher_is_better,
        )
    if f"{name}_prob" in known:
        if not higher_is_better:
            raise UserError(
                f"--lower-is-better names {name!r}, whose column {name}_prob is the probability that the "
                "left image is better and has no other direction. Take it out; if the column says that the "
                "left image is worse, write 1 - p."
            )
        swapped = _column(pairs, f"{name}_prob_swapped") if f"{name}_prob_swapped" in known else None
        reasons = ["no number in the column"] * len(pairs)
        return from_probabilities(name, _column(pairs, f"{name}_prob"), swapped=swapped, reasons=reasons)
    found = sorted(known)
    raise UserError(
        f"'{pairs.name}' has no scores {name!r}: needed are the columns {name}_left and {name}_right, or "
        f"{name}_prob. Found beside the set's own: {listed(found, limit=20) or 'none'}."
    )


def quality_column_scores(records: QualitySet, name: str, *, higher_is_better: bool = True) -> QualityScores:
    """Precomputed scores of a quality set: the column NAME, and NAME_std where it is there."""
    known = {column for record in records.records for column in record.extra}
    if name not in known:
        raise UserError(
            f"'{records.name}' has no column {name!r}. Found beside the set's own: "
            f"{listed(sorted(known), limit=20) or 'none'}."
        )
    return from_values(
        name,
        f"column {name}",
        _column(records, name),
        std=_column(records, f"{name}_std") if f"{name}_std" in known else None,
        reasons=["no number in the column"] * len(records),
        higher_is_better=higher_is_better,
    )


def _column(source: PreferenceSet | QualitySet, name: str) -> list[float]:
    records = source.pairs if isinstance(source, PreferenceSet) else source.records
    return [_float(record.extra.get(name)) for record in records]


def _float(value: Any) -> float:
    """NaN for what is no number; a missing score is a failure, never 0."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
