# SPDX-License-Identifier: Apache-2.0
"""Limits of a reward server: of one request, and of all requests that are in progress together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from visalign.errors import UserError
from visalign.rewards.base.memory import BYTES_PER_PIXEL, free_memory

from .connections import CONNECTION_BYTES

JSON_GROWTH = 40
"""Bytes of memory that a byte of JSON may take when it is read; measured were 37.8, of `{"":{"":` nested."""
_LEAST_PIXELS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    max_bytes: int = 256 << 20  # Bytes in the body of a request
    max_header: int = 1 << 20  # Bytes of JSON in it: prompts, records, shapes
    max_total_bytes: int = 1 << 30
    """Bytes of all requests in progress, from their first byte to their answer; a byte of JSON counts
    `JSON_GROWTH` times."""
    max_rows: int = 512  # Images or pairs in one request
    max_pixels: int = 64 << 20  # Pixels of all images of a request, and of all that are scored together
    max_prompt: int = 20_000  # Characters of one prompt
    timeout: float = 120.0  # Seconds that the judge may take for a batch
    receive_timeout: float = 60.0  # Seconds in which a body must have arrived


class QueueFull(RuntimeError):
    """Too much is in progress already."""


class ByteBudget:
    """Counts the bytes of the requests in progress."""

    def __init__(self, limits: RequestLimits) -> None:
        self.used, self._limits = 0, limits

    @contextmanager
    def reserve(self, length: int) -> Iterator[None]:
        """Reserve room for a body of `length` bytes and all the JSON that it may hold, or raise QueueFull."""
        count = length + JSON_GROWTH * min(length, self._limits.max_header)
        limit = self._limits.max_total_bytes
        if self.used + count > limit:
            raise QueueFull(f"{self.used} bytes are in progress; at most {limit} may be")
        self.used += count
        try:
            yield
        finally:
            self.used -= count


def limits_for(memory: float | None, *, connections: int, **fields: Any) -> RequestLimits:
    """Derive limits from memory: half for requests and connections, half for the judge's work on one batch.

    `memory` is in GiB, beside what the processes take idle; None takes half of what is free. `fields` override.
    """
    if memory is not None and not math.isfinite(memory):
        raise UserError(f"--memory is {memory}; give a number of GiB.")
    size = free_memory() // 2 if memory is None else int(memory * 2**30)
    total = min(RequestLimits.max_total_bytes, max(0, size // 2 - connections * CONNECTION_BYTES))
    header = min(RequestLimits.max_header, total // 4 // JSON_GROWTH)
    body = min(RequestLimits.max_bytes, total // 2)
    pixels = min(RequestLimits.max_pixels, size // 2 // BYTES_PER_PIXEL, (body - header) // 3)
    if pixels < _LEAST_PIXELS and "max_pixels" not in fields:
        shares = _LEAST_PIXELS * BYTES_PER_PIXEL, 7 * _LEAST_PIXELS + connections * CONNECTION_BYTES
        raise UserError(
            f"--memory leaves room for {pixels} pixels. Give {2 * max(shares) / 2**30:.2f} GiB, or --max-pixels."
        )
    derived = {"max_total_bytes": total, "max_header": header, "max_bytes": body, "max_pixels": pixels}
    return RequestLimits(**{**derived, **fields})
