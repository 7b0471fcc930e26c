# SPDX-License-Identifier: Apache-2.0
"""Images with prompts from what a user names: files, folders of any depth, tables, generated sets."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visalign.data.sets.columns import rename_columns
from visalign.data.sets.image_references import parquet_reference
from visalign.data.sets.tables import READERS, Row, listed, read_rows, require_columns
from visalign.errors import UserError

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""What counts as an image in a folder; a file that is named itself may end as it likes."""

PROMPT_ENDING = ".txt"
"""A file with the image's name and this ending holds its prompt."""

RECORD, SAMPLES = "metadata.jsonl", "samples"
"""GenEval's folders: a record, with its prompt, beside the folder of the samples."""
SAMPLED, SAMPLED_CLIP = "images.jsonl", ".webp"
"""The table that `visalign sample` writes beside its images; the ending of its videos."""


_NUMBERED = re.compile(r"(.*?)([0-9]+)(\.[A-Za-z]+)")
"""The name of a frame of a clip: what all share, the number, the ending."""


@dataclass(frozen=True, kw_only=True)
class ImageRow:
    """One image, or one clip, to judge."""

    image: str
    """A path, or a reference that `visalign.data.sets.image_references.resolve_image` reads; a folder where
    `numbered_frames` finds a clip in it."""
    prompt: str
    metadata: Mapping[str, Any] | None = None
    """The prompt's record for verifiers."""
    content: bytes | None = field(default=None, repr=False)
    """The image's file, where it travels with the row."""
    reason: str | None = None
    """Why there is nothing to judge, where that is known."""


def find_images(items: Sequence[Path], *, clips: bool = False) -> list[Path]:
    """The files to score: those named, and the images in the folders named and the folders below, sorted.

    Args:
        items: files and folders. A named file that does not exist stays: it becomes a row with its reason.
        clips: a folder in which `numbered_frames` finds a clip is found itself, not its frames.

    Returns:
        Paths, each once, in the order given; a warning says which were named twice.

    Raises:
        UserError: nothing was named, a folder holds no image, or a name is not UTF-8.
    """
    found: dict[Path, None] = {}
    twice: list[Path] = []
    for item in items:
        inside = [item]
        if item.is_dir():
            inside = list(_inside(item, clips))
            if not inside:
                raise UserError(
                    f"The folder '{item}' holds no image. Allowed endings: {', '.join(IMAGE_ENDINGS)}; "
                    "a file of another ending can be named itself."
                )
        twice += [path for path in inside if path in found]
        found.update(dict.fromkeys(inside))
    if not found:
        raise UserError("No images were named. Give files or folders.")
    for path in found:
        require_text_name(path)
    if twice:
        what = "image was" if len(set(twice)) == 1 else "images were"
        warnings.warn(
            f"{len(set(twice))} {what} named twice, which counts once: {listed(twice)}.", stacklevel=2
        )
    return list(found)


