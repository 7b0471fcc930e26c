# SPDX-License-Identifier: Apache-2.0
"""Reference images of a probe, the images that they are compared with, and their changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from visalign.data.sets.image_references import TEXT, resolve_image
from visalign.data.sets.sources import shapes_pairs
from visalign.data.shapes.preferences import ShapesPreferences, degraded
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import sample_scene
from visalign.data.text_tasks.tasks import text_tasks, wrong_solutions
from visalign.errors import UserError
from visalign.evaluation.probes.catalogue import Level, Probe, Sample
from visalign.evaluation.probes.text_catalogue import contrasts
from visalign.pipelines.score.image_rows import ImageRow
from visalign.rewards.base.images import load_images

_SPLIT = "heldout"
_THIRD = 2  # Stream of the draws of third images; `ShapesPreferences` uses 0 and 1


@dataclass(frozen=True)
class Reference:
    """Unchanged samples with their rivals."""

    source: str
    samples: tuple[Sample, ...]
    metadata: tuple[Mapping[str, Any] | None, ...]
    unreadable: int = 0  # Images that could not be read and are left out
    others: tuple[tuple[Sample, ...], ...] = ()
    """For pairwise judges: up to two other images per sample, under the sample's prompt."""
    strangers: int = 0  # Samples whose others are images of other prompts, because their own has no more

    def rivals(self, row: int) -> tuple[Sample, ...]:
        return self.others[row] if self.others else ()

    def contrasts(self) -> dict[int, int]:
        """Map rows to those that they are contrasted with (`contrasts`); the answer is the record's, else the text."""
        records = zip(self.samples, self.metadata, strict=True)
        answers = [str((record or {}).get("answer", sample.image)) for sample, record in records]
        others = contrasts([sample.prompt for sample in self.samples], answers)
        return {row: other for row, other in enumerate(others) if other is not None}

    def changed(self, probe: Probe, level: Level, row: int, seed: int) -> Sample | None:
        """Apply a probe's change, or the next other prompt, to a sample; None where it does not apply."""
        sample = self.samples[row]
        if probe.change is not None:
            return probe.change(sample, level, torch.Generator().manual_seed(1_000_003 * seed + row))
        prompts = (other.prompt for other in self.samples[row + 1 :] + self.samples[:row])
        other = next((prompt for prompt in prompts if prompt != sample.prompt), None)
        return None if other is None else Sample(sample.image, other)


def shapes_reference_set(count: int = 64, *, seed: int = 0) -> Reference:
    """Draw images of the shapes world in all its styles and distortions, each with two others of its prompt."""
    source = ShapesPreferences(seed, split=_SPLIT)
    samples, others, metadata = [], [], []
    for number, pair in enumerate(shapes_pairs(count, seed=seed, split=_SPLIT).pairs):
        record = pair.extra["record"]
        rng = np.random.default_rng([seed, _THIRD, number])
        prompt_record = record if rng.random() < 0.5 else source.near(record, rng)
        third = render(degraded(sample_scene(prompt_record, rng), rng))
        images = load_images([resolve_image(pair.image_left), resolve_image(pair.image_right), third]).images
        first, *rest = [Sample(image, pair.prompt) for image in images if image is not None]
        samples.append(first)
        others.append(tuple(rest))
        metadata.append(record)
    return Reference("shapes world", tuple(samples), tuple(metadata), others=tuple(others))


def task_reference_set(count: int = 64, *, seed: int = 0) -> Reference:
    """Pair the solutions of packaged text tasks with those of others, each a sample; a prompt's right one is first."""
    pairs = wrong_solutions(text_tasks(max((count + 1) // 2, 2), seed=seed, split="heldout"))
    texts = [(task, text) for task, wrong in pairs for text in (task["chosen"], wrong)]
    rows = [ImageRow(image=f"{TEXT}{text}", prompt=task["prompt"], metadata=task) for task, text in texts]
    return read_reference("packaged text tasks", rows[:count])


def read_reference(source: str, rows: Sequence[ImageRow]) -> Reference:
    """Read the images of rows; unreadable ones are counted."""
    samples, metadata, reasons = [], [], []
    for row in rows:
        try:
            batch = load_images([resolve_image(row.image)], texts=True)
            image, reason = batch.images[0], batch.reasons[0]
        except UserError as error:
            image, reason = None, str(error)
        if image is None:
            reasons.append(reason)
        else:
            samples.append(Sample(image, row.prompt))
            metadata.append(row.metadata)
    if not samples:
        raise UserError(f"None of the {len(rows)} reference samples of {source} can be read: {reasons[0]}")
    others, strangers = _find_rivals(samples)
    counts = {"unreadable": len(reasons), "strangers": strangers}
    return Reference(source, tuple(samples), tuple(metadata), others=others, **counts)


def _find_rivals(samples: Sequence[Sample]) -> tuple[tuple[tuple[Sample, ...], ...], int]:
    """Choose the next two images of the prompt, else of other prompts; of two images only the first has a rival."""
    groups: dict[str, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.prompt, []).append(row)
    rivals: list[tuple[Sample, ...]] = []
    strangers = 0
    for row, sample in enumerate(samples):
        group = groups[sample.prompt]
        start = group.index(row)
        if len(group) == 2:
            chosen = group[start + 1 :]
        else:
            pool, start = (range(len(samples)), row) if len(group) == 1 else (group, start)
            chosen = [pool[(start + step) % len(pool)] for step in (1, 2) if step < len(pool)]
            strangers += len(group) == 1 and bool(chosen)
        rivals.append(tuple(Sample(samples[other].image, sample.prompt) for other in chosen))
    return tuple(rivals), strangers
