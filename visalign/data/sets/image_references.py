# SPDX-License-Identifier: Apache-2.0
"""References to images, a path, an image inside a Parquet file or of the shapes world, and to completions."""

from __future__ import annotations

import io
import tarfile
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from tarfile import TarError
from threading import Lock
from typing import Any

from PIL import Image

from visalign.errors import UserError

PARQUET = "parquet://"
SHAPES = "shapes://"
TAR = "tar://"
TEXT = "text://"  # Begins the reference of a completion, which follows it as it is
_READING = Lock()  # Else threads that need one row group would each read it


class CompletionText(str):
    """Completion where a command takes images too; there a plain string is the path of one."""


def parquet_reference(path: str | Path, column: str, row: int) -> str:
    """Build the reference of an image stored in row 0, 1, ... of a Parquet file.

    Values of the column are bytes, {"bytes": ..., "path": ...} as the datasets library writes them, or a list of one.
    """
    return f"{PARQUET}{path}#{column}#{row}"


def refer_to_images(path: str | Path, number: int, row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Replace the images inside a renamed row by references, so that a large table fits into the memory.

    Images are {"bytes", "path"}; in columns that begin with "image" also bytes, or a list of one. `names` are the
    table's names of our columns.
    """
    cells = dict(row)
    for name, cell in row.items():
        is_image = name.startswith("image")
        if is_image and isinstance(cell, list) and len(cell) == 1 and isinstance(cell[0], str | bytes | dict):
            cells[name] = cell[0]
        content = cells[name]
        if isinstance(content, dict) and (is_image or content.keys() == {"bytes", "path"}):
            if content.keys() & {"bytes", "path"}:
                content, cells[name] = content.get("bytes"), content.get("path")
        elif not is_image:
            continue
        if isinstance(content, bytes) and Path(path).suffix.lower() == ".parquet":
            cells[name] = parquet_reference(path, names.get(name, name), number - 1)
    return {name: value for name, value in cells.items() if value is not None}


def shapes_reference(split: str, seed: int, kind: str, number: int, side: str = "") -> str:
    """Build the reference of an image of `ShapesPreferences(seed, split=split)`; kind "pair", "quality" or "image"."""
    return f"{SHAPES}{split}/{seed}/{kind}/{number}/{side}".rstrip("/")


def resolve_image(reference: str) -> Any:
    """Turn a reference into an input of a reward: a path (not opened), a PIL image, uint8 [H, W, 3], a completion."""
    if reference.startswith(TEXT):
        return CompletionText(reference.removeprefix(TEXT))
    if not reference.startswith((PARQUET, TAR, SHAPES)):
        return reference
    try:
        if reference.startswith(SHAPES):
            return _from_shapes(reference)
        content = image_bytes(reference)
    except (IndexError, KeyError, ValueError, TarError) as error:  # pyarrow.ArrowInvalid is a ValueError
        problem = str(error).rstrip(".")
        raise UserError(
            f"The reference '{reference}' leads to no image ({problem}); needed is {PARQUET}FILE#COLUMN#ROW, "
            f"{TAR}FILE#MEMBER, {SHAPES}SPLIT/SEED/pair/NUMBER/left|right or {SHAPES}SPLIT/SEED/quality|image/NUMBER."
        ) from error
    return open_bytes(content, reference)


def absolute_reference(image: str, folder: Path = Path()) -> str:
    """Make a path absolute, so that the votes can be served from anywhere; other references stay."""
    for scheme in (PARQUET, TAR):
        if image.startswith(scheme):
            return f"{scheme}{Path(image.removeprefix(scheme)).resolve()}"
    return image if "://" in image else str((folder / image).resolve())


def missing_files(references: list[str]) -> list[str]:
    """List the files of these references that do not exist, each once, in the order given."""
    paths = [file_and_position(reference)[0] for reference in references if not reference.startswith((SHAPES, TEXT))]
    return [path for path in dict.fromkeys(paths) if path and not Path(path).is_file()]


def open_bytes(content: bytes, name: str) -> Image.Image:
    """Open the content of an image file without decoding it."""
    try:
        return Image.open(io.BytesIO(content))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"'{name}' holds no image that can be read.") from error


def image_bytes(reference: str) -> bytes:
    """Return the content of an image's file; of an image of the shapes world its reference."""
    path, position = file_and_position(reference)
    if reference.startswith(PARQUET):
        return _parquet_bytes(path, *position.rsplit("#", 1))
    if reference.startswith(TAR):
        start, size = tar_members(path)[position]
        with open(path, "rb") as file:  # TarFile itself is not for several threads
            file.seek(start)
            return file.read(size)
    return reference.encode() if reference.startswith((SHAPES, TEXT)) else Path(reference).read_bytes()


def _parquet_bytes(path: str, column: str, row: str = "") -> bytes:
    number = int(row)
    _, starts = _open_parquet(path)
    group = bisect_right(starts, number) - 1
    with _READING:
        cells = _row_group(path, column, group)
    value = cells[number - starts[group]].as_py()
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    content = value.get("bytes") if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise ValueError(f"the column holds {type(content).__name__}")
    return content


def file_and_position(reference: str) -> tuple[str, str]:
    """Split a reference into its file and the position in it: COLUMN#ROW, or a member, whose name may have "#"."""
    if reference.startswith(TAR):
        path, _, member = reference.removeprefix(TAR).partition(".tar#")
        return f"{path}.tar", member
    path, *position = reference.removeprefix(PARQUET).rsplit("#", 2) if reference.startswith(PARQUET) else [reference]
    return path, "#".join(position)


@lru_cache(maxsize=64)
def tar_members(path: str) -> dict[str, tuple[int, int]]:
    """List the files of an uncompressed tar file: name -> (first byte, number of bytes)."""
    with tarfile.open(path, "r:") as tar:
        return {member.name: (member.offset_data, member.size) for member in tar if member.isfile()}


@lru_cache(maxsize=8)
def _open_parquet(path: str) -> tuple[Any, list[int]]:
    """Open a file and return it with the first row of each row group and the number of rows."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(path)
    sizes = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
    return file, list(accumulate(sizes, initial=0))


@lru_cache(maxsize=4)  # pairs are read in order, so few row groups serve all rows that follow
def _row_group(path: str, column: str, group: int) -> Any:
    file, _ = _open_parquet(path)
    return file.read_row_group(group, columns=[column]).column(0)


@lru_cache(maxsize=4)
def _shapes(split: str, seed: int) -> Any:
    from visalign.data.shapes.preferences import ShapesPreferences

    return ShapesPreferences(seed, split=split)


def _from_shapes(reference: str) -> Any:
    from visalign.data.shapes.render import render

    split, seed, kind, number, *side = reference.removeprefix(SHAPES).split("/")
    source = _shapes(split, int(seed))
    if kind == "quality":
        return render(source.quality(int(number)).scene)
    if kind == "image":
        return render(source.image(int(number))[1])
    return source.pair(int(number)).images()[("left", "right").index(side[0])]
