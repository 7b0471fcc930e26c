# SPDX-License-Identifier: Apache-2.0
"""Client of `visalign serve-reward`: a judge on other machines as a reward; images travel as 8-bit pixels."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import httpx

from visalign.interfaces import Metadata, Preferences, RewardCapabilities, Scores
from visalign.rewards.base.contract import (
    GROUP_KEY,
    RewardError,
    answer_of,
    check_counts,
    check_rules,
    read_pairs,
    read_request,
    rows_of,
)
from visalign.rewards.base.identity import Identity
from visalign.vision.pixels import to_levels

from .wire import CAPABILITIES, JUDGE_HEADER, MEDIA_TYPE, JudgeRequest, WireError, pack_request, unpack_answer

_RETRIED_STATUSES = (408, 429, 502, 503, 504)
_FATAL_STATUSES = (401, 403, 404, 411, 415)  # Statuses that any request of the call would get
_CONCURRENT_REQUESTS = 2
"""Requests of one call under way at each server: while it judges one, the next is packed and sent."""
_MAX_PAUSE = 30.0  # Longest pause, in seconds, before a server is asked again, whatever its Retry-After says
_CONNECT_SECONDS = 10.0
_LIMITS = ("max_batch", "max_rows", "max_pixels", "max_prompt", "max_header")
_SHARED_FIELDS = ("name", "identity", "scores", "compares", "unit")
"""Fields in which the cards of servers of one list agree."""


class _Server:
    """State of a server: what is under way there, and when it may be asked again."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self.client, self.url = client, url
        self.rows_under_way = self.failures_in_a_row = 0
        self.retry_at = 0.0


