# SPDX-License-Identifier: Apache-2.0
"""Several rewards on one set of images: scored, correlated, and shown where they part company."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from visalign.atomic import write_atomic
from visalign.data.sets.columns import Columns, rename_columns
from visalign.data.sets.layouts import PAIR_LAYOUTS, QUALITY_LAYOUTS
from visalign.data.sets.records import PreferenceSet
from visalign.data.sets.sources import GENERATED, load_source
from visalign.data.sets.tables import READERS, Row, listed, read_rows
from visalign.errors import UserError, suggestion
from visalign.evaluation.pages.agree_page import agree_page, file_tables
from visalign.evaluation.pages.table_files import FOLDER, write_tables
from visalign.evaluation.rewards.agreement import LEVEL, agreement, largest_disagreements, least_alike_prompts
from visalign.interfaces import PointwiseReward
from visalign.pipelines.score.image_rows import ImageRow, image_rows
from visalign.pipelines.score.provenance import provenance, reward_identity
from visalign.pipelines.score.report import load_shown_images
from visalign.pipelines.score.score import ScoreRow, score_rows
from visalign.pipelines.shared.run_folder import pretty

RESULT, PAGE, ROWS = "agreement.json", "agreement.html", "scores.jsonl"
SHOWN = 8
"""Images shown for every two rewards."""


def read_set(
    source: str,
    *,
    prompt: str | None = None,
    limit: int | None = None,
    columns: Columns | None = None,
    scores: Sequence[str] = (),
) -> list[ImageRow]:
    """Images with prompts from anything that names some.

    Args:
        source: A table with the columns image, prompt; a folder; or what `visalign evaluate` takes: a
            preference set (both images of each pair, each once) or a quality set.
        prompt: For images without one.
        limit: Take at most so many images.
        columns: How the columns of a table are read.
        scores: Names of scores, kept in the rows' metadata: of columns NAME, or NAME_left and NAME_right; or
            of rewards in a table that `visalign score` wrote (image, reward, value).
    """
    layout, colon, _ = source.partition(":")
    known = colon and (source in GENERATED or layout in PAIR_LAYOUTS or layout in QUALITY_LAYOUTS)
    wanted = columns or Columns()
    if known or _is_pairs(Path(source), wanted):
        found = load_source(source, limit=limit, columns=wanted)
        rows = (
            _of_pairs(found, scores)
            if isinstance(found, PreferenceSet)
            else _of_quality(found, prompt, scores)
        )
    elif Path(source).is_file() and scores:
        rows = _of_table(Path(source), prompt, wanted, scores)
    elif Path(source).exists():
        rows = _each_once(
            image_rows([Path(source)], prompt, needs_prompt=wanted.has_images, names=wanted.names)
        )
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
    seed: int = 0,
    batch_size: int = 32,
    on_batch: Callable[[int], object] | None = None,
    store: Any = None,
) -> dict[str, Any]:
    """Score a set by several rewards, or read their scores (`columns`, as `read_set` kept them), and compare
    their orders.

    Returns:
        JSON-able: `set`, `rewards` (unit, direction, counts), `pairs` (as
        `visalign.evaluation.rewards.agreement` has them, with `parted` images and `prompts`), `seconds`.
    """
    started = time.perf_counter()
    if len(rewards) + len(columns) < 2:
        raise UserError(
            f"{len(rewards) + len(columns)} reward was named; agreement takes two or more. Add --reward NAME "
            "or --scores NAME."
        )
    if len(rows) < 3:
        raise UserError(f"The set has {len(rows)} images; a rank correlation needs at least 3.")
    table = {name: [_column_row(name, row) for row in rows] for name in columns}
    if rewards:
        scored = score_rows(rows, rewards, batch_size=batch_size, on_batch=on_batch, store=store)
        table |= {label: scored[place :: len(rewards)] for place, label in enumerate(rewards)}
    judges = dict.fromkeys(columns, _Column()) | dict(rewards)
    records = [_reward_record(label, judge, table[label]) for label, judge in judges.items()]
    for record in records:
        if record["failed"] == len(rows):
            reason = next(iter(record["reasons"]), "no reason given")
            raise UserError(f"{record['label']} could judge none of the {len(rows)} images: {reason}")
    prompts = {row.prompt for row in rows}
    return {
        "format": "visalign agreement 1",
        "set": {"source": source, "images": len(rows), "prompts": len(prompts), "seed": seed, "level": LEVEL},
        "rewards": records,
        "pairs": _pairs(rows, table, judges, seed),
        "seconds": round(time.perf_counter() - started, 3),
    }


def _pairs(
    rows: Sequence[ImageRow], table: Mapping[str, Sequence[ScoreRow]], rewards: Mapping[str, Any], seed: int
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
            for row, first, second in largest_disagreements(values[a], values[b], most=SHOWN)
        ]
        entry["prompts"] = least_alike_prompts(values[a], values[b], prompts)
    return pairs


def write_agreement(folder: Path, result: Mapping[str, Any]) -> Path:
    """Write `agreement.json`, `tables/`, and `agreement.html` with the images that are shown."""
    names = dict.fromkeys(shown["image"] for pair in result["pairs"] for shown in pair["parted"])
    write_atomic(folder / RESULT, pretty(result))
    write_tables(folder / FOLDER, file_tables(result))
    return write_atomic(folder / PAGE, agree_page(result, load_shown_images(names)))


class _Column:
    """A column of scores in the place of a reward."""

    unit, higher_is_better = "as in the table", True


def _column_row(name: str, row: ImageRow) -> ScoreRow:
    value = ((row.metadata or {}).get(_SCORES) or {}).get(name)
    try:
        number = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        number = math.nan
    known = math.isfinite(number)
    reason = None if known else "no number in the column"
    return ScoreRow(
        image=row.image, reward=name, value=number if known else None, unit=_Column.unit, reason=reason
    )


_SCORES = "scores"
"""Key of the metadata under which `read_set` keeps columns."""


def _is_pairs(path: Path, columns: Columns) -> bool:
    """Whether a file is a table of pairs."""
    if path.suffix.lower() not in READERS or not path.is_file():
        return False
    _, given = next(read_rows(path), (0, {}))
    row = rename_columns(path, given, columns.names)
    return "image_left" in row or "image_right" in row


def _of_pairs(found: PreferenceSet, scores: Sequence[str]) -> list[ImageRow]:
    rows: dict[tuple[str, str], ImageRow] = {}
    _require({name for pair in found.pairs for name in pair.extra}, [f"{n}_left" for n in scores], found.name)
    for pair in found.pairs:
        record = pair.extra.get("record")
        metadata = dict(record) if isinstance(record, Mapping) else {}
        for side, image in (("left", pair.image_left), ("right", pair.image_right)):
            own = {_SCORES: {name: pair.extra.get(f"{name}_{side}") for name in scores}} if scores else {}
            known = rows.get((image, pair.prompt))
            if known is not None and scores and (known.metadata or {})[_SCORES] != own[_SCORES]:
                raise UserError(f"'{found.name}' has two scores of one image, '{image}'. Keep one.")
            rows[image, pair.prompt] = ImageRow(
                image=image, prompt=pair.prompt, metadata=metadata | own or None
            )
    return list(rows.values())


def _of_quality(found: Any, prompt: str | None, scores: Sequence[str]) -> list[ImageRow]:
    _require({name for record in found.records for name in record.extra}, scores, found.name)
    return [
        ImageRow(
            image=record.image,
            prompt=record.prompt or prompt or "",
            metadata={_SCORES: {name: record.extra.get(name) for name in scores}} if scores else None,
        )
        for record in found.records
    ]


def _of_table(path: Path, prompt: str | None, columns: Columns, scores: Sequence[str]) -> list[ImageRow]:
    """A table with scores; prompts and images where it has them."""
    table = [(number, rename_columns(path, given, columns.names)) for number, given in read_rows(path)]
    if table and {"image", "reward", "value"} <= set(table[0][1]):
        table = _by_image(table)
    _require({name for _, row in table for name in row}, scores, str(path))
    return [
        ImageRow(
            image=_place(path, str(row.get("image", f"row {number}"))),
            prompt=str(row.get("prompt", prompt or "")),
            metadata={_SCORES: {name: row.get(name) for name in scores}},
        )
        for number, row in table
    ]


def _each_once(rows: Sequence[ImageRow]) -> list[ImageRow]:
    """The first row of each image and prompt; a warning says how many say it again."""
    first: dict[tuple[str, str], ImageRow] = {}
    for row in rows:
        first.setdefault((row.image, row.prompt), row)
    if again := len(rows) - len(first):
        warnings.warn(f"{again} of {len(rows)} rows name an image again, which counts once.", stacklevel=3)
    return list(first.values())


def _by_image(table: Sequence[tuple[int, Row]]) -> list[tuple[int, Row]]:
    """The rows of a table of scores, each of one reward, as one row for each image and prompt."""
    found: dict[tuple[Any, Any], tuple[int, Row]] = {}
    for number, row in table:
        about = {name: row[name] for name in ("image", "prompt") if name in row}
        key = row["image"], row.get("prompt")
        found.setdefault(key, (number, about))[1][str(row["reward"])] = row["value"]
    return list(found.values())


def _place(path: Path, image: str) -> str:
    beside = path.parent / image
    return str(beside) if beside.is_file() else image


def _require(known: Collection[str], wanted: Sequence[str], name: str) -> None:
    missing = [column for column in wanted if column not in known]
    if missing:
        raise UserError(
            f"'{name}' has no column {missing[0]!r}. {suggestion(missing[0], known)}Found: "
            f"{listed(sorted(known), limit=20)}."
        )


def _values(rows: Sequence[ScoreRow], reward: Any) -> list[float]:
    sign = 1 if reward.higher_is_better else -1
    return [float("nan") if row.value is None else sign * row.value for row in rows]


def _reward_record(label: str, reward: Any, rows: Sequence[ScoreRow]) -> dict[str, Any]:
    reasons = [row.reason for row in rows if row.reason]
    known = [row.value for row in rows if row.value is not None]
    return {
        "label": label,
        "unit": reward.unit,
        "higher_is_better": reward.higher_is_better,
        "model": None if isinstance(reward, _Column) else reward_identity(reward).model,
        "digest": None if isinstance(reward, _Column) else reward_identity(reward).digest,
        "whose": None if isinstance(reward, _Column) else provenance(reward),
        "judged": len(known),
        "failed": len(rows) - len(known),
        "reasons": {reason: reasons.count(reason) for reason in list(dict.fromkeys(reasons))[:3]},
        "mean": float(np.mean(known)) if known else None,
        "spread": float(np.std(known)) if known else None,
    }
