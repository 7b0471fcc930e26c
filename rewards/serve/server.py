# SPDX-License-Identifier: Apache-2.0
"""A judge behind HTTP: safetensors in and out, limits, a token, batches across clients.

    GET  /health      JSON: the judge's card, limits, counts; no token needed
    POST /v1/score    images and prompts   -> scores
    POST /v1/compare  pairs and prompts    -> preferences

Refusals are JSON {"error": what was given, what is allowed}. The request is at fault: 400 unreadable body,
401 no or wrong token, 404 no such place, or the judge cannot do that, 405 wrong method, 408 the body came too
slowly, 411 no length, 413 too large, 415 other media type, 422 the judge refused this request. It is not at
fault: 500 the judge broke on it, 504 it took too long, and 503 with Retry-After: too much is waiting, the
judge's process died and cannot be replaced, or the server is ending.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from visalign.rewards.base.contract import RewardError

from .batches import Asked, Batcher, QueueFull
from .process import JudgeRefused
from .wire import JUDGE_HEADER, MEDIA_TYPE, JudgeRequest, WireError, unpack_request
from .wire_answer import pack_answer
from .worker import WorkerDied, WorkerTimeout, WorkerUnavailable


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server accepts."""

    max_bytes: int = 256 << 20
    """Of one request's body."""
    max_rows: int = 512
    """Images or pairs in one request."""
    max_pixels: int = 64 << 20
    """Of all images of a request together."""
    max_prompt: int = 20_000
    """Characters of one prompt."""
    timeout: float = 120.0
    """Seconds that the judge may take for a batch."""
    receive_timeout: float = 60.0
    """Seconds in which a body must have arrived."""


class Refused(Exception):
    """An answer other than 200.

    Args:
        status: of HTTP.
        message: what was given, what is allowed.
        retry_after: seconds, for a 503.
    """

    def __init__(self, status: int, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message.encode(errors="replace").decode())  # JSON can name what UTF-8 cannot hold
        self.status = status
        self.headers: dict[str, str] = {}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        if status == 503:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))


