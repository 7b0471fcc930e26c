# SPDX-License-Identifier: Apache-2.0
"""Score images with rewards: a row per image and reward, with a reason where there is no score."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from visalign.data.sets.image_references import open_bytes, resolve_image
from visalign.errors import UserError
from visalign.escaping import csv_cell
from visalign.interfaces import PointwiseReward, with_capabilities
from visalign.rewards.base.failure import Naming
from visalign.rewards.base.images import animation_length, pixels_of
from visalign.rewards.base.memory import max_pixels

from .image_rows import ImageRow, numbered_frames
from .whose import judge_identity

Table = Sequence[ImageRow]


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """What one reward says of one image."""

    image: str
    """Path as given, or as found in a given folder; or a reference into a Parquet table."""
    reward: str
    value: float | None
    """In `unit`; None where the image could not be judged."""
    unit: str
    std: float | None = None
    """Standard deviation in the same unit, where the reward gives one."""
    reason: str | None = None
    """Why there is no value."""
    prompt: str = ""
    parts: dict[str, float | None] = field(default_factory=dict)
    """The terms that the value was made of."""
    text: str | None = None
    """The judge's explanation, where it writes one."""
    judge: str = ""
    """Whose number it is: model, revision or fingerprint, and digest of the identity."""


def takes_clips(reward: Any) -> bool:
    """Return True if a reward scores clips instead of images, as `Frames` does."""
    return with_capabilities(reward).capabilities.takes_clips


class Keeper(Protocol):
    """Keeps scores as they come, such as `visalign.pipelines.score.log.RowLog`."""

    def get(self, label: str, row: ImageRow) -> ScoreRow | None:
        """What is known already."""
        ...

    def add(self, label: str, rows: Sequence[tuple[ImageRow, ScoreRow]]) -> None:
        """Keep new ones."""
        ...


def score_rows(
    table: Table,
    rewards: Mapping[str, PointwiseReward],
    *,
    batch_size: int = 32,
    on_batch: Callable[[int], object] | None = None,
    keeper: Keeper | None = None,
) -> list[ScoreRow]:
    """Score N images with their prompts by M rewards.

    Args:
        table: N images.
        rewards: label -> reward.
        batch_size: images held in memory at once; no effect on a score.
        on_batch: called with the number of images of each finished batch.
        keeper: knows earlier scores, which are not asked for again, and is given each batch when it is done.

    Returns:
        N·M rows, image by image.

    Raises:
        ValueError: batch_size below 1.
        RewardError: a reward raised.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")
    rows = []
    for start in range(0, len(table), batch_size):
        batch = table[start : start + batch_size]
        columns = [_batch_rows(label, reward, batch, keeper) for label, reward in rewards.items()]
        rows += [row for of_image in zip(*columns, strict=True) for row in of_image]
        if on_batch is not None:
            on_batch(len(batch))
    return rows


def _batch_rows(label: str, reward: PointwiseReward, batch: Table, keeper: Keeper | None) -> list[ScoreRow]:
    """One reward's rows of a batch: known ones, unreadable references, and what the reward is asked now."""
    found: dict[int, ScoreRow] = {}
    images: dict[int, Any] = {}
    for place, row in enumerate(batch):
        known = None if keeper is None else keeper.get(label, row)
        if known is not None:
            found[place] = known
            continue
        try:
            images[place] = _image(row, label, reward)
        except UserError as error:
            found[place] = _row(label, reward.unit, row, reason=str(error))
    for places in _held_at_once(images, pixels_of_clip if takes_clips(reward) else pixels_of):
        rows = _ask(label, reward, [batch[n] for n in places], [images[n] for n in places])
        fresh = dict(zip(places, rows, strict=True))
        found |= fresh
        if keeper is not None:
            keeper.add(label, [(batch[place], row) for place, row in fresh.items()])
    return [found[place] for place in range(len(batch))]


def _image(row: ImageRow, label: str, reward: PointwiseReward) -> Any:
    """What the reward is given: an image, or for one that takes clips also an animation or a list of frames.

    Raises:
        UserError: There is nothing to judge, or a clip for a judge of images.
    """
    if row.reason is not None:
        raise UserError(row.reason)
    found = resolve_image(row.image) if row.content is None else open_bytes(row.content, row.image)
    is_folder = isinstance(found, str) and os.path.isdir(found)
    frames = numbered_frames(row.image) if is_folder else []
    if takes_clips(reward):
        if is_folder and not frames:
            raise UserError(
                f"'{row.image}' is a folder, but no clip: one holds numbered images alone, of one name and "
                "ending, such as 1.png, 2.png."
            )
        return frames or found
    length = len(frames) or animation_length(found)
    if length > 1:
        raise UserError(
            f"'{row.image}' is a clip of {length} frames, and {label} judges images. Let the reward "
            f"'frames' ask it: -r frames --option reward={label}; --option frames=1 takes the middle frame."
        )
    return found


def pixels_of_clip(item: Any) -> int:
    """Pixels of all frames of a clip, told without decoding; what is more than a single image may have
    counts as that, since it is judged by fewer frames or not at all.
    """
    pixels = sum(map(pixels_of, item)) if isinstance(item, list) else pixels_of(item) * animation_length(item)
    return min(pixels, max_pixels())


def _held_at_once(images: Mapping[int, Any], pixels_of: Callable[[Any], int]) -> Iterator[list[int]]:
    """Places of images which together have no more pixels than a single one may."""
    places: list[int] = []
    most, pixels = max_pixels(), 0
    for place, image in images.items():
        own = pixels_of(image)
        own = own if own <= most else 0  # it will be refused, not decoded
        if places and pixels + own > most:
            yield places
            places, pixels = [], 0
        places.append(place)
        pixels += own
    if places:
        yield places


def _ask(label: str, reward: PointwiseReward, batch: Table, images: list[Any]) -> Iterator[ScoreRow]:
    records = [row.metadata for row in batch]
    with Naming(label):
        scores = reward.score(images, [row.prompt for row in batch], records if any(records) else None)
        told = judge_identity(reward).line
    for index, row in enumerate(batch):
        number = float(scores.value[index])
        valid = bool(scores.valid[index]) and math.isfinite(number)
        reason = scores.reason[index] if scores.reason else None
        if scores.valid[index] and not valid:
            reason = f"the reward returned {number:g}, which is no score"
        yield _row(
            label,
            scores.unit,
            row,
            value=number if valid else None,
            std=None if scores.std is None or not valid else _number(float(scores.std[index])),
            reason=None if valid else reason or "the reward gave no reason",
            parts={name: _number(float(part[index])) for name, part in scores.parts.items()},
            text=scores.text[index] if scores.text else None,
            judge=told,
        )


def _row(label: str, unit: str, row: ImageRow, *, value: float | None = None, **more: Any) -> ScoreRow:
    return ScoreRow(image=row.image, reward=label, value=value, unit=unit, prompt=row.prompt, **more)


def _number(value: float) -> float | None:
    """None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def to_json(rows: Sequence[ScoreRow]) -> str:
    """The rows as a JSON list of objects."""
    return json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False) + "\n"


def to_jsonl(rows: Sequence[ScoreRow]) -> str:
    """The rows as JSON objects, one in a line."""
    return "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)


def to_csv(rows: Sequence[ScoreRow]) -> str:
    """The rows as CSV (RFC 4180 quoting), one line per file and reward; parts and text are left to JSON."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    names = ("image", "reward", "value", "unit", "std", "reason", "prompt")
    writer.writerow(names)
    for row in rows:
        writer.writerow([csv_cell(getattr(row, name)) for name in names])
    return buffer.getvalue()
