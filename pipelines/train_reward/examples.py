# SPDX-License-Identifier: Apache-2.0
"""Labelled examples for a judge, from the shapes world or from files, one at a time by their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.shapes.preferences import KINDS, ShapesPreferences, degraded
from visalign.data.shapes.prompts import heldout_prompts, train_prompts
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import STYLES, Scene, sample_scene
from visalign.errors import UserError

from .row_names import row_name, row_number


@dataclass(frozen=True, kw_only=True)
class Example:
    """One pair (two pictures), triple (three, ascending) or rated picture (one)."""

    prompt: str
    images: tuple[Tensor, ...]
    """Each float32 [3, H, W] in [0, 1]."""
    label: float = math.nan
    """Pairs: probability that the first is better, for training."""
    truth: float = math.nan
    """Pairs: 1 or 0 for who is truly better (of votes: their majority), NaN where nobody knows."""
    clear: bool = True
    """Pairs: whether the truth is clear."""
    votes: tuple[int, int, int] | None = None
    """Pairs: for the first, for the second, for neither."""
    target: float = math.nan
    """Rated pictures: the mean opinion, 1 to 5 for the embedded models."""
    target_std: float = math.nan
    refined: str | None = None
    """Triples: the prompt of the third picture; None: the same."""
    features: Tensor | None = None
    """[pictures, F] what a frozen model says of the pictures, in their stead."""


class Examples(Protocol):
    """A numbered set."""

    @property
    def prompts(self) -> frozenset[str]:
        """All prompts of the set, or of where it is drawn from, as `plain` writes them."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Example: ...


