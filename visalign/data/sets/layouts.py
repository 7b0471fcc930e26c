# SPDX-License-Identifier: Apache-2.0
"""Published preference sets as they lie on a disk: HPDv2, HPDv3, Pick-a-Pic, ImageReward, GenAI-Bench.

Nothing is downloaded and no picture is opened: a record holds the path of its picture, or a reference into
its Parquet file. Annotations are read row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from visalign.errors import UserError

from .image_references import parquet_reference
from .records import PreferencePair, PreferenceSet, mixed_side
from .tables import Row, read_rows, require_columns

VOTES = {"leftvote": 1.0, "rightvote": 0.0, "tievote": 0.5, "bothbad_vote": 0.5}
"""GenAI-Bench's vote_type -> label."""

Numbered = tuple[int, PreferencePair]


def load_layout(
    layout: str, folder: str | Path, *, split: str = "test", limit: int | None = None
) -> PreferenceSet:
    """Pairs of a published set in its own folder layout.

    Args:
        layout: A key of `PAIR_LAYOUTS`.
        folder: Where the set was unpacked.
        split: Which of its annotation files: "train", "test", "validation" ...
        limit: Read at most so many pairs.

    Returns:
        At least one pair.

    Raises:
        UserError: The annotation file is missing (with what it would be called), lacks columns, or has a row
            that cannot be read.
    """
    pairs, rows = [], []
    for number, pair in islice(PAIR_LAYOUTS[layout](Path(folder), split), limit):
        pairs.append(pair)
        rows.append(number)
    if not pairs:
        raise UserError(f"The split '{split}' of {layout} in '{folder}' holds no labelled pair.")
    return PreferenceSet(name=f"{layout}-{split}", pairs=tuple(pairs), rows=tuple(rows))


def hpdv2(folder: Path, split: str) -> Iterator[Numbered]:
    """HPDv2: `{split}.json` beside a folder `{split}/` of pictures.

    train: one choice per row (`human_preference`, 1 for the chosen image). test: a ranking per prompt
    (`rank`, 1 is best), with those of the annotators in `raw_annotations`; each of its pairs is a record
    with their votes.

    Source: Wu et al., arXiv 2306.09341; columns as in its README and in its files.
    """
    path = annotation_file(folder, [f"{split}.json", f"{split}.jsonl"], "HPDv2")
    images = folder / split if (folder / split).is_dir() else folder
    for number, row in read_rows(path):
        require_columns(path, row, ("prompt",), purpose="HPDv2")
        names = _first(path, number, row, "image_path", "file_path")
        places = [str(images / name) for name in names]
        if "human_preference" in row:
            chosen = [float(value) for value in row["human_preference"]]
            label = 0.5 + (chosen[0] - chosen[1]) / 2
            yield (
                number,
                PreferencePair(
                    prompt=row["prompt"],
                    image_left=places[0],
                    image_right=places[1],
                    label=label,
                    split=split,
                ),
            )
            continue
        raw = row.get("raw_annotations", row.get("raw_annotation", []))
        ballots = [entry["rank"] if isinstance(entry, dict) else entry for entry in raw]
        yield from _ranked(number, row["prompt"], places, _first(path, number, row, "rank"), split, ballots)


def hpdv3(folder: Path, split: str) -> Iterator[Numbered]:
    """HPDv3: `{split}.json` with `path1` (the winner), `path2`, `model1`, `model2`, `choice_dist`.

    The winner always stands first there; here the sides are mixed by a hash of the paths, so that a judge
    which prefers a side gains nothing. `confidence` is kept in `extra`.

    Source: Ma et al., arXiv 2508.03789.
    """
    path = annotation_file(folder, [f"{split}.json", f"{split}.jsonl"], "HPDv3")
    for number, row in read_rows(path):
        require_columns(path, row, ("prompt", "path1", "path2"), purpose="HPDv3")
        counts = sorted((int(count) for count in row.get("choice_dist") or []), reverse=True)
        votes = (counts[0], counts[1], 0) if len(counts) == 2 and sum(counts) else None
        pair = PreferencePair(
            prompt=row["prompt"],
            image_left=str(folder / row["path1"]),
            image_right=str(folder / row["path2"]),
            label=1.0,
            votes=votes,
            generator_left=row.get("model1"),
            generator_right=row.get("model2"),
            split=split,
            extra={"confidence": row["confidence"]} if row.get("confidence") is not None else {},
        )
        yield number, mixed_side(pair)


