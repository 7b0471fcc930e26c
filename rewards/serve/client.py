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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import torch
from torch import Tensor

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

_PASSING_STATUSES = (408, 429, 502, 503, 504)
_CALL_FAILS_STATUSES = (401, 403, 404, 411, 415)
_CONCURRENT_REQUESTS = 2
"""Requests of one call that are under way at once at each server."""
_LONGEST_REST = 30.0
"""Seconds that a server is left alone at most, whatever its Retry-After says."""
_CONNECT_SECONDS = 10.0
_SIZES = ("max_batch", "max_rows", "max_pixels", "max_prompt", "max_header")
_SAME = ("name", "identity", "scores", "compares", "unit")
"""What the cards of servers of one list have in common."""


class _Server:
    """A server with its state."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout: float) -> None:
        self.url = url
        self.client = httpx.Client(
            base_url=url, timeout=httpx.Timeout(timeout, connect=_CONNECT_SECONDS), headers=headers
        )
        self.is_known = False
        self.under_way = 0
        """Rows."""
        self.failures = 0
        """In a row."""
        self.rests_until = 0.0
        self.is_other = False
        """Came back with another judge."""

    def rest(self, seconds: float) -> None:
        self.rests_until = time.monotonic() + min(seconds, _LONGEST_REST)


class _OtherJudge(RewardError):
    """A server serves another judge than the one that was asked for."""


class _Unanswered(RewardError):
    """No server at an address, or none that answers now."""


class RemoteReward:
    """Scores, or compares, through one server or several of the same judge.

    Name, unit, range and direction are those of the judge that is served. What cannot be read is sorted out
    here; an image whose request failed after all attempts is invalid with the reason, never a number. Of
    several servers the one with the fewest rows under way is asked; a request that fails at one goes to
    another, and one that failed is left alone for a while. Which server answered makes no difference to the
    scores or to their order.

    Args:
        url: of the server, e.g. "http://127.0.0.1:8000"; or a list of them, or several with commas between.
        token: the servers', or None.
        token_env: name of an environment variable that holds it; wins over nothing, loses to `token`.
        timeout: seconds for one request; half a minute more than the server allows its judge when None.
        attempts: tries of a request at each server that fails in passing (connection lost, judge died).
        pause: seconds before a server is asked again, doubled for each further failure.
        patience: seconds for which servers that are only busy are asked again, which counts as no attempt.
        batch_size: images in one request; the smallest of the servers' batch sizes when None.

    Raises:
        RewardError: no server can be reached, one is none of ours, or one serves another judge.
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
        if attempts < 1 or (batch_size is not None and batch_size < 1):
            raise ValueError(f"attempts is {attempts} and batch_size {batch_size}; both must be at least 1.")
        addresses = url.split(",") if isinstance(url, str) else url
        urls = list(dict.fromkeys(address.strip().rstrip("/") for address in addresses if address.strip()))
        if not urls:
            raise ValueError(f"url is {url!r}; give the address of a server, or a list of them.")
        self.url = ", ".join(urls)
        headers = _authorisation(token or (os.environ.get(token_env) if token_env else None))
        self._servers = [_Server(address, headers, timeout or 30.0) for address in urls]
        self._end = weakref.finalize(self, _close, self._servers)
        self._attempts, self._pause, self._patience, self._timeout = attempts, pause, patience, timeout
        self._choosing = threading.Lock()
        self._card: Mapping[str, Any] = {}
        self._sizes: dict[str, int] = {} if batch_size is None else {"max_batch": batch_size}
        self._meet_all()
        card = self._card
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
        return self._judged("/v1/score", [images], prompts, metadata)

    def compare(
        self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare B pairs."""
        if not self._compares:
            raise RewardError(f"{self.name!r} at {self.url} scores single images; use score.")
        return self._judged("/v1/compare", [left, right], prompts, metadata)

    def _judged(
        self, path: str, images: Sequence[Any], prompts: Sequence[str], metadata: Metadata | None
    ) -> Any:
        sides, texts, records, reasons = read_images(self.name, images, prompts, metadata)
        rows = [row for row, reason in enumerate(reasons) if reason is None]

        def ask(part: slice) -> Scores | Preferences:
            first, *other = (side[part] for side in sides)
            right = other[0] if other else None
            return self._ask(
                path, JudgeRequest(images=first, right=right, prompts=texts[part], metadata=records[part])
            )

        answers = self._in_order(ask, self._chunks(sides, texts, records))
        return spread(answers, rows, reasons, self.unit if path == "/v1/score" else None)

    def close(self) -> None:
        """Hang up."""
        self._end()

    def _in_order(
        self, ask: Callable[[slice], Scores | Preferences], parts: list[slice]
    ) -> list[Scores | Preferences]:
        """The answers in order; while a server judges one request the next is packed and sent."""
        if len(parts) < 2:
            return [ask(part) for part in parts]
        pool = ThreadPoolExecutor(_CONCURRENT_REQUESTS * len(self._servers))
        try:
            return list(pool.map(ask, parts))
        finally:
            pool.shutdown(cancel_futures=True)

    def _chunks(
        self, sides: Sequence[Pixels], prompts: Sequence[str], records: Sequence[Mapping[str, Any] | None]
    ) -> list[slice]:
        """Rows of one request each: at most a batch, and at most as many pixels and as much JSON as every
        server takes; what will be refused as too large stands alone."""
        parts, start, pixels, words = [], 0, 0, 0
        limits = self._sizes
        for row, (prompt, record, *images) in enumerate(zip(prompts, records, *sides, strict=True)):
            area = sum(image.shape[1] * image.shape[2] for image in images)
            area = area if len(prompt) <= limits["max_prompt"] else limits["max_pixels"] + 1
            length = _json_bytes(prompt, record, len(images))
            is_full = row - start >= min(limits["max_batch"], limits["max_rows"])
            is_large = pixels + area > limits["max_pixels"] or words + length > limits["max_header"]
            if row > start and (is_full or is_large):
                parts.append(slice(start, row))
                start, pixels, words = row, 0, 0
            pixels += area
            words += length
        return [*parts, slice(start, len(sides[0]))] if len(sides[0]) else []

    def _meet_all(self) -> None:
        """Read every server's card; who does not answer is met later, when it does."""

        def meet(server: _Server) -> RewardError | None:
            try:
                self._meet(server)
            except _Unanswered as error:
                return error
            return None

        with ThreadPoolExecutor(len(self._servers)) as pool:
            failures = list(pool.map(meet, self._servers))
        dead = [error for error in failures if error is not None]
        if len(dead) == len(self._servers):
            raise RewardError(" ".join(map(str, dead)))
        for server, error in zip(self._servers, failures, strict=True):
            if error is not None:
                server.failures = 1
                server.rest(self._pause)
        if dead:
            warnings.warn(
                f"{len(dead)} of {len(self._servers)} reward servers do not answer, the others take their "
                f"work: {' '.join(map(str, dead))}",
                stacklevel=4,
            )

    def _meet(self, server: _Server) -> None:
        """Read a server's card and limits; refuse what does not go with the others."""
        about = self._health(server)
        with self._choosing:
            self._card = self._card or about["judge"]
            if any(about["judge"].get(name) != self._card.get(name) for name in _SAME):
                raise _OtherJudge(
                    f"{server.url} serves {_described(about['judge'])}, and another server of {self.url} "
                    f"serves {_described(self._card)}; all must serve one version of one judge. Leave it out."
                )
            for name in _SIZES:
                limit = int(about["limits"].get(name, self._sizes.get(name, 1 << 22)))
                self._sizes[name] = min(limit, self._sizes.get(name, limit))
        seconds = self._timeout or float(about["limits"]["timeout"]) + 30.0
        server.client.timeout = httpx.Timeout(seconds, connect=min(seconds, _CONNECT_SECONDS))
        server.is_known = True

    def _health(self, server: _Server) -> Mapping[str, Any]:
        about: Any = None
        status, end, broken = 0, time.monotonic() + self._patience, 0
        try:
            while True:
                try:
                    reply = server.client.get("/health")
                except (httpx.ReadError, httpx.RemoteProtocolError):  # a full server closes connections
                    if (broken := broken + 1) >= self._attempts:
                        raise
                else:
                    if not _is_busy(reply) or time.monotonic() > end:
                        break
                time.sleep(self._pause)
            status = reply.status_code
            about = reply.json() if status == 200 else None
        except httpx.TransportError as error:
            raise _Unanswered(
                f"No reward server at {server.url} ({type(error).__name__}: {error}). Start one: "
                "visalign serve-reward NAME."
            ) from error
        except ValueError:
            pass
        if status in _PASSING_STATUSES:
            raise _Unanswered(f"{server.url} answers {status} when it is asked for its card.")
        if not isinstance(about, dict) or "judge" not in about:
            raise RewardError(
                f"{server.url} answers, but is no reward server of visalign (no card at /health)."
            )
        return about

    def _ask(self, path: str, request: JudgeRequest) -> Scores | Preferences:
        """The answer, or one of which nothing is valid that says why there is none."""

        def unknown(why: str) -> Scores | Preferences:
            return spread([], [], [why] * len(request), None if request.right is not None else self.unit)

        body = pack_request(request)
        why, failures, end = "", 0, time.monotonic() + self._patience
        allowed = self._attempts * len(self._servers)
        able = list(self._servers)
        while failures < allowed:
            server = self._choose(able, len(request))
            try:
                if not server.is_known:
                    self._meet(server)
                reply = server.client.post(path, content=body, headers={"Content-Type": MEDIA_TYPE})
            except _OtherJudge as error:
                self._leave_out(able, server, error)
                continue
            except (httpx.TransportError, _Unanswered) as error:
                why = f"the reward server did not answer ({type(error).__name__}: {error})"
                failures += 1
                self._leave_alone(server, why)
                continue
            finally:
                self._let_go(server, len(request))
            if reply.status_code == 200:
                try:
                    self._check_judge(server, reply.headers.get(JUDGE_HEADER, ""))
                except _OtherJudge as error:
                    self._leave_out(able, server, error)
                    continue
                server.failures, server.is_other = 0, False
                try:
                    return _read_answer(reply.content, request)
                except WireError as error:
                    return unknown(f"the reward server's answer is unreadable: {error}")
            failed = "failed" if reply.status_code >= 500 else "refused it"
            why = f"the reward server {failed} ({reply.status_code}): {_error_message(reply)}"
            if reply.status_code in _CALL_FAILS_STATUSES:
                raise RewardError(f"{self.name!r} at {server.url}: {why}")
            if reply.status_code == 413 and len(able) > 1:  # one that was met late may take less
                able.remove(server)
                continue
            if reply.status_code not in _PASSING_STATUSES:
                return unknown(why)
            rest = _retry_after(reply.headers.get("Retry-After", ""))
            if _is_busy(reply) and time.monotonic() < end:
                server.rest(max(rest, self._pause))
            else:
                failures += 1
                self._leave_alone(server, why, rest)
        return unknown(f"{why}; {allowed} attempts")

    def _choose(self, servers: Sequence[_Server], rows: int) -> _Server:
        """The server that rests least, then has least to do; back when its rest is over."""
        with self._choosing:
            now = time.monotonic()
            server = min(
                servers, key=lambda candidate: (max(now, candidate.rests_until), candidate.under_way)
            )
            server.under_way += rows
            rest = server.rests_until - now
        if rest > 0:
            time.sleep(rest)
        return server

    def _let_go(self, server: _Server, rows: int) -> None:
        with self._choosing:
            server.under_way -= rows

    def _leave_alone(self, server: _Server, why: str, seconds: float = 0.0) -> None:
        """After a failure, for longer each time; the first is told where others take the work."""
        server.failures += 1
        server.rest(max(seconds, self._pause * 2.0 ** min(server.failures - 1, 16)))
        if server.failures == 1 and len(self._servers) > 1:
            warnings.warn(f"{server.url}: {why}. Other servers take its work.", stacklevel=2)

    def _leave_out(self, able: list[_Server], server: _Server, error: _OtherJudge) -> None:
        """Go on without a server that came back with another judge, if any other is left."""
        if len(able) == 1:
            raise error
        able.remove(server)
        if not server.is_other:
            server.is_other, server.failures = True, 0  # it is told, whatever failed before
        self._leave_alone(server, str(error))

    def _check_judge(self, server: _Server, digest: str) -> None:
        """Refuse answers of another judge than the one whose card was read."""
        if digest != ("" if self.identity is None else self.identity.weights):
            raise _OtherJudge(
                f"The server at {server.url} serves another judge, or another version of it, than "
                f"{self.name!r} as it was when this client began. Make a new RemoteReward."
            )


def _authorisation(token: str | None) -> dict[str, str]:
    if not token:
        return {}
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError(
            "token holds characters that no HTTP header may hold, a line break or a space perhaps. Give the "
            "token alone."
        )
    return {"Authorization": f"Bearer {token}"}


def _described(card: Mapping[str, Any]) -> str:
    return f"{card['name']!r} (identity {card.get('identity')})"


def _close(servers: Sequence[_Server]) -> None:
    for server in servers:
        server.client.close()


def spread(
    answers: Sequence[Scores | Preferences],
    rows: Sequence[int],
    reasons: Sequence[str | None],
    unit: str | None,
) -> Scores | Preferences:
    """The answers to several requests, in order, as one over all B rows; what was not asked about is NaN and
    invalid with its reason. `unit` is that of scores, None for preferences.
    """
    size = len(reasons)
    tables = [{**columns_of(answer), "valid": answer.valid.float()} for answer in answers]
    columns = {
        name: scatter(
            torch.cat([table.get(name, torch.full_like(table["valid"], torch.nan)) for table in tables]),
            rows,
            size,
        )
        for name in dict.fromkeys(name for table in tables for name in table)
    }
    empty = torch.full((size,), torch.nan)
    texts: dict[str, list[Any]] = {"text": [None] * size, "reason": list(reasons)}
    for name, words in texts.items():
        entries = (word for answer in answers for word in getattr(answer, name) or [None] * len(answer))
        for row, word in zip(rows, entries, strict=True):
            words[row] = word
    text = [word or "" for word in texts["text"]] if any(texts["text"]) else None
    valid = columns.pop("valid", empty) == 1
    return answer_of({"main": empty, **columns}, valid, unit, text, texts["reason"])


def read_images(
    name: str, sides: Sequence[Any], prompts: Sequence[str], metadata: Metadata | None
) -> tuple[list[Pixels], list[str], list[Mapping[str, Any] | None], list[str | None]]:
    """Prepare what is sent: pixels of each side at 8 bits, prompts and records of the readable rows.

    Also returns a reason per row, None for the rows that are sent. Pairs have a left and a right side.
    """
    levels = [_as_uint8_batch(side) for side in sides]
    # An image of one pixel stands for what is 8-bit already: prompts and records are checked all the same.
    stands = [
        side if bytes_batch is None else torch.zeros(len(bytes_batch), 3, 1, 1)
        for side, bytes_batch in zip(sides, levels, strict=True)
    ]
    request = read_request(name, stands[0], prompts, metadata)
    batches = [request.images, *(load_images(side) for side in stands[1:])]
    if any(len(batch) != len(request) for batch in batches):
        raise ValueError(f"{name}: {len(batches[0])} left and {len(batches[1])} right images; give pairs.")
    reasons = [next(filter(None, why), None) for why in zip(*(b.reasons for b in batches), strict=True)]
    rows = [row for row, reason in enumerate(reasons) if reason is None]
    pixels: list[Pixels] = []
    for batch, bytes_batch in zip(batches, levels, strict=True):
        if bytes_batch is None:
            pixels.append(
                [to_levels(image) for image in (batch.images[row] for row in rows) if image is not None]
            )
        else:
            pixels.append(bytes_batch if len(rows) == len(request) else bytes_batch[rows])
    return pixels, [request.prompts[row] for row in rows], [request.metadata[row] for row in rows], reasons


def _as_uint8_batch(images: Any) -> Tensor | None:
    """uint8 [B, 3, H, W] of images that are 8-bit in a layout beyond doubt; else None, for `load_images`."""
    is_array = isinstance(images, np.ndarray) and images.dtype == np.uint8
    pixels = torch.from_numpy(np.array(images)) if is_array else images  # a copy can always be written to
    if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8 or pixels.ndim != 4 or 0 in pixels.shape:
        return None
    first, last = pixels.shape[1] == 3, pixels.shape[3] == 3
    if first == last:
        return None
    return (pixels if first else pixels.permute(0, 3, 1, 2)).cpu().contiguous()


def _read_answer(raw: bytes, request: JudgeRequest) -> Scores | Preferences:
    answer = unpack_answer(raw, len(request))
    if isinstance(answer, Scores) != (request.right is None):
        raise WireError("it is of another kind than what was asked for.")
    return answer


def _json_bytes(prompt: str, record: Mapping[str, Any] | None, sides: int) -> int:
    """Bound the bytes of a request's header for a row: its text (JSON within JSON) and its images' shapes."""
    return len(json.dumps(json.dumps([prompt, record], default=str))) + 120 * sides


def _is_busy(reply: httpx.Response) -> bool:
    """Return True if a server only has no room now."""
    try:
        return reply.status_code == 503 and reply.json()["busy"] is True
    except (ValueError, KeyError, TypeError):
        return False


def _retry_after(header: str) -> float:
    """Seconds that a server asks to wait; 0 where it does not say."""
    return float(header) if header.isascii() and header.isdecimal() else 0.0


def _error_message(reply: Any) -> str:
    try:
        return str(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]
