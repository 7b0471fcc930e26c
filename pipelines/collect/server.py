# SPDX-License-Identifier: Apache-2.0
"""The page on which people vote, and its requests.

    GET  /                       the page; ?me=SECRET identifies the voter of a browser that has none,
                                 ?invite=CODE lets a new one in
    POST /join   {name, invite}  -> {name, link}; the secret goes into a cookie
    POST /leave                  forgets the voter in this browser
    POST /next                   -> the next task, {done: true} at the end
    POST /back   {assignment}    -> the answer before it, to be corrected
    POST /vote   {client, assignment, answer, seconds}
    GET  /image/ASSIGNMENT/SIDE  the image, without the name of its file
    GET  /progress?key=KEY       votes so far, for whoever runs the server and knows the key

Refusals are JSON {"error": what was given, what is allowed}: 400 unreadable, 401 unknown voter, 403 another
page's request, another voter's task or a used-up invitation, 404, 409 a name that is taken or a browser that
votes as somebody else, 413 too long, 415 other media type, 422 a value that is not allowed, 507 a full disk.
"""

from __future__ import annotations

import hmac
import io
import json
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from PIL import Image
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Strict, ValidationError, create_model
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from visalign.data.sets.image_references import CompletionText, resolve_image
from visalign.errors import UserError
from visalign.evaluation.pages.base import page_environment, page_script, text_image
from visalign.evaluation.pages.votes_page import progress_page
from visalign.pipelines.serve_reward import call_when_ready, check_port_free, is_loopback

from .store import Assignment, VoteRefused, VoteStore
from .tasks import Form
from .votes import progress

LONGEST_BODY = 64 << 10
MOST_NAMES = 500  # Names that one start of the server registers, so that a leaked invitation cannot fill the file
MEDIA = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""Formats sent unchanged; other images are sent as PNG."""

_NUL = re.compile(rb"\0|(?<!\\)(?:\\\\)*\\u0000")

Share = Annotated[float, Strict(), Field(ge=0, le=1)]
Number = Annotated[int, Strict(), Field(gt=0, lt=2**62)]  # SQLite's integers have 64 bits
Model = TypeVar("Model", bound=BaseModel)


class Empty(BaseModel):
    pass


class Join(BaseModel):
    name: str
    invite: str = ""


class Back(BaseModel):
    assignment: Number | None = None


class Ballot(BaseModel):
    client: Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[\x00-\x7f]*$")]
    assignment: Number
    answer: dict[str, Any]
    seconds: Annotated[float, Strict(), Field(ge=0, lt=1e7)] | None = None


def serve_votes(
    store: VoteStore, *, host: str = "127.0.0.1", port: int = 8080, on_ready: Callable[[str, str], object]
) -> None:
    """Serve the page until interrupted; `on_ready` gets its address and that of the progress when it listens.

    On a host that others reach, new voters need the invitation in the address, which is another at each start.
    """
    from uvicorn import Server

    from visalign.rewards.serve.connections import connections_allowed, server_config

    check_port_free(host, port)
    url = f"http://{_own_address() if host in ('0.0.0.0', '::') else host}:{port}/"
    vote_url, key, invite, hosts = url, secrets.token_urlsafe(9), None, ["127.0.0.1", "localhost", "[::1]", host]
    if not is_loopback(host):
        invite, hosts = secrets.token_urlsafe(9), None  # 12 letters, short enough to be read out
        vote_url += f"?invite={invite}"
    app = vote_server(store, invite=invite, hosts=hosts, progress=(key, vote_url))
    server = Server(server_config(app, host, port, connections=connections_allowed(256), idle=30.0))
    call_when_ready(server, partial(on_ready, vote_url, f"{url}progress?key={key}"))
    server.run()


def _own_address() -> str:
    """Find the address by which others reach this machine, as the system would choose it; else its name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: an address of documentation, RFC 5737
            return probe.getsockname()[0]
        except OSError:
            return socket.gethostname()


