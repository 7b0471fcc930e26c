# SPDX-License-Identifier: Apache-2.0
"""What a reward server takes: limits of a request, bytes under way, connections; and how they follow from the
machine's memory and from what the judge needs for a pixel.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visalign.errors import UserError
from visalign.rewards.base.failure import Attempt
from visalign.rewards.base.memory import BYTES_PER_PIXEL, free_memory

from .wire import JudgeRequest, joined, pack_request, unpack_request
from .worker import JudgeWorker

JSON_GROWTH = 40
"""Bytes of memory that a byte of JSON may take when it is read; measured were 37.8, of `{"":{"":` nested."""
_USUAL_HEADER = 64 << 10
"""Bytes of JSON for which every request is charged in advance."""
CONNECTION_BYTES = 320 << 10
"""What a connection may have read that nobody has asked for: 64 KiB at uvicorn, one read of 256 KiB at
asyncio."""
_LEAST_PIXELS = 1 << 20
_SPARE_DESCRIPTORS = 32
"""For the judge's pipe, its process started anew, and files."""
BACKLOG = 64
"""Connections that the system accepts before the server looks; so many descriptors may be in use for a moment
beside those of the connections."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a server accepts."""

    max_bytes: int = 256 << 20
    """Of one request's body."""
    max_header: int = 4 << 20
    """Of the JSON in it: prompts, records, shapes."""
    max_total_bytes: int = 1 << 30
    """Of all requests under way together, from their first byte to their answer; a byte of JSON counts
    `JSON_GROWTH` times."""
    max_rows: int = 512
    """Images or pairs in one request."""
    max_pixels: int = 64 << 20
    """Of all images of a request together, and of all that are judged together."""
    max_prompt: int = 20_000
    """Characters of one prompt."""
    timeout: float = 120.0
    """Seconds that the judge may take for a batch."""
    receive_timeout: float = 60.0
    """Seconds in which a body must have arrived."""
    room_timeout: float = 10.0
    """Seconds that a request waits, unread, for others to go before it is told to come again."""

    def __post_init__(self) -> None:
        largest = self.max_bytes + JSON_GROWTH * min(self.max_bytes, self.max_header)
        if largest > self.max_total_bytes:
            raise ValueError(
                f"max_total_bytes is {self.max_total_bytes}, and the largest request may take {largest}: "
                f"max_bytes and {JSON_GROWTH} times max_header. Raise the one or lower the others."
            )


class QueueFull(RuntimeError):
    """Too much is under way already."""


class ByteBudget:
    """Bytes of the requests under way, first come first served."""

    def __init__(self, limits: RequestLimits) -> None:
        self.used = 0
        self._limits = limits
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    @asynccontextmanager
    async def held(self, length: int) -> AsyncIterator[Callable[[int], None]]:
        """Room for a body of `length` bytes until the end of the block; yields what must be told the bytes of
        its JSON.

        Raises:
            QueueFull: others have left no room in time, or leave none for JSON of that size.
        """
        mine = length + JSON_GROWTH * min(length, _USUAL_HEADER)
        try:
            async with asyncio.timeout(self._limits.room_timeout), self._turn:
                while self.used + mine > self._limits.max_total_bytes:
                    self._freed.clear()
                    await self._freed.wait()
                self.used += mine
        except TimeoutError as error:
            raise self._full() from error

        def charge(header: int) -> None:
            nonlocal mine
            more = JSON_GROWTH * max(0, header - _USUAL_HEADER)
            if self.used + more > self._limits.max_total_bytes:
                raise self._full()
            mine += more
            self.used += more

        try:
            yield charge
        finally:
            self.used -= mine
            self._freed.set()

    def _full(self) -> QueueFull:
        return QueueFull(f"{self.used} bytes are under way; at most {self._limits.max_total_bytes} may be")


