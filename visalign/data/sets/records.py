# SPDX-License-Identifier: Apache-2.0
"""Human judgements of images: pairs with a preferred side, and single images with a quality score."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from .tables import Row


@dataclass(frozen=True, kw_only=True)
class PreferencePair:
    """Two images of one prompt with the preference between them."""

    prompt: str
    image_left: str  # A path, or a reference that `resolve_image` reads
    image_right: str
    label: float  # Share of the votes for the left image: 1 left, 0 right, 0.5 a tie.
    votes: tuple[int, int, int] | None = None
    """Votes for left, for right, and for a tie; None where only the label is known."""
    annotator: str | None = None
    """Voter, in a table with a row per annotator; such rows of a pair are summed (`summed_votes`)."""
    ballots: tuple[tuple[str, float], ...] = ()
    """Vote of each named annotator, 1 left, 0 right, 0.5 a tie, where votes were summed from rows."""
    generator_left: str | None = None  # Name of the model that generated the left image
    generator_right: str | None = None
    resolution: str | None = None  # "WIDTHxHEIGHT" of the images, where it is known
    category: str | None = None  # Kind of prompt, e.g. "counting".
    split: str | None = None  # "train", "test" ...; None where the source has no splits.
    prompt_id: str | None = None  # Group of the pairs of one prompt; None groups by the prompt itself
    extra: Mapping[str, Any] = field(default_factory=dict)  # All other columns: scores of rewards, GenEval's metadata

    @property
    def group(self) -> str:
        """Key of the prompt, equal for all of its pairs; without a prompt that of the two images."""
        if self.prompt_id is not None:
            return self.prompt_id
        return self.prompt or " ".join(sorted((self.image_left, self.image_right)))

    @property
    def label_against_votes(self) -> bool:
        """True where most votes are for another side than the label, which then counts."""
        if self.votes is None:
            return False
        left, right, tie = self.votes
        if self.label == 0.5:
            return left != right and tie < max(left, right)
        return left <= right if self.label > 0.5 else right <= left

    def swapped(self) -> PreferencePair:
        """Exchange the sides, also in `extra`: NAME_left and NAME_right change places, NAME_prob becomes 1 − p, or
        changes places with NAME_prob_swapped.
        """
        return replace(
            self,
            image_left=self.image_right,
            image_right=self.image_left,
            label=1.0 - self.label,
            votes=None if self.votes is None else (self.votes[1], self.votes[0], self.votes[2]),
            ballots=tuple((name, 1.0 - label) for name, label in self.ballots),
            generator_left=self.generator_right,
            generator_right=self.generator_left,
            extra=dict(swap_column(name, value, self.extra) for name, value in self.extra.items()),
        )

    def to_row(self) -> Row:
        """Convert to an object of a JSONL file, None left out; `load_preferences` reads it back equal."""
        row = _to_row(self)
        ballots = [list(ballot) for ballot in row.pop("ballots")]
        lists = {"ballots": ballots, "votes": self.votes and list(self.votes)}
        return row | {name: value for name, value in lists.items() if value}


@dataclass(frozen=True, kw_only=True)
class QualityRecord:
    """An image with its mean opinion score."""

    image: str
    mos: float  # Mean opinion score in the unit of the set
    std: float | None = None  # Standard deviation of the opinions in the same unit
    prompt: str = ""
    generator: str | None = None
    resolution: str | None = None
    category: str | None = None  # Kind of image or of distortion
    split: str | None = None
    reference: str | None = None  # The undistorted image behind this one: images that share it belong into one split
    annotator: str | None = None  # Rater, in a table with a row per rating (`visalign.data.sets.ratings`)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """Key of the images that must stay in one split: the reference, else the image."""
        return self.image if self.reference is None else self.reference

    def to_row(self) -> Row:
        """Convert to an object of a JSONL file, None left out."""
        return _to_row(self)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Records of one source, with their numbers in its file for messages."""

    name: str
    rows: tuple[int, ...] = ()  # Number of each record in its file; empty for a set that was not read from one

    def row(self, index: int) -> int:
        """Row number of record 0, 1, ... in its file; counted from 1 where there is none."""
        return self.rows[index] if self.rows else index + 1


@dataclass(frozen=True, kw_only=True)
class PreferenceSet(_Rows):
    """Pairs of one source."""

    pairs: tuple[PreferencePair, ...]

    def __len__(self) -> int:
        return len(self.pairs)


@dataclass(frozen=True, kw_only=True)
class QualitySet(_Rows):
    """Scored images of one source."""

    records: tuple[QualityRecord, ...]
    higher_is_better: bool = True  # Direction of `mos`: False for difference scores (DMOS) where 0 is perfect
    ratings: QualitySet | None = None  # A record per rating, where `records` are the means of several raters

    def __len__(self) -> int:
        return len(self.records)

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """[N] group of each image for resampling: images linked by a shared prompt or reference.

        One that all images share is ignored; where all are linked, the column with fewer values gives the groups.
        """
        images = [record.image for record in self.records]
        prompts, references = [r.prompt or None for r in self.records], [r.reference for r in self.records]
        columns = [column for column in (prompts, references) if len(set(column)) > 1]
        groups = _connected_groups(images, columns)
        if len(columns) > 1 and len(set(groups)) == 1:
            groups = _connected_groups(images, [min(columns, key=lambda column: len(set(column)))])
        return groups


def mix_sides(pair: PreferencePair) -> PreferencePair:
    """Swap half of all pairs, chosen by a hash of prompt and file names."""
    images = sorted((pair.image_left, pair.image_right))
    names = (Path(image).name for image in images)
    left = images[zlib.crc32("\n".join((pair.prompt, *names)).encode()) % 2]
    return pair if pair.image_left == left else pair.swapped()


def _connected_groups(images: Sequence[str], columns: Sequence[Sequence[str | None]]) -> tuple[int, ...]:
    """[N] number of each row's connected component; rows are linked by their image and by each column."""
    nodes: dict[tuple[int, str], int] = {}  # images first, so that components are numbered by their rows
    rows = [nodes.setdefault((0, image), len(nodes)) for image in images]
    edges = [
        (row, nodes.setdefault((kind, value), len(nodes)))
        for kind, column in enumerate(columns, 1)
        for row, value in zip(rows, column, strict=True)
        if value is not None
    ]
    start, end = np.array(edges, dtype=np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(len(edges), np.int8), (start, end)), shape=(len(nodes), len(nodes)))
    return tuple(connected_components(graph, directed=False)[1][rows].tolist())


def swap_column(name: str, value: Any, extra: Mapping[str, Any]) -> tuple[str, Any]:
    """Return name and value of a further column when the sides are exchanged."""
    for side, other in (("_left", "_right"), ("_right", "_left")):
        if name.endswith(side):
            return name.removesuffix(side) + other, value
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


def _to_row(record: PreferencePair | QualityRecord) -> Row:
    values = {field.name: getattr(record, field.name) for field in fields(record) if field.name != "extra"}
    return {**record.extra, **{name: value for name, value in values.items() if value is not None}}
