# SPDX-License-Identifier: Apache-2.0
"""Image files and their scores, file by file for `--engine ray`: tables, WebDataset's tar files, folders."""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from visalign.atomic import write_atomic
from visalign.data.sets.columns import rename_columns, usual_names
from visalign.data.sets.image_references import refer_to_images
from visalign.data.sets.prompt_files import CAPTIONS
from visalign.data.sets.tables import READERS, Row, read_rows, require_columns, table_header
from visalign.errors import UserError

from .image_rows import IMAGE_ENDINGS, SAMPLED, ImageRow, find_images, table_row, with_prompt
from .log import score_key
from .score import ScoreRow

TARS = (".tar", ".tar.gz", ".tgz")
"""WebDataset's files: neighbours of one name are a sample, `7.jpg` with `7.txt` or `7.caption` and `7.json`."""
MEMBER = "tar_member"  # Column with the name of the image's file in a tar file
IMAGES = 1024  # Single images per file of scores
FIRST = 16  # Rows that are read before a start; more, until one has each column that is needed
METADATA_KEY = b"visalign"  # Key in a Parquet file of its `part_metadata`


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    rewards: Sequence[str]
    options: Sequence[str] = ()  # Options of the rewards, as `load_each` takes them
    prompt: str | None = None
    needs_prompt: bool = True
    names: Mapping[str, str] = field(default_factory=dict)  # Our name of a table's column -> the table's
    batch_size: int = 32
    clips: bool = False  # Whether folders of numbered frames are clips, as in `find_images`

    @property
    def default_prompt(self) -> str | None:
        """Prompt of rows without one; None where they are refused."""
        return self.prompt if self.needs_prompt else self.prompt or ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A table, a tar file, or single images, all by absolute paths."""

    source: Path | tuple[Path, ...]
    output: str  # File of its scores, relative to the output folder


def find_parts(items: Sequence[Path], *, clips: bool = False, prompt: str | None = None) -> list[Part]:
    """List the tables, tar files and images to score; of a folder with Parquet or tar files only these are read.

    img2dataset writes a Parquet file beside each tar file, which is left out where it has no images. Without a
    `prompt` for all, a folder of `visalign sample` is read by its table.
    """
    parts, strangers = list[Part](), list[Path]()
    for item in (item.absolute() for item in items):
        if prompt is None and (item / SAMPLED).is_file():
            parts.append(Part(source=item / SAMPLED, output=f"{item.name}.parquet"))
            continue
        tables = (path for path in item.rglob("*") if _is_table(path, (".parquet",)))
        inside = sorted(path for path in tables if "/." not in f"/{path.relative_to(item)}")
        beside = {path.with_suffix(".parquet") for path in inside if path.suffix == ".tar"}
        inside = [path for path in inside if path not in beside or _has_images(path)]
        files = inside or ([item] if _is_table(item, tuple(READERS)) else [])
        strangers += [] if files else [item]
        for path in files:
            name = str(path.relative_to(item)) if inside else path.name
            parts.append(Part(source=path, output=f"{name.removesuffix('.parquet')}.parquet"))
    images = find_images(strangers, clips=clips) if strangers or not items else []
    for start in range(0, len(images), IMAGES):
        name = f"images-{start // IMAGES:05}.parquet"
        parts.append(Part(source=tuple(images[start : start + IMAGES]), output=name))
    parts, sources = list(dict.fromkeys(parts)), dict[str, Part]()
    for part in parts:
        if (other := sources.setdefault(part.output, part)) is not part:
            both = f"'{other.source}' and of '{part.source}'"
            raise UserError(f"The scores of {both} would both be '{part.output}'. Score them one after the other.")
    return parts


def _is_table(path: Path, endings: tuple[str, ...]) -> bool:
    return path.name.lower().endswith((*endings, *TARS)) and path.is_file()


def _has_images(path: Path) -> bool:
    columns = dict.fromkeys(parquet_schema(path).names)
    return usual_names(columns, {}, is_judged=False).get("image", "image") in columns


def check_part(part: Part, options: ScoringOptions) -> None:
    """Refuse a part that lacks a column or all prompts, or whose first rows are damaged; no image is opened."""
    if isinstance(part.source, tuple):
        with_prompt(part.source[0], options.prompt, options.needs_prompt)
        return
    needed = ("image",) if options.default_prompt is not None else ("image", "prompt")
    is_parquet, columns = part.source.suffix.lower() == ".parquet", Row()
    if is_parquet:
        columns = dict.fromkeys(parquet_schema(part.source).names)
    for count, (_, row, _) in enumerate(() if is_parquet else _read_rows(part.source, options), 1):
        columns |= dict.fromkeys((*row, *(table_header(part.source) if count == 1 else ())))
        names = usual_names(columns, options.names, is_judged=False)
        if count >= FIRST and all(names.get(name, name) in columns for name in needed):
            return
    if columns:
        renamed = rename_columns(part.source, columns, usual_names(columns, options.names, is_judged=False))
        require_columns(part.source, renamed, needed, purpose="a table of images")


def read_part(part: Part, options: ScoringOptions) -> Iterator[ImageRow]:
    """Read the images of a part lazily, those of Parquet and tar files with content; a bad row has its reason."""
    if isinstance(part.source, tuple):
        for path in part.source:
            try:
                yield with_prompt(path, options.prompt, options.needs_prompt)
            except UserError as error:
                yield ImageRow(image=str(path), prompt="", reason=str(error))
        return
    path = part.source
    empty = dict.fromkeys(table_header(path))  # so that no other column stands in for an empty cell
    for number, cells, member in _read_rows(path, options):
        columns = empty | cells
        try:
            if options.clips and path.name == SAMPLED and "clip" in columns:
                columns["image"] = columns["clip"]
            if isinstance(caption := columns.get("prompt"), bytes):
                columns["prompt"] = _decode_caption(caption)
            names = usual_names(columns, options.names, is_judged=False)
            row = rename_columns(path, columns, names)
            content = row.get("image")
            if member is not None and isinstance(content, bytes):
                row["image"] = f"{path}/{member}"
            if isinstance(content, dict):
                content = content.get("bytes")
            file = row.pop(MEMBER, None)
            row = refer_to_images(path, number, row, names)
            image = table_row(path, row, options.default_prompt)
            yield replace(image, content=content, member=file) if isinstance(content, bytes) else image
        except UserError as error:
            yield ImageRow(image=f"{path}#{member or number}", prompt="", reason=str(error))


def _read_rows(path: Path, options: ScoringOptions) -> Iterator[tuple[int, Row, str | None]]:
    """Read (number, row, name of the sample in a tar file) of a file."""
    if path.name.lower().endswith(TARS):
        yield from _read_tar(path)
        return
    columns = None
    if path.suffix.lower() == ".parquet":  # whose further columns may be large
        names = usual_names(dict.fromkeys(parquet_schema(path).names), options.names, is_judged=False)
        columns = [names.get(name, name) for name in ("image", "prompt", "metadata", "record", "source")]
    yield from ((number, row, None) for number, row in read_rows(path, columns=columns))


def parquet_schema(path: Path) -> Any:
    """Read the schema of a Parquet file from its footer, or refuse a damaged one."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError) as error:
        message = " ".join(str(error).split())
        raise UserError(f"'{path}' cannot be read as Parquet: {message}. It may be cut short.") from error


