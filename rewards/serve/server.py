# SPDX-License-Identifier: Apache-2.0
"""A judge behind HTTP: safetensors in and out, limits, a token, batches across clients.

    GET  /health      JSON: the judge's card, limits, counts; no token needed
    POST /v1/score    images and prompts   -> scores
    POST /v1/compare  pairs and prompts    -> preferences

Refusals are JSON {"error": what was given, what is allowed}. The request is at fault: 400 unreadable body,
401 no or wrong token, 404 no such place, or the judge cannot do that, 405 wrong method, 408 the body came too
slowly, 411 no length, 413 too large, 415 other media type, 422 the judge refused this request. It is not at
fault: 500 the judge broke on it, 504 it took too long, and 503 with Retry-After: too much is under way (then
the refusal has {"busy": true}), the judge's process died and cannot be replaced, or the server is ending.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from visalign.errors import CaughtError
from visalign.interfaces import Preferences, Scores
from visalign.rewards.base.contract import RewardError, answer_of, rows_of

from .limits import ByteBudget, QueueFull, RequestLimits
from .wire import JUDGE_HEADER, MEDIA_TYPE, JudgeRequest, WireError, concatenate_requests, pack_answer, unpack_request
from .worker import JudgeFailed, JudgeRefused, WorkerDied, WorkerTimeout, WorkerUnavailable

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise RewardError("A reward server needs Starlette: python -m pip install 'visalign[serve]'.") from error

_REFUSALS: dict[Any, tuple[int, str]] = {
    WireError: (400, "Unreadable body: {}"),
    ClientDisconnect: (400, "The connection ended before the body did."),
    JudgeRefused: (422, "The judge refused the request: {}"),
    JudgeFailed: (500, "The judge broke on the request: {}"),
    QueueFull: (503, "Busy: {}. Try again."),
    WorkerUnavailable: (503, "There is no judge at the moment: {}. Try later."),
    WorkerDied: (503, "Twice {} while it worked on this request. Try later."),
    WorkerTimeout: (504, "Too slow: {}. Send fewer images at once."),
}
"""Exception -> status and message of the refusal."""


@dataclass(eq=False)
class _Pending:
    request: JudgeRequest
    answer: asyncio.Future[Scores | Preferences]


class Batcher:
    """Collects requests until a batch is full or its oldest has waited long enough, then has it judged.

    While a batch is judged the next one collects. A batch that the judge refuses, or dies of, is judged again request
    by request, so that only the one at fault fails. A request larger than `max_batch` rows or `max_pixels` is its own
    batch, and so is each where a judge compares the images of a call (`separate`). `max_wait` is in seconds, and
    `max_waiting` rows may wait in all. `judge.ask` runs in a thread.
    """

    def __init__(
        self,
        judge: Any,
        *,
        max_batch: int = 64,
        max_wait: float = 0.005,
        max_waiting: int = 4096,
        max_pixels: int = RequestLimits.max_pixels,
        timeout: float | None = 120.0,
        separate: bool = False,
    ) -> None:
        self._judge, self._separate = judge, separate
        self.max_batch, self.max_wait, self.max_waiting = max_batch, max_wait, max_waiting
        self.max_pixels, self.timeout = max_pixels, timeout
        self.counts = {"requests": 0, "images": 0, "batches": 0, "given_up": 0}
        self._queue: list[_Pending] = []
        self._ended = False
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        return sum(len(pending.request) for pending in self._queue)

    async def submit(self, request: JudgeRequest) -> Scores | Preferences:
        """Judge a request; raise `QueueFull` without queueing it, or what `JudgeWorker.ask` raises."""
        if self._ended:
            raise WorkerUnavailable
        if self._queue and self.waiting + len(request) > self.max_waiting:
            raise QueueFull(f"{self.waiting} images wait already; at most {self.max_waiting} may")
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        pending = _Pending(request, asyncio.get_running_loop().create_future())
        self.counts["requests"] += 1
        self.counts["images"] += len(request)
        self._queue.append(pending)
        self._arrived.set()
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self.counts["given_up"] += 1
            if pending in self._queue:
                self._queue.remove(pending)
            raise

    def stop(self) -> None:
        """Refuse what waits and what comes; what is being judged gets its answer."""
        self._ended = True
        _fail(self._queue, WorkerUnavailable())
        self._queue.clear()

    async def close(self) -> None:
        """Stop, and wait for nothing."""
        self.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            if self.max_wait and self.waiting < self.max_batch:
                await asyncio.sleep(self.max_wait)
            batch = self._take()
            if not self._queue:
                self._arrived.clear()
            try:
                await self._answer(batch)
            finally:  # closed meanwhile: nothing else would end their waiting
                _fail(batch, WorkerUnavailable())

    def _take(self) -> list[_Pending]:
        """Take the oldest requests of one kind (scores or pairs) that fit into a batch."""
        batch: list[_Pending] = []
        room, pixels = self.max_batch, self.max_pixels
        while self._queue:
            request = self._queue[0].request
            is_other = bool(batch) and (self._separate or (request.right is None) != (batch[0].request.right is None))
            if batch and (is_other or len(request) > room or request.pixels > pixels):
                break
            room, pixels = room - len(request), pixels - request.pixels
            batch.append(self._queue.pop(0))
        return batch

    async def _answer(self, batch: list[_Pending], tries: int = 2) -> None:
        """Hand each request its rows, or its error; a death is tried again, and without a judge none is at fault."""
        batch = [pending for pending in batch if not pending.answer.done()]
        if not batch:
            return
        request = concatenate_requests([pending.request for pending in batch])
        self.counts["batches"] += 1
        with CaughtError() as asking:  # any error is that of the requests, and must not end this task
            answer = await asyncio.to_thread(self._judge.ask, request, self.timeout)
            rows, unit = rows_of(answer), answer.unit if isinstance(answer, Scores) else None
            for pending in batch:
                part, rows = rows[: len(pending.request)], rows[len(pending.request) :]
                if not pending.answer.done():
                    pending.answer.set_result(answer_of(part, unit))
            return
        error = asking.error
        if self._ended:
            _fail(batch, WorkerUnavailable())  # the error may be that of a neighbour
        elif isinstance(error, WorkerUnavailable) or (
            len(batch) == 1 and not (isinstance(error, WorkerDied) and tries > 1)
        ):
            _fail(batch, error)
        else:
            for pending in batch:
                await self._answer([pending], tries - 1)


def _fail(batch: list[_Pending], error: Exception | SystemExit | None) -> None:
    for pending in batch:
        if error is not None and not pending.answer.done():
            pending.answer.set_exception(error)


def judge_server(
    judge: Any, card: dict[str, Any], *, token: str | None = None, limits: RequestLimits | None = None, **batching: Any
) -> Starlette:
    """Build the ASGI application, for uvicorn; `batching` are max_batch, max_wait and max_waiting of `Batcher`.

    `app.state.stop()`, from any thread or signal handler, has its `app.state.batcher` refuse what waits and what
    comes. `card` is `judge_card` of the judge; requests must bring `token` as `Authorization: Bearer TOKEN`.
    """
    bounds = limits or RequestLimits()
    batching |= {"separate": bool(card.get("needs_group") or card.get("needs_batch"))}
    batcher = Batcher(judge, timeout=bounds.timeout, max_pixels=bounds.max_pixels, **batching)
    budget = ByteBudget(bounds)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        app.state.stop = partial(asyncio.get_running_loop().call_soon_threadsafe, batcher.stop)
        yield
        await batcher.close()

    async def health(_: Request) -> Response:
        counts = batcher.counts | {"waiting": batcher.waiting, "bytes": budget.used}
        about = {
            "judge": card,
            "limits": asdict(bounds) | {"max_batch": batcher.max_batch},
            "counts": counts | {"restarts": getattr(judge, "restarts", 0)},
            "down": getattr(judge, "down", None),
            "token": token is not None,
        }
        return JSONResponse(about)

    async def answer(request: Request, *, is_pair: bool) -> Response:
        length = _check_head(request.headers, token, card, bounds.max_bytes, is_pair)
        with budget.reserve(length):
            raw = await _receive(request, length, bounds)
            parsed = await asyncio.to_thread(_read, raw, bounds, is_pair)  # others are served meanwhile
            packed = await _submit(batcher, parsed, request)
        return Response(packed, media_type="application/json", headers={JUDGE_HEADER: card["identity"] or ""})

    routes = [
        Route("/health", health),
        Route("/v1/score", partial(answer, is_pair=False), methods=["POST"]),
        Route("/v1/compare", partial(answer, is_pair=True), methods=["POST"]),
    ]
    refusals = dict.fromkeys((HTTPException, *_REFUSALS), _refuse)
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=refusals)
    app.state.batcher, app.state.stop = batcher, batcher.stop
    return app


async def _refuse(_: Request, error: Any) -> Response:
    if isinstance(error, HTTPException):  # also Starlette's own for another path or method
        status, message, headers = error.status_code, error.detail, error.headers
    else:
        status, text = _REFUSALS[type(error)]
        seconds = max(1, math.ceil(getattr(error, "retry_after", 1.0)))
        message, headers = text.format(error), {"Retry-After": str(seconds)} if status == 503 else None
    about: dict[str, Any] = {
        "error": message.encode(errors="replace").decode()
    }  # JSON can name what UTF-8 cannot hold
    if isinstance(error, QueueFull):
        about["busy"] = True
    return JSONResponse(about, status, headers)


def _check_head(headers: Any, token: str | None, card: dict[str, Any], max_bytes: int, is_pair: bool) -> int:
    """Return the length of the body, or refuse the request before a byte of the body is read."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    is_bearer = scheme.lower() == "bearer"
    if token is not None and not (is_bearer and hmac.compare_digest(secret.strip().encode(), token.encode())):
        message = "No or a wrong token; send the header 'Authorization: Bearer TOKEN'."
        raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    length = headers.get("content-length", "")
    size = int(length) if length.isdigit() else -1
    able = "scores images: POST /v1/score" if is_pair else "compares pairs: POST /v1/compare"
    for status, is_wrong, message in (
        (404, not card["compares" if is_pair else "scores"], f"The judge {card['name']!r} only {able}."),
        (415, kind != MEDIA_TYPE, f"The content type is {kind or 'missing'!r}; send {MEDIA_TYPE}."),
        (411, size < 0, "The request has no Content-Length; send the body in one piece."),
        (413, size > max_bytes, f"The body has {size} bytes; at most {max_bytes} are allowed. Split it."),
    ):
        if is_wrong:
            raise HTTPException(status, message)
    return size


