# SPDX-License-Identifier: Apache-2.0
"""Preference and quality sets by one name: a file, LAYOUT:FOLDER, or a generated set of the shapes world."""

from __future__ import annotations

from pathlib import Path

from visalign.data.shapes.preferences import ShapesPreferences
from visalign.errors import UserError, suggestion

from .files import load_preferences, load_quality
from .image_references import shapes_reference
from .layouts import PAIR_LAYOUTS, load_layout
from .quality_layouts import QUALITY_LAYOUTS, load_quality_layout
from .records import PreferencePair, PreferenceSet, QualityRecord, QualitySet
from .tables import read_rows, require_columns

GENERATED = ("shapes:pairs", "shapes:quality")
SHAPES_PAIRS = 400
"""How many pairs or rated pictures a generated set has where no limit is given."""


def load_source(
    source: str, *, split: str | None = None, limit: int | None = None
) -> PreferenceSet | QualitySet:
    """A preference or quality set.

    Args:
        source: A JSONL, JSON, CSV, TSV or Parquet file (`image_left` in it makes it a preference set, `mos` a
            quality set); LAYOUT:FOLDER with a key of `PAIR_LAYOUTS` or `QUALITY_LAYOUTS`; or "shapes:pairs",
            "shapes:quality".
        split: Which split; None means "test" for a layout of pairs, "heldout" for a generated set, and all of
            a file.
        limit: Read at most so many records.

    Returns:
        The set, unchecked (`visalign.data.sets.checks`).

    Raises:
        UserError: There is no such set, or it cannot be read.
    """
    if source in GENERATED:
        number = SHAPES_PAIRS if limit is None else limit
        make = shapes_pairs if source == GENERATED[0] else shapes_quality
        return make(number, split=split or "heldout")
    layout, colon, place = source.partition(":")
    if layout in PAIR_LAYOUTS and colon:
        return load_layout(layout, place, split=split or "test", limit=limit)
    if layout in QUALITY_LAYOUTS and colon:
        return load_quality_layout(layout, place, split=split, limit=limit)
    known = (*PAIR_LAYOUTS, *QUALITY_LAYOUTS)
    if not Path(source).exists():
        raise UserError(
            f"There is no set '{source}': it is no file. "
            f"{suggestion(layout, (*known, *GENERATED))}Allowed: a file, {', '.join(GENERATED)}, or "
            f"LAYOUT:FOLDER with LAYOUT one of {', '.join(known)}."
        )
    if Path(source).is_dir():
        raise UserError(
            f"'{source}' is a folder; say whose layout it has, as LAYOUT:{source} with LAYOUT one of "
            f"{', '.join(known)}."
        )
    return _from_file(source, split, limit)


def _from_file(source: str, split: str | None, limit: int | None) -> PreferenceSet | QualitySet:
    for _, row in read_rows(source):
        if "image_left" not in row and "image_right" not in row and ("mos" in row or "image" in row):
            return load_quality(source, split=split, limit=limit)
        needed = ("prompt", "image_left", "image_right")
        require_columns(source, row, needed, purpose="a preference set (a quality set: image, mos)")
        return load_preferences(source, split=split, limit=limit)
    raise UserError(f"'{source}' holds no record.")


def shapes_pairs(count: int, *, seed: int = 0, split: str = "heldout") -> PreferenceSet:
    """Pairs of the shapes world with votes; nothing is drawn before a picture is asked for.

    The generators are the styles in which the scenes are drawn; `extra` has the true utilities, what the pair
    differs in, and GenEval's record for verifiers.

    Args:
        count: How many.
        seed: Of the draws.
        split: "train" or "heldout".
    """
    source = ShapesPreferences(seed, split=split)
    pairs = []
    for number in range(count):
        pair = source.pair(number)
        left, right = pair.votes
        pairs.append(
            PreferencePair(
                prompt=pair.prompt,
                image_left=shapes_reference(split, seed, "pair", number, "left"),
                image_right=shapes_reference(split, seed, "pair", number, "right"),
                label=left / (left + right),
                votes=(left, right, 0),
                generator_left=pair.left.style,
                generator_right=pair.right.style,
                category=pair.record["tag"],
                split=split,
                extra={
                    "kind": pair.kind,
                    "utility_left": pair.utility[0],
                    "utility_right": pair.utility[1],
                    "prob": pair.prob,
                    "record": pair.record,
                },
            )
        )
    return PreferenceSet(name="shapes-pairs", pairs=tuple(pairs))


def shapes_quality(count: int, *, seed: int = 0, split: str = "heldout") -> QualitySet:
    """Rated pictures of the shapes world.

    Args:
        count: How many.
        seed: Of the draws.
        split: "train" or "heldout".
    """
    source = ShapesPreferences(seed, split=split)
    records = []
    for number in range(count):
        rated = source.quality(number)
        records.append(
            QualityRecord(
                image=shapes_reference(split, seed, "quality", number),
                mos=rated.mos,
                std=rated.std,
                generator=rated.scene.style,
                category=rated.scene.distortion.kind,
                split=split,
            )
        )
    return QualitySet(name="shapes-quality", records=tuple(records))