def _read_tar(path: Path) -> Iterator[tuple[int, Row, str]]:
    """Read WebDataset samples: the keys of `.json`, `.txt` as prompt, and the bytes of an image."""
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
                columns = _read_member(f".{ending.lower()}", content, row) or {"key": name}
                row |= columns | ({MEMBER: member.name} if columns.keys() == {"image"} else {})
        if row:
            yield number, row, name
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"'{path}' cannot be read as a tar file: {error}. It may be cut short.") from error


def _read_member(ending: str, content: bytes, row: Row) -> Row:
    """Read the columns that a file adds to its sample; text that is no JSON is refused later."""
    if ending in IMAGE_ENDINGS:
        return {} if isinstance(row.get("image"), bytes) else {"image": content}
    if ending != ".json":
        return {"prompt": content} if ending in CAPTIONS else {}
    record: Any = content.decode("utf-8-sig", errors="replace")
    with suppress(ValueError, RecursionError):
        record = json.loads(record)
    return {"metadata": record} | record | row if isinstance(record, dict) else {"metadata": record}


def _decode_caption(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise UserError(f"its caption is not UTF-8 text ({error.reason}); save it as UTF-8.") from error


def finished_parts(
    output: Path, parts: Sequence[Part], options: ScoringOptions, digests: Mapping[str, str]
) -> list[Part]:
    """Find the parts whose scores are in the folder, by these rewards, for the files' current content."""
    finished = []
    for part in parts:
        path = output / part.output
        if not path.is_file():
            continue
        metadata = json.loads((parquet_schema(path).metadata or {}).get(METADATA_KEY, b"{}"))
        expected = part_metadata(part, options, digests)
        if metadata.get("judges") != expected["judges"]:
            rewards = ", ".join(digests)
            raise UserError(f"'{path}' holds no scores of {rewards}, or of other versions. Give another --output.")
        if metadata == expected:
            finished.append(part)
    return finished


def part_metadata(part: Part, options: ScoringOptions, digests: Mapping[str, str]) -> dict[str, Any]:
    """Identify a file of scores: the rewards, the part's files and the way they are read."""
    files = part.source if isinstance(part.source, tuple) else (part.source,)
    inputs = score_key([str(path) for path in files], options.prompt or "", options.names)
    return {"judges": dict(digests), "input": inputs}


def write_scores(path: Path, rows: Sequence[ScoreRow], metadata: Mapping[str, Any]) -> None:
    """Write rows atomically as Parquet, a line per image and reward, with metadata for `finished_parts`."""
    import pyarrow
    import pyarrow.parquet

    columns: dict[str, Any] = dict.fromkeys(ScoreRow.__dataclass_fields__, pyarrow.string())
    columns |= dict.fromkeys(("value", "std"), pyarrow.float64())
    columns["higher_is_better"] = pyarrow.bool_()
    columns["parts"] = pyarrow.map_(pyarrow.string(), pyarrow.float64())
    table = pyarrow.Table.from_pylist(
        [asdict(row) | {"parts": list(row.parts.items())} for row in rows],
        schema=pyarrow.schema(columns).with_metadata({METADATA_KEY: json.dumps(metadata).encode()}),
    )
    file = io.BytesIO()
    pyarrow.parquet.write_table(table, file)
    write_atomic(path, file.getvalue())
