# SPDX-License-Identifier: Apache-2.0
"""Readers of published sets in their own folder layouts; nothing is downloaded and no image is opened.

A reader yields (row of the annotation file, fields of a `PreferencePair` or columns of `load_quality`). An
image is a path, or a reference into its Parquet file.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice
from pathlib import Path
from typing import Any

from visalign.errors import UserError

from .columns import read_quality
from .image_references import parquet_reference
from .records import PreferencePair, PreferenceSet, QualitySet, mix_sides
from .tables import NumberedRows, Row, read_rows, require_columns, select_split

VOTES = {"leftvote": 1.0, "rightvote": 0.0, "tievote": 0.5, "bothbad_vote": 0.5}  # GenAI-Bench's vote_type -> label

Fields = Iterator[tuple[int, dict[str, Any]]]


def load_layout(
    layout: str, folder: str | Path, *, split: str | None = None, limit: int | None = None
) -> PreferenceSet | QualitySet:
    """Load at most `limit` records of a published set: of `PAIR_LAYOUTS` (split "test" by default) or
    `QUALITY_LAYOUTS`; the folder is the results file for `geneval`.
    """
    source, records, folder = f"{layout} in '{folder}'", [], Path(os.path.expanduser(folder))
    if layout in PAIR_LAYOUTS:
        split = split or "test"
        rows = list(islice(PAIR_LAYOUTS[layout](folder, split), limit))
        if not rows:
            raise UserError(f"The split '{split}' of {source} holds no labelled pair.")
        pairs = [PreferencePair(split=split, **fields) for _, fields in rows]
        if layout == "hpdv3":
            pairs = [mix_sides(pair) for pair in pairs]
        return PreferenceSet(name=f"{layout}-{split}", pairs=tuple(pairs), rows=tuple(number for number, _ in rows))
    rows = select_split(source, QUALITY_LAYOUTS[layout](folder), split, limit)
    for number, fields in rows:
        try:
            records.append(read_quality(fields))
        except UserError as error:
            raise UserError(f"Row {number} of {source}: {error}") from error
    return QualitySet(name=layout, records=tuple(records), rows=tuple(number for number, _ in rows))


def hpdv2(folder: Path, split: str) -> Fields:
    """Read HPDv2: `{split}.json` next to a folder `{split}/` of images.

    train: one choice per row (`human_preference`, 1 for the chosen image). test: a ranking per prompt (`rank`, 1 is
    best), with those of the annotators in `raw_annotations`; each of its pairs is a record with their votes.
    Wu et al., arXiv 2306.09341; columns as in its README and in its files.
    """
    path = _annotation_file(folder, [f"{split}.json", f"{split}.jsonl"], "HPDv2")
    images = folder / split if (folder / split).is_dir() else folder
    for number, row in _rows(path, ("prompt",), "HPDv2"):
        column = "file_path" if "file_path" in row else "image_path"  # the test and the train files differ
        require_columns(path, row, (column,), purpose="HPDv2")
        paths = [str(images / name) for name in row[column]]
        if "human_preference" in row:
            left, right = map(float, row["human_preference"][:2])
            yield number, _pair(row["prompt"], paths, 0.5 + (left - right) / 2)
            continue
        require_columns(path, row, ("rank",), purpose="HPDv2")
        raw = row.get("raw_annotations", row.get("raw_annotation", []))
        ballots = [entry["rank"] if isinstance(entry, dict) else entry for entry in raw]
        yield from _ranked(number, row["prompt"], paths, row["rank"], ballots)


def hpdv3(folder: Path, split: str) -> Fields:
    """Read HPDv3: `{split}.json` with `path1` (the winner), `path2`, `model1`, `model2`, `choice_dist`.

    The winner always comes first there; `load_layout` mixes the sides by a hash of the paths, so that a judge with a
    position bias gains nothing. `confidence` is kept in `extra`. Ma et al., arXiv 2508.03789.
    HPDv3++ (arXiv 2606.14657) has `path1`, `path2` and `prompt` alone; splits train_aes, train_tf, test_aes, test_tf.
    """
    names = (f"{split}.json", f"{split}.jsonl", f"train/{split}.json", f"test/{split}.json")
    path = _annotation_file(folder, names, "HPDv3")
    for number, row in _rows(path, ("prompt", "path1", "path2"), "HPDv3"):
        counts = sorted((int(count) for count in row.get("choice_dist") or []), reverse=True)
        votes = (*counts, 0) if len(counts) == 2 and sum(counts) else None
        paths = [str(folder / row[name]) for name in ("path1", "path2")]
        models, extra = (row.get("model1"), row.get("model2")), _present(row, "confidence")
        yield number, _pair(row["prompt"], paths, 1.0, models, votes=votes, extra=extra)


def pick_a_pic(folder: Path, split: str) -> Fields:
    """Read Pick-a-Pic v1 and v2: Parquet files `{split}-*.parquet` (also in `data/`) with images inside.

    Rows with `has_label` false are left out; `label_0` is 1, 0, or 0.5 for a tie. A file without the columns `jpg_0`,
    `jpg_1` gives the URLs: such pairs can be evaluated on precomputed scores. Kirstain et al., arXiv 2305.01569.
    """
    import pyarrow.parquet

    columns = (
        "caption", "label_0", "model_0", "model_1", "has_label", "ranking_id", "user_id",
        "image_0_url", "image_1_url",
    )  # fmt: skip
    for path in _parquet_files(folder, split, "Pick-a-Pic"):
        has_images = {"jpg_0", "jpg_1"} <= set(pyarrow.parquet.read_schema(path).names)
        needed = ("caption", "label_0") if has_images else ("caption", "label_0", "image_0_url", "image_1_url")
        for number, row in _rows(path, needed, "Pick-a-Pic", columns):
            if row.get("has_label") is False:
                continue
            images = [
                parquet_reference(path, f"jpg_{side}", number - 1) if has_images else row[f"image_{side}_url"]
                for side in (0, 1)
            ]
            models = (row.get("model_0"), row.get("model_1"))
            user = None if row.get("user_id") is None else str(row["user_id"])
            extra, label = _present(row, "ranking_id", "user_id"), float(row["label_0"])
            yield number, _pair(row["caption"], images, label, models, annotator=user, extra=extra)


def image_reward(folder: Path, split: str) -> Fields:
    """Read ImageReward: `{split}.json` with `generations` and `ranking`, or the metadata of ImageRewardDB.

    The repository has `data/test.json` next to `data/test_images/`; ImageRewardDB has `metadata-{split}.parquet` with
    a row per image (`prompt_id`, `image_path`, `rank`). Rank 1 is best, equal ranks tie; each pair of a prompt is a
    record. Xu et al., arXiv 2304.05977.
    """
    path = _annotation_file(folder, [f"{split}.json", f"metadata-{split}.parquet"], "ImageReward")
    if path.suffix == ".json":
        folders = (path.parent / f"{split}_images", folder / "images")
        images = next((inner_folder for inner_folder in folders if inner_folder.is_dir()), path.parent)
        for number, row in _rows(path, ("prompt", "generations", "ranking"), "ImageReward"):
            paths = [str(images / name) for name in row["generations"]]
            yield from _ranked(number, row["prompt"], paths, row["ranking"], prompt_id=row.get("id"))
        return
    groups: dict[str, list[tuple[int, Row]]] = {}
    for number, row in _rows(path, ("prompt_id", "prompt", "image_path", "rank"), "ImageRewardDB"):
        groups.setdefault(str(row["prompt_id"]), []).append((number, row))
    for prompt_id, rows in groups.items():
        paths = [str(path.parent / row["image_path"]) for _, row in rows]
        ranks = [float(row["rank"]) for _, row in rows]
        number, first = rows[0]
        category = first.get("classification")
        yield from _ranked(number, first["prompt"], paths, ranks, prompt_id=prompt_id, category=category)


def genai_bench(folder: Path, split: str) -> Fields:
    """Read GenAI-Bench: Parquet files `image_generation/{split}*.parquet` with images inside.

    `vote_type` is leftvote, rightvote, tievote or bothbad_vote; the last two are ties. It is kept in `extra`.
    Jiang et al., arXiv 2406.04485.
    """
    inside = folder / "image_generation"
    columns = ("prompt", "left_model", "right_model", "vote_type")
    for path in _parquet_files(inside if inside.is_dir() else folder, split, "GenAI-Bench"):
        for number, row in _rows(path, ("prompt", "vote_type"), "GenAI-Bench", columns):
            vote = row["vote_type"]
            if vote not in VOTES:
                raise UserError(f"Row {number} of '{path}': vote_type is {vote!r:.80}; allowed: {', '.join(VOTES)}.")
            images = [parquet_reference(path, f"{side}_image", number - 1) for side in ("left", "right")]
            models = (row.get("left_model"), row.get("right_model"))
            yield number, _pair(row["prompt"], images, VOTES[vote], models, extra={"vote_type": vote})


PAIR_LAYOUTS: dict[str, Callable[[Path, str], Fields]] = {
    "hpdv2": hpdv2,
    "hpdv3": hpdv3,
    "pick_a_pic": pick_a_pic,
    "image_reward": image_reward,
    "genai_bench": genai_bench,
}
"""name -> reader of a folder and a split."""


def kadid10k(folder: Path) -> Fields:
    """Read KADID-10k: `dmos.csv` (dist_img, ref_img, dmos, var) next to `images/`.

    Its dmos runs from 1 to 5 and higher is better, whatever the name says; var is the variance. The category
    is the kind of distortion, 01 to 25, from the file's name (I01_07_03.png -> "07").
    Lin, Hosu and Saupe, KADID-10k, QoMEX 2019.
    """
    path = _annotation_file(folder, ["dmos.csv"], "KADID-10k")
    for number, row in _rows(path, ("dist_img", "ref_img", "dmos", "var"), "KADID-10k"):
        distortion = re.fullmatch(r"I\d\d_(\d\d)_\d\d\.png", row["dist_img"])
        record = {"mos": row["dmos"], "std": math.sqrt(float(row["var"])), "reference": row["ref_img"]}
        record["category"] = distortion[1] if distortion else None
        yield number, {"image": str(path.parent / "images" / row["dist_img"]), **record}


def koniq10k(folder: Path) -> Fields:
    """Read KonIQ-10k: `koniq10k_scores_and_distributions.csv` or `koniq10k_distributions_sets.csv`, images in
    `1024x768/` or `512x384/`.

    The score is MOS (1 to 5) with its SD; the second file also has the published split in `set`.
    Hosu et al., IEEE Trans. Image Processing 29 (2020) 4041.
    """
    names = ["koniq10k_distributions_sets.csv", "koniq10k_scores_and_distributions.csv"]
    path = _annotation_file(folder, names, "KonIQ-10k")
    size = next((size for size in ("1024x768", "512x384") if (path.parent / size).is_dir()), "1024x768")
    for number, row in _rows(path, ("image_name", "MOS"), "KonIQ-10k"):
        image = str(path.parent / size / row["image_name"])
        opinion = {"mos": row["MOS"], "std": row.get("SD")}
        yield number, {"image": image, **opinion, "resolution": size, "split": row.get("set")}


def spaq(folder: Path) -> Fields:
    """Read SPAQ: `Annotations/MOS and Image attribute scores.xlsx` (or .csv), images in `TestImage/`.

    The score is MOS, 0 to 100; the attributes (Brightness, Colorfulness ...) are kept in `extra`.
    Fang et al., Perceptual Quality Assessment of Smartphone Photography, CVPR 2020.
    """
    inside = folder / "Annotations"
    names = [f"MOS and Image attribute scores.{ending}" for ending in ("csv", "xlsx")]
    path = _annotation_file(inside if inside.is_dir() else folder, names, "SPAQ")
    for number, row in _rows(path, ("Image name", "MOS"), "SPAQ"):
        image = str(folder / "TestImage" / row.pop("Image name"))
        yield number, {"image": image, "mos": row.pop("MOS"), **row}


def geneval(path: Path) -> Fields:
    """Read the `results.jsonl` of GenEval's rules.

    The score is `correct`, 1 or 0, with `tag` as category and `reason` and `metadata` in `extra`; paths start at the
    folder of the file, or else are kept unchanged. Ghosh et al., arXiv 2310.11513; columns as its code writes them.
    """
    for number, row in _rows(path, ("filename", "tag", "prompt", "correct"), "GenEval's results.jsonl"):
        local = path.parent / row["filename"]
        image = str(local if local.is_file() else row["filename"])
        record = {"image": image, "mos": row["correct"], "prompt": row["prompt"], "category": row["tag"]}
        yield number, {**record, **_present(row, "reason", "metadata")}


QUALITY_LAYOUTS: dict[str, Callable[[Path], Fields]] = {
    "kadid10k": kadid10k,
    "koniq10k": koniq10k,
    "spaq": spaq,
    "geneval": geneval,
}
"""name -> reader of a folder (geneval: of a file)."""


def _annotation_file(folder: Path, names: Sequence[str], dataset: str) -> Path:
    """Find the first of these files in a folder or its `data/`."""
    if not folder.is_dir():
        raise UserError(f"There is no folder '{folder}'. Give the folder where {dataset} was unpacked.")
    for path in (inner_folder / name for inner_folder in (folder, folder / "data") for name in names):
        if path.is_file():
            return path
    files = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
    raise UserError(f"{dataset} in '{folder}' needs {' or '.join(names)}. Found there: {files}.")


def _parquet_files(folder: Path, split: str, dataset: str) -> list[Path]:
    files = [
        path for inner_folder in (folder, folder / "data") for path in sorted(inner_folder.glob(f"{split}*.parquet"))
    ]
    return files or [_annotation_file(folder, [f"{split}*.parquet"], dataset)]


def _rows(path: Path, needed: Sequence[str], purpose: str, columns: Sequence[str] | None = None) -> NumberedRows:
    """Read the rows of an annotation file, each of which must have the columns needed."""
    for number, row in read_rows(path, columns=columns):
        require_columns(path, row, needed, purpose=purpose)
        yield number, row


def _pair(
    prompt: str,
    images: Sequence[str],
    label: float,
    models: tuple[str | None, str | None] = (None, None),
    **fields: Any,
) -> dict[str, Any]:
    columns = {"prompt": prompt, "label": label, "image_left": images[0], "image_right": images[1]}
    return {**columns, "generator_left": models[0], "generator_right": models[1], **fields}


def _ranked(
    number: int,
    prompt: str,
    images: Sequence[str],
    ranks: Sequence[float],
    ballots: Sequence[Sequence[float]] = (),
    **fields: Any,
) -> Fields:
    """Make every pair of a ranked list (1 is best); each ballot, a ranking too, votes on each pair."""
    if any(len(entries) != len(images) for entries in (ranks, *ballots)):
        raise UserError(f"Row {number}: {len(images)} images, and a ranking of another number of them.")
    for i, j in combinations(range(len(images)), 2):
        left = sum(ballot[i] < ballot[j] for ballot in ballots)
        right = sum(ballot[i] > ballot[j] for ballot in ballots)
        votes = (left, right, len(ballots) - left - right) if ballots else None
        label = 0.5 if ranks[i] == ranks[j] else float(ranks[i] < ranks[j])
        yield number, _pair(prompt, (images[i], images[j]), label, votes=votes, **fields)


def _present(row: Row, *names: str) -> Row:
    return {name: row[name] for name in names if row.get(name) is not None}
