# SPDX-License-Identifier: Apache-2.0
"""Stored images that a policy learns from in place of its samples: compared, rated, or with captions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from visalign.data.sets.checks import check_preferences, summed_votes, without_duplicates
from visalign.data.sets.columns import Columns
from visalign.data.sets.hub_datasets import find_table
from visalign.data.sets.image_references import SHAPES, TAR, resolve_image
from visalign.data.sets.prompt_files import CAPTIONS, Edits, check_sources, source_of
from visalign.data.sets.records import PreferenceSet, QualitySet
from visalign.data.sets.sources import CAPTIONED, is_named_set, load_source, shapes_images
from visalign.data.sets.tables import column_names, listed
from visalign.errors import UserError
from visalign.pipelines.score.image_rows import IMAGE_ENDINGS, SAMPLED, SAMPLES, ImageRow
from visalign.pipelines.shared.parts import Records, Row, check_images, check_texts, name_key, read_images
from visalign.rewards.base.images import load_images, pixel_limit
from visalign.training.diffusion.samples import Stored
from visalign.vision.pixels import DECODING_ERRORS

ORIENTATION = 0x0112  # EXIF: 5 to 8 are lying on their side
SHAPES_IMAGES = 2000  # Images of shapes:images where data.images_size names no number
READ = 32  # Images that are in memory as files have them
_SOURCES = (
    'Give each pair one in a column "source", a path such as cup.png, or as `visalign sample` leaves it, '
    '{"source": PATH} in "metadata"; or leave data.pairs out.'
)


def read_stored(
    source: str,
    edits: Edits,
    *,
    size: int = 2,
    soft: bool = False,
    limit: int | None = None,
    several: bool = True,
    names: Mapping[str, str] | None = None,
) -> tuple[Records, tuple[str, ...]]:
    """Read the groups of `data.pairs`: pairs with the votes of each summed, without ties, or `size` rated images each.

    `edits` and `several` say whether the model edits an image, and whether it joins several; `names` is our name of
    a column -> the file's. `soft` takes preferences for probabilities, which ratings are not. A record has prompt, tag
    (its category), candidates, each {image, preference, where}, and where the model edits the source. Images are not
    read yet. With the records come oddities of the set that do not stop the run.
    """
    with name_key("data.pairs"):
        split = "train" if is_named_set(source) else None
        source_set = load_source(source, split=split, limit=limit, columns=Columns(names=names or {}))
        is_rated = isinstance(source_set, QualitySet)
        if is_rated and soft:
            raise UserError(
                "the set holds rated images, and loss_options soft=true takes votes for probabilities. "
                "Give image_left and image_right with votes, or set soft=false."
            )
        if not is_rated and size != 2:
            raise UserError(
                f"rollout.group_size is {size}, and a group of data.pairs is a pair. Set rollout.group_size=2; "
                "rollout.prompts_per_iteration is then the number of pairs. Larger groups need rated images: a "
                "table with image, prompt and mos."
            )
        check_texts([{"prompt": row.prompt} for row in (source_set.records if is_rated else source_set.pairs)])
        records, notes = _rated_groups(source_set, size, edits) if is_rated else _pairs(source_set, edits)
    rows = [(record, candidate) for record in records for candidate in record["candidates"]]
    check_images([Row(image["where"], record["prompt"], (image["image"],)) for record, image in rows], "data.pairs")
    if edits != "none":
        labelled = [(f"data.pairs: {record['candidates'][0]['where']}", record) for record in records]
        check_sources(labelled, needed=edits == "needed", several=several, remedy=_SOURCES)
    return records, tuple(f"data.pairs: {note}" for note in notes)


def read_captioned(
    source: str, edits: Edits, limit: int | None, sizes: Sequence[Any] | None, names: Mapping[str, str]
) -> tuple[Records, tuple[str, ...]]:
    """Read the images with captions of `data.images`, each the only candidate of its record, and notes on those left
    out. Each is decoded once; its "bucket" is the number of the nearest of `sizes`, by shape and then by area.
    """
    sides = [size if isinstance(size, list | tuple) else (size, size) for size in sizes or []]
    records: list[dict[str, Any]] = []
    left_out: list[str] = []
    with name_key("data.images"):
        rows = list(islice(_captioned_rows(source, limit, names), limit))
        with ThreadPoolExecutor() as pool:
            read = list(pool.map(_size, rows))
        for row, ((height, width), reason) in zip(rows, read, strict=True):
            if reason is not None:
                left_out.append(f"{row.image} ({reason})")
                continue
            candidate = {"image": row.image, "preference": 1.0, "where": f"'{source}'"}
            record: dict[str, Any] = {"prompt": row.prompt, "tag": "", "candidates": [candidate]}
            if sizes:
                gaps = [(math.log(h * width / (w * height)), math.log(h * w / (height * width))) for h, w in sides]
                record["bucket"] = min(range(len(sides)), key=lambda i: [*map(abs, gaps[i])])
            if edits != "none" and (edited := source_of({"metadata": row.metadata})) is not None:
                record["source"] = edited
            records.append(record)
        if not records:
            reasons = f"{listed(left_out) or 'it is empty'}.{_unread_table(Path(source))}"
            raise UserError(f"'{source}' has no image with a caption that can be read: {reasons}")
        check_texts(records)
        if edits != "none":
            check_sources(
                ((f"'{source}'", r) for r in records), needed=edits == "needed", several=True, remedy=_SOURCES
            )
    notes = [f"data.images: left out, of {len(rows)} images: {len(left_out)}. {listed(left_out)}."] if left_out else []
    notes = [f"{note}{_unread_table(Path(source))}" for note in notes]
    if len(rows) == limit and source != CAPTIONED:
        notes.append(f"data.images: the first {limit} images are read (data.images_size).")
    elif unread := _unread_images(Path(source), rows):
        beside = f"beside tables or tar files are not read, such as {unread[0]}. Give them as a folder of their own."
        notes.append(f"data.images: {len(unread)} images with captions {beside}")
    return records, tuple(notes)


def _captioned_rows(source: str, limit: int | None, names: Mapping[str, str]) -> Iterator[ImageRow]:
    """Read the images of a named set, a folder, a table, tar files, or tables of samples, with their captions."""
    from visalign.pipelines.score.parts import TARS, ScoringOptions, check_part, find_parts, read_part

    if source == CAPTIONED:
        yield from (ImageRow(image=image, prompt=prompt) for image, prompt in shapes_images(limit or SHAPES_IMAGES))
        return
    path = find_table(Path(source))
    if not path.exists():
        raise UserError(f"'{source}' does not exist. Give a folder of images with captions, a table, or {CAPTIONED}.")
    tables = [t for t in sorted(path.rglob(SAMPLED)) if "/." not in f"/{t.relative_to(path)}"] if path.is_dir() else []
    for part in (part for item in tables or [path] for part in find_parts([item])):
        if not isinstance(part.source, tuple):
            if part.source.name.lower().endswith(TARS) and part.source.suffix != ".tar":
                raise UserError(
                    f"'{part.source}' is compressed or not named .tar: images are read where they lie. "
                    "Unpack it to .tar."
                )
            check_part(part, ScoringOptions(rewards=[], names=names))
        for row in read_part(part, ScoringOptions(rewards=[], needs_prompt=False, names=names)):
            yield replace(row, content=None, image=f"{TAR}{part.source}#{row.member}" if row.member else row.image)


def _unread_images(folder: Path, rows: Sequence[ImageRow]) -> list[Path]:
    """Find the images with captions in a folder of which tables or tar files alone are read."""
    read = {Path(row.image) for row in rows}
    files = sorted(folder.absolute().rglob("*")) if folder.is_dir() else []
    files = [file for file in files if "/." not in f"/{file.relative_to(folder.absolute())}"]
    unread = [file for file in files if file.suffix.lower() in IMAGE_ENDINGS and file not in read]
    return [image for image in unread if any(map(Path.is_file, map(image.with_suffix, CAPTIONS)))]


def _unread_table(folder: Path) -> str:
    """Say which table lies in a folder whose images are read by their captions; with a leading blank."""
    files = sorted(folder.rglob("*")) if folder.is_dir() else []
    tables = [file for file in files if file.suffix.lower() in (".jsonl", ".csv", ".tsv") and file.name != SAMPLED]
    for table in (file for file in tables if not (file.parent / SAMPLES).is_dir()):  # GenEval's records
        with suppress(UserError):  # any file may lie there
            names = listed(column_names(table, {}), limit=20)
            return f" To read its table with the columns {names}, set data.images={table}; data.map names the caption."
    return ""


def _size(row: ImageRow) -> tuple[tuple[int, int], str | None]:
    """Return ((height, width) as shown, None) of a row's image, or why it cannot be learnt."""
    if row.reason or not row.prompt.strip():
        return (1, 1), (row.reason or "it has no caption").rstrip(".")
    if row.image.startswith(SHAPES):  # drawn when they are learnt, and square
        return (1, 1), None
    try:
        content = resolve_image(row.image)
        with Image.open(content) if isinstance(content, str) else content as opened:
            width, height = opened.size
            opened.draft("RGB", (1, 1))  # a JPEG is read whole and decoded small
            opened.load()
            turned = opened.getexif().get(ORIENTATION, 1) in (5, 6, 7, 8)
            is_special = opened.mode[0] in "IF" or width * height > pixel_limit()  # `read_images` may refuse it
            reason = load_images([opened]).reasons[0] if is_special else None
    except (UserError, *DECODING_ERRORS) as error:
        return (1, 1), str(error).rstrip(".")
    return (width, height) if turned else (height, width), reason