def as_image(picture: np.ndarray) -> Tensor:
    """float32 [3, H, W] in [0, 1] of uint8 [H, W, 3]."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float().div_(255)


def plain(prompt: str) -> str:
    """A prompt without what does not count when prompts are compared."""
    return " ".join(prompt.split()).casefold()


def split_prompts(split: str) -> frozenset[str]:
    """The prompts of a split of the shapes world."""
    records = train_prompts() if split == "train" else heldout_prompts()
    return frozenset(plain(record["prompt"]) for record in records)


class ShapesPairs:
    """Pairs of the shapes world.

    Args:
        seed: of the draws.
        count: how many.
        split: of the prompts, "train" or "heldout".
        labels: "votes", "truth" or "probability".
        annotators: votes per pair.
        kinds: what the pictures of a pair differ in.
    """

    def __init__(
        self,
        seed: int,
        count: int,
        *,
        split: str = "train",
        labels: str = "votes",
        annotators: int = 9,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        self.world = ShapesPreferences(seed, split=split, annotators=annotators, kinds=kinds)
        self.count, self.labels, self.split = count, labels, split

    @property
    def prompts(self) -> frozenset[str]:
        return split_prompts(self.split)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Example:
        pair = self.world.pair(number)
        left, right = pair.utility
        truth = 0.5 if left == right else float(left > right)
        won, lost = pair.votes
        return Example(
            prompt=pair.prompt,
            images=tuple(as_image(picture) for picture in pair.pictures()),
            label={"votes": won / (won + lost), "truth": truth, "probability": pair.prob}[self.labels],
            truth=truth,
            clear=pair.is_clear,
            votes=(won, lost, 0) if self.labels == "votes" else None,
        )


class ShapesTriples:
    """Three pictures of one prompt, ascending: of another prompt or spoilt; right but poor; right and rich.

    The world has no words for what makes a picture rich, so the refined prompt is the prompt.

    Args:
        seed: of the draws.
        count: how many.
        split: of the prompts, "train" or "heldout".
    """

    def __init__(self, seed: int, count: int, *, split: str = "train") -> None:
        self.world = ShapesPreferences(seed, split=split)
        self.count, self.seed, self.split = count, seed, split

    @property
    def prompts(self) -> frozenset[str]:
        return split_prompts(self.split)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Example:
        rng = np.random.default_rng([self.seed, 41, number])
        record = self.world.record(rng)
        poor, rich = sorted(rng.choice(len(STYLES), size=2, replace=False))
        right = [sample_scene(record, rng, style=STYLES[style]) for style in (poor, rich)]
        if rng.random() < 0.7:
            worse: Scene = sample_scene(self.world.near(record, rng), rng, style=STYLES[poor])
        else:
            worse = degraded(sample_scene(record, rng, style=STYLES[poor]), rng)
        pictures = tuple(as_image(render(scene)) for scene in (worse, *right))
        return Example(prompt=record["prompt"], images=pictures)


class ShapesRatings:
    """Rated pictures of the shapes world.

    Args:
        seed: of the draws.
        count: how many.
        split: of the prompts, "train" or "heldout".
        annotators: ratings per picture.
    """

    def __init__(self, seed: int, count: int, *, split: str = "train", annotators: int = 9) -> None:
        self.world = ShapesPreferences(seed, split=split, annotators=annotators)
        self.count, self.split = count, split

    @property
    def prompts(self) -> frozenset[str]:
        return split_prompts(self.split)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Example:
        rated = self.world.quality(number)
        return Example(
            prompt=rated.scene.record["prompt"],
            images=(as_image(render(rated.scene)),),
            target=rated.mos,
            target_std=rated.std,
        )


class FilePairs:
    """Pairs of a preference set; triples need a column `image_refined`, and may have `prompt_refined`.

    Args:
        pairs: the set, checked.
        triples: whether triples are made: the worse picture, the better one, the refined one.
        folder: where relative paths of refined pictures begin.
    """

    def __init__(self, pairs: PreferenceSet, *, triples: bool = False, folder: Path | None = None) -> None:
        self.pairs, self.triples, self.folder = pairs, triples, folder or Path()
        lacking = [n for n, pair in enumerate(pairs.pairs) if triples and "image_refined" not in pair.extra]
        if lacking:
            raise UserError(
                f"{len(lacking)} rows of '{pairs.name}' have no column image_refined (the first is row "
                f"{row_number(pairs, lacking[0])}); ict learns from triples: image_left and image_right, "
                "of which one is better, and image_refined, made from a richer prompt."
            )

        tied = [n for n, pair in enumerate(pairs.pairs) if triples and pair.label == 0.5]
        if tied:
            raise UserError(
                f"{len(tied)} rows of '{pairs.name}' are ties (the first is row "
                f"{row_number(pairs, tied[0])}); ict learns that one of image_left and "
                "image_right is better. Take them out."
            )

    @property
    def prompts(self) -> frozenset[str]:
        return frozenset(plain(pair.prompt) for pair in self.pairs.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, number: int) -> Example:
        pair = self.pairs.pairs[number]
        where = row_name(self.pairs, number)
        sides = [pair.image_left, pair.image_right]
        if self.triples:
            if pair.label > 0.5:
                sides.reverse()
            images = read_images([*sides, str(self.folder / str(pair.extra["image_refined"]))], where)
            refined = pair.extra.get("prompt_refined")
            return Example(
                prompt=pair.prompt, images=images, refined=None if refined is None else str(refined)
            )
        truth = pair.label if pair.label == 0.5 else float(pair.label > 0.5)
        return Example(
            prompt=pair.prompt,
            images=read_images(sides, where),
            label=pair.label,
            truth=truth,
            votes=pair.votes,
        )


class FileRatings:
    """Rated pictures of a quality set, in its unit.

    Args:
        records: the set, checked.
    """

    def __init__(self, records: QualitySet) -> None:
        self.records = records

    @property
    def prompts(self) -> frozenset[str]:
        """The pictures (or their references), as a quality set need not have prompts."""
        return frozenset(record.group for record in self.records.records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, number: int) -> Example:
        record = self.records.records[number]
        where = row_name(self.records, number)
        sign = 1.0 if self.records.higher_is_better else -1.0
        return Example(
            prompt=record.prompt,
            images=read_images([record.image], where),
            target=sign * record.mos,
            target_std=math.nan if record.std is None else record.std,
        )


def read_images(references: Sequence[str], where: str) -> tuple[Tensor, ...]:
    """The pictures of a row.

    Args:
        references: what `resolve_image` takes.
        where: the row, for the message.

    Raises:
        UserError: a picture cannot be read.
    """
    from visalign.rewards.base.images import load_images

    batch = load_images([resolve_image(reference) for reference in references])
    for reference, reason in zip(references, batch.reasons, strict=True):
        if reason is not None:
            raise UserError(
                f"The picture '{reference}' in {where} cannot be read: {reason}. Repair it or take the row "
                "out."
            )
    return tuple(image for image in batch.images if image is not None)
