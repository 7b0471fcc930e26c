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
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

from visalign.errors import CaughtError
from visalign.interfaces import Preferences, Scores
from visalign.rewards.base.contract import RewardError

from .limits import ByteBudget, QueueFull, RequestLimits
from .wire import (
    JUDGE_HEADER,
    MEDIA_TYPE,
    JudgeRequest,
    WireError,
    concatenate_requests,
    pack_answer,
    select_rows,
    unpack_request,
)
from .worker import JudgeRefused, WorkerDied, WorkerTimeout, WorkerUnavailable

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise RewardError(
        "A reward server needs Starlette, which is not installed: python -m pip install 'visalign[serve]'."
    ) from error


class BatchJudge(Protocol):
    """Answers a batch, as `JudgeWorker` does."""

    def ask(self, request: JudgeRequest, timeout: float | None = None) -> Scores | Preferences: ...


class Refused(HTTPException):
    """An answer other than 200: what was given, what is allowed."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        message = message.encode(errors="replace").decode()  # JSON can name what UTF-8 cannot hold
        super().__init__(status, message, {name.replace("_", "-"): value for name, value in headers.items()})


@dataclass(eq=False)
class _Waiting:
    request: JudgeRequest
    answer: asyncio.Future[Scores | Preferences]


@dataclass(kw_only=True)
class BatchCounts:
    """Counters of a batcher."""

    requests: int = 0
    images: int = 0
    batches: int = 0
    failed: int = 0
    given_up: int = 0
    """Requests whose client went away before they were answered."""
    largest: int = 0


class Batcher:
    """Collects requests until a batch is full or its oldest has waited long enough, then has it judged.

    While a batch is judged the next one collects. A batch that the judge refuses, or dies of, is asked again
    request by request, so that only the one at fault fails.

    Args:
        judge: answers a batch; called in a thread, one batch at a time.
        max_batch: rows in a batch; a larger single request is its own batch.
        max_wait: seconds that the first request of a batch waits for others.
        max_waiting: rows that may wait in all.
        max_pixels: of the images in a batch; a larger single request is its own batch.
        timeout: seconds for one batch.
    """

    def __init__(
        self,
        judge: BatchJudge,
        *,
        max_batch: int = 64,
        max_wait: float = 0.005,
        max_waiting: int = 4096,
        max_pixels: int = RequestLimits.max_pixels,
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
        self._fail(self._queue, _ending())
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
            finally:  # closed meanwhile: nobody else would end their waiting
                self._fail(batch, _ending())

    def _take(self) -> list[_Waiting]:
        """The oldest requests of one kind (scores or pairs) that fit into a batch."""
        batch: list[_Waiting] = []
        room, pixels = self.max_batch, self.max_pixels
        while self._queue:
            request = self._queue[0].request
            is_other = bool(batch) and (request.right is None) != (batch[0].request.right is None)
            if batch and (is_other or len(request) > room or request.pixels > pixels):
                break
            room, pixels = room - len(request), pixels - request.pixels
            batch.append(self._queue.pop(0))
        return batch

    async def _answer(self, batch: list[_Waiting], tries: int = 2) -> None:
        """Hand each request its rows, or its error. What is alone has failed by itself, but a death is tried
        once more; where there is no judge, nobody is at fault and nothing is asked again."""
        batch = [item for item in batch if not item.answer.done()]
        if not batch:
            return
        request = concatenate_requests([item.request for item in batch])
        self.counts.batches += 1
        self.counts.largest = max(self.counts.largest, len(request))
        with CaughtError() as asking:  # whatever is raised is the requests', and must not end this task
            loop = asyncio.get_running_loop()
            answer = await loop.run_in_executor(None, self._judge.ask, request, self.timeout)
            start = 0
            for item in batch:
                end = start + len(item.request)
                if not item.answer.done():
                    item.answer.set_result(select_rows(answer, slice(start, end)))
                start = end
            return
        error = asking.error
        is_hopeless = self._ended or isinstance(error, WorkerUnavailable)
        if not is_hopeless and (len(batch) > 1 or (isinstance(error, WorkerDied) and tries > 1)):
            for item in batch:
                if not self._ended:
                    await self._answer([item], tries - 1)
        elif self._ended and len(batch) > 1:  # the error may be a neighbour's
            self._fail(batch, _ending())
        else:
            self._fail(batch, error)

    def _fail(self, items: list[_Waiting], error: Exception | SystemExit | None) -> None:
        """Hand an error to those who still wait."""
        for item in items:
            if error is not None and not item.answer.done():
                item.answer.set_exception(error)
                self.counts.failed += 1


def _ending() -> WorkerUnavailable:
    return WorkerUnavailable("the server is ending", 5.0)


def judge_server(
    judge: BatchJudge,
    card: dict[str, Any],
    *,
    token: str | None = None,
    limits: RequestLimits | None = None,
    **batching: Any,
) -> Starlette:
    """The application, for uvicorn.

    Args:
        judge: answers batches, e.g. a `JudgeWorker`.
        card: `judge_card` of it.
        token: that requests must bring as `Authorization: Bearer TOKEN`; None asks for none.
        limits: of a request, and of all together.
        **batching: max_batch, max_wait, max_waiting of `Batcher`; too much is refused with 503.

    Returns:
        An ASGI application; `app.state.batcher` is its batcher, and `app.state.stop()`, from any thread or
        signal handler, has it refuse what waits and what comes.
    """
    bounds = limits or RequestLimits()
    batcher = Batcher(judge, timeout=bounds.timeout, max_pixels=bounds.max_pixels, **batching)
    budget = ByteBudget(bounds)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        app.state.stop = partial(asyncio.get_running_loop().call_soon_threadsafe, batcher.stop)
        yield
        await batcher.close()

    async def health(_: Request) -> Response:
        counts = asdict(batcher.counts) | {"waiting": batcher.waiting, "bytes": budget.used}
        about = {
            "judge": card,
            "limits": asdict(bounds) | {"max_batch": batcher.max_batch},
            "counts": counts | {"restarts": getattr(judge, "restarts", 0)},
            "down": getattr(judge, "down", None),
            "token": token is not None,
        }
        return JSONResponse(about)

    async def answer(request: Request, *, is_pair: bool) -> Response:
        _authorise(request.headers.get("authorization"), token)
        length = _check_head(request.headers, card, bounds, is_pair)
        with budget.reserve(length) as charge:
            raw = await _receive(request, length, bounds, charge)
            parsed = await asyncio.to_thread(_read, raw, bounds, is_pair)  # others are served meanwhile
            packed = await _unless_gone(request, _judged(batcher, parsed))
        return Response(packed, media_type=MEDIA_TYPE, headers={JUDGE_HEADER: card["identity"] or ""})

    routes = [
        Route("/health", health),
        Route("/v1/score", partial(answer, is_pair=False), methods=["POST"]),
        Route("/v1/compare", partial(answer, is_pair=True), methods=["POST"]),
    ]
    refusals = {HTTPException: _refusal, QueueFull: _busy}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=refusals)
    app.state.batcher, app.state.stop = batcher, batcher.stop
    return app


async def _refusal(_: Request, error: Any) -> Response:
    """Every refusal in one form; those that are not ours are of another path or method."""
    paths = (
        "" if isinstance(error, Refused) else ". There are GET /health, POST /v1/score and POST /v1/compare."
    )
    return JSONResponse({"error": f"{error.detail}{paths}"}, error.status_code, error.headers)


async def _busy(_: Request, error: Any) -> Response:
    about = {"error": f"Busy: {error}. Try again.", "busy": True}
    return JSONResponse(about, 503, {"Retry-After": "1"})


def _authorise(header: str | None, token: str | None) -> None:
    if token is None:
        return
    scheme, _, sent = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode(), token.encode()):
        message = "No or a wrong token; send the header 'Authorization: Bearer TOKEN'."
        raise Refused(401, message, WWW_Authenticate="Bearer")


def _check_head(headers: Any, card: dict[str, Any], limits: RequestLimits, is_pair: bool) -> int:
    """Refuse what can be before a byte of the body is read; else the body's length."""
    if not card["compares" if is_pair else "scores"]:
        able = "compares pairs: POST /v1/compare" if is_pair is False else "scores images: POST /v1/score"
        raise Refused(404, f"The judge {card['name']!r} cannot do that; it {able}.")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != MEDIA_TYPE:
        raise Refused(415, f"The content type is {kind or 'missing'!r}; send {MEDIA_TYPE}.")
    length = headers.get("content-length")
    if length is None or not length.isdigit():
        raise Refused(411, "The request has no Content-Length; send the body in one piece.")
    if int(length) > limits.max_bytes:
        raise Refused(413, f"The body has {length} bytes; at most {limits.max_bytes} are allowed. Split it.")
    return int(length)