def _pairs(source_set: PreferenceSet, edits: Edits) -> tuple[list[dict[str, Any]], list[str]]:
    """Read pairs with their votes summed; ties are left out."""
    findings = check_preferences(source_set, files=False)
    pairs, summed = summed_votes(without_duplicates(source_set))
    sources = {
        (pair.prompt, frozenset((pair.image_left, pair.image_right))): edited
        for pair in reversed(source_set.pairs)  # of several rows the first counts
        if edits != "none" and (edited := source_of(pair.extra)) is not None
    }
    records: list[dict[str, Any]] = []
    for number, pair in enumerate(pairs.pairs):
        if pair.label == 0.5:
            continue
        images = pair.image_left, pair.image_right
        where = f"row {pairs.row(number)} of '{pairs.name}'"
        sides = zip(images, (pair.label, 1 - pair.label), strict=True)
        candidates = [{"image": image, "preference": share, "where": where} for image, share in sides]
        records.append({"prompt": pair.prompt, "tag": pair.category or "", "candidates": candidates})
        if (edited := sources.get((pair.prompt, frozenset(images)))) is not None:
            records[-1]["source"] = edited
    if not records:
        raise UserError(f"the votes on each of {len(pairs)} pairs are ties. Give more votes.")
    notes = [finding.message for finding in (*findings, *summed) if finding.kind not in ("ties", "one_side")]
    if ties := len(pairs) - len(records):
        notes.append(f"{ties} of {len(pairs)} pairs are ties and left out.")
    return records, notes


