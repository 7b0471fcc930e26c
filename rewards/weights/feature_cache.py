# SPDX-License-Identifier: Apache-2.0
"""Cache tower features, so that each image or prompt is encoded once, also across calls."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor


class Stored(Protocol):
    """Tensor or group of tensors with a size."""

    @property
    def nbytes(self) -> int: ...

    def clone(self) -> Self: ...


V = TypeVar("V", bound=Stored)


class FeatureCache(Generic[V]):
    """Least-recently-used cache of tensors by content key, limited in `bytes`; counts `misses`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.misses = 0
        self._entries: OrderedDict[Hashable, V] = OrderedDict()
        self.bytes = 0
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> V | None:
        with self._lock:
            if key not in self._entries:
                self.misses += 1
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def put(self, key: Hashable, value: V) -> None:
        """Store a copy, unless it is larger than the whole cache."""
        with self._lock:
            if key in self._entries or value.nbytes > self.max_bytes:
                return
            # a row of a batch would keep the whole batch in memory
            self._entries[key] = value.clone()
            self.bytes += value.nbytes
            while self.bytes > self.max_bytes:
                self.bytes -= self._entries.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.bytes = 0


def encode_once(
    keys: Sequence[bytes], encode: Callable[[list[int]], Tensor], *, cache: FeatureCache[Tensor], batch_size: int
) -> Tensor:
    """Return features [N, ...] of N ≥ 1 items; `encode` maps positions of new, distinct ones to theirs."""
    first: dict[bytes, int] = {}
    for position, key in enumerate(keys):
        first.setdefault(key, position)
    features = {key: feature for key in first if (feature := cache.get(key)) is not None}
    missing = [position for key, position in first.items() if key not in features]
    for start in range(0, len(missing), batch_size):
        chunk = missing[start : start + batch_size]
        for position, feature in zip(chunk, encode(chunk), strict=True):
            features[keys[position]] = feature
            cache.put(keys[position], feature)
    return torch.stack([features[key] for key in keys])


def image_key(image: Tensor) -> bytes:
    """Hash the 8-bit levels and the shape of an image [3, H, W] in [0, 1]."""
    levels = image.mul(255).round().to(torch.uint8).cpu().contiguous()
    digest = hashlib.blake2b(str(tuple(image.shape)).encode(), digest_size=20)
    digest.update(levels.numpy().data)
    return digest.digest()


def text_key(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).digest()