class RemoteReward:
    """Scores, or compares, through one server or several of the same judge, with its name, unit and range.

    An image whose request failed after all attempts is invalid with the reason, never a number. Of several servers the
    one with the fewest rows under way is asked; a request that fails at one goes to another, and one that failed is
    left out for a while. Scores and their order do not depend on the server that answered.

    Args:
        url: of the server, e.g. "http://127.0.0.1:8000"; or a list of them, or several with commas between.
        token_env: name of an environment variable that holds the token, unless `token` is given.
        timeout: seconds for one request; half a minute more than the server allows its judge when None.
        attempts: tries of a request at each server that fails in passing (connection lost, judge died).
        pause: seconds before a server is asked again, doubled for each further failure.
        patience: seconds for which servers that are only busy are asked again, which counts as no attempt.
        batch_size: images in one request; the smallest of the servers' batch sizes when None.
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
        check_counts("remote", attempts=attempts, batch_size=batch_size)
        is_header = token.isascii() and (token + "_").isprintable() and " " not in token  # httpx's error would show it
        are_positive = pause > 0 and (timeout is None or timeout > 0)
        rules = {
            f"url is {url!r}; give the address of a server, or a list of them": bool(urls),
            f"timeout is {timeout} and pause {pause}; allowed are seconds above 0": are_positive,
            "token holds characters that no HTTP header may hold, such as a line break or a space": is_header,
        }
        check_rules("remote", rules)
        self.url = ", ".join(urls)
        self._attempts, self._pause, self._patience = attempts, pause, patience
        self._lock = threading.Lock()
        headers, clients = {"Authorization": f"Bearer {token}"} if token else {}, ExitStack()
        self._servers = [
            _Server(
                clients.enter_context(httpx.Client(base_url=address, headers=headers, timeout=timeout or 30.0)),
                address,
            )
            for address in urls
        ]
        self._end = weakref.finalize(self, clients.close)
        with ThreadPoolExecutor(len(urls)) as pool:
            abouts = list(pool.map(self._read_health, self._servers))
        card = abouts[0]["judge"]
        for server, about in zip(self._servers, abouts, strict=True):
            if any(about["judge"].get(field) != card.get(field) for field in _SHARED_FIELDS):
                other, first = (f"{c['name']!r} (identity {c.get('identity')})" for c in (about["judge"], card))
                raise RewardError(f"{server.url} serves {other}, and {urls[0]} serves {first}. Leave one of them out.")
            seconds = timeout or float(about["limits"]["timeout"]) + 30.0
            server.client.timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
        self._limits = {name: min(int(about["limits"][name]) for about in abouts) for name in _LIMITS}
        self.name, self.unit = str(card["name"]), str(card.get("unit", ""))
        low, high = card.get("range", ("-inf", "inf"))
        self.range = (float(low), float(high))
        self.higher_is_better = bool(card.get("higher_is_better", True))
        needs: dict[str, Any] = {name: bool(card[name]) for name in CAPABILITIES if name in card}
        self.capabilities = RewardCapabilities(**needs)
        rows = (
            self._limits["max_rows"] if self.capabilities.compares_samples else batch_size or self._limits["max_batch"]
        )
        self._max_rows = min(rows, self._limits["max_rows"])
        self.identity: Any = None
        if card.get("identity"):
            self.identity = Identity(judge=self.name, model="remote", weights=str(card["identity"]))

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images; a judge of pairs raises RewardError."""
        return self._judge("/v1/score", images, None, prompts, metadata)

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        """Compare B pairs; a judge of single images raises RewardError."""
        return self._judge("/v1/compare", left, right, prompts, metadata)

    def close(self) -> None:
        self._end()

    def _judge(self, path: str, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None) -> Any:
        request, rows, reasons = readable_rows(self.name, left, right, prompts, metadata)
        entries: list[Mapping[str, Any]] = [_failed_row(reason) for reason in reasons]
        parts = [*self._split(request)]
        groups = [group for part in parts for group in {_group(part, row) for row in range(len(part))}]
        is_cut = self.capabilities.needs_batch or len(set(groups)) < len(groups)
        if self.capabilities.compares_samples and len(parts) > 1 and is_cut:
            raise RewardError(
                f"{self.name!r} compares images with each other, and {len(request)} do not go to {self.url} together. "
                f"Score at most {self._max_rows} at once, the images of a group in a row, or start the server with "
                "more --memory or --max-pixels."
            )
        pool = ThreadPoolExecutor(_CONCURRENT_REQUESTS * len(self._servers))
        try:
            answers = pool.map(lambda part: self._request(path, part), parts)
            for row, entry in zip(rows, chain.from_iterable(answers), strict=True):
                entries[row] = entry
        finally:
            pool.shutdown(cancel_futures=True)
        return answer_of(entries, self.unit if right is None else None)

    def _split(self, request: JudgeRequest) -> Iterator[JudgeRequest]:
        """Split a request by the servers' limits, before a group that would be cut if the judge compares its images.

        A row that is too large is its own request.
        """
        limits, bounds, start, pixels, header = self._limits, [0], 0, 0, 0
        areas, lengths = list[int](), list[int]()
        for row, (prompt, record) in enumerate(zip(request.prompts, request.metadata, strict=True)):
            images = [side[row] for side in (request.images, request.right) if side is not None]
            area = sum(image.shape[1] * image.shape[2] for image in images)
            if len(prompt) > limits["max_prompt"]:
                area = limits["max_pixels"] + 1
            # text is JSON within JSON, and each image has its shape in the header
            length = len(json.dumps(json.dumps([prompt, record], default=str))) + 120 * len(images)
            areas.append(area)
            lengths.append(length)
            if not self.capabilities.compares_samples or row == 0 or _group(request, row) != _group(request, row - 1):
                start = row
            is_large = pixels + area > limits["max_pixels"] or header + length > limits["max_header"]
            if row > bounds[-1] and (is_large or row - bounds[-1] >= self._max_rows):
                fits = sum(areas[start:]) <= limits["max_pixels"] and sum(lengths[start:]) <= limits["max_header"]
                bounds.append(start if bounds[-1] < start and row - start < self._max_rows and fits else row)
                pixels, header = sum(areas[bounds[-1] : row]), sum(lengths[bounds[-1] : row])
            pixels, header = pixels + area, header + length
        for first, end in zip(bounds, [*bounds[1:], len(request)], strict=True):
            if first < end:
                yield replace(
                    request,
                    images=request.images[first:end],
                    prompts=request.prompts[first:end],
                    metadata=request.metadata[first:end],
                    right=request.right and request.right[first:end],
                )

    def _read_health(self, server: _Server) -> Mapping[str, Any]:
        deadline, failures = time.monotonic() + self._patience, 0
        while True:
            try:
                reply = server.client.get("/health")
                about = _json_object(reply)
                if "judge" in about:
                    return about
                if about.get("busy") is not True or time.monotonic() > deadline:
                    raise RewardError(f"{server.url} answers {reply.status_code}, but is no reward server of ours.")
            except httpx.TransportError as error:  # a full server closes connections, too
                failures += 1
                if failures >= self._attempts:
                    raise RewardError(
                        f"No reward server at {server.url} ({error}). Start one: visalign serve-reward NAME."
                    ) from error
            time.sleep(self._pause)

    def _request(self, path: str, request: JudgeRequest) -> list[dict[str, Any]]:
        """Return the rows of the answer, all failed with the reason if there is none."""
        body = pack_request(request)
        reason, failures, deadline = "", 0, time.monotonic() + self._patience
        allowed = self._attempts * len(self._servers)
        while failures < allowed:
            is_busy, seconds = False, 0.0
            with self._next_server(len(request)) as server:
                try:
                    reply = server.client.post(path, content=body, headers={"Content-Type": MEDIA_TYPE})
                except httpx.TransportError as error:
                    reply = None
                    reason = f"the reward server did not answer ({type(error).__name__}: {error})"
            if reply is not None:
                if reply.status_code == 200:
                    server.failures_in_a_row = 0
                    return self._read_answer(server, reply, len(request))
                about = _json_object(reply)
                verb = "failed" if reply.status_code >= 500 else "refused it"
                reason = f"the reward server {verb} ({reply.status_code}): {about.get('error', reply.text[:200])}"
                if reply.status_code in _FATAL_STATUSES:
                    raise RewardError(f"{self.name!r} at {server.url}: {reason}")
                if reply.status_code not in _RETRIED_STATUSES:
                    break
                retry_after = reply.headers.get("Retry-After", "")  # its other form, a date, is ignored
                seconds = float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else 0.0
                is_busy = about.get("busy") is True and time.monotonic() < deadline
            failures += not is_busy
            self._back_off(server, "" if is_busy else reason, seconds)
        else:
            reason += f"; {allowed} attempts"
        return [_failed_row(reason)] * len(request)

    def _read_answer(self, server: _Server, reply: httpx.Response, size: int) -> list[dict[str, Any]]:
        """Read an answer; refuse one of another judge than the one whose card was read."""
        if reply.headers.get(JUDGE_HEADER, "") != ("" if self.identity is None else self.identity.weights):
            raise RewardError(f"{server.url} serves another judge, or version of it, than {self.name!r} as it was.")
        try:
            return rows_of(unpack_answer(reply.content, size))
        except WireError as error:
            return [_failed_row(f"the reward server's answer is unreadable: {error}")] * size

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

    def _back_off(self, server: _Server, reason: str, seconds: float) -> None:
        """Leave a server alone, after a failure (with a reason) for longer each time."""
        server.failures_in_a_row += bool(reason)
        factor = 2.0 ** min(server.failures_in_a_row - 1, 16) if reason else 1.0
        server.retry_at = time.monotonic() + min(max(seconds, self._pause * factor), _MAX_PAUSE)
        if reason and server.failures_in_a_row == 1 and len(self._servers) > 1:
            warnings.warn(f"{server.url}: {reason}. Other servers take its work.", stacklevel=2)


