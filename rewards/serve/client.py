# SPDX-License-Identifier: Apache-2.0
"""A judge on another machine: the client of `visalign serve-reward`, a reward like any other.

Images travel as 8-bit pixels: floats are rounded to the nearest of 256 levels, as a PNG would round them.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import torch
from torch import Tensor

from visalign.interfaces import Metadata, Preferences, Scores
from visalign.rewards.base.contract import RewardError, answer_of, columns_of, read_request, scatter
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import load_images

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
"""Requests of one call that are under way at once."""
_LONGEST_RETRY_AFTER = 30.0
"""Seconds that a server's Retry-After is obeyed."""


class RemoteReward:
    """Scores, or compares, through a server.

    Name, unit, range and direction are those of the judge that is served. What cannot be read is sorted out
    here; an image whose request failed after all attempts is invalid with the reason, never a number.

    Args:
        url: of the server, e.g. "http://127.0.0.1:8000".
        token: the server's, or None.
        token_env: name of an environment variable that holds it; wins over nothing, loses to `token`.
        timeout: seconds for one request; half a minute more than the server allows its judge when None.
        attempts: tries of a request that fails in passing (busy, connection lost).
        pause: seconds before the second try, doubled for each further one.
        batch_size: images in one request; the server's batch size when None.

    Raises:
        RewardError: the server cannot be reached, or is none of ours.
        ValueError: attempts or batch_size below 1.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        token_env: str | None = None,
        timeout: float | None = None,
        attempts: int = 4,
        pause: float = 0.25,
        batch_size: int | None = None,
    ) -> None:
        if attempts < 1 or (batch_size is not None and batch_size < 1):
            raise ValueError(f"attempts is {attempts} and batch_size {batch_size}; both must be at least 1.")
        secret = token or (os.environ.get(token_env) if token_env else None)
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self.url = url.rstrip("/")
        self._client = httpx.Client(base_url=self.url, timeout=timeout or 30.0, headers=headers)
        self._end = weakref.finalize(self, self._client.close)
        self._attempts, self._pause = attempts, pause
        about = self._health()
        card, limits = about["judge"], about["limits"]
        self._client.timeout = timeout or float(limits["timeout"]) + 30.0
        self.name = str(card["name"])
        self._scores, self._compares = bool(card["scores"]), bool(card["compares"])
        self.unit = str(card.get("unit", ""))
        low, high = card.get("range", ("-inf", "inf"))
        self.range = (float(low), float(high))
        self.higher_is_better = bool(card.get("higher_is_better", True))
        self.needs_group = bool(card.get("needs_group"))
        if card.get("identity"):
            self.identity = Identity(judge=self.name, model="remote", weights=str(card["identity"]))
        self._batch = min(batch_size or int(limits["max_batch"]), int(limits["max_rows"]))
        self._pixels, self._longest = int(limits["max_pixels"]), int(limits["max_prompt"])

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
        sides, texts, records, reasons = read_pictures(self.name, images, prompts, metadata)
        rows = [row for row, reason in enumerate(reasons) if reason is None]

        def ask(part: slice) -> Scores | Preferences:
            one, *other = (side[part] for side in sides)
            right = other[0] if other else None
            return self._ask(
                path, JudgeRequest(images=one, right=right, prompts=texts[part], metadata=records[part])
            )

        found = self._in_order(ask, self._chunks(sides, texts))
        return spread(found, rows, reasons, self.unit if path == "/v1/score" else None)

    def close(self) -> None:
        """Hang up."""
        self._end()

    def _in_order(
        self, ask: Callable[[slice], Scores | Preferences], parts: list[slice]
    ) -> list[Scores | Preferences]:
        """The answers in order; while the server judges one request the next is packed and sent."""
        if len(parts) < 2:
            return [ask(part) for part in parts]
        pool = ThreadPoolExecutor(_CONCURRENT_REQUESTS)
        try:
            return list(pool.map(ask, parts))
        finally:
            pool.shutdown(cancel_futures=True)

    def _chunks(self, sides: Sequence[Pixels], prompts: Sequence[str]) -> list[slice]:
        """Rows of one request each: at most a batch, and at most as many pixels as the server takes; what it
        will refuse as too large stands alone."""
        parts, start, pixels = [], 0, 0
        for row, (prompt, *images) in enumerate(zip(prompts, *sides, strict=True)):
            own = sum(image.shape[1] * image.shape[2] for image in images)
            own = own if len(prompt) <= self._longest else self._pixels + 1
            if row > start and (row - start >= self._batch or pixels + own > self._pixels):
                parts.append(slice(start, row))
                start, pixels = row, 0
            pixels += own
        return [*parts, slice(start, len(sides[0]))] if len(sides[0]) else []

    def _health(self) -> Mapping[str, Any]:
        try:
            reply = self._client.get("/health")
            about = reply.json() if reply.status_code == 200 else None
        except httpx.TransportError as error:
            raise RewardError(
                f"No reward server at {self.url} ({type(error).__name__}: {error}). Start one: "
                "visalign serve-reward NAME."
            ) from error
        except ValueError:
            about = None
        if not isinstance(about, dict) or "judge" not in about:
            raise RewardError(
                f"{self.url} answers, but is no reward server of visalign (no card at /health)."
            )
        return about

    def _ask(self, path: str, asked: JudgeRequest) -> Scores | Preferences:
        """The answer, or one of which nothing is valid that says why there is none."""

        def unknown(why: str) -> Scores | Preferences:
            return spread([], [], [why] * len(asked), None if asked.right is not None else self.unit)

        body = pack_request(asked)
        why, rest = "", 0.0
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(max(rest, self._pause * 2 ** (attempt - 1)))
            rest = 0.0
            try:
                reply = self._client.post(path, content=body, headers={"Content-Type": MEDIA_TYPE})
            except httpx.TransportError as error:
                why = f"the reward server did not answer ({type(error).__name__}: {error})"
                continue
            if reply.status_code == 200:
                self._check_judge(reply.headers.get(JUDGE_HEADER, ""))
                try:
                    answer = unpack_answer(reply.content, len(asked))
                    if isinstance(answer, Scores) != (asked.right is None):
                        raise WireError("it is of another kind than what was asked for.")
                    return answer
                except WireError as error:
                    return unknown(f"the reward server's answer is unreadable: {error}")
            failed = "failed" if reply.status_code >= 500 else "refused it"
            why = f"the reward server {failed} ({reply.status_code}): {_error_message(reply)}"
            rest = _retry_after(reply.headers.get("Retry-After", ""))
            if reply.status_code in _CALL_FAILS_STATUSES:
                raise RewardError(f"{self.name!r} at {self.url}: {why}")
            if reply.status_code not in _PASSING_STATUSES:
                return unknown(why)
        return unknown(f"{why}; {self._attempts} attempts")

    def _check_judge(self, digest: str) -> None:
        """Refuse answers of another judge than the one whose card was read."""
        known = getattr(self, "identity", None)
        if digest != ("" if known is None else known.weights):
            raise RewardError(
                f"The server at {self.url} serves another judge, or another version of it, than "
                f"{self.name!r} as it was when this client began. Make a new RemoteReward."
            )


def spread(
    found: Sequence[Scores | Preferences],
    rows: Sequence[int],
    reasons: Sequence[str | None],
    unit: str | None,
) -> Scores | Preferences:
    """The answers to several requests, in order, as one over all B rows; what was not asked about is NaN and
    invalid with its reason. `unit` is that of scores, None for preferences.
    """
    size = len(reasons)
    each = [{**columns_of(answer), "valid": answer.valid.float()} for answer in found]
    columns = {
        name: scatter(
            torch.cat([own.get(name, torch.full_like(own["valid"], torch.nan)) for own in each]), rows, size
        )
        for name in dict.fromkeys(name for own in each for name in own)
    }
    empty = torch.full((size,), torch.nan)
    said: dict[str, list[Any]] = {"text": [None] * size, "reason": list(reasons)}
    for name, words in said.items():
        told = (word for answer in found for word in getattr(answer, name) or [None] * len(answer))
        for row, word in zip(rows, told, strict=True):
            words[row] = word
    text = [word or "" for word in said["text"]] if any(said["text"]) else None
    valid = columns.pop("valid", empty) == 1
    return answer_of({"main": empty, **columns}, valid, unit, text, said["reason"])


def read_pictures(
    name: str, sides: Sequence[Any], prompts: Sequence[str], metadata: Metadata | None
) -> tuple[list[Pixels], list[str], list[Mapping[str, Any] | None], list[str | None]]:
    """What is sent: the pixels of each side at 8 bits, prompts and records of the rows in which all images
    could be read; and of all B rows the reason why it is left out, or None. Of pairs the sides are the
    left and the right images.
    """
    levels = [_as_uint8_batch(side) for side in sides]
    # An image of one pixel stands for what is 8-bit already: prompts and records are checked all the same.
    stands = [
        side if known is None else torch.zeros(len(known), 3, 1, 1)
        for side, known in zip(sides, levels, strict=True)
    ]
    request = read_request(name, stands[0], prompts, metadata)
    batches = [request.images, *(load_images(side) for side in stands[1:])]
    if any(len(batch) != len(request) for batch in batches):
        raise ValueError(f"{name}: {len(batches[0])} left and {len(batches[1])} right images; give pairs.")
    reasons = [next(filter(None, why), None) for why in zip(*(b.reasons for b in batches), strict=True)]
    rows = [row for row, reason in enumerate(reasons) if reason is None]
    pixels: list[Pixels] = []
    for batch, known in zip(batches, levels, strict=True):
        if known is None:
            pixels.append(
                [_to_uint8(image) for image in (batch.images[row] for row in rows) if image is not None]
            )
        else:
            pixels.append(known if len(rows) == len(request) else known[rows])
    return pixels, [request.prompts[row] for row in rows], [request.metadata[row] for row in rows], reasons


def _as_uint8_batch(images: Any) -> Tensor | None:
    """uint8 [B, 3, H, W] of images that are 8-bit in a layout beyond doubt; else None, for `load_images`."""
    is_array = isinstance(images, np.ndarray) and images.dtype == np.uint8
    found = torch.from_numpy(np.array(images)) if is_array else images  # a copy can always be written to
    if not isinstance(found, Tensor) or found.dtype != torch.uint8 or found.ndim != 4 or 0 in found.shape:
        return None
    first, last = found.shape[1] == 3, found.shape[3] == 3
    if first == last:
        return None
    return (found if first else found.permute(0, 3, 1, 2)).cpu().contiguous()


def _to_uint8(image: Tensor) -> Tensor:
    return image.mul(255).round().clamp(0, 255).to(torch.uint8).cpu()


def _retry_after(said: str) -> float:
    """Seconds that a server asks to wait, within reason."""
    return min(float(said), _LONGEST_RETRY_AFTER) if said.isdigit() else 0.0


def _error_message(reply: Any) -> str:
    try:
        return str(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]