def vote_server(
    store: VoteStore,
    *,
    invite: str | None = None,
    hosts: list[str] | None = None,
    progress: tuple[str, str] = ("", ""),
) -> Starlette:
    """Build the application for uvicorn.

    New voters need the code `invite`, if any. Requests may have only the host names `hosts`, against other web pages.
    `progress` is the key of its page, without which there is none, and the address for voters that it shows.
    """
    server = _VoteServer(store, invite, progress)
    routes = [Route("/", server.root), Route("/image/{assignment:str}/{side:str}", server.image)]
    routes.append(Route("/progress", server.progress))
    for endpoint in (server.join, server.leave, server.next, server.back, server.vote):
        routes.append(Route(f"/{endpoint.__name__}", endpoint, methods=["POST"]))
    handlers: dict[Any, Any] = dict.fromkeys((HTTPException, UserError, ClientDisconnect), _refuse)
    middleware = [] if hosts is None else [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
    return Starlette(routes=routes, exception_handlers=handlers, middleware=middleware)


class _VoteServer:
    def __init__(self, store: VoteStore, invite: str | None, progress: tuple[str, str]) -> None:
        self._key, self._vote_url = progress
        self._store, self._invite, self._cookie = store, (invite or "").encode(), f"visalign-{store.name}"
        self._names = 0
        self._answer = answer_model(store.form, store.places, store.choices)
        script, digest = page_script("collect_page.js")
        template = page_environment().get_template("collect_page.html.j2")
        self._page = template.render(form=store.form, places=store.places, script=script)
        policy = (
            "default-src 'none'; img-src 'self' data:; connect-src 'self'; style-src 'unsafe-inline'; "
            f"script-src '{digest}'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
        )
        # the address may hold the voter's secret, which no other site gets to see
        self._headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}

    def _name(self, request: Request) -> str:
        return self._store.voter(request.cookies.get(self._cookie, ""))

    def _remember(self, response: Response, secret: str) -> Response:
        response.set_cookie(self._cookie, secret, max_age=90 * 86_400, httponly=True, samesite="strict")
        return response

    async def root(self, request: Request) -> Response:
        secret = request.query_params.get("me")
        if secret is None:
            return HTMLResponse(self._page, headers=self._headers)
        name, here = self._store.voter(secret), request.cookies.get(self._cookie)
        if here not in (None, secret):  # a link from elsewhere must not have Ada vote as its sender
            with suppress(VoteRefused):
                other = self._store.voter(here or "")
                message = f"This browser votes as {other!r}. To vote as {name!r}, leave the page by its button first."
                raise HTTPException(409, message)
        return self._remember(RedirectResponse("/", 303), secret)

    async def progress(self, request: Request) -> Response:
        key = request.query_params.get("key", "")
        if not self._key or not hmac.compare_digest(key.encode(errors="replace"), self._key.encode()):
            raise HTTPException(403, "The progress needs the key in the address that visalign collect printed.")
        counts = await run_in_threadpool(progress, self._store)
        return HTMLResponse(progress_page(counts, vote_url=self._vote_url, file=str(self._store.path)))

    async def join(self, request: Request) -> Response:
        body = await _read_body(request, Join)
        if self._invite and not hmac.compare_digest(body.invite.encode(errors="replace"), self._invite):
            raise HTTPException(403, "Only invited people may vote. Open the link that you were sent.")
        if self._names >= MOST_NAMES:
            raise HTTPException(403, f"{MOST_NAMES} names have joined by this invitation. Ask for a new one.")
        secret = await run_in_threadpool(self._store.join, body.name)
        self._names += 1
        response = JSONResponse({"name": self._store.voter(secret), "link": f"/?me={secret}"})
        return self._remember(response, secret)

    async def leave(self, request: Request) -> Response:
        await _read_body(request, Empty)
        response = JSONResponse({})
        response.delete_cookie(self._cookie)
        return response

    async def next(self, request: Request) -> Response:
        await _read_body(request, Empty)
        name = self._name(request)
        return self._show(request, name, await run_in_threadpool(self._store.next, name))

    async def back(self, request: Request) -> Response:
        body, name = await _read_body(request, Back), self._name(request)
        if (assignment := await run_in_threadpool(self._store.before, name, body.assignment)) is None:
            raise HTTPException(404, "There is nothing before this.")
        return self._show(request, name, assignment)

    async def vote(self, request: Request) -> Response:
        body, name = await _read_body(request, Ballot), self._name(request)
        answer = read_answer(body.answer, self._answer)
        save = partial(self._store.vote, client=body.client, seconds=body.seconds)
        await run_in_threadpool(save, name, body.assignment, answer)
        return JSONResponse({"kept": body.client})

    async def image(self, request: Request) -> Response:
        side, number = request.path_params["side"], request.path_params["assignment"]
        if not re.fullmatch("[0-9]{1,100}", number):  # int() takes no more than 4,300 digits
            raise HTTPException(400, f"{number:.20} is no number of a task.")
        assignment = self._store.assignment(self._name(request), min(int(number), 2**62))  # SQLite's end at 2**63
        if side not in assignment.task.places:
            raise HTTPException(404, f"There is no image on the {side:.20}.")
        content, media_type = await run_in_threadpool(image_bytes, assignment.image(side))
        # another file of votes may be served here next, with the same numbers
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return Response(content, media_type=media_type, headers=headers)

    def _show(self, request: Request, name: str, assignment: Assignment | None) -> Response:
        """Send a task to the page without file names, gold or repeats."""
        answered, total = self._store.progress(name)
        link = f"/?me={request.cookies.get(self._cookie, '')}"
        content: dict[str, Any] = {"name": name, "link": link, "answered": answered, "total": total}
        if assignment is None:
            return JSONResponse(content | {"done": True})
        number, task = assignment.assignment, assignment.task
        content["images"] = {side: f"/image/{number}/{side}" for side in task.places}
        return JSONResponse(content | {"assignment": number, "prompt": task.prompt, "answer": assignment.answer})


