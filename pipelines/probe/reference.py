# SPDX-License-Identifier: Apache-2.0
"""The images that a judge is probed on, those they are compared with, and their changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.sources import shapes_pairs
from visalign.data.shapes.preferences import ShapesPreferences, degraded
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import sample_scene
from visalign.errors import UserError
from visalign.evaluation.probes.catalogue import Level, Probe, Sample
from visalign.pipelines.score.image_rows import ImageRow
from visalign.rewards.base.images import load_images

COUNT = 64
"""Reference images where the user gives none."""
_SPLIT = "heldout"
_THIRD = 2
"""Stream of the draws of third images; `ShapesPreferences` uses 0 and 1."""


@dataclass(frozen=True)
class Reference:
    """The unchanged samples and what was read of them."""

    source: str
    samples: tuple[Sample, ...]
    metadata: tuple[Mapping[str, Any] | None, ...]
    unreadable: int = 0
    """Images that could not be read and are left out."""
    others: tuple[tuple[Sample, ...], ...] = ()
    """For judges that compare: up to two other images per sample, under the sample's prompt."""
    strangers: int = 0
    """Samples whose others are images of other prompts, because their own has no more."""

    def rivals(self, row: int) -> tuple[Sample, ...]:
        """The other images of a sample."""
        return self.others[row] if self.others else ()

    def changed(self, probe: Probe, level: Level, row: int, seed: int) -> Sample | None:
        """A sample after a probe's change, None where that does not apply to it."""
        if probe.change is not None:
            generator = torch.Generator().manual_seed(1_000_003 * seed + row)
            return probe.change(self.samples[row], level, generator)
        return self.with_other_prompt(row)

    def with_other_prompt(self, row: int) -> Sample | None:
        """A sample under the prompt of the next one that has another, None where all have the same."""
        sample = self.samples[row]
        prompts = (other.prompt for other in self.samples[row + 1 :] + self.samples[:row])
        found = next((prompt for prompt in prompts if prompt != sample.prompt), None)
        return None if found is None else Sample(sample.image, found)


def shapes_reference_set(count: int = COUNT, *, seed: int = 0) -> Reference:
    """Images of the shapes world, right and wrong for their prompts, in all its styles and distortions.

    Each has two others of its prompt: the right image of its pair, and a third that is drawn freely.
    """
    source = ShapesPreferences(seed, split=_SPLIT)
    samples, others, metadata = [], [], []
    for number, pair in enumerate(shapes_pairs(count, seed=seed, split=_SPLIT).pairs):
        record = pair.extra["record"]
        rng = np.random.default_rng([seed, _THIRD, number])
        wanted = record if rng.random() < 0.5 else source.near(record, rng)
        third = render(degraded(sample_scene(wanted, rng), rng))
        images = [resolve_image(pair.image_left), resolve_image(pair.image_right), third]
        first, *rest = [
            Sample(image, pair.prompt) for image in load_images(images).images if image is not None
        ]
        samples.append(first)
        others.append(tuple(rest))
        metadata.append(record)
    return Reference("shapes world", tuple(samples), tuple(metadata), others=tuple(others))


def read_reference(source: str, rows: Sequence[ImageRow]) -> Reference:
    """Read the images of rows."""
    samples, metadata, reason = [], [], ""
    for row in rows:
        try:
            batch = load_images([resolve_image(row.image)])
        except UserError as error:
            reason = reason or str(error)
            continue
        image = batch.images[0]
        if image is None:
            reason = reason or str(batch.reasons[0])
            continue
        samples.append(Sample(image, row.prompt))
        metadata.append(row.metadata)
    if not samples:
        raise UserError(f"None of the {len(rows)} reference images of {source} can be read: {reason}")
    others, strangers = _others(samples)
    return Reference(
        source,
        tuple(samples),
        tuple(metadata),
        unreadable=len(rows) - len(samples),
        others=others,
        strangers=strangers,
    )


def _others(samples: Sequence[Sample]) -> tuple[tuple[tuple[Sample, ...], ...], int]:
    """The next two images of the same prompt, or, where there is none, the next two of other prompts.

    The second of only two images of a prompt has none: their one comparison is the first one's.
    """
    groups: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.prompt, []).append(row)
    found: list[tuple[Sample, ...]] = []
    strangers = 0
    for row, sample in enumerate(samples):
        mine = groups[sample.prompt]
        place = mine.index(row)
        if len(mine) > 2:
            chosen = [mine[(place + 1) % len(mine)], mine[(place + 2) % len(mine)]]
        elif len(mine) == 2:
            chosen = mine[1 - place : 2 - place] if place == 0 else []
        else:
            chosen = [(row + step) % len(samples) for step in (1, 2) if step < len(samples)]
            strangers += bool(chosen)
        found.append(tuple(Sample(samples[other].image, sample.prompt) for other in chosen))
    return tuple(found), strangers
