# SPDX-License-Identifier: Apache-2.0
"""Search for images in more than one set, by file, by bytes and by pixels, in bounded time."""

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
"""Default time limit of a search."""
BLOCK = 256
"""References per block; whole blocks are shuffled, so that files are read in order."""
THREADS = 8
"""Decoding and hashing release Python's lock, so threads suffice."""
MOST_ALIKE = 0.25
"""Share of files of equal length above which their bytes are not hashed: pixels show as much."""

Item = tuple[str, str]
"""(reference, name of its set)."""
_RESOLVING = threading.Lock()
"""Parquet readers and the shapes world serve one thread at a time."""


@dataclass(frozen=True, kw_only=True)
class ImageLeaks:
    """Result of a search for shared images."""

    shared: tuple[tuple[Item, Item], ...]
    """Two references of one image in different sets, a pair for each image."""
    compared: int
    """Images whose content was compared, by bytes or by pixels."""
    total: int
    """Images of all sets."""
    unreadable: int
    """Images that could not be opened, and so were compared by their files alone."""
    seconds: float

    @property
    def is_complete(self) -> bool:
        """True if every image was compared, or there was no need to look further."""
        return bool(self.shared) or self.compared + self.unreadable >= self.total

    def note(self) -> str | None:
        """Report how far a search came that ran out of time; None for a complete one."""
        if self.is_complete:
            return None
        pace = 1000 * self.seconds / max(self.compared, 1)
        return (
            f"By pixels {self.compared} of {self.total} images were compared in {self.seconds:.0f} s "
            f"({pace:.1f} s for 1,000), the others by their files alone: a copy of theirs that was saved "
            "again may be in two of the sets."
        )


def shared_images(sets: Mapping[str, Iterable[str]], *, seconds: float | None = SECONDS) -> ImageLeaks:
    """Find images that are in more than one set, under whatever name.

    The search compares references and files first (links of any kind lead to one file), then the bytes of
    files of equal length, then the decoded pixels, upright and in RGB, so that an image that was saved again
    without loss is found. It ends at the first of these that finds something. Of the largest set only images
    of a size that another set has are decoded. An image that was cut, scaled or compressed again with loss
    counts as another image.

    Args:
        sets: Name -> references as `visalign.data.sets.image_references.resolve_image` reads them.
        seconds: Time after which no further image is opened, in a fixed shuffled order; `ImageLeaks.note`
            then reports how far it came. None has no limit.

    Returns:
        The pairs found.
    """
    started = time.monotonic()
    end = float("inf") if seconds is None else started + seconds
    items = [(ref, name) for name, refs in sets.items() for ref in dict.fromkeys(refs)]
    order = {name: index for index, name in enumerate(sets)}
    compared = unreadable = 0
    groups: list[list[Item]] = []
    if len({name for _, name in items}) < 2:
        compared = len(items)
    else:
        groups = _by_file(items, end)
        if not groups:
            groups, compared, unreadable = _by_pixels(items, end)
    pairs = []
    for group in groups:
        first, *rest = sorted(group, key=lambda item: order[item[1]])
        pairs.append((first, next(item for item in rest if item[1] != first[1])))
    return ImageLeaks(
        shared=tuple(pairs),
        compared=compared,
        total=len(items),
        unreadable=unreadable,
        seconds=time.monotonic() - started,
    )


def refuse_shared_images(
    sets: Mapping[str, Iterable[str]], *, what: str, seconds: float | None = SECONDS
) -> list[str]:
    """Refuse sets that share an image; return a note where not all images could be compared in time.

    Args:
        sets: As in `shared_images`.
        what: Middle of the message, e.g. "of data.heldout are also in data.train".
        seconds: As in `shared_images`.
    """
    leaks = shared_images(sets, seconds=seconds)
    if leaks.shared:
        names = [
            f"'{ref}' ({name} and {other_name})"
            if ref == other
            else f"'{ref}' ({name}) is '{other}' ({other_name})"
            for (ref, name), (other, other_name) in leaks.shared
        ]
        raise UserError(
            f"{len(names)} images {what}: {listed(names)}. Training and test would share them. Take each out "
            "of one of them."
        )
    note = leaks.note()
    return [note] if note else []


