# SPDX-License-Identifier: Apache-2.0
"""The requests of one call, given up together, and how a request fails."""

from __future__ import annotations

import socket
import threading

from visalign.errors import UserError


class ServerError(UserError):
    """What a server said or failed to say; the message names the URL.

    Args:
        message: for the user.
        status: of the HTTP answer, where there was one.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class PassingError(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, message: str, *, status: int | None = None, pause: float | None = None) -> None:
        super().__init__(message)
        self.status, self.pause = status, pause


class Calls:
    """The requests of one call, to be given up together."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    def add(self, connection: socket.socket) -> None:
        with self._lock:
            if self.over.is_set():
                raise PassingError("given up, because another request of the call failed")
            self._open.add(connection)

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.discard(connection)

    def give_up(self) -> None:
        """Wake those that wait for another attempt, and hang up on the server."""
        self.over.set()
        with self._lock:
            for connection in self._open:
                shut(connection)


def shut(connection: socket.socket) -> None:
    """Hang up, so that whoever reads there wakes."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the server was faster
        return
