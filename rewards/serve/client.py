# SPDX-License-Identifier: Apache-2.0
"""Client of `visalign serve-reward`: a judge on other machines as a reward.

Images travel as 8-bit pixels: floats are rounded to the nearest of 256 levels, as a PNG would round them.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import torch

from visalign.interfaces import Metadata, Preferences, RewardCapabilities, Scores
from visalign.rewards.base.contract import RewardError, answer_of, columns_of, read_request, scatter
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import load_images
from visalign.vision.pixels import to_levels

from .wire import (
    JUDGE_HEADER,
    MEDIA_TYPE,
    JudgeRequest,
    Pixels,
    WireError,
    pack_request,
    unpack_answer,
)

_RETRIED_STATUSES = (408, 429, 502, 503, 504)
_FATAL_STATUSES = (401, 403, 404, 411, 415)
"""Statuses that any request of the call would get."""
_CONCURRENT_REQUESTS = 2
"""Requests of one call under way at each server: while it judges one, the next is packed and sent."""
_MAX_PAUSE = 30.0
"""Longest pause, in seconds, before a server is asked again, whatever its Retry-After says."""
_CONNECT_SECONDS = 10.0
_LIMITS = ("max_batch", "max_rows", "max_pixels", "max_prompt", "max_header")
_SHARED_FIELDS = ("name", "identity", "scores", "compares", "unit")
"""Fields in which the cards of servers of one list agree."""


class _Server:
    """A server with its state."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url = url
        self.client = httpx.Client(base_url=url, headers=headers)
        self.set_timeout(30.0)
        self.rows_under_way = 0
        self.failures_in_a_row = 0
        self.retry_at = 0.0

    def set_timeout(self, seconds: float) -> None:
        self.client.timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))

    def pause(self, seconds: float) -> None:
        self.retry_at = time.monotonic() + min(seconds, _MAX_PAUSE)


