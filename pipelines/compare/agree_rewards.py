# SPDX-License-Identifier: Apache-2.0
"""Agreement of several rewards on one set of images: scores, rank correlations, largest disagreements."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from visalign.atomic import write_atomic
from visalign.data.sets.columns import Columns, read_table, usual_names
from visalign.data.sets.hub_datasets import find_table
from visalign.data.sets.layouts import PAIR_LAYOUTS, QUALITY_LAYOUTS
from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.sets.sources import GENERATED, is_named_set, load_source, lower_rewards
from visalign.data.sets.tables import Row, first_row, require_columns
from visalign.data.sets.text_rows import PAIR
from visalign.errors import UserError
from visalign.evaluation.pages.agree_page import agree_page, file_tables
from visalign.evaluation.pages.table_files import FOLDER, write_tables
from visalign.evaluation.rewards.agreement import LEVEL, agreement, largest_disagreements
from visalign.interfaces import PointwiseReward
from visalign.pipelines.score.image_rows import ImageRow, image_rows, record_metadata
from visalign.pipelines.score.provenance import provenance, reward_identity
from visalign.pipelines.score.report import load_shown_images
from visalign.pipelines.score.score import MISSING, ScoreRow, finite_or_none, read_number, score_rows
from visalign.pipelines.shared.reward_options import check_columns
from visalign.pipelines.shared.run_folder import pretty

RESULT, PAGE, ROWS = "agreement.json", "agreement.html", "scores.jsonl"
SHOWN = 8  # Images shown for every two rewards
_SCORES, _LOWER = "scores", "lower_is_better"  # Keys of the rows' metadata: scores from columns, names of some


def read_set(
    source: str,
    *,
    prompt: str | None = None,
    limit: int | None = None,
    columns: Columns | None = None,
    scores: Sequence[str] = (),
) -> list[ImageRow]:
    """Read distinct images with prompts from a table (image, prompt), a folder, or a set of `evaluate`.

    Of a preference set both images of each pair are read, each once. `scores` are kept in the rows' metadata: of
    columns NAME, or NAME_left and NAME_right; or of rewards in a table that `visalign score` wrote.
    """
    columns = columns or Columns()
    path = Path(source) if is_named_set(source) else find_table(source)
    first = first_row(path)
    columns_of_first = first.keys() | usual_names(first, columns.names, is_judged=False).keys()
    if is_named_set(source) or columns_of_first & {"image_left", "image_right", *PAIR}:
        records = load_source(source if is_named_set(source) else str(path), limit=limit, columns=columns)
        is_pairs = isinstance(records, PreferenceSet)
        rows = _rows_of_pairs(path, records, scores) if is_pairs else _rows_of_images(path, records, prompt, scores)
    elif path.is_file() and scores:
        rows = _rows_of_table(path, prompt, columns, scores)
    elif path.exists():
        rows = _distinct(image_rows([path], prompt, needs_prompt=columns.has_images, names=columns.names))
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
    columns: Sequence[str] = (),
    lower_is_better: Sequence[str] = (),
    seed: int = 0,
    batch_size: int = 32,
    on_batch: Callable[[int], object] | None = None,
    store: Any = None,
) -> dict[str, Any]:
    """Score a set by several rewards, or read their scores (`columns`, as `read_set` kept them), and compare
    their orders as JSON: `visalign.evaluation.rewards.agreement` and the largest disagreements of every two.
    `lower_is_better` names columns; a table of `visalign score` says it itself.
    """
    started = time.perf_counter()
    if len(rewards) + len(columns) < 2 or len(rows) < 3:
        got = f"{len(rewards) + len(columns)} rewards and {len(rows)} images"
        raise UserError(f"Agreement takes at least 2 rewards (--reward, --scores) and 3 images; got {got}.")
    check_columns(columns, list(rewards), lower_is_better)
    table = {name: [_column_row(name, row, lower_is_better) for row in rows] for name in columns}
    if rewards:
        scored = score_rows(rows, rewards, batch_size=batch_size, on_batch=on_batch, store=store)
        table |= {label: scored[index :: len(rewards)] for index, label in enumerate(rewards)}
    judges = dict.fromkeys(columns, None) | dict(rewards)
    records = [_reward_record(label, judge, table[label]) for label, judge in judges.items()]
    if failed := next((record for record in records if not record["judged"]), None):
        reason = next(iter(failed["reasons"]))
        raise UserError(f"{failed['label']} could judge none of the {len(rows)} images: {reason}")
    prompts = len({row.prompt for row in rows})
    return {
        "format": "visalign agreement 1",
        "set": {"source": source, "images": len(rows), "prompts": prompts, "seed": seed, "level": LEVEL},
        "rewards": records,
        "pairs": _compare_pairs(rows, table, seed),
        "seconds": round(time.perf_counter() - started, 3),
    }


def write_agreement(folder: Path, result: Mapping[str, Any]) -> Path:
    """Write `agreement.json`, `tables/`, and `agreement.html` with its images embedded."""
    names = dict.fromkeys(row["image"] for pair in result["pairs"] for row in pair["disagreements"])
    write_atomic(folder / RESULT, pretty(result))
    write_tables(folder / FOLDER, file_tables(result))
    return write_atomic(folder / PAGE, agree_page(result, load_shown_images(names)))


def _compare_pairs(rows: Sequence[ImageRow], table: Mapping[str, Sequence[ScoreRow]], seed: int) -> list[Any]:
    """Compare every two rewards: agreement, and the images and prompts on which they differ most."""
    scores = list(table.values())
    values = np.array([[row.value for row in column] for column in scores], dtype=np.float64)  # None becomes NaN
    values *= [[1 if column[0].higher_is_better else -1] for column in scores]  # up is better
    pairs = agreement(list(table), values, [row.prompt for row in rows], seed=seed)
    for entry, (a, b) in zip(pairs, combinations(range(len(table)), 2), strict=True):
        entry["disagreements"] = [
            {"image": rows[row].image, "prompt": rows[row].prompt, "first": first, "second": second}
            | {"first_score": scores[a][row].value, "second_score": scores[b][row].value}
            for row, first, second in largest_disagreements(values[a], values[b], most=SHOWN)
        ]
    return pairs


def _column_row(name: str, row: ImageRow, lower_is_better: Sequence[str]) -> ScoreRow:
    record: Mapping[str, Any] = {_SCORES: {}, _LOWER: (), **(row.metadata or {})}
    number = finite_or_none(read_number(record[_SCORES].get(name)))
    about: dict[str, Any] = {"unit": "as in the table", "reason": MISSING if number is None else None}
    about["higher_is_better"] = name not in {*lower_is_better, *record[_LOWER]}
    return ScoreRow(image=row.image, reward=name, value=number, **about)


def _rows_of_pairs(path: Path, pairs: PreferenceSet, scores: Sequence[str]) -> list[ImageRow]:
    names = {name for pair in pairs.pairs for name in pair.extra}
    require_columns(path, dict.fromkeys(names), [f"{name}_left" for name in scores], purpose="--scores")
    rows: dict[tuple[str, str], ImageRow] = {}
    for pair in pairs.pairs:
        metadata = record_metadata(pair.image_left, pair.extra)
        for side, image in (("left", pair.image_left), ("right", pair.image_right)):
            if scores:
                metadata = metadata | {_SCORES: {name: pair.extra.get(f"{name}_{side}") for name in scores}}
            row = ImageRow(image=image, prompt=pair.prompt, metadata=metadata or None)
            earlier = rows.setdefault((image, pair.prompt), row)
            if scores and (earlier.metadata or {})[_SCORES] != metadata[_SCORES]:
                raise UserError(f"'{pairs.name}' has two scores of one image, '{image}'. Keep one.")
    return list(rows.values())


def _rows_of_images(path: Path, records: QualitySet, prompt: str | None, scores: Sequence[str]) -> list[ImageRow]:
    names = dict.fromkeys(name for record in records.records for name in record.extra)
    require_columns(path, names, scores, purpose="--scores")
    rows = []
    for record in records.records:
        columns = {_SCORES: {name: record.extra.get(name) for name in scores}} if scores else {}
        metadata = record_metadata(record.image, record.extra) | columns or None
        rows.append(ImageRow(image=record.image, prompt=record.prompt or prompt or "", metadata=metadata))
    return rows


def _rows_of_table(path: Path, prompt: str | None, columns: Columns, scores: Sequence[str]) -> list[ImageRow]:
    """Read a table with scores; prompts and images where it has them."""
    table, source, lower = list(read_table(path, columns.names)), str(path), set[str]()
    is_long = all({"image", "reward"} <= set(row) for _, row in table)
    if is_long and any("value" in row for _, row in table):  # a row per image and reward
        by_image: dict[tuple[Any, Any], tuple[int, Row]] = {}
        ours = {theirs: name for name, theirs in columns.names.items()}
        for number, row in table:
            image = {name: row[name] for name in ("image", "prompt") if name in row}
            _, merged = by_image.setdefault((row["image"], row.get("prompt")), (number, image))
            reward = ours.get(str(row["reward"]), str(row["reward"]))
            if reward in merged and repr(merged[reward]) != repr(row.get("value")):
                raise UserError(f"'{path}' scores {row['image']} twice by {reward}. Give a table of one scoring.")
            merged[reward] = row.get("value")
        lower = {ours.get(name, name) for name in lower_rewards(row for _, row in table)}
        table, source = list(by_image.values()), f"rewards of {path}"
    require_columns(source, dict.fromkeys(name for _, row in table for name in row), scores, purpose="--scores")
    rows = []
    for number, row in table:
        image = str(row.get("image", f"row {number}"))
        metadata = record_metadata(image, row) | {_SCORES: {name: row.get(name) for name in scores}}
        metadata |= {_LOWER: sorted(lower)} if lower else {}
        if "://" not in image and (path.parent / image).is_file():
            image = str(path.parent / image)
        rows.append(ImageRow(image=image, prompt=str(row.get("prompt", prompt or "")), metadata=metadata))
    return _distinct(rows)


def _distinct(rows: Sequence[ImageRow]) -> list[ImageRow]:
    """Keep the first row of each image and prompt; a warning counts the others."""
    first: dict[tuple[str, str], ImageRow] = {}
    for row in rows:
        first.setdefault((row.image, row.prompt), row)
    if repeated := len(rows) - len(first):
        warnings.warn(f"{repeated} of {len(rows)} rows name an image again, which counts once.", stacklevel=3)
    return list(first.values())


def _reward_record(label: str, reward: PointwiseReward | None, rows: Sequence[ScoreRow]) -> dict[str, Any]:
    reasons = [row.reason for row in rows if row.reason]
    values = [row.value for row in rows if row.value is not None]
    identity = None if reward is None else reward_identity(reward)
    return {
        "label": label,
        "unit": rows[0].unit,
        "higher_is_better": rows[0].higher_is_better,
        "model": identity and identity.model,
        "digest": identity and identity.digest,
        "provenance": reward and provenance(reward),
        "judged": len(values),
        "failed": len(rows) - len(values),
        "reasons": {reason: reasons.count(reason) for reason in list(dict.fromkeys(reasons))[:3]},
        "mean": float(np.mean(values)) if values else None,
        "spread": float(np.std(values)) if values else None,
    }