async def _receive(
    request: Any, length: int, limits: RequestLimits, charge: Callable[[int], None]
) -> bytearray:
    """The body; a client that sends too slowly, too much JSON, or goes away is refused."""
    body = bytearray(length)  # pixels are later read in place, which takes memory that can be written to
    end = 0
    try:
        async with asyncio.timeout(limits.receive_timeout):
            async for chunk in request.stream():
                begin, end = end, end + len(chunk)
                body[begin:end] = chunk
                if begin < 8 <= end:
                    header = int.from_bytes(body[:8], "little")
                    if limits.max_header < header:
                        raise Refused(
                            413,
                            f"The header has {header} bytes (prompts, records); at most {limits.max_header} "
                            "are allowed. Split the request.",
                        )
                    charge(header)
    except TimeoutError as error:
        raise Refused(408, f"The body did not arrive within {limits.receive_timeout:g} seconds.") from error
    except ClientDisconnect as error:
        raise Refused(400, "The connection ended before the body did.") from error
    return body


def _read(raw: bytearray, limits: RequestLimits, is_pair: bool) -> JudgeRequest:
    """The request in a body, within the limits."""
    try:
        request = unpack_request(raw)
    except WireError as error:
        raise Refused(400, f"Unreadable body: {error}") from error
    if not len(request):
        raise Refused(400, "The request is empty; send at least one image.")
    if (request.right is not None) != is_pair:
        raise Refused(400, "Single images go to /v1/score, pairs (left and right) to /v1/compare.")
    if len(request) > limits.max_rows:
        raise Refused(413, f"{len(request)} rows; at most {limits.max_rows} are allowed. Split the request.")
    if request.pixels > limits.max_pixels:
        raise Refused(
            413, f"{request.pixels} pixels; at most {limits.max_pixels} are allowed. Split the request."
        )
    longest = max(map(len, request.prompts))
    if longest > limits.max_prompt:
        raise Refused(413, f"A prompt of {longest} characters; at most {limits.max_prompt} are allowed.")
    return request


async def _unless_gone(request: Request, judging: Coroutine[Any, Any, bytes]) -> bytes:
    """The answer; if the client goes away meanwhile, its request is taken out of the queue."""
    answer, leaving = asyncio.ensure_future(judging), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answer, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise Refused(400, "The client went away before its answer.")
    finally:
        answer.cancel()
        leaving.cancel()
        await asyncio.gather(answer, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _judged(batcher: Batcher, request: JudgeRequest) -> bytes:
    try:
        return pack_answer(await batcher.submit(request))
    except WorkerUnavailable as error:
        why = f"There is no judge at the moment: {error}. Try later."
        raise Refused(503, why, Retry_After=str(max(1, math.ceil(error.retry_after)))) from error
    except WorkerDied as error:
        why = f"Twice {error} while it worked on this request. Try later."
        raise Refused(503, why, Retry_After="1") from error
    except WorkerTimeout as error:
        raise Refused(504, f"Too slow: {error}. Send fewer images at once.") from error
    except (JudgeRefused, ValueError, TypeError) as error:
        raise Refused(422, f"The judge refused the request: {error}") from error
    except RewardError as error:
        raise Refused(500, f"The judge broke on the request: {error}") from error