def _rated_groups(rated: QualitySet, size: int, edits: Edits) -> tuple[list[dict[str, Any]], list[str]]:
    """Cut the rated images of each prompt (and source) into groups of `size`, in the order of the file."""
    groups: dict[Any, dict[str, Any]] = {}
    for number, image in enumerate(rated.records):
        if not image.prompt.strip():
            raise UserError(f"row {rated.row(number)} of '{rated.name}' has no prompt to learn its image for.")
        source = None if edits == "none" else source_of(image.extra)
        score = image.mos if rated.higher_is_better else -image.mos
        where = f"row {rated.row(number)} of '{rated.name}'"
        group = groups.setdefault((image.prompt, repr(source)), {"tag": image.category or "", "candidates": {}})
        candidate = {"image": image.image, "preference": score, "where": where}
        first = group["candidates"].setdefault(image.image, candidate)
        if first["preference"] != score:
            raise UserError(
                f"{first['where']} and row {rated.row(number)} rate one image of one prompt differently. Keep one of "
                "them, or name the raters in a column annotator, whose mean counts."
            )
        group |= {"prompt": image.prompt} | ({} if source is None else {"source": source})
    records = [
        group | {"candidates": part}
        for group in groups.values()
        for start in range(0, len(group["candidates"]), size)
        if len(part := [*group["candidates"].values()][start : start + size]) == size
    ]
    if not records:
        largest = max(len(group["candidates"]) for group in groups.values())
        raise UserError(
            f"rollout.group_size is {size}, and no prompt has so many rated images: {largest} at most. Set "
            f"rollout.group_size={max(2, largest)} or less, or rate more images of a prompt."
        )
    images = sum(len(group["candidates"]) for group in groups.values())
    left_out = images - size * len(records)
    note = f"{left_out} of {images} images are left out: groups have {size} (rollout.group_size)."
    return records, [note] if left_out else []


def stored_latents(policy: Any) -> Stored:
    """Return a function that encodes the images of records to clean latents."""
    if not hasattr(policy, "encode_images"):
        raise UserError(
            f"data.pairs: the adapter {type(policy).__name__} has no encode_images, which makes latents of "
            "images. Add it (visalign.interfaces.DiffusionPolicy says how), or leave data.pairs out."
        )

    def latents(records: Sequence[Mapping[str, Any]]) -> Tensor:
        parts = []
        with ThreadPoolExecutor() as pool:
            for start in range(0, len(records), READ):  # few at a time: images may be large
                part = records[start : start + READ]
                images = pool.map(lambda record: read_images([record["image"]], record["where"])[0], part)
                parts.append(policy.encode_images(list(images)))
        return torch.cat(parts)

    return latents
