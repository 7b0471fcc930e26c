# SPDX-License-Identifier: Apache-2.0
"""Several rewards on one set of images: scored, correlated, and shown where they part company."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from visalign.atomic import write_atomic
from visalign.data.sets.layouts import PAIR_LAYOUTS, QUALITY_LAYOUTS
from visalign.data.sets.records import PreferenceSet
from visalign.data.sets.sources import GENERATED, load_source
from visalign.data.sets.tables import READERS, read_rows
from visalign.errors import UserError
from visalign.evaluation.pages.agree_page import agree_page, file_tables
from visalign.evaluation.pages.table_files import write_tables
from visalign.evaluation.rewards.agreement import LEVEL, agreement, parted, prompts_apart
from visalign.interfaces import PointwiseReward
from visalign.pipelines.score.image_rows import ImageRow, image_rows
from visalign.pipelines.score.log import judge_identity
from visalign.pipelines.score.report import shown_pictures
from visalign.pipelines.score.score import ScoreRow, score_rows
from visalign.pipelines.score.whose import whose
from visalign.pipelines.shared.run_folder import pretty

RESULT, PAGE, ROWS = "agreement.json", "agreement.html", "scores.jsonl"
SHOWN = 8
"""Images shown for every two rewards."""


def read_set(source: str, *, prompt: str | None = None, limit: int | None = None) -> list[ImageRow]:
    """Images with prompts from anything that names some.

    Args:
        source: A table with the columns image, prompt; a folder; or what `visalign evaluate` takes: a
            preference set (both images of each pair, each once) or a quality set.
        prompt: For images without one.
        limit: Take at most so many images.

    Raises:
        UserError: There is no such set, or it cannot be read.
    """
    layout, colon, _ = source.partition(":")
    known = colon and (source in GENERATED or layout in PAIR_LAYOUTS or layout in QUALITY_LAYOUTS)
    if known or _is_pairs(Path(source)):
        found = load_source(source, limit=limit)
        rows = _of_pairs(found) if isinstance(found, PreferenceSet) else _of_quality(found, prompt)
    elif Path(source).exists():
        rows = image_rows([Path(source)], prompt)
    else:
        names = ", ".join((*PAIR_LAYOUTS, *QUALITY_LAYOUTS))
        raise UserError(
            f"There is no set '{source}'. Give a table with the columns image, prompt; a folder of images; "
            f"{', '.join(GENERATED)}; or LAYOUT:FOLDER with LAYOUT one of {names}."
        )
    return rows if limit is None else rows[:limit]


def agree_rewards(
    rows: Sequence[ImageRow],
    rewards: Mapping[str, PointwiseReward],
    *,
    source: str = "",
    seed: int = 0,
    batch_size: int = 32,
    on_batch: Callable[[int], object] | None = None,
    keeper: Any = None,
) -> dict[str, Any]:
    """Score a set by several rewards and compare their orders.

    Returns:
        JSON-able: `set`, `rewards` (unit, direction, counts), `pairs` (as
        `visalign.evaluation.rewards.agreement` has them, with `parted` images and `prompts`), `seconds`.

    Raises:
        UserError: Fewer than two rewards or three images, or one of the rewards judged nothing.
        RewardError: A reward raised.
    """
    started = time.perf_counter()
    if len(rewards) < 2:
        raise UserError(f"{len(rewards)} reward was named; agreement takes two or more. Add --reward NAME.")
    if len(rows) < 3:
        raise UserError(f"The set has {len(rows)} images; a rank correlation needs at least 3.")
    scored = score_rows(rows, rewards, batch_size=batch_size, on_batch=on_batch, keeper=keeper)
    labels = list(rewards)
    table = {label: scored[place :: len(labels)] for place, label in enumerate(labels)}
    records = [_reward_record(label, rewards[label], table[label]) for label in labels]
    for record in records:
        if record["failed"] == len(rows):
            reason = next(iter(record["reasons"]), "no reason given")
            raise UserError(f"{record['label']} could judge none of the {len(rows)} images: {reason}")
    prompts = {row.prompt for row in rows}
    return {
        "format": "visalign agreement 1",
        "set": {
            "source": source,
            "images": len(rows),
            "prompts": len(prompts),
            "seed": seed,
            "level": LEVEL,
        },
        "rewards": records,
        "pairs": _pairs(rows, table, rewards, seed),
        "seconds": round(time.perf_counter() - started, 3),
    }


def _pairs(
    rows: Sequence[ImageRow],
    table: Mapping[str, Sequence[ScoreRow]],
    rewards: Mapping[str, PointwiseReward],
    seed: int,
) -> list[dict[str, Any]]:
    """Every two rewards: agreement, the images on which they part, the prompts they order least alike."""
    labels = list(rewards)
    values = np.array([_values(table[label], rewards[label]) for label in labels])
    prompts = [row.prompt for row in rows]
    pairs = agreement(labels, values, prompts, seed=seed)
    for entry, (a, b) in zip(pairs, combinations(range(len(labels)), 2), strict=True):
        entry["parted"] = [
            {
                "image": rows[row].image,
                "prompt": rows[row].prompt,
                "first": first,
                "second": second,
                "first_score": table[labels[a]][row].value,
                "second_score": table[labels[b]][row].value,
            }
            for row, first, second in parted(values[a], values[b], most=SHOWN)
        ]
        entry["prompts"] = prompts_apart(values[a], values[b], prompts)
    return pairs


def write_agreement(folder: Path, result: Mapping[str, Any]) -> Path:
    """Write `agreement.json`, `tables/`, and `agreement.html` with the pictures that are shown."""
    names = dict.fromkeys(shown["image"] for pair in result["pairs"] for shown in pair["parted"])
    write_atomic(folder / RESULT, pretty(result))
    write_tables(folder, file_tables(result))
    return write_atomic(folder / PAGE, agree_page(result, shown_pictures(names)))


def _is_pairs(path: Path) -> bool:
    """Whether a file is a table of pairs."""
    if path.suffix.lower() not in READERS or not path.is_file():
        return False
    _, row = next(read_rows(path), (0, {}))
    return "image_left" in row or "image_right" in row


def _of_pairs(found: PreferenceSet) -> list[ImageRow]:
    rows: dict[tuple[str, str], ImageRow] = {}
    for pair in found.pairs:
        record = pair.extra.get("record")
        metadata = record if isinstance(record, Mapping) else None
        for image in (pair.image_left, pair.image_right):
            rows[image, pair.prompt] = ImageRow(image=image, prompt=pair.prompt, metadata=metadata)
    return list(rows.values())


def _of_quality(found: Any, prompt: str | None) -> list[ImageRow]:
    return [ImageRow(image=record.image, prompt=record.prompt or prompt or "") for record in found.records]


def _values(rows: Sequence[ScoreRow], reward: PointwiseReward) -> list[float]:
    sign = 1 if reward.higher_is_better else -1
    return [float("nan") if row.value is None else sign * row.value for row in rows]


def _reward_record(label: str, reward: PointwiseReward, rows: Sequence[ScoreRow]) -> dict[str, Any]:
    reasons = [row.reason for row in rows if row.reason]
    known = [row.value for row in rows if row.value is not None]
    return {
        "label": label,
        "unit": reward.unit,
        "higher_is_better": reward.higher_is_better,
        "digest": judge_identity(reward).digest,
        "whose": whose(reward),
        "judged": len(known),
        "failed": len(rows) - len(known),
        "reasons": {reason: reasons.count(reason) for reason in list(dict.fromkeys(reasons))[:3]},
        "mean": float(np.mean(known)) if known else None,
        "spread": float(np.std(known)) if known else None,
    }
