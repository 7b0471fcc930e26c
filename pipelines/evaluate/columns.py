# SPDX-License-Identifier: Apache-2.0
"""Precomputed scores of an evaluation, from the columns of the set itself."""

from __future__ import annotations

from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.sets.tables import listed
from visalign.errors import UserError
from visalign.evaluation.rewards.pair_scores import PairScores, from_probabilities, from_scores
from visalign.evaluation.rewards.quality import QualityScores, from_values
from visalign.pipelines.score.score import MISSING, read_number


def column_scores(pairs: PreferenceSet, name: str, *, higher_is_better: bool = True) -> PairScores:
    """Read precomputed scores of a preference set; a row without a number counts as failed.

    Columns are NAME_left and NAME_right (scores; NAME_std_left, NAME_std_right too), or NAME_prob, the
    probability that the left image is better (with NAME_prob_swapped, the same after an exchange).
    """
    columns = {column for pair in pairs.pairs for column in pair.extra}
    reasons = [MISSING] * len(pairs)
    if {f"{name}_left", f"{name}_right"} <= columns:
        has_std = {f"{name}_std_left", f"{name}_std_right"} <= columns
        return from_scores(
            name,
            f"column {name}",
            _column(pairs, f"{name}_left"),
            _column(pairs, f"{name}_right"),
            std_left=_column(pairs, f"{name}_std_left") if has_std else None,
            std_right=_column(pairs, f"{name}_std_right") if has_std else None,
            reasons=reasons,
            higher_is_better=higher_is_better,
        )
    if f"{name}_prob" not in columns:
        raise UserError(
            f"'{pairs.name}' has no scores {name!r}: needed are the columns {name}_left and {name}_right, or "
            f"{name}_prob. Found besides the set's own: {listed(sorted(columns), limit=20) or 'none'}."
        )
    if not higher_is_better:
        raise UserError(
            f"--lower-is-better names {name!r}, but {name}_prob is the probability that the left image is "
            "better. Take it out."
        )
    swapped = _column(pairs, f"{name}_prob_swapped") if f"{name}_prob_swapped" in columns else None
    return from_probabilities(name, _column(pairs, f"{name}_prob"), swapped=swapped, reasons=reasons)


def quality_column_scores(records: QualitySet, name: str, *, higher_is_better: bool = True) -> QualityScores:
    """Read precomputed scores of a quality set: the column NAME, and NAME_std where it exists."""
    columns = {column for record in records.records for column in record.extra}
    if name not in columns:
        raise UserError(
            f"'{records.name}' has no column {name!r}. Found besides the set's own: "
            f"{listed(sorted(columns), limit=20) or 'none'}."
        )
    return from_values(
        name,
        f"column {name}",
        _column(records, name),
        std=_column(records, f"{name}_std") if f"{name}_std" in columns else None,
        reasons=[MISSING] * len(records),
        higher_is_better=higher_is_better,
    )


def _column(source: PreferenceSet | QualitySet, name: str) -> list[float]:
    records = source.pairs if isinstance(source, PreferenceSet) else source.records
    return [read_number(record.extra.get(name)) for record in records]
