# SPDX-License-Identifier: Apache-2.0
"""Images decoded by worker processes ahead of a judge on a GPU, which would wait for them.

Threads would take the interpreter from the thread that launches the judge, and halve its speed.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import repeat
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from visalign.errors import UserError
from visalign.interfaces import with_capabilities

from .images import read_levels

FEWEST = 256  # Images for which processes are started
CHUNK = 8  # Images that a process decodes at a time; two chunks wait for each process
LARGEST = 1 << 22  # Pixels of an image; the judge reads larger ones itself, so that few fill the memory
ROOM = 1 << 28  # Bytes of shared memory that chunks of a process may take
T = TypeVar("T")


def decode_ahead(
    items: Sequence[T], open_item: Callable[[T], Any], rewards: Iterable[Any]
) -> Generator[Tensor | None]:
    """Yield the pixels uint8 [3, H, W] of each item on the GPU, or None where a judge has to read it itself.

    That is so for unreadable and unusual images, and for all where no reward takes images on a GPU. Close the iterator
    to end the processes. `open_item` turns an item into a path or a PIL image, in a process.
    """
    workers = worker_count(len(items)) if any(map(takes_decoded, rewards)) else 0
    if not workers:
        yield from repeat(None, len(items))
        return
    chunks: DataLoader[Any] = DataLoader(
        _Decoder(items, open_item),
        batch_size=CHUNK,
        num_workers=workers,
        collate_fn=_pack,
        pin_memory=torch.cuda.is_available(),
        multiprocessing_context="fork",
        generator=torch.Generator(),  # not torch's own, which others draw from
    )
    for levels, shapes in chunks:
        pixels = levels.to("cuda" if levels.is_pinned() else "cpu", non_blocking=True)
        for part, shape in zip(pixels.split([math.prod(shape) for shape in shapes]), shapes, strict=True):
            yield part.view(*shape).permute(2, 0, 1) if len(part) else None


def takes_decoded(reward: Any) -> bool:
    """Return True if a reward is given what `decode_ahead` yields."""
    return with_capabilities(reward).capabilities.takes_gpu_images


def worker_count(images: int) -> int:
    """Return how many processes decode so many images: 0 without a GPU, a free core or room, or for few images."""
    if images < FEWEST or not torch.cuda.is_available() or "fork" not in multiprocessing.get_all_start_methods():
        return 0
    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's processes share the machine
    cores, room = len(os.sched_getaffinity(0)) // beside, shutil.disk_usage("/dev/shm").free // beside
    return max(0, min(cores - 2, room // ROOM))


class _Decoder(Dataset[Tensor | None], Generic[T]):
    """Items as `decode_ahead` takes them, and their pixels."""

    def __init__(self, items: Sequence[T], open_item: Callable[[T], Any]) -> None:
        self.items, self.open_item = items, open_item

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tensor | None:
        try:
            return read_levels(self.open_item(self.items[index]), LARGEST)
        except (UserError, OSError):  # the judge's process meets it again and reports it
            return None


def _pack(images: Sequence[Tensor | None]) -> tuple[Tensor, list[list[int]]]:
    """Join the pixels of images in one tensor, since each one between processes costs as much as a small image.

    Also returns the shape (H, W, 3) of each: they stay as PIL lays them out, and the GPU puts the channels first.
    """
    shapes = [[0] if image is None else list(image.permute(1, 2, 0).shape) for image in images]
    pixels = [image.permute(1, 2, 0).flatten() for image in images if image is not None]
    return torch.cat(pixels) if pixels else torch.zeros(0, dtype=torch.uint8), shapes