def limits_for(
    worker: JudgeWorker, memory: float | None, *, connections: int, **chosen: Any
) -> RequestLimits:
    """`limits_within` so many GiB, half of what is free when None, for the judge as it is measured."""
    if memory is not None and not math.isfinite(memory):
        raise UserError(f"--memory is {memory}; give a number of GiB.")
    size = free_memory() // 2 if memory is None else int(memory * 2**30)
    return limits_within(size, peak_bytes_per_pixel(worker), connections=connections, **chosen)


def limits_within(
    memory: int, bytes_per_pixel: float, *, connections: int = 0, **chosen: Any
) -> RequestLimits:
    """Limits of a server that may take so much memory: half for what is under way and for connections, half
    for the judge's work on one batch.

    Args:
        memory: bytes, beside those that the processes take when they idle.
        bytes_per_pixel: of the judge's peak, `peak_bytes_per_pixel`.
        connections: that may be open; each may hold `CONNECTION_BYTES` that no request is charged for.
        **chosen: fields of `RequestLimits` that are set.

    Raises:
        UserError: not even 2^20 pixels fit, or the fields chosen do not fit together.
    """
    total = min(RequestLimits.max_total_bytes, max(0, memory // 2 - connections * CONNECTION_BYTES))
    header = min(RequestLimits.max_header, total // 4 // JSON_GROWTH)
    body = min(RequestLimits.max_bytes, total // 2)
    pixels = min(RequestLimits.max_pixels, int(memory // 2 / bytes_per_pixel), (body - header) // 3)
    if pixels < _LEAST_PIXELS and "max_pixels" not in chosen:
        shares = _LEAST_PIXELS * bytes_per_pixel, 7 * _LEAST_PIXELS + connections * CONNECTION_BYTES
        least = math.ceil(2 * max(shares))
        raise UserError(
            f"--memory leaves {memory} bytes, in which {pixels} pixels can be judged: {bytes_per_pixel:.0f} "
            f"bytes each and as much for requests. Give at least {least / 2**30:.2f} GiB, or --max-pixels."
        )
    try:
        return RequestLimits(
            **{
                "max_total_bytes": total,
                "max_header": header,
                "max_bytes": body,
                "max_pixels": pixels,
                **chosen,
            }
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def peak_bytes_per_pixel(worker: JudgeWorker, timeout: float = 60.0) -> float:
    """Bytes by which the judge's process grows at its peak for each pixel judged: the difference between
    two images of 256² and two of 1024², over that of their pixels.

    `BYTES_PER_PIXEL` where the system does not tell the peak, or the judge cannot judge noise in time.
    """

    def peak(side: int) -> int:
        noise = torch.randint(0, 256, (1, 3, side, side), dtype=torch.uint8)
        one = JudgeRequest(
            images=noise,
            prompts=["an image"],
            metadata=[None],
            right=None if worker.card["scores"] else noise,
        )
        raw = pack_request(one)
        Path(f"/proc/{worker.pid}/clear_refs").write_text("5")  # the peak begins anew (proc(5))
        worker.ask(joined([unpack_request(raw), unpack_request(raw)]), timeout)
        told = Path(f"/proc/{worker.pid}/status").read_text().partition("VmHWM:")[2]
        return int(told.split()[0]) << 10

    with Attempt() as measuring:
        peak(256)  # what is made once is not counted
        small, large = peak(256), max(peak(1024), peak(1024))  # allocators keep some of what was freed
        sides = 1 if worker.card["scores"] else 2
        return max(12.0, (large - small) / (2 * sides * (1024**2 - 256**2)))
    assert measuring.error is not None
    return float(BYTES_PER_PIXEL)


def connections_allowed(wanted: int) -> int:
    """Connections that leave the process descriptors for everything else.

    Raises:
        UserError: the limit of open files leaves none.
    """
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        in_use = len(os.listdir("/proc/self/fd"))
    except (ModuleNotFoundError, OSError):
        return wanted
    room = limit - in_use - 2 * BACKLOG - _SPARE_DESCRIPTORS if limit > 0 else wanted
    if room < 1:
        raise UserError(
            f"The limit of open files is {limit}, which leaves no connection. Raise it: ulimit -n 1024."
        )
    return min(wanted, room)
