# SPDX-License-Identifier: Apache-2.0
"""Very many images as files of their own: tables, WebDataset's tar files, folders, read batch by batch.

Light to import, since every process that reads does.
"""

from __future__ import annotations

import json
import pickle
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from visalign.data.sets.columns import rename_columns
from visalign.data.sets.tables import READERS, Row, read_rows, require_columns
from visalign.errors import UserError

from .image_rows import IMAGE_ENDINGS, ImageRow, find_images, table_row, with_prompt

TARS = (".tar", ".tar.gz", ".tgz")
"""WebDataset's files: neighbours of one name are a sample, `7.jpg` with `7.txt` (prompt) and `7.json`."""
TOGETHER, BYTES = 8, 16 << 20
"""Batches that a worker is given at a time, and bytes of images from which they are fewer: handing them over
costs as much as a small judge."""
IMAGES = 1024
"""Loose images whose scores stand in one file."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How rows are read and judged."""

    rewards: Sequence[str]
    options: Sequence[str] = ()
    """Of the rewards, as `load_each` takes them."""
    prompt: str | None = None
    needs_prompt: bool = True
    names: Mapping[str, str] = field(default_factory=dict)
    """Our name of a table's column -> the table's."""
    batch_size: int = 32
    clips: bool = False
    """Whether folders of numbered frames are clips, as of `find_images`."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A table, a tar file, or loose images, all by absolute paths."""

    source: Path | tuple[Path, ...]
    output: str
    """The file of its scores, under the folder of all."""


def parts_of(items: Sequence[Path], *, clips: bool = False) -> list[Part]:
    """What is to be scored, file by file.

    Args:
        items: Tables, tar files, folders, images. A folder that holds Parquet or tar files, at any depth, is
            read as these alone; else as the images in it.
        clips: As of `find_images`.

    Raises:
        UserError: Nothing was named, a folder holds none of these, or two files would have one output.
    """
    found: dict[str, Path] = {}
    loose: list[Path] = []
    for item in (given.absolute() for given in items):
        inside = sorted(
            path
            for path in item.rglob("*")
            if _is_table(path, (".parquet",)) and "/." not in f"/{path.relative_to(item)}"
        )
        for path in inside or ([item] if _is_table(item, tuple(READERS)) else []):
            name = str(path.relative_to(item)) if inside else path.name
            name = name if name.endswith(".parquet") else f"{name}.parquet"
            if found.setdefault(name, path) != path:
                raise UserError(
                    f"The scores of '{found[name]}' and of '{path}' would both be '{name}'. Name the folder "
                    "that holds both, or score them one after the other."
                )
        if not inside and not _is_table(item, tuple(READERS)):
            loose.append(item)
    parts = [Part(source=path, output=name) for name, path in found.items()]
    images = find_images(loose, clips=clips) if loose or not items else []
    for start in range(0, len(images), IMAGES):
        name = f"images-{start // IMAGES:05}.parquet"
        if name in found:
            raise UserError(f"The scores of '{found[name]}' and of images would both be '{name}'. Rename it.")
        parts.append(Part(source=tuple(images[start : start + IMAGES]), output=name))
    return parts


def _is_table(path: Path, endings: tuple[str, ...]) -> bool:
    return path.name.lower().endswith((*endings, *TARS)) and path.is_file()


def check_part(part: Part, asking: Asking) -> None:
    """Refuse a part whose first row shows that it cannot be read; no image is opened.

    Raises:
        UserError: It lacks a column, a prompt, or is damaged; the message says which.
    """
    if isinstance(part.source, tuple):
        with_prompt(part.source[0], asking.prompt, asking.needs_prompt)
        return
    if part.source.suffix.lower() == ".parquet":
        first: Row | None = dict.fromkeys(columns_of(part.source))
    else:
        first = next((row for _, row, _ in _given(part.source, asking)), None)
    if first is not None:
        needed = ("image",) if _prompt(asking) is not None else ("image", "prompt")
        purpose = "a table of images"
        row = rename_columns(part.source, first, asking.names)
        require_columns(part.source, row, needed, purpose=purpose)


