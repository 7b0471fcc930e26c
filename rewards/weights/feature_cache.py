# SPDX-License-Identifier: Apache-2.0
"""Features computed once: an image or prompt goes through its tower a single time, also across calls."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor


class Stored(Protocol):
    """A tensor, or several that belong together."""

    @property
    def nbytes(self) -> int: ...

    def clone(self) -> Self: ...


V = TypeVar("V", bound=Stored)


class FeatureCache(Generic[V]):
    """Tensors by content key, the least recently used thrown out above a number of bytes.

    Attributes:
        hits: how often `get` found what it was asked for.
        misses: how often it did not.
    """

    def __init__(self, max_bytes: int) -> None:
        """Make an empty cache of at most so many bytes; 0 stores nothing."""
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; allowed are numbers of bytes from 0 (no cache).")
        self.max_bytes = max_bytes
        self.hits = self.misses = 0
        self._held: OrderedDict[Hashable, V] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def bytes(self) -> int:
        """What the stored tensors take together."""
        return self._bytes

    def get(self, key: Hashable) -> V | None:
        """What is stored under that key, or None."""
        with self._lock:
            if key not in self._held:
                self.misses += 1
                return None
            self.hits += 1
            self._held.move_to_end(key)
            return self._held[key]

    def put(self, key: Hashable, value: V) -> None:
        """Store a copy; what is larger than the whole cache is left out."""
        with self._lock:
            if key in self._held or value.nbytes > self.max_bytes:
                return
            # A row of a batch shares the batch's memory; the copy holds its own alone.
            self._held[key] = value.clone()
            self._bytes += value.nbytes
            while self._bytes > self.max_bytes:
                self._bytes -= self._held.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
            self._bytes = 0


def encode_once(
    keys: Sequence[bytes],
    encode: Callable[[list[int]], Tensor],
    *,
    cache: FeatureCache[Tensor],
    batch_size: int,
) -> Tensor:
    """Features [N, ...] of N ≥ 1 items by their content keys, each distinct one that the cache lacks encoded
    once, in calls of `encode` with at most `batch_size` positions.
    """
    known: dict[bytes, Tensor] = {}
    missing: dict[bytes, int] = {}
    for position, key in enumerate(keys):
        if key in known or key in missing:
            continue
        found = cache.get(key)
        if found is None:
            missing[key] = position
        else:
            known[key] = found
    todo = list(missing.items())
    for start in range(0, len(todo), batch_size):
        chunk = todo[start : start + batch_size]
        for (key, _), feature in zip(chunk, encode([position for _, position in chunk]), strict=True):
            known[key] = feature
            cache.put(key, feature)
    return torch.stack([known[key] for key in keys])


def image_key(image: Tensor) -> bytes:
    """Content key of an image [3, H, W] in [0, 1]: its 8-bit levels and its shape."""
    levels = image.mul(255).round().to(torch.uint8).cpu().contiguous()
    digest = hashlib.blake2b(str(tuple(image.shape)).encode(), digest_size=20)
    digest.update(levels.numpy().data)
    return digest.digest()


def text_key(text: str) -> bytes:
    """Content key of a prompt."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).digest()