def pick_a_pic(folder: Path, split: str) -> Iterator[Numbered]:
    """Pick-a-Pic v1 and v2: Parquet files `{split}-*.parquet` (also in `data/`) with pictures inside.

    Rows with `has_label` false are left out; `label_0` is 1, 0, or 0.5 for a tie. A file without the columns
    `jpg_0`, `jpg_1` gives the URLs: such pairs can be evaluated on precomputed scores.

    Source: Kirstain et al., arXiv 2305.01569.
    """
    columns = (
        "caption", "label_0", "label_1", "model_0", "model_1", "has_label", "ranking_id", "user_id",
        "image_0_uid", "image_1_uid", "image_0_url", "image_1_url",
    )  # fmt: skip
    for path in _parquet_files(folder, split, "Pick-a-Pic"):
        inside = {"jpg_0", "jpg_1"} <= set(_parquet_columns(path))
        for number, row in read_rows(path, columns=columns):
            require_columns(path, row, ("caption", "label_0"), purpose="Pick-a-Pic")
            if row.get("has_label") is False:
                continue
            refs = [
                parquet_reference(path, f"jpg_{side}", number - 1)
                if inside
                else str(_first(path, number, row, f"image_{side}_url", f"image_{side}_uid"))
                for side in (0, 1)
            ]
            yield (
                number,
                PreferencePair(
                    prompt=row["caption"],
                    image_left=refs[0],
                    image_right=refs[1],
                    label=float(row["label_0"]),
                    generator_left=row.get("model_0"),
                    generator_right=row.get("model_1"),
                    split=split,
                    extra={name: row[name] for name in ("ranking_id", "user_id") if name in row},
                ),
            )


def image_reward(folder: Path, split: str) -> Iterator[Numbered]:
    """ImageReward: `{split}.json` with `generations` and `ranking`, or the metadata of ImageRewardDB.

    The repository has `data/test.json` beside `data/test_images/`; ImageRewardDB has
    `metadata-{split}.parquet` with a row per image (`prompt_id`, `image_path`, `rank`). Rank 1 is best, equal
    ranks tie; each pair of a prompt is a record.

    Source: Xu et al., arXiv 2304.05977.
    """
    names = [f"{split}.json", f"metadata-{split}.parquet", f"metadata-{split}.csv", f"metadata-{split}.jsonl"]
    path = annotation_file(folder, names, "ImageReward")
    images = next(
        (place for place in (path.parent / f"{split}_images", folder / "images") if place.is_dir()),
        path.parent,
    )
    if path.suffix == ".json":
        for number, row in read_rows(path):
            require_columns(path, row, ("prompt", "generations", "ranking"), purpose="ImageReward")
            places = [str(images / name) for name in row["generations"]]
            yield from _ranked(number, row["prompt"], places, row["ranking"], split, [], row.get("id"))
        return
    groups: dict[str, list[tuple[int, Row]]] = {}
    for number, row in read_rows(path):
        needed = ("prompt_id", "prompt", "image_path", "rank")
        require_columns(path, row, needed, purpose="ImageRewardDB")
        groups.setdefault(str(row["prompt_id"]), []).append((number, row))
    for name, rows in groups.items():
        places = [str(path.parent / row["image_path"]) for _, row in rows]
        ranks = [float(row["rank"]) for _, row in rows]
        category = rows[0][1].get("classification")
        yield from _ranked(rows[0][0], rows[0][1]["prompt"], places, ranks, split, [], name, category)