async def _receive(request: Any, length: int, limits: RequestLimits) -> bytearray:
    """Return the body; refuse a client that sends too slowly, too much JSON, or goes away."""
    body = bytearray(length)  # pixels are later read in place, which takes memory that can be written to
    end = 0
    try:
        async with asyncio.timeout(limits.receive_timeout):
            async for chunk in request.stream():
                begin, end = end, end + len(chunk)
                body[begin:end] = chunk
                if begin < 8 <= end:
                    header = int.from_bytes(body[:8], "little")
                    if header > limits.max_header:
                        message = f"The header has {header} bytes (prompts, records); at most {limits.max_header}"
                        raise HTTPException(413, f"{message} are allowed. Split the request.")
    except TimeoutError as error:
        raise HTTPException(408, f"The body did not arrive within {limits.receive_timeout:g} seconds.") from error
    return body


def _read(raw: bytearray, limits: RequestLimits, is_pair: bool) -> JudgeRequest:
    request = unpack_request(raw)
    if not len(request):
        raise HTTPException(400, "The request is empty; send at least one image.")
    if (request.right is not None) != is_pair:
        raise HTTPException(400, "Single images go to /v1/score, pairs (left and right) to /v1/compare.")
    for noun, count, limit in (
        ("rows", len(request), limits.max_rows),
        ("pixels", request.pixels, limits.max_pixels),
        ("characters in a prompt", max(map(len, request.prompts)), limits.max_prompt),
    ):
        if count > limit:
            raise HTTPException(413, f"{count} {noun}; at most {limit} are allowed. Split the request.")
    return request


async def _submit(batcher: Batcher, parsed: JudgeRequest, request: Request) -> bytes:
    """Return the packed answer; if the client goes away meanwhile, its request leaves the queue."""
    answer = asyncio.ensure_future(batcher.submit(parsed))
    leaving = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return pack_answer(answer.result())
    finally:
        answer.cancel()
        leaving.cancel()
        await asyncio.gather(answer, leaving, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
