# SPDX-License-Identifier: Apache-2.0
"""The connections of a reward server: how many at once, and which are closed. It needs uvicorn."""

from __future__ import annotations

import json
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_SPARED = 1.0
"""Seconds that a new connection has to ask."""
_FULL = json.dumps({"error": "Busy: too many connections. Try again.", "busy": True}).encode()


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with `most` connections and no silent ones.

    One that has asked nothing for `idle` seconds, or is still asking, or does not read its answer, is closed;
    so is, when there are too many, the one that has been so longest and for a second at least, those that
    never asked first. One too many while all others wait for answers is told to come again.
    """

    _idle_since = 0.0
    _ends: Any = None
    _unread: Any = None

    def __init__(self, *args: Any, most: int, idle: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most, self._idle = most, idle

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def may_go(self) -> bool:
        waits = self.is_idle or self._unread is not None
        return waits and self.loop.time() - self._idle_since > _SPARED

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._rest()
        if len(self.connections) <= self._most:
            return
        ours: Any = self.connections
        others = [line for line in ours if line is not self and line.may_go()]
        oldest = min(others, key=lambda line: (line.cycle is not None, line._idle_since), default=None)
        if oldest is not None:
            self.connections.discard(oldest)
            oldest.transport.abort()
            return
        head = f"HTTP/1.1 503 Busy\r\nContent-Type: application/json\r\nContent-Length: {len(_FULL)}\r\n"
        transport.write(head.encode() + b"Retry-After: 1\r\nConnection: close\r\n\r\n" + _FULL)
        transport.close()

    def on_response_complete(self) -> None:
        self._rest()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._idle_since = self.loop.time()
        self._unread = self.loop.call_later(self._idle, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_again()

    def _read_again(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._ends.cancel()
        self._read_again()
        super().connection_lost(exc)

    def _rest(self) -> None:
        self._idle_since = self.loop.time()
        if self._ends is not None:
            self._ends.cancel()
        self._ends = self.loop.call_later(self._idle, self._end_if_idle)

    def _end_if_idle(self) -> None:
        if self.is_idle and not self.transport.is_closing():
            self.transport.abort()