def _by_file(items: Sequence[Item], end: float) -> list[list[Item]]:
    """Find groups of one file, then groups of equal bytes."""
    states = {ref: _file_state(ref) for ref, _ in items}
    if groups := _across_sets((states[ref][0], (ref, name)) for ref, name in items):
        return groups
    sizes = ((states[ref][1], (ref, name)) for ref, name in items if states[ref][1] is not None)
    same_size = [item for group in _across_sets(sizes) for item in group]
    if len(same_size) > MOST_ALIKE * len(items):
        return []
    hashes = _parallel_map(lambda item: _hash_bytes(item[0]), same_size, end)
    return _across_sets((digest, item) for item, digest in hashes if digest is not None)


def _by_pixels(items: Sequence[Item], end: float) -> tuple[list[list[Item]], int, int]:
    """Find (groups of equal pixels, number of images compared, number of unreadable ones)."""
    by_set: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: item[1]):
        by_set.setdefault(item[1], []).append(item)
    hashes: list[tuple[Hashable, Item]] = []
    sizes: set[tuple[int, int]] = set()
    compared = unreadable = 0
    smallest_first = sorted(by_set.values(), key=len)
    for members in smallest_first:
        sizes_known = frozenset(sizes) if members is smallest_first[-1] else None
        results = _parallel_map(
            lambda item, sizes_known=sizes_known: _size_and_pixels(item[0], sizes_known), members, end
        )
        for item, (size, digest) in results:
            compared, unreadable = compared + (size is not None), unreadable + (size is None)
            if size is not None:
                sizes.add(size)
            if digest is not None:
                hashes.append((digest, item))
    return _across_sets(hashes), compared, unreadable


def _across_sets(keyed: Iterable[tuple[Hashable, Item]]) -> list[list[Item]]:
    """Group items by key and keep the groups with members of several sets."""
    groups: dict[Hashable, list[Item]] = {}
    for key, item in keyed:
        groups.setdefault(key, []).append(item)
    return [group for group in groups.values() if len({name for _, name in group}) > 1]


def _parallel_map(
    function: Callable[[Item], Any], items: Sequence[Item], end: float
) -> Iterator[tuple[Item, Any]]:
    """Yield (item, result) until the time is over, blocks in shuffled order."""
    blocks = [items[start : start + BLOCK] for start in range(0, len(items), BLOCK)]
    random.Random(0).shuffle(blocks)
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        for block in blocks:
            for start in range(0, len(block), 2 * THREADS):
                if time.monotonic() > end:
                    return
                batch = block[start : start + 2 * THREADS]
                yield from zip(batch, pool.map(function, batch), strict=True)


def _file_state(reference: str) -> tuple[Hashable, int | None]:
    """(identity of the image's file and place in it, bytes of a file that holds this image alone)."""
    if reference.startswith(SHAPES):
        return reference, None
    path, *position = (
        reference.removeprefix(PARQUET).rsplit("#", 2) if reference.startswith(PARQUET) else [reference]
    )
    try:
        stat = os.stat(path)
    except OSError:
        return reference, None
    return (stat.st_dev, stat.st_ino, *position), None if position else stat.st_size


def _hash_bytes(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "blake2b").digest()
    except OSError:
        return None


def _size_and_pixels(
    reference: str, sizes_known: frozenset[tuple[int, int]] | None
) -> tuple[tuple[int, int] | None, bytes | None]:
    """(size, hash of the pixels); no hash where the size is not among the known, no size where unreadable."""
    try:
        with _open(reference) as image:
            size = (max(image.size), min(image.size))  # the same before and after it is turned upright
            return size, _pixel_hash(image) if sizes_known is None or size in sizes_known else None
    except (OSError, ValueError, SyntaxError, UserError, Image.DecompressionBombError):
        return None, None


def _open(reference: str) -> Image.Image:
    if not reference.startswith((PARQUET, SHAPES)):
        return Image.open(reference)
    with _RESOLVING:
        image = resolve_image(reference)
    return image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))


def _pixel_hash(image: Image.Image) -> bytes:
    upright = ImageOps.exif_transpose(image)
    if upright.mode[0] in "IF":  # 16 or 32 bits, which RGB would cut
        pixels = np.asarray(upright)
    elif upright.has_transparency_data:
        pixels = np.asarray(upright.convert("RGBA"))
        pixels = pixels[..., :3] if (pixels[..., 3] == 255).all() else pixels
    else:
        pixels = np.asarray(upright.convert("RGB"))
    digest = hashlib.blake2b(repr(pixels.shape).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
