# SPDX-License-Identifier: Apache-2.0
"""Images that stand in more than one set, found by file, by bytes and by pixels, in bounded time."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from visalign.errors import UserError

from .image_references import PARQUET, SHAPES, resolve_image
from .tables import listed

SECONDS = 60.0
"""Time that a search may take before it says how far it came."""
BLOCK = 256
"""References that are worked on together; whole blocks are shuffled, so that files are read in order."""
THREADS = 8
"""Decoding and hashing leave Python's lock, so threads serve."""

MOST_ALIKE = 0.25
"""Share of files of equal length above which their bytes are not read for themselves: pixels tell as much."""

Item = tuple[str, str]
"""(reference, name of its set)."""
_RESOLVING = threading.Lock()
"""Parquet readers and the shapes world are asked by one thread at a time."""


@dataclass(frozen=True, kw_only=True)
class ImageLeaks:
    """What a search found."""

    shared: tuple[tuple[Item, Item], ...]
    """Two references of one image that stand in different sets, a pair for each image."""
    compared: int
    """Images whose content was compared, by bytes or by pixels."""
    total: int
    """Images of all sets."""
    unreadable: int
    """Images that could not be opened, and so were compared by their files alone."""
    seconds: float

    @property
    def is_complete(self) -> bool:
        """Whether every image was compared, or there was no need to look further."""
        return bool(self.shared) or self.compared + self.unreadable >= self.total

    def note(self) -> str | None:
        """How far a search came whose time was over; None for one that came to its end."""
        if self.is_complete:
            return None
        pace = 1000 * self.seconds / max(self.compared, 1)
        return (
            f"By pixels {self.compared} of {self.total} images were compared in {self.seconds:.0f} s "
            f"({pace:.1f} s for 1,000), the others by their files alone: an image of theirs that was saved "
            "anew may stand in two of the sets."
        )


def shared_images(sets: Mapping[str, Iterable[str]], *, seconds: float | None = SECONDS) -> ImageLeaks:
    """Find images that stand in more than one set, under whatever name.

    First by what costs nothing, the reference itself and the file behind it (links of any kind lead to one
    file); then the bytes of files of equal length; then the decoded pixels, upright and in RGB, so that an
    image that was saved anew without loss is found. A search ends at the first of these that finds
    something. Of the largest set only images of a size that another set has are decoded. An image that
    was cut, scaled or compressed anew with loss is another image here.

    Args:
        sets: Name -> references as `visalign.data.sets.image_references.resolve_image` reads them.
        seconds: After so long no further image is opened, and `ImageLeaks.note` says how far it came;
            the order is shuffled, always alike. None looks at all.

    Returns:
        The pairs found.
    """
    started = time.monotonic()
    end = float("inf") if seconds is None else started + seconds
    items = [(ref, name) for name, refs in sets.items() for ref in dict.fromkeys(refs)]
    order = {name: place for place, name in enumerate(sets)}
    counts = {"compared": 0, "unreadable": 0}

    def result(groups: Sequence[Sequence[Item]]) -> ImageLeaks:
        return ImageLeaks(
            shared=tuple(_two_sets(sorted(group, key=lambda item: order[item[1]])) for group in groups),
            total=len(items),
            seconds=time.monotonic() - started,
            **counts,
        )

    if len({name for _, name in items}) < 2:
        counts["compared"] = len(items)
        return result([])
    states = {ref: _file_state(ref) for ref, _ in items}
    if found := _across((states[ref][0], (ref, name)) for ref, name in items):
        return result(found)
    sizes = ((states[ref][1], (ref, name)) for ref, name in items if states[ref][1] is not None)
    alike = [item for group in _across(sizes) for item in group]
    if len(alike) <= MOST_ALIKE * len(items):
        hashed = _mapped(lambda item: _bytes_hash(item[0]), alike, end)
        if found := _across((key, item) for item, key in hashed if key is not None):
            return result(found)
    return result(_by_pixels(items, end, counts))


def refuse_shared_images(
    sets: Mapping[str, Iterable[str]], *, what: str, seconds: float | None = SECONDS
) -> list[str]:
    """Refuse sets (name -> references) that share an image; a note where not all could be compared in time.

    Args:     sets: As `shared_images`.     what: Where they stand in more than one of these, e.g. "of
    data.heldout also stand in data.train".     seconds: As `shared_images`.

    Raises:
        UserError: An image stands in more than one set; the message names them.
    """
    found = shared_images(sets, seconds=seconds)
    if found.shared:
        names = [_named(first, second) for first, second in found.shared]
        raise UserError(
            f"{len(names)} images {what}: {listed(names)}. What is learnt would be measured. Take each out "
            "of one of them."
        )
    note = found.note()
    return [note] if note else []