def genai_bench(folder: Path, split: str) -> Iterator[Numbered]:
    """GenAI-Bench, image generation: Parquet files `image_generation/{split}*.parquet` with pictures inside.

    `vote_type` is leftvote, rightvote, tievote or bothbad_vote; the last two are ties. It is kept in `extra`.

    Source: Jiang et al., arXiv 2406.04485.
    """
    inside = folder / "image_generation"
    columns = ("prompt", "left_model", "right_model", "vote_type")
    for path in _parquet_files(inside if inside.is_dir() else folder, split, "GenAI-Bench"):
        for number, row in read_rows(path, columns=columns):
            require_columns(path, row, ("prompt", "vote_type"), purpose="GenAI-Bench (image generation)")
            if row["vote_type"] not in VOTES:
                raise UserError(
                    f"Row {number} of '{path}': vote_type is {row['vote_type']!r}; allowed: "
                    f"{', '.join(VOTES)}."
                )
            yield (
                number,
                PreferencePair(
                    prompt=row["prompt"],
                    image_left=parquet_reference(path, "left_image", number - 1),
                    image_right=parquet_reference(path, "right_image", number - 1),
                    label=VOTES[row["vote_type"]],
                    generator_left=row.get("left_model"),
                    generator_right=row.get("right_model"),
                    split=split,
                    extra={"vote_type": row["vote_type"]},
                ),
            )


PAIR_LAYOUTS: dict[str, Callable[[Path, str], Iterator[Numbered]]] = {
    "hpdv2": hpdv2,
    "hpdv3": hpdv3,
    "pick_a_pic": pick_a_pic,
    "image_reward": image_reward,
    "genai_bench": genai_bench,
}
"""name -> reader of a folder and a split."""


def annotation_file(folder: Path, names: Sequence[str], what: str) -> Path:
    """The first of these files in a folder or its `data/`.

    Raises:
        UserError: There is no such folder, or none of the files; the message says what is there.
    """
    if not folder.is_dir():
        raise UserError(f"There is no folder '{folder}'. Give the folder where {what} was unpacked.")
    for place in (folder, folder / "data"):
        for name in names:
            if (place / name).is_file():
                return place / name
    there = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
    raise UserError(f"{what} in '{folder}' needs {' or '.join(names)}. Found there: {there}.")


def _parquet_files(folder: Path, split: str, what: str) -> list[Path]:
    found = [path for place in (folder, folder / "data") for path in sorted(place.glob(f"{split}*.parquet"))]
    return found or [annotation_file(folder, [f"{split}*.parquet"], what)]


def _parquet_columns(path: Path) -> list[str]:
    import pyarrow.parquet

    return list(pyarrow.parquet.read_schema(path).names)


def _ranked(
    number: int,
    prompt: str,
    places: Sequence[str],
    ranks: Sequence[float],
    split: str,
    ballots: Sequence[Sequence[float]],
    prompt_id: str | None = None,
    category: str | None = None,
) -> Iterator[Numbered]:
    """Every pair of a ranked list (1 is best); votes are counted over the ballots, each a ranking too."""
    for name, entries in (("ranks", ranks), *(("ranks of one annotator", ballot) for ballot in ballots)):
        if len(entries) != len(places):
            raise UserError(f"Row {number}: {len(places)} images and {len(entries)} {name}.")
    for i, j in combinations(range(len(places)), 2):
        left = sum(ballot[i] < ballot[j] for ballot in ballots)
        right = sum(ballot[i] > ballot[j] for ballot in ballots)
        yield (
            number,
            PreferencePair(
                prompt=prompt,
                image_left=places[i],
                image_right=places[j],
                label=0.5 if ranks[i] == ranks[j] else float(ranks[i] < ranks[j]),
                votes=(left, right, len(ballots) - left - right) if ballots else None,
                category=category,
                split=split,
                prompt_id=prompt_id,
            ),
        )


def _first(path: Path, number: int, row: Row, *names: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise UserError(f"Row {number} of '{path}' lacks {' or '.join(names)}. Found: {', '.join(row)}.")
