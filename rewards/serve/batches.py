# SPDX-License-Identifier: Apache-2.0
"""Requests of many clients joined into full batches, and each answer handed back to its own sender."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from visalign.interfaces import Preferences, Scores
from visalign.rewards.base.attempt import Attempt

from .wire import JudgeRequest, joined
from .wire_answer import rows_of
from .worker import WorkerDied, WorkerUnavailable


class Asked(Protocol):
    """What answers a batch: `JudgeWorker`, or anything like it."""

    def ask(self, request: JudgeRequest, timeout: float | None = None) -> Scores | Preferences: ...


class QueueFull(RuntimeError):
    """Too many images wait already."""


@dataclass(eq=False)
class _Waiting:
    request: JudgeRequest
    answer: asyncio.Future[Scores | Preferences]
    attempts: int = 0


@dataclass(kw_only=True)
class BatchCounts:
    """What a batcher has done."""

    requests: int = 0
    images: int = 0
    batches: int = 0
    failed: int = 0
    given_up: int = 0
    """Requests whose client went away before they were answered."""
    largest: int = field(default=0)


class Batcher:
    """Collects requests until a batch is full or its oldest has waited long enough, then has it judged.

    While a batch is judged the next one collects. A batch that the judge refuses, or dies of, is asked again
    request by request, so that only the one at fault fails.

    Args:
        judge: answers a batch; called in a thread, one batch at a time.
        max_batch: rows in a batch; a larger single request is its own batch.
        max_wait: seconds that the first request of a batch waits for others.
        max_waiting: rows that may wait in all.
        max_pixels: of the images that wait in all, which bounds the memory: 3 bytes each.
        timeout: seconds for one batch.
    """

    def __init__(
        self,
        judge: Asked,
        *,
        max_batch: int = 64,
        max_wait: float = 0.005,
        max_waiting: int = 4096,
        max_pixels: int = 1 << 29,
        timeout: float | None = 120.0,
    ) -> None:
        self._judge = judge
        self.max_batch, self.max_wait, self.max_waiting = max_batch, max_wait, max_waiting
        self.max_pixels, self.timeout = max_pixels, timeout
        self.counts = BatchCounts()
        self._queue: list[_Waiting] = []
        self._ended = False
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Rows that wait."""
        return sum(len(item.request) for item in self._queue)

    async def submit(self, request: JudgeRequest) -> Scores | Preferences:
        """Judge a request.

        Raises:
            QueueFull: too much waits already; nothing was queued.
            RewardError: what the judge raised of this request.
            WorkerDied, WorkerTimeout: the judge died of this request, or was too slow for it.
            WorkerUnavailable: there is no judge now, or the server ends.
        """
        if self._ended:
            raise _ending()
        if self._queue and self.waiting + len(request) > self.max_waiting:
            raise QueueFull(f"{self.waiting} images wait already; at most {self.max_waiting} may")
        pixels = sum(item.request.pixels for item in self._queue)
        if self._queue and pixels + request.pixels > self.max_pixels:
            raise QueueFull(f"{pixels} pixels wait already; at most {self.max_pixels} may")
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        item = _Waiting(request, asyncio.get_running_loop().create_future())
        self.counts.requests += 1
        self.counts.images += len(request)
        self._queue.append(item)
        self._arrived.set()
        try:
            return await item.answer
        except asyncio.CancelledError:
            self.counts.given_up += 1
            if item in self._queue:
                self._queue.remove(item)
            raise

    def stop(self) -> None:
        """Refuse what waits and what comes; what is being judged gets its answer."""
        self._ended = True
        for item in self._queue:
            _fail(item, _ending())
        self._queue.clear()

    async def close(self) -> None:
        """Stop, and wait for nothing."""
        self.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            self._arrived.clear()
            if not self._queue:
                await self._arrived.wait()
            if self.max_wait and self.waiting < self.max_batch:
                await asyncio.sleep(self.max_wait)
            batch = self._take()
            if batch:
                await self._answer(batch)

    def _take(self) -> list[_Waiting]:
        """The oldest requests of one kind (scores or pairs) that fit into a batch; one that was asked alone
        stays alone."""
        batch: list[_Waiting] = []
        rows = 0
        for item in list(self._queue):
            if item.answer.done():
                self._queue.remove(item)
                continue
            if batch and (
                (item.request.right is None) != (batch[0].request.right is None)
                or rows + len(item.request) > self.max_batch
                or item.attempts
                or batch[0].attempts
            ):
                break
            batch.append(item)
            rows += len(item.request)
            self._queue.remove(item)
        return batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        whole = joined([item.request for item in batch])
        self.counts.batches += 1
        self.counts.largest = max(self.counts.largest, len(whole))
        loop = asyncio.get_running_loop()
        try:
            with Attempt() as asking:  # whatever is raised is the requests', and must not end this task
                answer = await loop.run_in_executor(None, self._judge.ask, whole, self.timeout)
        except asyncio.CancelledError:  # closed meanwhile: nobody else would end their waiting
            for item in batch:
                _fail(item, _ending())
            raise
        if asking.error is not None:
            self._refused(batch, asking.error)
            return
        start = 0
        for item in batch:
            end = start + len(item.request)
            if not item.answer.done():
                item.answer.set_result(rows_of(answer, slice(start, end)))
            start = end

    def _refused(self, batch: list[_Waiting], error: Exception) -> None:
        """Ask again one by one; what was alone has failed by itself, but a death is tried once more. Where
        there is no judge, nobody is at fault and nothing is asked again."""
        again = []
        is_hopeless = self._ended or isinstance(error, WorkerUnavailable)
        if self._ended and len(batch) > 1:  # the error may be a neighbour's
            error = _ending()
        for item in batch:
            item.attempts += 1
            limit = 2 if isinstance(error, WorkerDied) else 1
            if not is_hopeless and (len(batch) > 1 or item.attempts < limit):
                again.append(item)
            elif _fail(item, error):
                self.counts.failed += 1
        self._queue[:0] = again
        self._arrived.set()


def _ending() -> WorkerUnavailable:
    return WorkerUnavailable("the server is ending", 5.0)


def _fail(item: _Waiting, error: Exception) -> bool:
    """Hand an error to who waits; False where nobody does any more."""
    if item.answer.done():
        return False
    item.answer.set_exception(error)
    return True
