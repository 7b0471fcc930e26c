# SPDX-License-Identifier: Apache-2.0
"""Score image files with rewards: a row per file and reward, with a reason where there is no score."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from visalign.errors import UserError
from visalign.interfaces import PointwiseReward

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""What counts as an image in a folder; a file that is named itself may end as it likes."""


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """What one reward says of one file."""

    image: str
    """Path as given, or as found in a given folder."""
    reward: str
    value: float | None
    """In `unit`; None where the image could not be judged."""
    unit: str
    std: float | None = None
    """Standard deviation in the same unit, where the reward gives one."""
    reason: str | None = None
    """Why there is no value."""
    parts: dict[str, float | None] = field(default_factory=dict)
    """The terms that the value was made of."""
    text: str | None = None
    """The judge's explanation, where it writes one."""


def find_images(items: Sequence[Path]) -> list[Path]:
    """The files to score: those named, and the images directly in the folders named, sorted.

    Args:
        items: files and folders. A named file that does not exist stays: it becomes a row with its reason.

    Returns:
        Paths, each once, in the order given.

    Raises:
        UserError: nothing was named, or a folder holds no image.
    """
    found: dict[Path, None] = {}
    for item in items:
        inside = [item]
        if item.is_dir():
            inside = sorted(path for path in item.iterdir() if path.suffix.lower() in IMAGE_ENDINGS)
            if not inside:
                raise UserError(
                    f"The folder '{item}' holds no image. Allowed endings: {', '.join(IMAGE_ENDINGS)}; "
                    "a file of another ending can be named itself."
                )
        found.update(dict.fromkeys(inside))
    if not found:
        raise UserError("No images were named. Give files or folders.")
    return list(found)


def score_images(
    paths: Sequence[Path],
    prompt: str,
    rewards: Mapping[str, PointwiseReward],
    *,
    batch_size: int = 32,
    on_batch: Callable[[int], object] | None = None,
) -> list[ScoreRow]:
    """Score N files with M rewards against one prompt.

    Args:
        paths: N files.
        prompt: what the images were asked to show.
        rewards: label -> reward.
        batch_size: files held in memory at once; no effect on a score.
        on_batch: called with the number of files of each finished batch.

    Returns:
        N·M rows, file by file.

    Raises:
        ValueError: batch_size below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it must be at least 1.")
    rows = []
    for start in range(0, len(paths), batch_size):
        batch = paths[start : start + batch_size]
        columns = [list(_rows(label, reward, batch, prompt)) for label, reward in rewards.items()]
        rows += [row for of_file in zip(*columns, strict=True) for row in of_file]
        if on_batch is not None:
            on_batch(len(batch))
    return rows


def _rows(label: str, reward: PointwiseReward, batch: Sequence[Path], prompt: str) -> Iterator[ScoreRow]:
    scores = reward.score(list(batch), [prompt] * len(batch))
    for index, path in enumerate(batch):
        number = float(scores.value[index])
        valid = bool(scores.valid[index]) and math.isfinite(number)
        reason = scores.reason[index] if scores.reason else None
        if scores.valid[index] and not valid:
            reason = f"the reward returned {number:g}, which is no score"
        yield ScoreRow(
            image=str(path),
            reward=label,
            value=number if valid else None,
            unit=scores.unit,
            std=None if scores.std is None or not valid else _number(float(scores.std[index])),
            reason=None if valid else reason or "the reward gave no reason",
            parts={name: _number(float(part[index])) for name, part in scores.parts.items()},
            text=scores.text[index] if scores.text else None,
        )


def _number(value: float) -> float | None:
    """None for NaN and infinities, which JSON does not have."""
    return value if math.isfinite(value) else None


def to_json(rows: Sequence[ScoreRow]) -> str:
    """The rows as a JSON list of objects.

    Args:
        rows: what `score_images` returned.
    """
    return json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False) + "\n"


def to_csv(rows: Sequence[ScoreRow]) -> str:
    """The rows as CSV (RFC 4180 quoting), one line per file and reward; parts and text are left to JSON.

    Args:
        rows: what `score_images` returned.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    names = ("image", "reward", "value", "unit", "std", "reason")
    writer.writerow(names)
    for row in rows:
        writer.writerow(["" if getattr(row, name) is None else getattr(row, name) for name in names])
    return buffer.getvalue()