def _named(first: Item, second: Item) -> str:
    if first[0] == second[0]:
        return f"'{first[0]}' ({first[1]} and {second[1]})"
    return f"'{first[0]}' ({first[1]}) is '{second[0]}' ({second[1]})"


def _by_pixels(items: Sequence[Item], end: float, counts: dict[str, int]) -> list[list[Item]]:
    """Groups of equal pixels; counts what was looked at."""
    names = sorted({name for _, name in items}, key=lambda name: sum(own == name for _, own in items))
    keys: list[tuple[Hashable, Item]] = []
    sizes: set[tuple[int, int]] = set()
    for name in names:
        known = frozenset(sizes) if name == names[-1] else None
        own = [item for item in items if item[1] == name]
        for item, (size, key) in _mapped(lambda item, known=known: _pixels(item[0], known), own, end):
            counts["unreadable" if size is None else "compared"] += 1
            if size is not None:
                sizes.add(size)
            if key is not None:
                keys.append((key, item))
    return _across(keys)


def _across(keyed: Iterable[tuple[Hashable, Item]]) -> list[list[Item]]:
    """Items that share a key with one of another set, by key, in their order."""
    groups: dict[Hashable, list[Item]] = {}
    for key, item in keyed:
        groups.setdefault(key, []).append(item)
    return [group for group in groups.values() if len({name for _, name in group}) > 1]


def _two_sets(group: Sequence[Item]) -> tuple[Item, Item]:
    """The first of a group, and the first of another set."""
    return group[0], next(item for item in group if item[1] != group[0][1])


def _mapped(work: Callable[[Item], Any], items: Sequence[Item], end: float) -> Iterator[tuple[Item, Any]]:
    """(item, result) of as many as time allows, blocks in shuffled order."""
    blocks = [items[start : start + BLOCK] for start in range(0, len(items), BLOCK)]
    random.Random(0).shuffle(blocks)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for block in blocks:
            for start in range(0, len(block), 2 * THREADS):
                if time.monotonic() > end:
                    return
                part = block[start : start + 2 * THREADS]
                yield from zip(part, pool.map(work, part), strict=True)


def _file_state(reference: str) -> tuple[Hashable, int | None]:
    """(what is the same for two names of one image, bytes of its file where it has a file of its own)."""
    if reference.startswith(SHAPES):
        return reference, None
    path, place = reference.removeprefix(PARQUET), ""
    if reference.startswith(PARQUET):
        path, *rest = path.rsplit("#", 2)
        place = "#".join(rest)
    try:
        found = os.stat(path)
    except OSError:
        return reference, None
    return (found.st_dev, found.st_ino, place), None if place else found.st_size


def _bytes_hash(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "blake2b").digest()
    except OSError:
        return None


def _pixels(
    reference: str, known: frozenset[tuple[int, int]] | None
) -> tuple[tuple[int, int] | None, bytes | None]:
    """(size, hash of the pixels); no hash where the size is not among the known, no size where unreadable."""
    try:
        with _opened(reference) as image:
            size = (max(image.size), min(image.size))  # the same before and after it is turned upright
            is_wanted = known is None or size in known
            return size, _pixel_hash(image) if is_wanted else None
    except (OSError, ValueError, SyntaxError, UserError, Image.DecompressionBombError):
        return None, None


def _opened(reference: str) -> Image.Image:
    if not reference.startswith((PARQUET, SHAPES)):
        return Image.open(reference)
    with _RESOLVING:
        found = resolve_image(reference)
    return found if isinstance(found, Image.Image) else Image.fromarray(np.asarray(found))


def _pixel_hash(image: Image.Image) -> bytes:
    upright = ImageOps.exif_transpose(image)
    if upright.mode[0] in "IF":  # 16 or 32 bits, which RGB would cut
        content = np.asarray(upright)
    elif upright.has_transparency_data:
        content = np.asarray(upright.convert("RGBA"))
        content = content[..., :3] if (content[..., 3] == 255).all() else content
    else:
        content = np.asarray(upright.convert("RGB"))
    digest = hashlib.blake2b(repr(content.shape).encode())
    digest.update(np.ascontiguousarray(content).data)
    return digest.digest()
