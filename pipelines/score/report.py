# SPDX-License-Identifier: Apache-2.0
"""Scores of many images in short: their spread, the best and worst images, what failed; and the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from visalign.atomic import write_atomic
from visalign.data.sets.image_references import resolve_image
from visalign.errors import UserError
from visalign.evaluation.pages.base import embedded
from visalign.evaluation.pages.score_page import score_page
from visalign.evaluation.pages.table_files import FileTable
from visalign.interfaces import PointwiseReward
from visalign.rewards.base.images import load_images

from .image_rows import numbered_frames
from .score import ScoreRow
from .whose import foreign, whose

SHOWN = 8
"""Best and worst images of each reward that the page shows."""
SHOWN_SIDE = 320
MOST_BINS = 40
NAMED = 5
"""Images that are named for each reason of failure."""
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def score_summary(
    rows: Sequence[ScoreRow], rewards: Mapping[str, PointwiseReward], *, seconds: float
) -> dict[str, Any]:
    """What N·M scores say of N images and M rewards.

    Returns:
        JSON-able: `images`, `prompts`, `seconds` and `rewards`, each with `label`, `unit`, `whose` number it
        is, `caution` where a packaged judge does not belong, `higher_is_better`, `judged`, `failed`,
        `failures` (reason, count and some images, most frequent first), `mean`, `spread`, `mean_std` of its
        own uncertainty, `quantiles` {percent: value}, `histogram`
        (edges and counts), `best` and `worst` rows. What is not there is None.
    """
    own: dict[str, list[ScoreRow]] = {label: [] for label in rewards}
    for row in rows:
        own[row.reward].append(row)
    return {
        "format": "visalign score summary 1",
        "images": len(rows) // max(len(own), 1),
        "prompts": len({row.prompt for row in rows}),
        "seconds": round(seconds, 3),
        "rewards": [_reward(label, rewards[label], found) for label, found in own.items()],
    }


def write_score_page(path: Path, summary: Mapping[str, Any]) -> Path:
    """Write the page with the images that are shown."""
    names = {
        row["image"] for reward in summary["rewards"] for side in ("best", "worst") for row in reward[side]
    }
    return write_atomic(path, score_page(summary, shown_images(sorted(names))))


def file_tables(rows: Sequence[ScoreRow], summary: Mapping[str, Any]) -> list[FileTable]:
    """The values of each reward, and every score with an image a row, for files."""
    rewards = summary["rewards"]
    counts = ("judged", "failed", "mean", "spread", "mean_std")
    quantiles = [f"{100 * q:.0f}" for q in QUANTILES]
    values = [
        [reward["label"], reward["unit"], *(reward[name] for name in counts)]
        + [reward["quantiles"].get(percent) for percent in quantiles]
        for reward in rewards
    ]
    labels = [reward["label"] for reward in rewards]
    has_std = {reward["label"] for reward in rewards if reward["mean_std"] is not None}
    images = [rows[start : start + len(labels)] for start in range(0, len(rows), max(len(labels), 1))]
    scores = [
        [own[0].image, own[0].prompt]
        + [value for row in own for value in (row.value, row.std)[: 1 + (row.reward in has_std)]]
        for own in images
    ]
    heads = [name for label in labels for name in (label, f"{label}_std")[: 1 + (label in has_std)]]
    columns = ("reward", "unit", *counts, *(f"percentile_{percent}" for percent in quantiles))
    return [
        FileTable(name="values", columns=columns, rows=values),
        FileTable(name="scores", columns=("image", "prompt", *heads), rows=scores),
    ]


def shown_images(names: Iterable[str]) -> dict[str, dict[str, Any] | None]:
    """Image -> image as `embedded` gives it; None where it cannot be read, as it may be gone since."""
    found: dict[str, dict[str, Any] | None] = {}
    for name in names:
        try:
            frames = numbered_frames(name)
            image = load_images([frames[len(frames) // 2] if frames else resolve_image(name)]).images[0]
        except UserError:
            image = None
        found[name] = None if image is None else embedded(image, side=SHOWN_SIDE)
    return found


def _reward(label: str, reward: PointwiseReward, rows: Sequence[ScoreRow]) -> dict[str, Any]:
    judged = [row for row in rows if row.value is not None]
    values = np.array([row.value for row in judged], dtype=np.float64)
    order = np.argsort(-values if reward.higher_is_better else values, kind="stable")
    count = min(SHOWN, (len(judged) + 1) // 2)
    rest = min(SHOWN, len(judged) - count)
    stds = [row.std for row in judged if row.std is not None]
    return {
        "label": label,
        "unit": rows[0].unit if rows else reward.unit,
        "whose": whose(reward),
        "caution": foreign(reward, [row.prompt for row in rows]),
        "higher_is_better": bool(reward.higher_is_better),
        "judged": len(judged),
        "failed": len(rows) - len(judged),
        "failures": _failures(rows),
        "mean": float(values.mean()) if len(judged) else None,
        "spread": float(values.std()) if len(judged) else None,
        "mean_std": float(np.mean(stds)) if stds else None,
        "quantiles": {f"{100 * q:.0f}": float(np.quantile(values, q)) for q in QUANTILES if len(judged)},
        "histogram": histogram(values) if len(judged) else None,
        "best": [_shown(judged[k]) for k in order[:count]],
        "worst": [_shown(judged[k]) for k in order[::-1][:rest]],
    }


def histogram(values: np.ndarray) -> dict[str, list[float]]:
    """Counts of values in bins of one width, as many as the values call for, at most `MOST_BINS`.

    Returns:
        `edges` [K + 1] and `counts` [K]; one bin around the value where all are equal.
    """
    width = float(np.ptp(values))
    if width <= 1e-12 * float(np.abs(values).max()):
        half = abs(float(values[0])) / 10 or 0.5
        return {"edges": [float(values[0]) - half, float(values[0]) + half], "counts": [float(len(values))]}
    # The Freedman-Diaconis width, by hand: a single far outlier would ask numpy for millions of bins.
    low, high = np.quantile(values, [0.25, 0.75])
    step = 2 * float(high - low) / len(values) ** (1 / 3)
    bins = min(max(int(np.ceil(width / step)), 1), MOST_BINS) if step > width / MOST_BINS else MOST_BINS
    counts, edges = np.histogram(values, bins=max(bins, min(5, len(values))))
    return {"edges": edges.tolist(), "counts": counts.astype(float).tolist()}


def _failures(rows: Sequence[ScoreRow]) -> list[dict[str, Any]]:
    """Reasons with their images, most frequent first; a reason that names its image counts without it."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.value is None:
            reason = (row.reason or "the reward gave no reason").replace(row.image, "the image")
            found.setdefault(reason, []).append(row.image)
    most = sorted(found.items(), key=lambda entry: -len(entry[1]))
    return [{"reason": reason, "count": len(names), "images": names[:NAMED]} for reason, names in most]


def _shown(row: ScoreRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("image", "prompt", "value", "std", "parts", "text")}
