# SPDX-License-Identifier: Apache-2.0
"""Ratings of several raters, a row each, as one mean opinion score per image."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from visalign.errors import UserError

from .records import QualityRecord, QualitySet
from .tables import listed

OUTLIER = 3.0  # Distance of a rating from the middle half of all, in widths of that half, from which it is reported

UNKNOWN_AGREEMENT = "how far people agree is not known"


def mean_ratings(ratings: QualitySet) -> QualitySet:
    """Replace the rows of an image's raters by one with their mean and standard deviation; other sets stay.

    `QualitySet.ratings` keeps the rows. Two different ratings of one image by one rater are refused.
    """
    groups: dict[tuple[str, str, str | None], list[int]] = {}
    rows: dict[tuple[str, str, str | None], tuple[int, float]] = {}
    for index, record in enumerate(ratings.records):
        groups.setdefault((record.image, record.prompt, record.split), []).append(index)
        if record.annotator is not None:
            key = record.image, record.prompt, record.annotator
            row, mos = rows.setdefault(key, (ratings.row(index), record.mos))
            if mos != record.mos:
                raise UserError(
                    f"'{ratings.name}': {record.annotator} rated '{record.image}' {mos:g} in row {row} and "
                    f"{record.mos:g} in row {ratings.row(index)}. Keep one of them."
                )
    if all(record.annotator is None for record in ratings.records):
        return ratings
    records = [_mean([ratings.records[index] for index in indices]) for indices in groups.values()]
    numbers = tuple(ratings.row(indices[0]) for indices in groups.values())
    return replace(ratings, records=tuple(records), rows=numbers, ratings=ratings)


def _mean(records: list[QualityRecord]) -> QualityRecord:
    of_raters = {record.annotator: record.mos for record in records if record.annotator is not None}  # one rating each
    scores = [*of_raters.values(), *(record.mos for record in records if record.annotator is None)]
    std = float(np.std(scores, ddof=1)) if len(scores) > 1 else records[0].std
    extra = {**records[0].extra, "ratings": len(scores)}
    return replace(records[0], mos=float(np.mean(scores)), std=std, annotator=None, extra=extra)


def describe_ratings(ratings: QualitySet) -> list[tuple[str, int, str]]:
    """Report (kind, count, message) of what is odd about ratings: how many raters there are, and values far off."""
    scores = np.array([record.mos for record in ratings.records])
    raters = Counter(record.annotator for record in ratings.records)
    notes = []
    if len(raters) > 1:
        images = len({record.image for record in ratings.records})
        message = f"{len(scores)} ratings of {images} images by {len(raters)} raters: an image's score is their mean."
        notes.append(("ratings", len(scores), message))
    elif None not in raters:
        rater = next(iter(raters))
        message = f"All {len(scores)} ratings are by one rater, {rater}: {UNKNOWN_AGREEMENT}."
        notes.append(("one rater", len(scores), message))
    low, high = np.percentile(scores, [25, 75])
    margin = OUTLIER * (high - low)
    far = [i for i, score in enumerate(scores) if margin and not low - margin <= score <= high + margin]
    if far:
        usual = np.delete(scores, far)
        values = listed([f"{scores[i]:g} in row {ratings.row(i)}" for i in far])
        message = (
            f"{len(far)} scores are far from the others ({usual.min():g} to {usual.max():g}): {values}. Check them."
        )
        notes.append(("far", len(far), message))
    return notes