def readable_rows(
    name: str, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None
) -> tuple[JudgeRequest, list[int], list[str | None]]:
    """Prepare a request of the rows whose images can be read; return it, their numbers, and a reason per row."""
    if right is None:
        request = read_request(name, left, prompts, metadata)
        numbers = [[row] for row in range(len(request))]
    else:
        request, pairs = read_pairs(name, left, right, prompts, metadata)
        numbers = pairs.tolist()
    images, why = request.images.images, request.images.reasons
    reasons = [next((why[number] for number in row if why[number] is not None), None) for row in numbers]
    rows = [row for row, reason in enumerate(reasons) if reason is None]
    levels = [[to_levels(images[number]) for number in numbers[row]] for row in rows]  # type: ignore[arg-type]
    readable = JudgeRequest(
        images=[row[0] for row in levels],
        prompts=[request.prompts[row] for row in rows],
        metadata=[request.metadata[row] for row in rows],
        right=None if right is None else [row[1] for row in levels],
    )
    return readable, rows, reasons


def _group(request: JudgeRequest, row: int) -> Any:
    return (request.metadata[row] or {}).get(GROUP_KEY)


def _failed_row(reason: str | None) -> dict[str, Any]:
    return {"columns": {}, "text": None, "reason": reason}


def _json_object(reply: httpx.Response) -> Mapping[str, Any]:
    try:
        value = reply.json()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
