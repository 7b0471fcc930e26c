# SPDX-License-Identifier: Apache-2.0
"""Images with prompts from the items of a command line: files, folders of any depth, tables."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visalign.data.sets.columns import RATERS, image_path, read_table
from visalign.data.sets.hub_datasets import find_table
from visalign.data.sets.prompt_files import CAPTIONS, metadata_of, source_of
from visalign.data.sets.tables import READERS, Row, first_row, listed, read_rows, require_columns
from visalign.data.sets.text_rows import text_record
from visalign.errors import UserError, excerpt
from visalign.model_files import why_unreadable

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".avif", ".jp2", ".bmp", ".gif", ".tif", ".tiff")
"""Endings of images in folders; a file that is named itself may have any."""
_BESIDE = ("", *CAPTIONS, *".json .jsonl .csv .tsv .parquet .xlsx .html .tex .md .yaml .yml .log".split())
"""Endings of captions, tables and pages beside images; a warning counts the files with any other."""
RECORD, SAMPLES = "metadata.jsonl", "samples"
"""GenEval's folders: a record with the prompt, next to the folder of the samples."""
SAMPLED, SAMPLED_CLIP = "images.jsonl", ".webp"
"""Table that `visalign sample` writes next to its images; the ending of its videos."""
_NUMBERED = re.compile(r"(.*?)([0-9]+)(\.[A-Za-z]+)")  # Name of a clip's frame: common start, number, ending


@dataclass(frozen=True, kw_only=True)
class ImageRow:
    image: str
    """A path, or a reference that `visalign.data.sets.image_references.resolve_image` reads; a folder where
    `numbered_frames` finds a clip in it."""
    prompt: str
    metadata: Mapping[str, Any] | None = None  # The prompt's record for verifiers
    seed: int | str | None = None  # Seed of the image, where a table has the column
    content: bytes | None = field(default=None, repr=False)  # The image's file, where it travels with the row
    member: str | None = None  # Name of the image's file in a tar file
    reason: str | None = None  # Why there is nothing to score, where that is known


def find_images(items: Sequence[Path], *, clips: bool = False) -> list[Path]:
    """Find the files to score, each once: those named, and the images in the folders named and below, sorted.

    A named file that does not exist becomes a row with its reason. With `clips` a folder of `numbered_frames` is one.
    """
    paths, skipped = Counter[Path](), Counter[str]()
    for item in items:
        files = list(_walk(item, clips, skipped)) if item.is_dir() else [item]
        if not files:
            endings = ", ".join(IMAGE_ENDINGS)
            raise UserError(f"The folder '{item}' holds no image. {_count(skipped)}Allowed endings: {endings}.")
        paths.update(files)
    if not paths:
        raise UserError("No images were named. Give files or folders.")
    for path in paths:
        require_text_name(path)
    if skipped:
        warnings.warn(f"{_count(skipped)}Convert images among them to PNG.", stacklevel=2)
    if repeated := [path for path, count in paths.items() if count > 1]:
        warnings.warn(f"Images named twice count once: {listed(repeated)}.", stacklevel=2)
    return list(paths)


def _count(skipped: Counter[str]) -> str:
    """Count the files that are not read by their endings, with a trailing blank; empty without any."""
    endings = listed([f"{ending} ({count})" for ending, count in skipped.most_common()])
    return f"{skipped.total()} files with other endings are not read: {endings}. " if skipped else ""


