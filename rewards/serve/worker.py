# SPDX-License-Identifier: Apache-2.0
"""A judge in a process of its own: if it dies, another takes its place and no other request is harmed.

Requests go to the process over a plain pipe as the bytes that they came in; a death is known at once.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from visalign.errors import CaughtError
from visalign.interfaces import PairwiseReward, PointwiseReward, Preferences, Scores, with_capabilities
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.images import as_contract

from . import wire
from .wire import JudgeRequest, WireError


class JudgeRefused(RewardError):
    """The judge found fault with the request (it raised a ValueError or TypeError)."""


class JudgeFailed(RewardError):
    """The judge broke on a request that has no fault of its own."""


class WorkerDied(RuntimeError):
    """The judge's process ended while it worked on a request; the next request starts a new one."""


class WorkerTimeout(RuntimeError):
    """The judge took longer than allowed; its process was ended."""


class WorkerUnavailable(RuntimeError):
    """No judge answers any request now; ask again after `retry_after` seconds."""

    def __init__(self, message: str = "the server is ending", retry_after: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


_LOAD_SECONDS = 600.0  # Time for a judge to be ready
_RESTARTS_AT_ONCE = 3  # Failures in a row after which the judge is started again at once; then only after a pause
_MAX_PAUSE = 60.0  # Longest pause before a restart, in seconds


class JudgeWorker:
    """The judge `load_judge(name, **options)` in a child process, which is restarted when it dies.

    `card` describes it, `restarts` counts, and `down` says why there is none, or is None. `on_load` gets the judge.
    """

    def __init__(
        self, name: str, options: Mapping[str, Any] | None = None, *, threads: int | None = None, on_load: Any = id
    ) -> None:
        self._arguments = (name, dict(options or {}), threads, on_load)
        self._lock = threading.Lock()
        self._closed = False
        self._failures = 0
        self._retry_at = 0.0
        self.restarts = 0
        self.down: str | None = None
        self.card = self._start()

    def ask(self, request: JudgeRequest, timeout: float | None = None) -> Scores | Preferences:
        """Judge a request of at least one row; calls from several threads wait for each other.

        JudgeRefused and JudgeFailed are the judge's; WorkerDied and WorkerTimeout: the process ended;
        WorkerUnavailable: none.
        """
        with self._lock:
            self._ensure_running()
            try:
                messages = request.messages or (wire.pack_request(request),)
                self._link.send(len(messages))
                for message in messages:
                    self._link.send_bytes(message)
                if not self._link.poll(timeout):
                    self._stop(f"the judge did not answer within {timeout:g} seconds")
                    raise WorkerTimeout(self.down)
                reply = self._link.recv()
            except (EOFError, OSError) as error:
                self._process.join(5.0)
                self._stop(f"the judge's process ended (exit code {self._process.exitcode})")
                raise (WorkerUnavailable() if self._closed else WorkerDied(self.down)) from error
            self._failures = 0
        if isinstance(reply, RewardError):
            raise reply
        try:
            return wire.unpack_answer(reply, len(request))
        except WireError as error:
            raise JudgeFailed(f"the judge's answer is unusable: {error}") from error

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def close(self) -> None:
        """End the process; a request that still waits for it gets `WorkerUnavailable`."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        if self._closed and self._lock.locked():
            self._process.kill()  # a death wakes a thread that waits for an answer, a closed link does not
        self._link.close()
        self._process.join(2.0)
        self._process.kill()
        self._process.join()

    def _start(self) -> dict[str, Any]:
        context = multiprocessing.get_context("spawn")
        self._link, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, *self._arguments), daemon=True)
        self._process.start()
        child.close()
        begun = time.monotonic()
        try:
            reply = self._link.recv() if self._link.poll(_LOAD_SECONDS) else "it was not ready in time"
        except (EOFError, OSError):
            self._process.join(5.0)
            reply = f"its process ended while loading (exit code {self._process.exitcode})"
        if isinstance(reply, str):
            self._end()
            seconds = time.monotonic() - begun
            raise RewardError(f"The judge {self._arguments[0]!r} could not be loaded ({seconds:.0f} s): {reply}")
        return reply

    def _ensure_running(self) -> None:
        if self._closed:
            raise WorkerUnavailable
        if self.down is None:
            return
        pause = self._retry_at - time.monotonic()
        if pause > 0:
            raise WorkerUnavailable(self.down, pause)
        self.restarts += 1
        try:
            if self._start() != self.card:  # its files have changed: caches know it by the old card
                raise RewardError(f"The judge {self.card['name']!r} is another version now; start the server again.")
        except (RewardError, OSError) as error:
            self._stop(str(error))
            raise WorkerUnavailable(str(error), self._retry_at - time.monotonic()) from error
        self.down = None

    def _stop(self, reason: str) -> None:
        """End the process after a failure; several failures in a row lengthen the pause before a restart."""
        self._end()
        self._failures += 1
        extra = self._failures - _RESTARTS_AT_ONCE
        self.down = reason if extra <= 0 else f"{reason}, {self._failures} times in a row"
        self._retry_at = time.monotonic() + (0.0 if extra <= 0 else min(2.0 ** (extra - 1), _MAX_PAUSE))


def _serve(link: Connection, name: str, options: dict[str, Any], threads: int | None, on_load: Any) -> None:
    """Run in the child: load the judge, then answer until the other end hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal; the server decides
    import torch

    from visalign.rewards.catalogue import load_judge

    if threads is not None:
        torch.set_num_threads(threads)
    judge, reply = None, None
    with CaughtError() as loading:
        judge = load_judge(name, **options)
        reply = judge_card(judge)
        on_load(judge)
    try:
        link.send(reply if loading.error is None else _describe(loading.error))
        while loading.error is None:
            messages = [bytearray(link.recv_bytes()) for _ in range(link.recv())]
            with CaughtError() as judging:  # one bad request must not end the process
                request = wire.concatenate_requests([wire.unpack_request(message) for message in messages])
                reply = wire.pack_answer(answer_request(judge, request))
            if (error := judging.error) is not None:
                reply = error if isinstance(error, JudgeRefused | JudgeFailed) else JudgeFailed(_describe(error))
                if not isinstance(reply, JudgeRefused):
                    traceback.print_exception(error)  # clients get the message without the lines
            link.send(reply)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def judge_card(judge: Any) -> dict[str, Any]:
    """Describe a judge for clients, as JSON values."""
    judge = with_capabilities(judge)
    identity = judge.identity
    card: dict[str, Any] = {
        "name": judge.name,
        "scores": isinstance(judge, PointwiseReward),
        "compares": isinstance(judge, PairwiseReward),
        "identity": None if identity is None else identity.digest,
        "model": None if identity is None else identity.model,
        "revision": None if identity is None else identity.revision or None,
        **{name: getattr(judge.capabilities, name) for name in wire.CAPABILITIES},
    }
    if isinstance(judge, PointwiseReward):
        card |= {
            "unit": judge.unit,
            "range": [str(bound) for bound in judge.range],  # text, since JSON has no infinity
            "higher_is_better": judge.higher_is_better,
        }
    return card


def answer_request(judge: Any, request: JudgeRequest) -> Scores | Preferences:
    """Score or compare; raise JudgeRefused where the judge finds fault with the request, else JudgeFailed."""
    with CaughtError() as judging:
        sides = [
            # [3, H, 3] of levels could be read with the channels first or last
            as_contract([image / 255 if image.shape[-1] == 3 else image for image in side])
            for side in (request.images, request.right)
            if side is not None
        ]
        judge_rows = judge.score if request.right is None else judge.compare
        return judge_rows(*sides, request.prompts, request.metadata)
    kind = JudgeRefused if isinstance(judging.error, ValueError | TypeError) else JudgeFailed
    raise kind(_describe(judging.error)) from judging.error


def _describe(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"