def require_text_name(path: Path) -> None:
    """Refuse a name that no table and no page can hold, before anything is judged.

    Raises:
        UserError: The name's bytes are not UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"The name of the image {os.fsencode(path)!r} is not UTF-8, and tables and pages are. Rename it."
        ) from error


def require_still(path: Path) -> None:
    """Refuse an animation where images alone are judged, which would be its first frame.

    Raises:
        UserError: It has more than one frame.
    """
    from visalign.rewards.base.images import animation_length  # torch, which readers of files do without

    if (length := animation_length(path)) > 1:
        raise UserError(
            f"'{path}' is a clip of {length} frames, and images are compared here. Score clips with "
            "visalign score -r frames, or give one of the frames."
        )


def image_rows(
    items: Sequence[Path],
    prompt: str | None = None,
    *,
    needs_prompt: bool = True,
    names: Mapping[str, str] | None = None,
    clips: bool = False,
) -> list[ImageRow]:
    """Images with prompts.

    Args:
        items: Image files; folders, whose images may have their prompts beside them (`cat.png`, `cat.txt`) or
            lie as GenEval writes them (`00000/metadata.jsonl`, `00000/samples/`); clips likewise (a folder
            `roll` of frames, `roll.txt` beside it);
            tables (`visalign.data.sets.tables.READERS`) with the columns image, prompt and, if wanted,
            metadata (an object, or JSON text). Paths in a table start at its folder; a Parquet table may hold
            the images.
        prompt: Of all images of files and folders, and of table rows that have none.
        needs_prompt: False where no reward looks at it; what has none then gets an empty one.
        names: Our name of a table's column -> the table's.
        clips: As of `find_images`.

    Raises:
        UserError: Nothing was named, a table lacks columns or cannot be read, or an image has no prompt.
    """
    rows: list[ImageRow] = []
    others: list[Path] = []
    for item in items:
        if item.suffix.lower() in READERS and not item.is_dir():
            rows += _from_table(item, prompt, needs_prompt, names or {})
        else:
            others.append(item)
    if others or not items:
        rows += [with_prompt(path, prompt, needs_prompt) for path in find_images(others, clips=clips)]
    return rows


def numbered_frames(folder: str | Path) -> list[Path]:
    """The frames of a folder that holds one clip, in the order of their numbers; of any other none.

    Such a folder has nothing in it, but hidden files, than two or more images whose names differ in their
    numbers alone: `1.png`, `2.png`, or `roll_001.jpg`, `roll_002.jpg`. GenEval's samples are no clip.
    """
    folder = Path(folder)
    if folder.name == SAMPLES and (folder.parent / RECORD).is_file():
        return []
    found: dict[Path, int] = {}
    kinds = set()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                match = _NUMBERED.fullmatch(entry.name)
                if entry.name.startswith("."):
                    continue
                if match is None or match[3].lower() not in IMAGE_ENDINGS or not entry.is_file():
                    return []
                kinds.add((match[1], match[3]))
                found[folder / entry.name] = int(match[2])
    except (OSError, ValueError):  # a file, none at all, or one that may not be read
        return []
    is_clip = len(kinds) == 1 and len(found) > 1
    return sorted(found, key=lambda path: (found[path], path.name)) if is_clip else []


def _inside(folder: Path, clips: bool) -> Iterator[Path]:
    """Images in a folder, then in those below it, sorted at each step; hidden folders are left out, and the
    `grid.png` of all samples that GenEval and `visalign sample` write; of its videos the middle frame, or
    with `clips` the whole.
    """
    for place, below, names in os.walk(folder):
        if clips and numbered_frames(place):
            yield Path(place)
            continue
        below[:] = sorted(name for name in below if not name.startswith("."))
        if {RECORD, SAMPLED} & set(names):
            names = [name for name in names if name != "grid.png"]
        if SAMPLED in names:
            videos = {Path(name).stem for name in names if name.endswith(SAMPLED_CLIP)}
            other = ".png" if clips else SAMPLED_CLIP
            names = [name for name in names if not (name.endswith(other) and Path(name).stem in videos)]
        yield from (Path(place, name) for name in sorted(names) if Path(name).suffix.lower() in IMAGE_ENDINGS)


def with_prompt(path: Path, prompt: str | None, needed: bool) -> ImageRow:
    """An image's file with its prompt: the given one, GenEval's record, or the text beside it.

    Raises:
        UserError: There is none, and one is needed.
    """
    metadata, record = None, path.parent.parent / RECORD
    if path.parent.name == SAMPLES and record.is_file():
        _, metadata = next(read_rows(record), (1, {}))
        said = metadata.get("prompt")
        prompt = said if prompt is None and isinstance(said, str) else prompt
    beside = Path(f"{path.resolve()}{PROMPT_ENDING}") if path.is_dir() else path.with_suffix(PROMPT_ENDING)
    if path.suffix != PROMPT_ENDING and prompt is None and beside.is_file():
        try:
            prompt = beside.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise UserError(f"'{beside}' is not UTF-8 text ({error.reason}); save it as UTF-8.") from error
    if prompt is None and needed:
        raise UserError(
            f"Missing option '--prompt' / '-p': '{path}' has no prompt. Say with it what the images should "
            f"show, put a prompt into '{beside.name}' beside it, or give a table with the columns image, "
            "prompt."
        )
    return ImageRow(image=str(path), prompt=prompt or "", metadata=metadata)


def _from_table(
    path: Path, prompt: str | None, needs_prompt: bool, names: Mapping[str, str]
) -> list[ImageRow]:
    prompt = prompt if needs_prompt else prompt or ""
    needed = ("image",) if prompt is not None else ("image", "prompt")
    rows = []
    for count, (number, given) in enumerate(read_rows(path)):
        row = rename_columns(path, given, names)
        if not count:
            require_columns(path, row, needed, purpose="a table of images")
        try:
            rows.append(table_row(path, number, row, prompt))
        except UserError as error:
            raise UserError(f"Row {number} of '{path}': {error}") from error
    if not rows:
        raise UserError(f"'{path}' holds no row.")
    return rows


def table_row(path: Path, number: int, row: Row, prompt: str | None) -> ImageRow:
    """A table's row under our names as an image to judge.

    Raises:
        UserError: It has no image, no prompt where none is given for all, or metadata that are no object.
    """
    said = row.get("prompt", prompt)
    if not isinstance(said, str):
        raise UserError(f"'prompt' is {'missing' if said is None else repr(said)}, needed is a text.")
    value = str(row["image"]) if isinstance(row.get("image"), int) else row.get("image")
    if path.suffix.lower() == ".parquet" and isinstance(value, dict | bytes):
        image = parquet_reference(path, "image", number - 1)
    elif isinstance(value, str) and value:
        is_whole = Path(value).is_absolute() or "://" in value
        image = value if is_whole else str(path.parent / value)
    else:
        raise UserError(f"'image' is {'missing' if value is None else repr(value)}, needed is a path.")
    return ImageRow(image=image, prompt=said, metadata=_metadata(row.get("metadata")))


def _metadata(value: Any) -> Mapping[str, Any] | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(f"'metadata' is no JSON ({error.msg} at column {error.colno}).") from error
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"'metadata' is a {type(value).__name__}, needed is an object.")
    return value