def rows_of(part: Part, asking: Asking) -> Iterator[ImageRow]:
    """The images of a part, those of Parquet and tar files with their content, read as they are asked for.

    A row that is no image with a prompt has its reason instead.

    Raises:
        UserError: The file itself cannot be read (any further).
    """
    if isinstance(part.source, tuple):
        for path in part.source:
            try:
                yield with_prompt(path, asking.prompt, asking.needs_prompt)
            except UserError as error:
                yield ImageRow(image=str(path), prompt="", reason=str(error))
        return
    path = part.source
    for number, given, member in _given(path, asking):
        try:
            row = rename_columns(path, given, asking.names)
            content = row.get("image")
            if member is not None and isinstance(content, bytes):
                row["image"] = f"{path}/{member}"
            if isinstance(content, dict):
                content = content.get("bytes")
            made = table_row(path, number, row, _prompt(asking))
            yield replace(made, content=content) if isinstance(content, bytes) else made
        except UserError as error:
            yield ImageRow(image=f"{path}#{member or number}", prompt="", reason=str(error))


def _prompt(asking: Asking) -> str | None:
    return asking.prompt if asking.needs_prompt else asking.prompt or ""


def _given(path: Path, asking: Asking) -> Iterator[tuple[int, Row, str | None]]:
    """(number, row, name of the sample in a tar file) as they stand in a file."""
    if path.name.lower().endswith(TARS):
        yield from _samples(path)
        return
    wanted = [asking.names.get(name, name) for name in ("image", "prompt", "metadata")]
    yield from ((number, row, None) for number, row in read_rows(path, columns=wanted))


def columns_of(path: Path) -> list[str]:
    """The columns of a Parquet file, by its end alone.

    Raises:
        UserError: It is none, or is damaged.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_schema(path).names
    except (pyarrow.ArrowException, OSError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"'{path}' cannot be read as Parquet: {said}. It may be cut short.") from error


def _samples(path: Path) -> Iterator[tuple[int, Row, str]]:
    """Samples of a WebDataset file: the keys of `.json`, `.txt` as prompt, and the bytes of an image."""
    number, name, row = 0, "", {}
    try:
        with tarfile.open(path, "r|*") as tar:
            for member in tar:
                folder, slash, base = member.name.rpartition("/")
                stem, _, ending = base.partition(".")
                if not member.isfile() or not stem:
                    continue
                if row and name != folder + slash + stem:
                    yield number, row, name
                    row = {}
                number, name = number + (not row), folder + slash + stem
                file = tar.extractfile(member)
                content = b"" if file is None else file.read()
                row |= _member(f".{ending.lower()}", content, row) or {"key": name}
        if row:
            yield number, row, name
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"'{path}' cannot be read as a tar file: {error}. It may be cut short.") from error


def _member(ending: str, content: bytes, row: Row) -> Row:
    """What a file of a sample adds to its row; what cannot be read stays text, and is refused there."""
    if ending in IMAGE_ENDINGS:
        return {"image": content} if not isinstance(row.get("image"), bytes) else {}
    text = content.decode(errors="replace")
    if ending == ".txt":
        return {"prompt": text.strip()}
    if ending != ".json":
        return {}
    with suppress(ValueError, RecursionError):
        record = json.loads(text)
        return {"metadata": record} | record | row if isinstance(record, dict) else {"metadata": record}
    return {"metadata": text}


def read_batches(item: Row, asking: Asking) -> Iterator[Row]:
    """A part in whole batches, some at a time, which a worker judges; each part begins anew."""
    part: Part = pickle.loads(item["part"])
    rows, start, number = rows_of(part, asking), 0, 0
    more: Row = {"place": item["place"], "unread": "", "is_last": False}
    try:
        given = list(islice(rows, asking.batch_size))
        while True:
            after = list(islice(rows, asking.batch_size))
            held = sum(len(row.content or b"") for row in given)
            if after and len(given) < TOGETHER * asking.batch_size and held < BYTES:
                given += after
                continue
            told = {"number": number, "start": start, "is_last": not after}
            yield more | told | {"rows": pickle.dumps(given)}
            if not after:
                return
            number, start, given = number + 1, start + len(given), after
    except UserError as error:
        yield more | {"number": number, "start": start, "rows": pickle.dumps([]), "unread": str(error)}