def require_text_name(path: Path) -> None:
    """Refuse a file name that is not UTF-8, which no table and no page can hold."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The name of the image {os.fsencode(path)!r} is not UTF-8. Rename it.") from error


def require_still(path: Path) -> None:
    """Refuse an animation where only images are scored, which would be its first frame."""
    from visalign.rewards.base.images import animation_length  # torch, which readers of files do without

    if (length := animation_length(path)) > 1:
        raise UserError(f"'{path}' is a clip of {length} frames, and images are compared here. Use score -r frames.")


def image_rows(
    items: Sequence[Path],
    prompt: str | None = None,
    *,
    needs_prompt: bool = True,
    names: Mapping[str, str] | None = None,
    clips: bool = False,
) -> list[ImageRow]:
    """Read images with their prompts from image files, folders, clips and tables.

    Prompts lie next to images (`cat.png`, `cat.txt`; a clip's frames in `roll`, `roll.txt`), or in GenEval's layout.
    Tables have the columns image, prompt, metadata under `names` (ours -> theirs). `prompt` is that of all images, in
    tables of rows without one. Without it, a folder of `visalign sample` is read by its table.
    """
    rows, files, default = list[ImageRow](), list[Path](), prompt if needs_prompt else prompt or ""
    for item in map(find_table, items):
        if item.suffix.lower() in READERS and not item.is_dir():
            rows += _read_table(item, default, names or {})
        elif prompt is None and (item / SAMPLED).is_file():
            rows += _read_sampled(item, default, names or {}, clips)
        else:
            files.append(item)
    if files or not items:
        rows += [with_prompt(path, prompt, needs_prompt) for path in find_images(files, clips=clips)]
    return rows


def numbered_frames(folder: str | Path) -> list[Path]:
    """List the frames, two or more, of a folder whose names differ in their numbers alone (GenEval's are no clip)."""
    folder = Path(folder)
    if folder.name == SAMPLES and (folder.parent / RECORD).is_file():
        return []
    frames: list[tuple[str, str, int, str]] = []  # Start, ending, number and name
    try:
        with os.scandir(folder) as entries:
            for entry in (entry for entry in entries if not entry.name.startswith(".")):
                match = _NUMBERED.fullmatch(entry.name)
                if match is None or match[3].lower() not in IMAGE_ENDINGS or not entry.is_file():
                    return []
                frames.append((match[1], match[3], int(match[2]), entry.name))
    except (OSError, ValueError):  # a file, a missing folder, or one that may not be read
        return []
    is_clip = len({frame[:2] for frame in frames}) == 1 < len(frames)
    return [folder / name for *_, name in sorted(frames)] if is_clip else []


def with_prompt(path: Path, prompt: str | None, needed: bool) -> ImageRow:
    """Find the prompt of an image's file: the one given, GenEval's record, or the text file next to it."""
    metadata, record = None, path.parent.parent / RECORD
    if path.parent.name == SAMPLES and record.is_file():
        _, metadata = next(read_rows(record), (1, {}))
        if prompt is None and isinstance(metadata.get("prompt"), str):
            prompt = metadata["prompt"]
    stem = path.resolve() if path.is_dir() else path.with_suffix("")
    texts = [Path(f"{stem}{ending}") for ending in CAPTIONS]
    text = next(filter(Path.is_file, texts), texts[0])
    if path != text and prompt is None and text.is_file():
        try:
            prompt = text.read_text(encoding="utf-8-sig").strip()  # editors put U+FEFF first
        except UnicodeDecodeError as error:
            raise UserError(f"'{text}' is not UTF-8 text ({error.reason}); save it as UTF-8.") from error
    if prompt is None and needed:
        if not path.exists():
            raise UserError(f"There is no image, folder or table '{path}'.")
        raise UserError(
            f"'{path}' has no prompt. Put one into '{text.name}' next to the image, give a table with the columns "
            "image, prompt, or score all images for one (--prompt of visalign score)."
        )
    return ImageRow(image=str(path), prompt=prompt or "", metadata=metadata)


def table_row(path: Path, row: Row, prompt: str | None) -> ImageRow:
    """Read a table's row with our column names."""
    text, image = row.get("prompt", prompt), image_path(row, "image", path.parent)
    if not isinstance(text, str):
        raise UserError(f"'prompt' is {'missing' if text is None else excerpt(text)}, needed is a text.")
    metadata = row.get("metadata")
    try:
        metadata = json.loads(metadata or "null") if isinstance(metadata, str) else metadata
    except (ValueError, RecursionError) as error:
        raise UserError(f"'metadata' is not JSON ({why_unreadable(error)}).") from error
    if not isinstance(metadata, Mapping | None):
        raise UserError(f"'metadata' is a {type(metadata).__name__}, needed is an object.")
    metadata = record_metadata(image, {**row, "metadata": metadata} if metadata else row) or None
    return ImageRow(image=image, prompt=text, metadata=metadata, seed=row.get("seed"))


def record_metadata(image: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Collect what rewards read of a row: metadata, record, source of an edit; of a completion all columns."""
    record, source = columns.get("record"), source_of(columns)
    metadata = text_record(image, columns) | dict(metadata_of(columns))
    metadata |= dict(record) if isinstance(record, Mapping) else {}
    return metadata if source is None else metadata | {"source": source}


def shared_metadata(rows: Iterable[ImageRow]) -> dict[str, Any]:
    """Keep the metadata that are equal in all rows."""
    first, *further = (row.metadata or {} for row in rows)
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in further)}


def _walk(folder: Path, clips: bool, skipped: Counter[str]) -> Iterator[Path]:
    """List the images in a folder and below, sorted at each step; `skipped` counts the endings of other files.

    The `grid.png` of GenEval and `visalign sample` is left out; of sampled videos the middle frame is listed, or with
    `clips` the whole.
    """
    for folder_path, folders, names in os.walk(folder):
        if clips and numbered_frames(folder_path):
            yield Path(folder_path)
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if {RECORD, SAMPLED} & set(names):
            names = [name for name in names if name != "grid.png"]
        if SAMPLED in names:
            videos = {Path(name).stem for name in names if name.endswith(SAMPLED_CLIP)}
            other = ".png" if clips else SAMPLED_CLIP
            names = [name for name in names if not (name.endswith(other) and Path(name).stem in videos)]
        endings = {name: Path(name).suffix.lower() for name in sorted(names) if not name.startswith(".")}
        skipped.update(ending for ending in endings.values() if ending not in (*IMAGE_ENDINGS, *_BESIDE))
        yield from (Path(folder_path, name) for name, ending in endings.items() if ending in IMAGE_ENDINGS)


def _read_table(path: Path, prompt: str | None, names: Mapping[str, str]) -> list[ImageRow]:
    needed = ("image",) if prompt is not None else ("image", "prompt")
    rows, rated = list[ImageRow](), set[tuple[str, str]]()
    for number, row in read_table(path, names):
        if not rows:
            require_columns(path, row, needed, purpose="a table of images")
        try:
            image = table_row(path, row, prompt)
        except UserError as error:
            raise UserError(f"Row {number} of '{path}': {error}") from error
        key = image.image, image.prompt
        if RATERS.isdisjoint(row) or key not in rated:  # of a row per rater the image is scored once
            rows.append(image)
        rated.add(key)
    if not rows:
        raise UserError(f"'{path}' holds no row.")
    return rows


def _read_sampled(folder: Path, prompt: str | None, names: Mapping[str, str], clips: bool) -> list[ImageRow]:
    """Read the images of a folder's `SAMPLED`, with `clips` its videos; a warning names images that it lacks."""
    table = folder / SAMPLED
    videos = {"image": "clip"} if clips and "clip" in first_row(table) else {}
    rows = _read_table(table, prompt, {**videos, **names})
    listed_images = {Path(row.image).resolve() for row in rows}
    unlisted = [path for path in _walk(folder, clips, Counter()) if path.resolve() not in listed_images]
    if unlisted:
        images = f"{len(unlisted)} images are left out, which '{table}' does not list: {listed(unlisted)}"
        warnings.warn(f"{images}. Name them one by one.", stacklevel=3)
    return rows
