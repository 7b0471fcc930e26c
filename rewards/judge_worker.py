# SPDX-License-Identifier: Apache-2.0
"""A judge in a process of its own: if it dies, another takes its place and nobody else is harmed."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from visalign.interfaces import Metadata, PairwiseReward, PointwiseReward, Preferences, Scores

from .contract import RewardError
from .probes import Attempt
from .wire import JudgeRequest, pack_answer, pack_request, unpack_answer, unpack_request


class WorkerDied(RuntimeError):
    """The judge's process ended while it worked on a request."""


class WorkerTimeout(RuntimeError):
    """The judge took longer than allowed; its process was ended."""


def judge_card(judge: PointwiseReward | PairwiseReward) -> dict[str, Any]:
    """What a client must know of a judge: JSON values.

    Args:
        judge: a reward, or one that compares.
    """
    identity = getattr(judge, "identity", None)
    card: dict[str, Any] = {
        "name": judge.name,
        "scores": isinstance(judge, PointwiseReward),
        "compares": isinstance(judge, PairwiseReward),
        "identity": None if identity is None else identity.digest,
        "needs_group": bool(getattr(judge, "needs_group", False)),
    }
    if isinstance(judge, PointwiseReward):
        low, high = judge.range
        card |= {
            "unit": judge.unit,
            "range": [str(low), str(high)],
            "higher_is_better": judge.higher_is_better,
        }
    return card


def answer_request(judge: Any, request: JudgeRequest) -> Scores | Preferences:
    """Score or compare, as the request asks.

    Raises:
        RewardError: the judge cannot do that.
    """
    metadata: Metadata = request.metadata
    if request.right is None:
        if not isinstance(judge, PointwiseReward):
            raise RewardError(f"{judge.name!r} only compares pairs of images.")
        return judge.score(request.images, request.prompts, metadata)
    if not isinstance(judge, PairwiseReward):
        raise RewardError(f"{judge.name!r} scores single images and does not compare pairs.")
    return judge.compare(request.images, request.right, request.prompts, metadata)


def _serve(link: Connection, name: str, options: dict[str, Any], threads: int | None) -> None:
    """The process: load the judge, then answer until the other end hangs up."""
    import torch

    from .catalogue import load_judge

    if threads is not None:
        torch.set_num_threads(threads)
    judge: Any = None
    reply = b""
    with Attempt() as loading:
        judge = load_judge(name, **options)
        reply = json.dumps(judge_card(judge)).encode()
    link.send_bytes(_told(reply, loading))
    while loading.error is None:
        try:
            request = unpack_request(link.recv_bytes())
        except EOFError:
            return
        with Attempt() as judging:  # one bad request must not end the process
            reply = pack_answer(answer_request(judge, request))
        link.send_bytes(_told(reply, judging))


def _told(reply: bytes, attempt: Attempt) -> bytes:
    """The reply, or as text what was raised, for the other end to raise."""
    if attempt.error is None:
        return b"+" + reply
    return b"-" + f"{type(attempt.error).__name__}: {attempt.error}".encode()


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
        self.restarts = 0
        self.card = self._start()

    def ask(self, request: JudgeRequest, timeout: float | None = None) -> Scores | Preferences:
        """Judge a request; calls from several threads wait for each other.

        Args:
            request: at least one row.
            timeout: seconds; None waits for ever.

        Raises:
            RewardError: what the judge raised; or a new process has another version of the judge.
            WorkerDied, WorkerTimeout: the process ended, and a new one is ready.
        """
        with self._lock:
            try:
                self._link.send_bytes(pack_request(request))
                if not self._link.poll(timeout):
                    self._restart()
                    raise WorkerTimeout(f"the judge did not answer within {timeout:g} seconds")
                reply = self._link.recv_bytes()
            except (EOFError, OSError) as error:
                self._process.join(5.0)
                code = self._process.exitcode
                self._restart()
                raise WorkerDied(f"the judge's process ended (exit code {code})") from error
        if reply[:1] == b"-":
            raise RewardError(reply[1:].decode(errors="replace"))
        return unpack_answer(reply[1:], len(request))

    @property
    def pid(self) -> int | None:
        """Of the present process."""
        return self._process.pid

    def close(self) -> None:
        """End the process."""
        self._link.close()
        self._process.join(2.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _start(self) -> dict[str, Any]:
        context = multiprocessing.get_context("spawn")
        self._link, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child, *self._arguments), daemon=True)
        self._process.start()
        child.close()
        name, begun = self._arguments[0], time.monotonic()
        try:
            ready = self._link.poll(self._load_timeout)
            reply = self._link.recv_bytes() if ready else b"-it was not ready in time"
        except EOFError:
            self._process.join(5.0)
            reply = f"-its process ended while loading (exit code {self._process.exitcode})".encode()
        if reply[:1] == b"-":
            self.close()
            seconds = time.monotonic() - begun
            said = reply[1:].decode(errors="replace")
            raise RewardError(f"The judge {name!r} could not be loaded ({seconds:.0f} s): {said}")
        return json.loads(reply[1:])

    def _restart(self) -> None:
        self.close()
        self.restarts += 1
        card = self._start()
        if card != self.card:  # its files have changed: caches know it by the old card
            self.close()
            raise RewardError(
                f"The judge {self.card['name']!r} was started anew and is another version now; start the "
                "server or worker again to use it."
            )
