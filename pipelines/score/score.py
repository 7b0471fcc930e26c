# SPDX-License-Identifier: Apache-2.0
"""Score images with rewards: a row per image and reward, with a reason where there is no score."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any

from torch import Tensor

from visalign.data.sets.image_references import CompletionText, open_bytes, resolve_image
from visalign.errors import Naming, UserError
from visalign.evaluation.pages.table_files import csv_cell
from visalign.interfaces import PointwiseReward, score_named, with_capabilities
from visalign.rewards.base.ahead import decode_ahead, takes_decoded, worker_count
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.images import animation_length, as_contract, pixels_of
from visalign.rewards.base.memory import max_pixels

from .image_rows import ImageRow, numbered_frames
from .log import ScoreLog, score_key
from .provenance import reward_identity

MISSING = "no number in the column"  # Reason of a failure where scores are read from a table


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    image: str  # Path as given, or as listed from a given folder; or a reference into a Parquet table
    reward: str
    value: float | None  # Score in `unit`; None where the image could not be scored
    unit: str
    std: float | None = None  # Standard deviation in the same unit, where the reward gives one
    reason: str | None = None  # Why there is no value
    prompt: str = ""
    parts: dict[str, float | None] = field(default_factory=dict)  # Terms of the value
    text: str | None = None  # The judge's explanation, where it writes one
    judge: str = ""  # Provenance: model, revision or fingerprint, and digest of the identity
    higher_is_better: bool = True


def takes_clips(reward: Any) -> bool:
    """Return True if a reward scores clips instead of images, as `Frames` does."""
    return with_capabilities(reward).capabilities.takes_clips


def check_batch_size(name: str, reward: Any, count: int, batch_size: int) -> None:
    """Refuse a reward that scores the samples of a batch against each other where one batch does not hold all."""
    if count > batch_size and with_capabilities(reward).capabilities.compares_samples:
        raise UserError(
            f"{name} scores the samples of a batch against each other, and {count} are more than one batch of "
            f"{batch_size}. Set --batch-size {count}."
        )


def score_rows(
    table: Sequence[ImageRow],
    rewards: Mapping[str, PointwiseReward],
    *,
    batch_size: int = 32,
    on_batch: Callable[[int], object] | None = None,
    store: ScoreLog | None = None,
) -> list[ScoreRow]:
    """Score N images with their prompts by M rewards: N·M rows, image by image.

    `batch_size` bounds memory alone; `on_batch` gets the images of each finished batch. Scores in `store` are kept.
    Batches are four times as large where images are decoded ahead: a GPU has nothing to do between two.
    """
    for label, reward in rewards.items():
        check_batch_size(label, reward, len(table), batch_size)
    batch_size *= 4 if any(map(takes_decoded, rewards.values())) and worker_count(len(table)) else 1

    def open_new(row: ImageRow) -> Any:
        is_stored = store is not None and all(store.get(_key(row, label)) is not None for label in rewards)
        return None if is_stored else _open(row)

    rows = []
    with closing(decode_ahead(table, open_new, rewards.values())) as ahead:
        for start in range(0, len(table), batch_size):
            batch = table[start : start + batch_size]
            decoded = list(islice(ahead, len(batch)))
            columns = [_scored(label, reward, batch, decoded, store) for label, reward in rewards.items()]
            rows += chain.from_iterable(zip(*columns, strict=True))
            if on_batch is not None:
                on_batch(len(batch))
    return rows


def _key(row: ImageRow, label: str) -> str:
    return f"{score_key([row.image], row.prompt, row.metadata)}:{label}"


def _scored(
    label: str, reward: PointwiseReward, batch: Sequence[ImageRow], decoded: Sequence[Any], store: ScoreLog | None
) -> list[ScoreRow]:
    """Collect one reward's rows of a batch: stored ones, unreadable references, and new scores."""
    keys = [_key(row, label) for row in batch if store is not None]
    stored = {index: entry for index, key in enumerate(keys) if store and (entry := store.get(key)) is not None}
    compares = with_capabilities(reward).capabilities.compares_samples
    rows, images = {} if compares and len(stored) < len(batch) else stored, dict[int, Any]()
    for index, row in enumerate(batch):
        if index in rows:
            continue
        try:
            is_decoded = takes_decoded(reward) and decoded[index] is not None
            images[index] = decoded[index] if is_decoded else _load(row, label, reward)
        except UserError as error:
            about = {"unit": reward.unit, "higher_is_better": reward.higher_is_better, "prompt": row.prompt}
            rows[index] = ScoreRow(image=row.image, reward=label, value=None, reason=str(error), **about)
    parts = list(_split_by_pixels(images, pixels_of_clip if takes_clips(reward) else pixels_of))
    if compares and len(parts) > 1:
        raise UserError(
            f"{label} scores images against each other, and these have more than {max_pixels()} pixels together. "
            "Shrink them, or raise the environment variable VISALIGN_MAX_PIXELS."
        )
    for indices in parts:
        scores = _score(label, reward, [batch[i] for i in indices], [images[i] for i in indices])
        rows |= zip(indices, scores, strict=True)
        if store is not None:
            store.add({keys[index]: rows[index] for index in indices})
    return [rows[index] for index in range(len(batch))]