def _check_box(box: tuple[str, float, float, float, float]) -> tuple[str, float, float, float, float]:
    _, left, top, right, bottom = box
    if not (left < right and top < bottom):
        raise ValueError("a box is [side, left, top, right, bottom] in shares of the image, 0 to 1")
    return box


def answer_model(form: Form, sides: tuple[str, ...], choices: tuple[str, ...]) -> type[BaseModel]:
    """Build the type of an answer to a form, places as on the screen.

    `choice` of a pair or a group; `slider` 1 to the number of its words; `checklist`, question -> true or false;
    `boxes` [side, left, top, right, bottom] in shares of the image; `text`.
    """
    box = Annotated[tuple[Literal[sides], Share, Share, Share, Share], AfterValidator(_check_box)]
    fields: dict[str, Any] = {"choice": (Literal[choices], ...)} if choices else {}
    if form.slider:
        fields["slider"] = (Annotated[float, Strict(), Field(ge=1, le=len(form.slider))], ...)
    if form.checklist:
        fields["checklist"] = (dict[Literal[form.checklist], Annotated[bool, Strict()]], {})
    if form.boxes:
        fields["boxes"] = (Annotated[list[box], Field(max_length=32)], [])
    if form.text:
        fields["text"] = (Annotated[str, Field(max_length=4000)], "")
    return create_model("Answer", __config__=ConfigDict(extra="forbid"), **fields)


def read_answer(answer: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Check an answer against its form and drop empty values; `unseen` alone means an image was not shown."""
    values = {name: value for name, value in answer.items() if value not in (None, "", [], {})}
    if values == {"unseen": True}:
        return values
    if isinstance(values.get("text"), str):  # a limit on the length can cut an emoji in two
        values["text"] = _valid_text(values["text"])
    _validate(values, model)
    if not values:
        raise HTTPException(422, "The answer is empty: nothing was set, marked or written.")
    return values


def _validate(values: Any, model: type[Model]) -> Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            questions = ", ".join(model.model_fields)
            raise HTTPException(422, f"{name:.200} was not asked; asked were {questions}.") from None
        value = "missing" if first["type"] == "missing" else f"{first['input']!r:.100}"
        raise HTTPException(422, f"{name or 'The request':.200} is {value}: {first['msg']}.") from None


def image_bytes(reference: str) -> tuple[bytes, str]:
    try:
        image = resolve_image(reference)
        if isinstance(image, CompletionText):
            return text_image(image)[0], "image/svg+xml"
        if isinstance(image, str):
            content = Path(image).read_bytes()
            image = Image.open(io.BytesIO(content))
            if image.format in MEDIA:
                return content, MEDIA[image.format]
        buffer = io.BytesIO()
        image = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
        image.convert("RGB").save(buffer, "PNG")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # the type alone: the message would name the file, and with it perhaps the generator
        raise HTTPException(404, f"The image cannot be read: {type(error).__name__}.") from error
    return buffer.getvalue(), "image/png"


async def _read_body(request: Request, model: type[Model]) -> Model:
    """Read the JSON object of a request, which a page of another origin cannot send."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is not None and origin.partition("://")[2] != host:
        raise HTTPException(403, f"Request from {origin:.200}; only the page of this server may ask.")
    # a form of another site can send other types without asking the browser's permission (CORS)
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "The content type must be application/json.")
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > LONGEST_BODY:
            raise HTTPException(413, f"The request has more than {LONGEST_BODY} bytes. Write less.")
    if _NUL.search(raw):  # ends a text for readers in C
        raise HTTPException(400, "The request holds a NUL character. Leave it out.")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The request is not JSON: {type(error).__name__}.") from error
    return _validate(body, model)


async def _refuse(_: Request, error: Any) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": _valid_text(error.detail)}, error.status_code, error.headers)
    if isinstance(error, ClientDisconnect):
        return JSONResponse({"error": "The connection ended before the body did."}, 400)
    status = error.status if isinstance(error, VoteRefused) else 422
    return JSONResponse({"error": _valid_text(str(error))}, status)


def _valid_text(text: str) -> str:
    """Replace half surrogates, which JSON can name and UTF-8 cannot hold."""
    return text.encode(errors="replace").decode()
