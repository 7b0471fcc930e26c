# SPDX-License-Identifier: Apache-2.0
"""Connections of an HTTP server: how many at once, and which are closed. It needs uvicorn."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

CONNECTION_BYTES = 320 << 10
"""Bytes that a connection may hold unread: 64 KiB at uvicorn, one read of 256 KiB at asyncio."""
_BACKLOG = 64
"""Connections that the system accepts before the server looks; they need descriptors beside the open ones."""
_SPARE_DESCRIPTORS = 64  # Descriptors for the judge's pipe, its process when it is restarted, and files
_GRACE = 1.0  # Seconds that a new connection has to send its request before it may be closed for another
_FULL = json.dumps({"error": "Busy: too many connections. Try again.", "busy": True}).encode()


def server_config(app: Any, host: str, port: int, *, connections: int, idle: float) -> Config:
    """Configure uvicorn with at most `connections`, each closed after `idle` seconds of silence."""
    return Config(
        app,
        host=host,
        port=port,
        http=partial(BoundedProtocol, max_connections=connections, idle=idle),  # type: ignore[arg-type]
        ws="none",
        backlog=_BACKLOG,
        log_level="error",  # a line for each bad request would let anybody fill the disk
        timeout_keep_alive=math.ceil(idle),
    )


def connections_allowed(requested: int) -> int:
    """Return the number of connections that the limit of open files leaves room for."""
    try:
        import resource
    except ModuleNotFoundError:  # not a Unix
        return requested
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = limit - 2 * _BACKLOG - _SPARE_DESCRIPTORS
    return requested if limit == resource.RLIM_INFINITY else max(1, min(requested, room))


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with limits that its settings lack, or silent connections would crowd out all others.

    A connection is closed when for `idle` seconds it has sent no whole request or does not read its answer. When there
    are more than `max_connections`, the one that has been so longest (and for a second at least) is closed, those that
    never sent a request first; if there is none, the new one gets 503.
    """

    def __init__(self, *args: Any, max_connections: int, idle: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._max_connections, self._idle = max_connections, idle
        self._idle_since = 0.0
        self._idle_timer: Any = None
        self._unread_timer: Any = None

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def may_close(self) -> bool:
        waits = self.is_idle or self._unread_timer is not None
        return waits and self.loop.time() - self._idle_since > _GRACE

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_idle_timer()
        if len(self.connections) <= self._max_connections:
            return
        open_connections: Any = self.connections
        closable = [other for other in open_connections if other is not self and other.may_close()]
        if closable:
            oldest = min(closable, key=lambda other: (other.cycle is not None, other._idle_since))
            self.connections.discard(oldest)
            oldest.transport.abort()
            return
        head = f"HTTP/1.1 503 Busy\r\nContent-Type: application/json\r\nContent-Length: {len(_FULL)}\r\n"
        transport.write(head.encode() + b"Retry-After: 1\r\nConnection: close\r\n\r\n" + _FULL)
        transport.close()

    def on_response_complete(self) -> None:
        self._start_idle_timer()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._idle_since = self.loop.time()
        self._unread_timer = self.loop.call_later(self._idle, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._idle_timer.cancel()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def _start_idle_timer(self) -> None:
        self._idle_since = self.loop.time()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = self.loop.call_later(self._idle, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.is_idle:
            self.transport.abort()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