def _open(row: ImageRow) -> Any:
    """Return the image of a row, not decoded."""
    if row.reason is not None:
        raise UserError(row.reason)
    return resolve_image(row.image) if row.content is None else open_bytes(row.content, row.image)


def _load(row: ImageRow, label: str, reward: PointwiseReward) -> Any:
    """Load a reward's input: an image, or for one that takes clips also an animation or a list of frames."""
    image = _open(row)
    if isinstance(image, CompletionText):
        return image
    is_folder = isinstance(image, str) and os.path.isdir(image)
    frames = numbered_frames(row.image) if is_folder else []
    if takes_clips(reward):
        if is_folder and not frames:
            raise UserError(f"'{row.image}' is a folder, but no clip, which holds nothing but 1.png, 2.png ...")
        return frames or image
    length = len(frames) or animation_length(image)
    if length > 1:
        raise UserError(
            f"'{row.image}' is a clip of {length} frames, and {label} judges images. Let the reward "
            f"'frames' ask it: -r frames --option reward={label}; --option frames=1 takes the middle frame."
        )
    return image


def pixels_of_clip(item: Any) -> int:
    """Count the pixels of all frames of a clip without decoding it, at most the limit of a single image."""
    pixels = sum(map(pixels_of, item)) if isinstance(item, list) else pixels_of(item) * animation_length(item)
    return min(pixels, max_pixels())


def _split_by_pixels(images: Mapping[int, Any], pixels_of: Callable[[Any], int]) -> Iterator[list[int]]:
    """Split indices so that the images of each part have no more pixels than a single one may."""
    indices, limit, total = list[int](), max_pixels(), 0
    for index, image in images.items():
        pixels = pixels if (pixels := pixels_of(image)) <= limit else 0  # a larger one is refused, not decoded
        if indices and total + pixels > limit:
            yield indices
            indices, total = [], 0
        indices.append(index)
        total += pixels
    if indices:
        yield indices


def _score(label: str, reward: PointwiseReward, batch: Sequence[ImageRow], images: list[Any]) -> Iterator[ScoreRow]:
    records, prompts = [row.metadata for row in batch], [row.prompt for row in batch]
    samples = as_contract(images) if all(isinstance(image, Tensor) for image in images) else images
    scores = score_named(reward, samples, prompts, records if any(records) else None, name=label)
    with Naming(label):
        judge = reward_identity(reward).line
    for index, (row, reason) in enumerate(zip(batch, failure_reasons(scores), strict=True)):
        value = finite_or_none(scores.value[index])
        yield ScoreRow(
            image=row.image,
            reward=label,
            value=value,
            unit=scores.unit,
            std=None if scores.std is None or value is None else finite_or_none(scores.std[index]),
            reason=reason,
            prompt=row.prompt,
            parts={name: finite_or_none(part[index]) for name, part in scores.parts.items()},
            text=scores.text[index] if scores.text else None,
            judge=judge,
            higher_is_better=reward.higher_is_better,
        )


def finite_or_none(value: Any) -> float | None:
    """Convert a number; NaN and infinities, which JSON does not have, become None."""
    number = float(value)
    return number if math.isfinite(number) else None


def read_number(value: Any) -> float:
    """Read a number of a table's column, or NaN: a missing score is a failure, never 0."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def encode_rows(rows: Sequence[ScoreRow], form: str) -> str:
    """Encode rows as "json" (a list), "jsonl", or "csv" (RFC 4180 quoting) without parts and text."""
    if form == "json":
        return json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False) + "\n"
    if form == "jsonl":
        return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    names = ("image", "reward", "value", "unit", "std", "reason", "prompt", "higher_is_better")
    writer.writerow(names)
    writer.writerows([csv_cell(getattr(row, name)) for name in names] for row in rows)
    return buffer.getvalue()