def judge_server(
    judge: Asked,
    card: dict[str, Any],
    *,
    token: str | None = None,
    limits: Limits | None = None,
    max_batch: int = 64,
    max_wait: float = 0.005,
    max_waiting: int = 4096,
) -> Any:
    """The application, for uvicorn.

    Args:
        judge: answers batches, e.g. a `JudgeWorker`.
        card: `judge_card` of it.
        token: that requests must bring as `Authorization: Bearer TOKEN`; None asks for none.
        limits: of a request.
        max_batch: rows judged together.
        max_wait: seconds that the first request of a batch waits for others.
        max_waiting: rows that may wait; what comes beyond is refused with 503.

    Returns:
        A FastAPI application; `app.state.batcher` is its batcher, and `app.state.stop()`, from any thread or
        signal handler, has it refuse what waits and what comes.

    Raises:
        RewardError: FastAPI is not installed.
    """
    FastAPI, Request, JSONResponse, HTTPException = _fastapi()
    bounds = limits or Limits()
    batcher = Batcher(
        judge, max_batch=max_batch, max_wait=max_wait, max_waiting=max_waiting, timeout=bounds.timeout
    )
    desk = _Desk(judge, card, token, bounds, batcher)

    @asynccontextmanager
    async def living(_: Any) -> AsyncIterator[None]:
        app.state.stop = partial(asyncio.get_running_loop().call_soon_threadsafe, batcher.stop)
        yield
        await batcher.close()

    async def health() -> Any:
        return JSONResponse(desk.about())

    async def score(request: Any) -> Any:
        return await desk.answer(request, is_pair=False)

    async def compare(request: Any) -> Any:
        return await desk.answer(request, is_pair=True)

    # annotations are texts in this file, and FastAPI would look for the classes among the module's names
    for function in (score, compare):
        function.__annotations__["request"] = Request
    app = FastAPI(title="visalign", lifespan=living, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.batcher, app.state.stop = batcher, batcher.stop
    app.add_exception_handler(HTTPException, _no_such_place)
    routes = (("/health", health, "GET"), ("/v1/score", score, "POST"), ("/v1/compare", compare, "POST"))
    for path, function, method in routes:
        app.add_api_route(path, function, methods=[method], response_model=None)
    return app


async def _no_such_place(_: Any, error: Any) -> Any:
    """The answer to another path or method than ours, in the form of all refusals."""
    from fastapi.responses import JSONResponse

    said = f"{error.detail}. There are GET /health, POST /v1/score and POST /v1/compare."
    return JSONResponse({"error": said}, error.status_code, headers=error.headers)


def _fastapi() -> tuple[Any, Any, Any, Any]:
    """Its application, request, JSON response and the exception that it raises itself."""
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse
        from starlette.exceptions import HTTPException
    except ModuleNotFoundError as error:
        raise RewardError(
            "A reward server needs FastAPI, which is not installed: python -m pip install 'visalign[serve]'."
        ) from error
    return FastAPI, Request, JSONResponse, HTTPException


@dataclass(frozen=True)
class _Desk:
    """What all requests of a server meet."""

    judge: Asked
    card: dict[str, Any]
    token: str | None
    limits: Limits
    batcher: Batcher

    def about(self) -> dict[str, Any]:
        """The content of /health."""
        batcher = self.batcher
        counts = asdict(batcher.counts) | {"waiting": batcher.waiting}
        return {
            "judge": self.card,
            "limits": asdict(self.limits) | {"max_batch": batcher.max_batch},
            "counts": counts | {"restarts": getattr(self.judge, "restarts", 0)},
            "down": getattr(self.judge, "down", None),
            "token": self.token is not None,
        }

    async def answer(self, request: Any, *, is_pair: bool) -> Any:
        """The answer to a request, or its refusal."""
        from fastapi import Response
        from fastapi.responses import JSONResponse

        try:
            _authorise(request.headers.get("authorization"), self.token)
            _check_head(request.headers, self.card, self.limits, is_pair)
            raw = await _receive(request, self.limits)
            asked = _read(raw, self.limits, is_pair)
            answer = await _unless_gone(request, _judged(self.batcher, asked))
            told = {JUDGE_HEADER: self.card["identity"] or ""}
            return Response(answer, media_type=MEDIA_TYPE, headers=told)
        except Refused as refusal:
            return JSONResponse({"error": str(refusal)}, refusal.status, headers=refusal.headers)


def _authorise(given: str | None, token: str | None) -> None:
    if token is None:
        return
    scheme, _, sent = (given or "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode(), token.encode()):
        raise Refused(401, "No or a wrong token; send the header 'Authorization: Bearer TOKEN'.")


def _check_head(headers: Any, card: dict[str, Any], limits: Limits, is_pair: bool) -> None:
    """What can be refused before a byte of the body is read."""
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


async def _receive(request: Any, limits: Limits) -> bytearray:
    """The body; a client that sends more than it said, too slowly, or goes away is refused."""
    from starlette.requests import ClientDisconnect

    body = bytearray()  # pixels are later read in place, which takes memory that can be written to
    try:
        async with asyncio.timeout(limits.receive_timeout):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limits.max_bytes:
                    raise Refused(413, f"The body is larger than {limits.max_bytes} bytes. Split it.")
                body += chunk
    except TimeoutError as error:
        raise Refused(408, f"The body did not arrive within {limits.receive_timeout:g} seconds.") from error
    except ClientDisconnect as error:
        raise Refused(400, "The connection ended before the body did.") from error
    return body


def _read(raw: bytearray, limits: Limits, is_pair: bool) -> JudgeRequest:
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


async def _unless_gone(request: Any, judging: Coroutine[Any, Any, bytes]) -> bytes:
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


async def _gone(request: Any) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _judged(batcher: Batcher, request: JudgeRequest) -> bytes:
    try:
        return pack_answer(await batcher.submit(request))
    except QueueFull as error:
        raise Refused(503, f"Busy: {error}. Try again.") from error
    except WorkerUnavailable as error:
        why = f"There is no judge at the moment: {error}. Try later."
        raise Refused(503, why, error.retry_after) from error
    except WorkerDied as error:
        raise Refused(503, f"Twice {error} while it worked on this request. Try later.") from error
    except WorkerTimeout as error:
        raise Refused(504, f"Too slow: {error}. Send fewer images at once.") from error
    except (JudgeRefused, ValueError, TypeError) as error:
        raise Refused(422, f"The judge refused the request: {error}") from error
    except RewardError as error:
        raise Refused(500, f"The judge broke on the request: {error}") from error
