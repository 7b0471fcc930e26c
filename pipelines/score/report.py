# SPDX-License-Identifier: Apache-2.0
"""Summary of many scores: distribution, best and worst images, failures; tables and the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from visalign.atomic import write_atomic
from visalign.data.sets.image_references import TEXT, resolve_image
from visalign.errors import UserError
from visalign.evaluation.pages.base import embedded, embedded_text
from visalign.evaluation.pages.score_page import score_page
from visalign.evaluation.pages.table_files import FileTable
from visalign.interfaces import PointwiseReward
from visalign.rewards.base.images import load_images

from .image_rows import numbered_frames
from .provenance import domain_note, provenance
from .score import ScoreRow

SHOWN = 8  # Best and worst images of each reward on the page
SHOWN_SIDE = 320
MOST_BINS = 40
NAMED = 5  # Images that are named for each reason of failure
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def score_summary(rows: Sequence[ScoreRow], rewards: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
    """Summarize N·M scores of N images by M rewards as JSON; missing values are None."""
    return {
        "format": "visalign score summary 1",
        "images": len(rows) // len(rewards),
        "prompts": len({row.prompt for row in rows}),
        "seconds": round(seconds, 3),
        "rewards": [
            _summarize(label, reward, rows[index :: len(rewards)])
            for index, (label, reward) in enumerate(rewards.items())
        ],
    }


def write_score_page(path: Path, summary: Mapping[str, Any]) -> Path:
    names = {row["image"] for reward in summary["rewards"] for row in (*reward["best"], *reward["worst"])}
    return write_atomic(path, score_page(summary, load_shown_images(sorted(names))))


def file_tables(rows: Sequence[ScoreRow], summary: Mapping[str, Any]) -> list[FileTable]:
    """Build tables for files: the statistics of each reward, and every score with a row per image."""
    rewards = summary["rewards"]
    statistics = ("label", "unit", "judged", "failed", "mean", "spread", "mean_std")
    percents = [f"{100 * q:.0f}" for q in QUANTILES]
    values = [[r[name] for name in statistics] + [r["quantiles"].get(p) for p in percents] for r in rewards]
    with_std = {reward["label"] for reward in rewards if reward["mean_std"] is not None}
    scores: dict[int, list[Any]] = {}
    for index, row in enumerate(rows):
        cells = scores.setdefault(index // len(rewards), [row.image, row.prompt])
        cells += [row.value, row.std] if row.reward in with_std else [row.value]
    labels = [reward["label"] for reward in rewards]
    heads = [name for label in labels for name in (label, f"{label}_std") if name == label or label in with_std]
    columns = ("reward", *statistics[1:], *(f"percentile_{percent}" for percent in percents))
    return [
        FileTable(name="values", columns=columns, rows=values),
        FileTable(name="scores", columns=("image", "prompt", *heads), rows=list(scores.values())),
    ]


def load_shown_images(names: Iterable[str]) -> dict[str, dict[str, Any] | None]:
    """Load images as `embedded` encodes them; None where one cannot be read any more."""
    images: dict[str, dict[str, Any] | None] = {}
    for name in names:
        image = None
        if name.startswith(TEXT):
            images[name] = embedded_text(name.removeprefix(TEXT))
            continue
        with suppress(UserError):
            frames = numbered_frames(name)
            image = load_images([frames[len(frames) // 2] if frames else resolve_image(name)]).images[0]
        images[name] = None if image is None else embedded(image, side=SHOWN_SIDE)
    return images


def _summarize(label: str, reward: PointwiseReward, rows: Sequence[ScoreRow]) -> dict[str, Any]:
    scored = [row for row in rows if row.value is not None]
    values = np.array([row.value for row in scored], dtype=np.float64)
    order = np.argsort(-values if reward.higher_is_better else values, kind="stable")
    count, rest = min(SHOWN, (len(scored) + 1) // 2), min(SHOWN, len(scored) // 2)
    stds = [row.std for row in scored if row.std is not None]
    return {
        "label": label,
        "unit": rows[0].unit,
        "provenance": provenance(reward),
        "warning": domain_note(reward, [row.prompt for row in rows]),
        "higher_is_better": bool(reward.higher_is_better),
        "judged": len(scored),
        "failed": len(rows) - len(scored),
        "failures": _failures(rows),
        "mean": float(values.mean()) if scored else None,
        "spread": float(values.std()) if scored else None,
        "mean_std": float(np.mean(stds)) if stds else None,
        "quantiles": {f"{100 * q:.0f}": float(np.quantile(values, q)) for q in QUANTILES if scored},
        "histogram": histogram(values) if scored else None,
        "best": [_shown_row(scored[k]) for k in order[:count]],
        "worst": [_shown_row(scored[k]) for k in order[::-1][:rest]],
    }


def histogram(values: np.ndarray) -> dict[str, list[float]]:
    """Count values in √n bins of one width: `edges` [K + 1], `counts` [K]; equal values have one bin around them."""
    if float(np.ptp(values)) <= 1e-12 * float(np.abs(values).max()):
        half = abs(float(values[0])) / 10 or 0.5
        return {"edges": [float(values[0]) - half, float(values[0]) + half], "counts": [float(len(values))]}
    counts, edges = np.histogram(values, bins=min(max(math.ceil(math.sqrt(len(values))), 5), MOST_BINS))
    return {"edges": edges.tolist(), "counts": counts.astype(float).tolist()}


def _failures(rows: Sequence[ScoreRow]) -> list[dict[str, Any]]:
    """Group failures by reason, most frequent first, ignoring the image's name in it."""
    images: dict[str, list[str]] = {}
    for row in rows:
        if row.value is None:
            images.setdefault((row.reason or "").replace(row.image, "the image"), []).append(row.image)
    by_count = sorted(images.items(), key=lambda entry: -len(entry[1]))
    return [{"reason": reason, "count": len(names), "images": names[:NAMED]} for reason, names in by_count]


def _shown_row(row: ScoreRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in ("image", "prompt", "value", "std", "parts", "text")}
