# SPDX-License-Identifier: Apache-2.0
"""The page on which people vote, and what it talks to.

    GET  /                       the page; ?me=SECRET says who one is, ?invite=CODE that one may come
    POST /join   {name, invite}  -> {name, link}; the secret goes into a cookie
    POST /leave                  forgets who one is in this browser
    POST /next                   -> what to answer now, {done: true} at the end
    POST /back   {assignment}    -> what was answered before it, to be corrected
    POST /vote   {client, assignment, answer, seconds}
    GET  /image/ASSIGNMENT/SIDE  the image; its file's name is not told

Refusals are JSON {"error": what was given, what is allowed}: 400 unreadable, 401 nobody, 403 of another page
or another's task, 404, 409 a name that is taken, 413 too long, 415 other media type, 422 no such answer.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

import visalign.evaluation.pages
from visalign.data.sets.image_references import resolve_image
from visalign.errors import UserError

from .store import CHOICES, SIDES, Assignment, NotYours, Taken, Unknown, VoteStore
from .tasks import Form

PAGES = Path(visalign.evaluation.pages.__file__).parent
LONGEST_BODY = 64 << 10
LONGEST_TEXT = 4_000
MOST_BOXES = 32
LONGEST_CLIENT = 80
MEDIA = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
"""Sent as they are; other images as PNG."""


class Refused(HTTPException):
    """An answer other than 200."""


def vote_server(store: VoteStore, *, invite: str | None = None, hosts: list[str] | None = None) -> Starlette:
    """The application, for uvicorn.

    Args:
        store: of the votes.
        invite: a code that new people must bring; None lets all in.
        hosts: names under which it may be asked, which keeps other web pages out of a server on this machine;
            None allows all.
    """
    voting = _Voting(store, invite)
    routes = [Route("/", voting.root), Route("/image/{assignment:int}/{side:str}", voting.image)]
    for place in (voting.join, voting.leave, voting.next, voting.back, voting.vote):
        routes.append(Route(f"/{place.__name__}", place, methods=["POST"]))
    refusals: dict[Any, Callable[..., Any]] = {HTTPException: _refusal}
    refusals |= {error: _said(status) for error, status in REFUSALS.items()}
    middleware = [] if hosts is None else [Middleware(TrustedHostMiddleware, allowed_hosts=hosts)]
    return Starlette(routes=routes, exception_handlers=refusals, middleware=middleware)


class _Voting:
    """What the server answers."""

    def __init__(self, store: VoteStore, invite: str | None) -> None:
        self._store, self._invite, self._cookie = store, invite, f"visalign-{store.name}"
        self._page, policy = _page(store)
        self._headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}

    def _name(self, request: Request) -> str:
        return self._store.who(self._secret(request))

    def _secret(self, request: Request) -> str:
        return request.cookies.get(self._cookie, "")

    def _remember(self, answer: Response, secret: str) -> Response:
        answer.set_cookie(self._cookie, secret, max_age=90 * 86_400, httponly=True, samesite="strict")
        return answer

    async def root(self, request: Request) -> Response:
        me = request.query_params.get("me")
        if me is None:
            return HTMLResponse(self._page, headers=self._headers)
        try:
            self._store.who(me)
        except Unknown:
            raise Refused(401, "This link names nobody here. Ask for a new one.") from None
        return self._remember(RedirectResponse("/", 303), me)

    async def join(self, request: Request) -> Response:
        body = await _body(request)
        given, name = str(body.get("invite", "")).encode(errors="replace"), body.get("name")
        if self._invite is not None and not hmac.compare_digest(given, self._invite.encode()):
            raise Refused(403, "Only who was invited may vote. Open the link that you were sent.")
        if not isinstance(name, str):
            raise Refused(422, f"name is {name!r:.100}; needed is a text.")
        secret = await run_in_threadpool(self._store.join, name)
        answer = JSONResponse({"name": self._store.who(secret), "link": f"/?me={secret}"})
        return self._remember(answer, secret)

    async def leave(self, request: Request) -> Response:
        await _body(request)
        answer = JSONResponse({})
        answer.delete_cookie(self._cookie)
        return answer

    async def next(self, request: Request) -> Response:
        await _body(request)
        name = self._name(request)
        return self._told(request, name, await run_in_threadpool(self._store.next, name))

    async def back(self, request: Request) -> Response:
        body = await _body(request)
        name, number = self._name(request), body.get("assignment")
        if number is not None and not _is_integer(number):
            raise Refused(422, f"assignment is {number!r:.100}; needed is a number, or nothing.")
        shown = await run_in_threadpool(self._store.before, name, number)
        if shown is None:
            raise Refused(404, "There is nothing before this.")
        return self._told(request, name, shown)

    async def vote(self, request: Request) -> Response:
        body = await _body(request)
        name, number, client = self._name(request), body.get("assignment"), body.get("client")
        if not _is_integer(number):
            raise Refused(422, f"assignment is {number!r:.100}; needed is a number.")
        if not isinstance(client, str) or not 0 < len(client) <= LONGEST_CLIENT or not client.isascii():
            raise Refused(422, f"client is {client!r:.100}; needed are 1 to {LONGEST_CLIENT} letters, ASCII.")
        seconds = body.get("seconds")
        if seconds is not None and not (_is_number(seconds) and 0 <= seconds < 1e7):
            raise Refused(422, f"seconds is {seconds!r:.100}; needed is a number, at least 0.")
        is_pair = len(self._store.shown(name, number).task.images) == 2
        answer = read_answer(body.get("answer"), self._store.form, is_pair)
        keep = partial(self._store.vote, client=client, seconds=seconds)
        await run_in_threadpool(keep, name, number, answer)
        return JSONResponse({"kept": client})

    async def image(self, request: Request) -> Response:
        side, assignment = request.path_params["side"], request.path_params["assignment"]
        shown = self._store.shown(self._name(request), min(assignment, 2**62))
        if side not in SIDES[: len(shown.task.images)]:
            raise Refused(404, f"There is no image on the {side:.20}.")
        content, kind = await run_in_threadpool(image_bytes, shown.image(side))
        # another file of votes may be served here next, with the same numbers
        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        return Response(content, media_type=kind, headers=headers)

    def _told(self, request: Request, name: str, shown: Assignment | None) -> Response:
        """What the page is told: nothing of files, of gold or of repeats."""
        done, total = self._store.progress(name)
        link = f"/?me={self._secret(request)}"
        told: dict[str, Any] = {"name": name, "link": link, "answered": done, "total": total}
        if shown is None:
            return JSONResponse(told | {"done": True})
        sides = SIDES[: len(shown.task.images)]
        told |= {"assignment": shown.assignment, "prompt": shown.task.prompt, "answer": shown.answer}
        return JSONResponse(told | {"images": {side: f"/image/{shown.assignment}/{side}" for side in sides}})


REFUSALS: dict[type[UserError], int] = {Unknown: 401, NotYours: 403, Taken: 409, UserError: 422}


def read_answer(answer: Any, form: Form, is_pair: bool) -> dict[str, Any]:
    """What was answered, sides as on the screen, with nothing in it that was not asked.

    Returns:
        `choice` of a pair; `slider` 1 to the number of its words; `checklist`, question -> true or false;
        `boxes` [side, left, top, right, bottom] in shares of the image; `text`. Or `unseen` alone, where an
        image could not be shown.

    Raises:
        Refused: it is not of that form, or says nothing.
    """
    if not isinstance(answer, Mapping):
        raise Refused(422, f"answer is {answer!r:.100}; needed is an object.")
    allowed = {"choice": is_pair, "slider": bool(form.slider), "checklist": bool(form.checklist)}
    allowed |= {"boxes": form.boxes, "text": form.text}
    given = {name: value for name, value in answer.items() if value not in (None, "", [], {})}
    if given == {"unseen": True}:
        return {"unseen": True}
    if unasked := [name for name in given if not allowed.get(name)]:
        asked = ", ".join(name for name, is_asked in allowed.items() if is_asked)
        raise Refused(422, f"{', '.join(unasked):.200} was not asked; asked were {asked}.")
    if is_pair and given.get("choice") not in CHOICES:
        raise Refused(422, f"choice is {given.get('choice')!r:.100}; allowed are {', '.join(CHOICES)}.")
    if not given:
        raise Refused(422, "The answer is empty: nothing was set, marked or written.")
    slider, text = given.get("slider"), given.get("text")
    if form.slider and not (_is_number(slider) and 1 <= slider <= len(form.slider)):
        raise Refused(422, f"slider is {slider!r:.100}; needed is a number, 1 to {len(form.slider)}.")
    if text is not None:
        if not isinstance(text, str) or len(text) > LONGEST_TEXT:
            said = f"{len(text)} letters" if isinstance(text, str) else f"a {type(text).__name__}"
            raise Refused(422, f"text is {said}; allowed are {LONGEST_TEXT} letters.")
        given["text"] = text.encode("utf-8", "replace").decode()
    _check_marks(given.get("checklist", {}), form)
    _check_boxes(given.get("boxes", []), is_pair)
    return given


def _check_marks(marks: Any, form: Form) -> None:
    if not isinstance(marks, Mapping) or not all(isinstance(said, bool) for said in marks.values()):
        raise Refused(422, f"checklist is {marks!r:.100}; needed is question: true or false.")
    if unknown := [question for question in marks if question not in form.checklist]:
        raise Refused(422, f"Not on the checklist: {', '.join(unknown):.200}.")


def _check_boxes(boxes: Any, is_pair: bool) -> None:
    sides = SIDES if is_pair else SIDES[:1]
    if not isinstance(boxes, list) or len(boxes) > MOST_BOXES:
        raise Refused(422, f"boxes are {boxes!r:.100}; needed is a list of at most {MOST_BOXES}.")
    for box in boxes:
        fits = isinstance(box, list) and len(box) == 5 and box[0] in sides
        ends = [end for end in box[1:] if _is_number(end) and 0 <= end <= 1] if fits else []
        if len(ends) != 4 or not (ends[0] < ends[2] and ends[1] < ends[3]):
            raise Refused(
                422,
                f"A box is {box!r:.100}; needed is [{' or '.join(sides)}, left, top, right, bottom] in "
                "shares of the image, 0 to 1.",
            )


def image_bytes(reference: str) -> tuple[bytes, str]:
    """The bytes of an image and their media type.

    Raises:
        Refused: it cannot be read.
    """
    try:
        found = resolve_image(reference)
        if isinstance(found, str):
            content = Path(found).read_bytes()
            found = Image.open(io.BytesIO(content))
            if found.format in MEDIA:
                return content, MEDIA[found.format]
        buffer = io.BytesIO()
        image = found if isinstance(found, Image.Image) else Image.fromarray(np.asarray(found))
        image.convert("RGB").save(buffer, "PNG")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise Refused(404, f"The image cannot be read: {type(error).__name__}.") from error
    return buffer.getvalue(), "image/png"


def _page(store: VoteStore) -> tuple[str, str]:
    """The page and its security policy: its own script alone, and nothing from elsewhere."""
    found = Environment(
        loader=FileSystemLoader(PAGES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    script = (PAGES / "collect_page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    is_pair = len(next(iter(store.tasks.values())).images) == 2
    page = found.get_template("collect_page.html.j2").render(
        form=store.form, is_pair=is_pair, script=Markup(script)
    )
    return page, (
        f"default-src 'none'; img-src 'self' data:; connect-src 'self'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
    )


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object of a request, which a page of another origin cannot send."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is not None and origin.partition("://")[2] != host:
        raise Refused(403, f"The request comes from {origin:.200}; only the page of this server may ask.")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"The content type is {kind:.100}; send application/json.")
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > LONGEST_BODY:
            raise Refused(413, f"The request has more than {LONGEST_BODY} bytes. Write less.")
    try:
        found = json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The request is no JSON: {type(error).__name__}.") from error
    if not isinstance(found, dict):
        raise Refused(400, f"The request is a {type(found).__name__}; needed is an object.")
    return found


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e18 < value < 1e18


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**62


async def _refusal(_: Request, error: Any) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


def _said(status: int) -> Callable[[Request, Any], Any]:
    async def answer(_: Request, error: Any) -> Response:
        return JSONResponse({"error": str(error).encode(errors="replace").decode()}, status)

    return answer
