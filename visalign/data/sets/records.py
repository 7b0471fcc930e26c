# SPDX-License-Identifier: Apache-2.0
"""Human judgements of images: pairs with a preferred side, and single images with a quality score."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visalign.errors import UserError

from .tables import Row


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Two images of one prompt and what people said of them."""

    prompt: str
    image_left: str
    """A path, or any reference that `visalign.data.sets.image_references.resolve_image` reads."""
    image_right: str
    label: float
    """Share of the judgement in favour of the left image: 1 left, 0 right, 0.5 a tie, between them votes."""
    votes: tuple[int, int, int] | None = None
    """How many people preferred left, preferred right, saw a tie; None where only the label is known."""
    generator_left: str | None = None
    """Name of the model that made the left image."""
    generator_right: str | None = None
    resolution: str | None = None
    """ "WIDTHxHEIGHT" of the images, where it is known."""
    category: str | None = None
    """Kind of prompt, e.g. "counting"."""
    split: str | None = None
    """ "train", "test" ...; None where the source has no splits."""
    prompt_id: str | None = None
    """What groups the pairs of one prompt; the prompt itself where the source gives none."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other columns: scores of judges, GenEval's metadata, annotators."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.label <= 1.0:  # also refuses NaN
            raise UserError(
                f"A label is the share in favour of the left image, 0 to 1 (or left, right, tie); got "
                f"{self.label}."
            )
        if self.votes is not None and (min(self.votes) < 0 or sum(self.votes) == 0):
            raise UserError(
                f"Votes are counts (left, right, tie), at least one of them positive; got {self.votes}."
            )

    @property
    def group(self) -> str:
        """What the pair shares with the other pairs of its prompt."""
        return self.prompt if self.prompt_id is None else self.prompt_id

    def swapped(self) -> PreferencePair:
        """The same judgement with the sides exchanged, and so the columns of `extra` that have sides.

        NAME_left and NAME_right change places; of a probability for the left image, NAME_prob, so do its two
        orders where NAME_prob_swapped is there, and else it becomes 1 − p.
        """
        return PreferencePair(
            prompt=self.prompt,
            image_left=self.image_right,
            image_right=self.image_left,
            label=1.0 - self.label,
            votes=None if self.votes is None else (self.votes[1], self.votes[0], self.votes[2]),
            generator_left=self.generator_right,
            generator_right=self.generator_left,
            resolution=self.resolution,
            category=self.category,
            split=self.split,
            prompt_id=self.prompt_id,
            extra=dict(_other_side(name, value, self.extra) for name, value in self.extra.items()),
        )

    def to_row(self) -> Row:
        """The record as one object of a JSONL file, None left out; `load_preferences` reads it back equal."""
        row: Row = {name: getattr(self, name) for name in PAIR_FIELDS if getattr(self, name) is not None}
        if self.votes is not None:
            row["votes"] = list(self.votes)
        return {**self.extra, **row}


@dataclass(frozen=True, kw_only=True)
class QualityRecord:
    """One image with its mean opinion score."""

    image: str
    mos: float
    """Mean opinion score in the unit of the set."""
    std: float | None = None
    """Standard deviation of the opinions in the same unit."""
    prompt: str = ""
    generator: str | None = None
    resolution: str | None = None
    category: str | None = None
    """Kind of image or of distortion."""
    split: str | None = None
    reference: str | None = None
    """The undistorted image that this one was made from: images that share it belong into one split."""
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not math.isfinite(self.mos):
            raise UserError(f"mos must be a number; got {self.mos}.")
        if self.std is not None and not self.std >= 0:
            raise UserError(f"std must be a number, at least 0; got {self.std}.")

    @property
    def group(self) -> str:
        """What is resampled together: the reference, else the image."""
        return self.image if self.reference is None else self.reference

    def to_row(self) -> Row:
        """The record as one object of a JSONL file, None left out."""
        return {
            **self.extra,
            **{n: getattr(self, n) for n in QUALITY_FIELDS if getattr(self, n) is not None},
        }


PAIR_FIELDS = (
    "prompt", "image_left", "image_right", "label", "generator_left", "generator_right", "resolution",
    "category", "split", "prompt_id",
)  # fmt: skip
QUALITY_FIELDS = (
    "image", "mos", "std", "prompt", "generator", "resolution", "category", "split", "reference",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PreferenceSet:
    """Pairs of one source."""

    name: str
    pairs: tuple[PreferencePair, ...]
    rows: tuple[int, ...] = ()
    """Number of each pair in its file, for messages; empty for a set that was not read from one."""

    def __len__(self) -> int:
        return len(self.pairs)

    def row(self, number: int) -> int:
        """The row of record 0, 1, 2, ... as its file counts them; from 1 where there is none."""
        return self.rows[number] if self.rows else number + 1


@dataclass(frozen=True, kw_only=True)
class QualitySet:
    """Scored images of one source."""

    name: str
    records: tuple[QualityRecord, ...]
    higher_is_better: bool = True
    """Direction of `mos`: False for difference scores (DMOS) where 0 is perfect."""
    rows: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.records)

    def row(self, number: int) -> int:
        """As of a `PreferenceSet`."""
        return self.rows[number] if self.rows else number + 1


def mixed_side(pair: PreferencePair) -> PreferencePair:
    """The pair, or its mirror image, by a hash of its prompt and images: half of a set, the same half always.

    Args:
        pair: Any pair.
    """
    images = sorted((pair.image_left, pair.image_right))
    names = (Path(image).name for image in images)  # so that a set that was moved keeps its sides
    digest = zlib.crc32("\n".join((pair.prompt, *names)).encode())
    wanted = images[digest % 2]
    return pair if pair.image_left == wanted else pair.swapped()


def _other_side(name: str, value: Any, extra: Mapping[str, Any]) -> tuple[str, Any]:
    """A column and its value when the sides are exchanged."""
    for mine, other in (("_left", "_right"), ("_right", "_left")):
        if name.endswith(mine):
            return name.removesuffix(mine) + other, value
    if name.endswith("_prob_swapped") and name.removesuffix("_swapped") in extra:
        return name.removesuffix("_swapped"), value
    if name != "prob" and not name.endswith("_prob"):
        return name, value
    if f"{name}_swapped" in extra:
        return f"{name}_swapped", value
    try:
        return name, 1.0 - float(value)
    except (TypeError, ValueError):
        return name, value
