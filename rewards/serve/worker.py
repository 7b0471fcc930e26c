# SPDX-License-Identifier: Apache-2.0
"""A judge in a process of its own: if it dies, another takes its place and nobody else is harmed."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Mapping
from typing import Any

from visalign.interfaces import Preferences, Scores
from visalign.rewards.base.contract import RewardError

from .process import read_reply, serve_judge
from .wire import JudgeRequest, pack_request


class WorkerDied(RuntimeError):
    """The judge's process ended while it worked on a request; a new one is ready."""


class WorkerTimeout(RuntimeError):
    """The judge took longer than allowed; its process was ended."""


class WorkerUnavailable(RuntimeError):
    """There is no judge now, whatever is asked.

    Args:
        message: why.
        retry_after: seconds after which it is tried again.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


_PATIENCE = 4
"""Deaths in a row after which the judge is given a rest."""
_LONGEST_REST = 60.0


class JudgeWorker:
    """One judge in a child process; started at once, started anew after it died.

    Args:
        name: for `load_judge`.
        options: its options.
        threads: CPU threads of the process; None as torch chooses.
        load_timeout: seconds for the judge to be ready.

    Attributes:
        card: what `judge_card` says of it.
        restarts: how often it was started anew.
        down: why there is no judge now, or None.

    Raises:
        RewardError: the judge cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        *,
        threads: int | None = None,
        load_timeout: float = 600.0,
    ) -> None:
        self._arguments = (name, dict(options or {}), threads)
        self._load_timeout = load_timeout
        self._lock = threading.Lock()
        self._closed = False
        self._troubles = 0
        self._retry_at = 0.0
        self.restarts = 0
        self.down: str | None = None
        self.card = self._start()

    def ask(self, request: JudgeRequest, timeout: float | None = None) -> Scores | Preferences:
        """Judge a request; calls from several threads wait for each other.

        Args:
            request: at least one row.
            timeout: seconds; None waits for ever.

        Raises:
            JudgeRefused, JudgeFailed: what the judge raised.
            WorkerDied, WorkerTimeout: the process ended, and a new one is ready.
            WorkerUnavailable: no new one could be started, several died in a row, or it is closed.
        """
        with self._lock:
            self._make_ready()
            try:
                messages = request.messages or (pack_request(request),)
                self._link.send_bytes(len(messages).to_bytes(4, "little"))
                for message in messages:
                    self._link.send_bytes(message)
                if not self._link.poll(timeout):
                    self._restart()
                    raise WorkerTimeout(f"the judge did not answer within {timeout:g} seconds")
                reply = self._link.recv_bytes()
            except (EOFError, OSError) as error:
                raise self._died() from error
            self._troubles = 0
        return read_reply(reply, len(request))

    @property
    def pid(self) -> int | None:
        """Of the present process."""
        return self._process.pid

    def close(self) -> None:
        """End the process; who still waits for it is told so."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        if self._closed and self._lock.locked():
            self._process.kill()  # a death wakes who waits for an answer, a closed link does not
        self._link.close()
        self._process.join(2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> dict[str, Any]:
        context = multiprocessing.get_context("spawn")
        self._link, child = context.Pipe()
        self._process = context.Process(target=serve_judge, args=(child, *self._arguments), daemon=True)
        self._process.start()
        child.close()
        name, begun = self._arguments[0], time.monotonic()
        try:
            ready = self._link.poll(self._load_timeout)
            reply = self._link.recv_bytes() if ready else b"-it was not ready in time"
        except (EOFError, OSError):
            self._process.join(5.0)
            reply = f"-its process ended while loading (exit code {self._process.exitcode})".encode()
        if reply[:1] != b"+":
            self._end()
            seconds = time.monotonic() - begun
            said = reply[1:].decode(errors="replace")
            raise RewardError(f"The judge {name!r} could not be loaded ({seconds:.0f} s): {said}")
        return json.loads(reply[1:])

    def _make_ready(self) -> None:
        """Start the judge again if it is down and has rested."""
        if self._closed:
            raise WorkerUnavailable("the server is ending")
        rest = self._retry_at - time.monotonic()
        if self.down is not None and rest > 0:
            raise WorkerUnavailable(self.down, rest)
        if self.down is not None:
            self._restart()

    def _died(self) -> WorkerDied | WorkerUnavailable:
        """What to raise of a process that ended; a new one is ready, or it is said why not."""
        self._process.join(5.0)
        said = f"the judge's process ended (exit code {self._process.exitcode})"
        if self._troubles + 1 >= _PATIENCE:
            self._end()
            return self._rest(f"{said}, {self._troubles + 1} times in a row")
        self._troubles += 1
        try:
            self._restart()
        except WorkerUnavailable as error:
            return error
        return WorkerDied(said)

    def _restart(self) -> None:
        if self._closed:
            raise WorkerUnavailable("the server is ending")
        self._end()
        self.restarts += 1
        try:
            card = self._start()
            if card != self.card:  # its files have changed: caches know it by the old card
                self._end()
                raise RewardError(
                    f"The judge {self.card['name']!r} was started anew and is another version now; start "
                    "the server or worker again to use it."
                )
        except (RewardError, OSError) as error:
            raise self._rest(str(error)) from error
        self.down = None

    def _rest(self, why: str) -> WorkerUnavailable:
        """No new process for a while, longer each time."""
        self._troubles += 1
        rest = min(2.0 ** max(0, self._troubles - _PATIENCE), _LONGEST_REST)
        self.down, self._retry_at = why, time.monotonic() + rest
        return WorkerUnavailable(why, rest)