class RemoteReward:
    """Scores, or compares, through one server or several of the same judge.

    Name, unit, range and direction are those of the judge that is served. Unreadable images are not sent; an
    image whose request failed after all attempts is invalid with the reason, never a number. Of several
    servers the one with the fewest rows under way is asked; a request that fails at one goes to another, and
    one that failed is left out for a while. Scores and their order do not depend on the server that answered.

    Args:
        url: of the server, e.g. "http://127.0.0.1:8000"; or a list of them, or several with commas between.
        token: the servers', or None.
        token_env: name of an environment variable that holds the token, unless `token` is given.
        timeout: seconds for one request; half a minute more than the server allows its judge when None.
        attempts: tries of a request at each server that fails in passing (connection lost, judge died).
        pause: seconds before a server is asked again, doubled for each further failure.
        patience: seconds for which servers that are only busy are asked again, which counts as no attempt.
        batch_size: images in one request; the smallest of the servers' batch sizes when None.

    Raises:
        RewardError: a server cannot be reached, is none of ours, or serves another judge than the others.
        ValueError: attempts or batch_size below 1, no url, a token that cannot be sent.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        token: str | None = None,
        token_env: str | None = None,
        timeout: float | None = None,
        attempts: int = 4,
        pause: float = 0.25,
        patience: float = 600.0,
        batch_size: int | None = None,
    ) -> None:
        addresses = url.split(",") if isinstance(url, str) else url
        urls = list(dict.fromkeys(address.strip().rstrip("/") for address in addresses if address.strip()))
        token = token or (os.environ.get(token_env) if token_env else None) or ""
        checks = {
            f"attempts is {attempts} and batch_size {batch_size}; both must be at least 1.": min(
                attempts, batch_size or attempts
            )
            >= 1,
            f"url is {url!r}; give the address of a server, or a list of them.": bool(urls),
            "token holds characters that no HTTP header may hold, such as a line break or a space. Give the "
            "token by itself.": token.isascii() and (token + "_").isprintable() and " " not in token,
        }
        for message, holds in checks.items():
            if not holds:
                raise ValueError(message)
        self.url = ", ".join(urls)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._servers = [_Server(address, headers) for address in urls]
        self._end = weakref.finalize(self, _close, self._servers)
        self._attempts, self._pause, self._patience = attempts, pause, patience
        self._lock = threading.Lock()
        with ThreadPoolExecutor(len(urls)) as pool:
            abouts = list(pool.map(self._read_health, self._servers))
        card = abouts[0]["judge"]
        limits = [about["limits"] for about in abouts]
        for server, about in zip(self._servers, abouts, strict=True):
            if any(about["judge"].get(field) != card.get(field) for field in _SHARED_FIELDS):
                raise RewardError(
                    f"{server.url} serves {_describe(about['judge'])}, and {urls[0]} serves "
                    f"{_describe(card)}; all must serve one version of one judge. Leave it out."
                )
            server.set_timeout(timeout or float(about["limits"]["timeout"]) + 30.0)
        self._limits = {name: min(int(values[name]) for values in limits) for name in _LIMITS}
        self._max_rows = min(batch_size or self._limits["max_batch"], self._limits["max_rows"])
        self.name = str(card["name"])
        self._scores, self._compares = bool(card["scores"]), bool(card["compares"])
        self.unit = str(card.get("unit", ""))
        low, high = card.get("range", ("-inf", "inf"))
        self.range = (float(low), float(high))
        self.higher_is_better = bool(card.get("higher_is_better", True))
        self.capabilities = RewardCapabilities(needs_group=bool(card.get("needs_group")))
        self.identity: Any = None
        if card.get("identity"):
            self.identity = Identity(judge=self.name, model="remote", weights=str(card["identity"]))

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images."""
        if not self._scores:
            raise RewardError(f"{self.name!r} at {self.url} only compares pairs; use compare.")
        return self._judge("/v1/score", [images], prompts, metadata)

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        """Compare B pairs."""
        if not self._compares:
            raise RewardError(f"{self.name!r} at {self.url} scores single images; use score.")
        return self._judge("/v1/compare", [left, right], prompts, metadata)

    def close(self) -> None:
        """Hang up."""
        self._end()

    def _judge(self, path: str, images: Sequence[Any], prompts: Sequence[str], metadata: Metadata | None) -> Any:
        sides, texts, records, reasons = read_images(self.name, images, prompts, metadata)
        rows = [row for row, reason in enumerate(reasons) if reason is None]

        def ask(chunk: slice) -> Scores | Preferences:
            left, right = [*(side[chunk] for side in sides), None][:2]
            assert left is not None  # there is at least one side
            request = JudgeRequest(images=left, right=right, prompts=texts[chunk], metadata=records[chunk])
            return self._request(path, request)

        pool = ThreadPoolExecutor(_CONCURRENT_REQUESTS * len(self._servers))
        try:
            answers = list(pool.map(ask, self._chunks(sides, texts, records)))
        finally:
            pool.shutdown(cancel_futures=True)
        return _merge(answers, rows, reasons, self.unit if path == "/v1/score" else None)

    def _chunks(
        self, sides: Sequence[Pixels], prompts: Sequence[str], records: Sequence[Mapping[str, Any] | None]
    ) -> list[slice]:
        """Split rows into requests within the servers' limits; a row that is too large is its own request."""
        chunks, start, pixels, header = [], 0, 0, 0
        limits = self._limits
        for row, (prompt, record, *images) in enumerate(zip(prompts, records, *sides, strict=True)):
            area = sum(image.shape[1] * image.shape[2] for image in images)
            if len(prompt) > limits["max_prompt"]:
                area = limits["max_pixels"] + 1
            # text is JSON within JSON, and each image has its shape in the header
            length = len(json.dumps(json.dumps([prompt, record], default=str))) + 120 * len(images)
            is_large = pixels + area > limits["max_pixels"] or header + length > limits["max_header"]
            if row > start and (is_large or row - start >= self._max_rows):
                chunks.append(slice(start, row))
                start, pixels, header = row, 0, 0
            pixels, header = pixels + area, header + length
        return [*chunks, slice(start, len(prompts))] if prompts else []

    def _read_health(self, server: _Server) -> Mapping[str, Any]:
        """Read a server's card and limits."""
        deadline, failures = time.monotonic() + self._patience, 0
        while True:
            try:
                reply = server.client.get("/health")
                if not _is_busy(reply) or time.monotonic() > deadline:
                    break
            except httpx.TransportError as error:  # a full server closes connections, too
                failures += 1
                if failures >= self._attempts:
                    raise RewardError(
                        f"No reward server at {server.url} ({type(error).__name__}: {error}). Start one: "
                        "visalign serve-reward NAME."
                    ) from error
            time.sleep(self._pause)
        about = _json_object(reply) if reply.status_code == 200 else {}
        if "judge" not in about:
            raise RewardError(
                f"{server.url} answers {reply.status_code}, but is no reward server of visalign (no card at /health)."
            )
        return about

    def _request(self, path: str, request: JudgeRequest) -> Scores | Preferences:
        """Return the answer, or one without a valid row whose reason says why there is none."""
        body = pack_request(request)
        reason, failures, deadline = "", 0, time.monotonic() + self._patience
        allowed = self._attempts * len(self._servers)
        while failures < allowed:
            with self._next_server(len(request)) as server:
                try:
                    reply = server.client.post(path, content=body, headers={"Content-Type": MEDIA_TYPE})
                except httpx.TransportError as error:
                    reply = None
                    reason = f"the reward server did not answer ({type(error).__name__}: {error})"
            if reply is None:
                failures += 1
                self._back_off(server, reason)
            elif reply.status_code == 200:
                server.failures_in_a_row = 0
                return self._read_answer(server, reply, request)
            else:
                verb = "failed" if reply.status_code >= 500 else "refused it"
                error = str(_json_object(reply).get("error", reply.text[:200]))
                reason = f"the reward server {verb} ({reply.status_code}): {error}"
                if reply.status_code in _FATAL_STATUSES:
                    raise RewardError(f"{self.name!r} at {server.url}: {reason}")
                if reply.status_code not in _RETRIED_STATUSES:
                    return self._without_answer(request, reason)
                header = reply.headers.get("Retry-After", "")
                seconds = float(header) if header.isascii() and header.isdecimal() else 0.0
                if _is_busy(reply) and time.monotonic() < deadline:
                    server.pause(max(seconds, self._pause))
                else:
                    failures += 1
                    self._back_off(server, reason, seconds)
        return self._without_answer(request, f"{reason}; {allowed} attempts")

    def _read_answer(self, server: _Server, reply: httpx.Response, request: JudgeRequest) -> Scores | Preferences:
        """Read an answer; refuse one of another judge than the one whose card was read."""
        if reply.headers.get(JUDGE_HEADER, "") != ("" if self.identity is None else self.identity.weights):
            raise RewardError(
                f"The server at {server.url} serves another judge, or another version of it, than "
                f"{self.name!r} as it was when this client began. Make a new RemoteReward."
            )
        try:
            answer = unpack_answer(reply.content, len(request))
        except WireError as error:
            return self._without_answer(request, f"the reward server's answer is unreadable: {error}")
        if isinstance(answer, Scores) == (request.right is None):
            return answer
        return self._without_answer(request, "the reward server answered scores for pairs, or the reverse")

    def _without_answer(self, request: JudgeRequest, reason: str) -> Scores | Preferences:
        return _merge([], [], [reason] * len(request), None if request.right is not None else self.unit)

    @contextmanager
    def _next_server(self, rows: int) -> Iterator[_Server]:
        """Choose the server that may be asked soonest, then that with the fewest rows under way."""
        with self._lock:
            now = time.monotonic()
            server = min(self._servers, key=lambda server: (max(now, server.retry_at), server.rows_under_way))
            server.rows_under_way += rows
            wait = server.retry_at - now
        try:
            if wait > 0:
                time.sleep(wait)
            yield server
        finally:
            with self._lock:
                server.rows_under_way -= rows

    def _back_off(self, server: _Server, reason: str, seconds: float = 0.0) -> None:
        """Leave a server alone after a failure, for longer each time."""
        server.failures_in_a_row += 1
        server.pause(max(seconds, self._pause * 2.0 ** min(server.failures_in_a_row - 1, 16)))
        if server.failures_in_a_row == 1 and len(self._servers) > 1:
            warnings.warn(f"{server.url}: {reason}. Other servers take its work.", stacklevel=2)


