# SPDX-License-Identifier: Apache-2.0
"""A judge behind HTTP: safetensors in and out, limits, a token, batches across clients.

    GET  /health      JSON: the judge's card, limits, counts; no token needed
    POST /v1/score    images and prompts   -> scores
    POST /v1/compare  pairs and prompts    -> preferences

Refusals are JSON {"error": what was given, what is allowed}: 400 unreadable body, 401 no or wrong token, 404
the judge cannot do that, 408 the body came too slowly, 411 no length, 413 too large, 415 other media type,
422 the judge refused this request, 500 the judge died of it, 503 too much is waiting, 504 too slow.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from .contract import RewardError
from .judge_batches import Asked, Batcher, QueueFull
from .judge_worker import WorkerDied, WorkerTimeout
from .wire import JUDGE_HEADER, MEDIA_TYPE, WireError, pack_answer, unpack_request


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
    """An answer other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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
        A FastAPI application; `app.state.batcher` is its batcher.

    Raises:
        RewardError: FastAPI is not installed.
    """
    FastAPI, Request, JSONResponse = _fastapi()
    bounds = limits or Limits()
    batcher = Batcher(
        judge, max_batch=max_batch, max_wait=max_wait, max_waiting=max_waiting, timeout=bounds.timeout
    )
    desk = _Desk(judge, card, token, bounds, batcher)

    @asynccontextmanager
    async def living(_: Any) -> AsyncIterator[None]:
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
    app.state.batcher = batcher
    routes = (("/health", health, "GET"), ("/v1/score", score, "POST"), ("/v1/compare", compare, "POST"))
    for path, function, method in routes:
        app.add_api_route(path, function, methods=[method], response_model=None)
    return app


def _fastapi() -> tuple[Any, Any, Any]:
    """Its application, request and JSON response."""
    try:
        from fastapi import FastAPI, Request
        from fastapi.responses import JSONResponse
    except ModuleNotFoundError as error:
        raise RewardError(
            "A reward server needs FastAPI, which is not installed: python -m pip install 'visalign[serve]'."
        ) from error
    return FastAPI, Request, JSONResponse


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
            answer = await _judged(self.batcher, raw, self.limits, is_pair)
            told = {JUDGE_HEADER: self.card["identity"] or ""}
            return Response(answer, media_type=MEDIA_TYPE, headers=told)
        except Refused as refusal:
            headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
            headers |= {"Retry-After": "1"} if refusal.status == 503 else {}
            return JSONResponse({"error": str(refusal)}, refusal.status, headers=headers)


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


async def _receive(request: Any, limits: Limits) -> bytes:
    """The body; a client that sends more than it said, too slowly, or goes away is refused."""
    from starlette.requests import ClientDisconnect

    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.receive_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.max_bytes:
                    raise Refused(413, f"The body is larger than {limits.max_bytes} bytes. Split it.")
                chunks.append(chunk)
    except TimeoutError as error:
        raise Refused(408, f"The body did not arrive within {limits.receive_timeout:g} seconds.") from error
    except ClientDisconnect as error:
        raise Refused(400, "The connection ended before the body did.") from error
    return b"".join(chunks)


async def _judged(batcher: Batcher, raw: bytes, limits: Limits, is_pair: bool) -> bytes:
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
    if longest := [p for p in request.prompts if len(p) > limits.max_prompt]:
        raise Refused(
            413, f"A prompt of {len(longest[0])} characters; at most {limits.max_prompt} are allowed."
        )
    try:
        return pack_answer(await batcher.submit(request))
    except QueueFull as error:
        raise Refused(503, f"Busy: {error}. Try again.") from error
    except WorkerTimeout as error:
        raise Refused(504, f"Too slow: {error}. Send fewer images at once.") from error
    except WorkerDied as error:
        raise Refused(500, f"Twice {error} while it worked on this request.") from error
    except (RewardError, ValueError, TypeError) as error:
        raise Refused(422, f"The judge refused the request: {error}") from error