def _describe(card: Mapping[str, Any]) -> str:
    return f"{card['name']!r} (identity {card.get('identity')})"


def _close(servers: Sequence[_Server]) -> None:
    for server in servers:
        server.client.close()


def _merge(
    answers: Sequence[Scores | Preferences],
    rows: Sequence[int],
    reasons: Sequence[str | None],
    unit: str | None,
) -> Scores | Preferences:
    """Merge the answers about `rows` into one over all B rows; the others are invalid with their reason.

    `unit` is that of scores, None for preferences.
    """
    size = len(reasons)
    tables = [{**columns_of(answer), "valid": answer.valid.float()} for answer in answers]
    columns = {"main": torch.full((size,), torch.nan), "valid": torch.zeros(size)}
    for name in dict.fromkeys(name for table in tables for name in table):
        parts = [table.get(name, torch.full_like(table["valid"], torch.nan)) for table in tables]
        columns[name] = scatter(torch.cat(parts), rows, size)
    texts: dict[str, list[Any]] = {"text": [None] * size, "reason": list(reasons)}
    for name, words in texts.items():
        entries = (word for answer in answers for word in getattr(answer, name) or [None] * len(answer))
        for row, word in zip(rows, entries, strict=True):
            words[row] = word
    text = [word or "" for word in texts["text"]] if any(texts["text"]) else None
    return answer_of(columns, columns.pop("valid") == 1, unit, text, texts["reason"])


def read_images(
    name: str, sides: Sequence[Any], prompts: Sequence[str], metadata: Metadata | None
) -> tuple[list[Pixels], list[str], list[Mapping[str, Any] | None], list[str | None]]:
    """Prepare a request: pixels of each side at 8 bits, prompts and records of the readable rows.

    Also returns a reason per row, None for the rows that are sent. Pairs have a left and a right side.
    """
    request = read_request(name, sides[0], prompts, metadata)
    batches = [request.images, *map(load_images, sides[1:])]
    if any(len(batch) != len(request) for batch in batches):
        raise ValueError(f"{name}: {len(batches[0])} left and {len(batches[1])} right images; give pairs.")
    reasons = [next(filter(None, why), None) for why in zip(*(b.reasons for b in batches), strict=True)]
    rows = [row for row, reason in enumerate(reasons) if reason is None]
    pixels: list[Pixels] = [
        [to_levels(image) for image in (batch.images[row] for row in rows) if image is not None] for batch in batches
    ]
    return pixels, [request.prompts[row] for row in rows], [request.metadata[row] for row in rows], reasons


def _json_object(reply: httpx.Response) -> Mapping[str, Any]:
    """Return the JSON object of a reply, empty if it has none."""
    try:
        value = reply.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_busy(reply: httpx.Response) -> bool:
    """Return True if a server only has no room now."""
    return reply.status_code == 503 and _json_object(reply).get("busy") is True
