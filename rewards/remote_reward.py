# SPDX-License-Identifier: Apache-2.0
"""A judge on another machine: the client of `visalign serve-reward`, a reward like any other.

Images travel as 8-bit pixels: floats are rounded to the nearest of 256 levels, as a PNG would round them.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visalign.interfaces import Metadata, Preferences, Scores

from .contract import RewardError, make_scores, read_request, scatter
from .identity import Identity
from .images import load_images
from .wire import JUDGE_HEADER, MEDIA_TYPE, JudgeRequest, WireError, pack_request, unpack_answer

_PASSING = (408, 429, 502, 503, 504)
_OURS = (401, 403, 404, 411, 413, 415)


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
        RewardError: httpx is not installed, the server cannot be reached, or is none of ours.
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
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise RewardError(
                "A remote reward needs httpx, which is not installed: python -m pip install "
                "'visalign[serve]'."
            ) from error
        secret = token or (os.environ.get(token_env) if token_env else None)
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self.url = url.rstrip("/")
        self._client = httpx.Client(base_url=self.url, timeout=timeout or 30.0, headers=headers)
        self._end = weakref.finalize(self, self._client.close)
        self._broken: tuple[type[Exception], ...] = (httpx.TransportError,)
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
        self._pixels = int(limits["max_pixels"])

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images."""
        if not self._scores:
            raise RewardError(f"{self.name!r} at {self.url} only compares pairs; use compare.")
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows = [row for row, _ in request.images.readable()]
        levels = [_levels(image) for _, image in request.images.readable()]
        texts = [request.prompts[row] for row in rows]
        records = [request.metadata[row] for row in rows]
        found: list[Scores] = []
        for part in self._chunks(levels, None):
            asked = JudgeRequest(images=levels[part], prompts=texts[part], metadata=records[part])
            found.append(self._scored(asked))
        return _spread(found, rows, reasons, self.unit)

    def compare(
        self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare B pairs."""
        if not self._compares:
            raise RewardError(f"{self.name!r} at {self.url} scores single images; use score.")
        request, other = read_request(self.name, left, prompts, metadata), load_images(right)
        if len(other) != len(request):
            raise ValueError(f"{self.name}: {len(request)} left and {len(other)} right images; give pairs.")
        reasons = [a or b for a, b in zip(request.images.reasons, other.reasons, strict=True)]
        rows = [row for row, reason in enumerate(reasons) if reason is None]
        sides = [
            [_levels(i) for i in (batch.images[row] for row in rows) if i is not None]
            for batch in (request.images, other)
        ]
        texts, records = [request.prompts[row] for row in rows], [request.metadata[row] for row in rows]
        found = []
        for part in self._chunks(*sides):
            asked = JudgeRequest(
                images=sides[0][part], right=sides[1][part], prompts=texts[part], metadata=records[part]
            )
            answer, why = self._ask("/v1/compare", asked)
            found.append(answer if isinstance(answer, Preferences) else _unknown(len(asked), why))
        return _spread_preferences(found, rows, reasons)

    def close(self) -> None:
        """Hang up."""
        self._end()

    def _scored(self, asked: JudgeRequest) -> Scores:
        answer, why = self._ask("/v1/score", asked)
        if isinstance(answer, Scores):
            return answer
        return make_scores(torch.full((len(asked),), torch.nan), [why] * len(asked), self.unit)

    def _chunks(self, images: list[Tensor], others: list[Tensor] | None) -> list[slice]:
        """Rows of one request each: at most a batch, and at most as many pixels as the server takes."""
        parts, start, pixels = [], 0, 0
        for row, image in enumerate(images):
            own = image.shape[1] * image.shape[2]
            own += 0 if others is None else others[row].shape[1] * others[row].shape[2]
            if row > start and (row - start >= self._batch or pixels + own > self._pixels):
                parts.append(slice(start, row))
                start, pixels = row, 0
            pixels += own
        return [*parts, slice(start, len(images))] if images else []

    def _health(self) -> Mapping[str, Any]:
        try:
            reply = self._client.get("/health")
            about = reply.json() if reply.status_code == 200 else None
        except self._broken as error:
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

    def _ask(self, path: str, asked: JudgeRequest) -> tuple[Scores | Preferences | None, str]:
        """The answer, or None and why there is none."""
        body = pack_request(asked)
        why = ""
        for attempt in range(self._attempts):
            if attempt:
                time.sleep(self._pause * 2 ** (attempt - 1))
            try:
                reply = self._client.post(path, content=body, headers={"Content-Type": MEDIA_TYPE})
            except self._broken as error:
                why = f"the reward server did not answer ({type(error).__name__}: {error})"
                continue
            if reply.status_code == 200:
                self._check_judge(reply.headers.get(JUDGE_HEADER, ""))
                try:
                    return unpack_answer(reply.content, len(asked)), ""
                except WireError as error:
                    return None, f"the reward server's answer is unreadable: {error}"
            why = f"the reward server refused it ({reply.status_code}): {_complaint(reply)}"
            if reply.status_code in _OURS:
                raise RewardError(f"{self.name!r} at {self.url}: {why}")
            if reply.status_code not in _PASSING:
                return None, why
        return None, f"{why}; {self._attempts} attempts"

    def _check_judge(self, digest: str) -> None:
        """Refuse answers of another judge than the one whose card was read."""
        known = getattr(self, "identity", None)
        if digest != ("" if known is None else known.weights):
            raise RewardError(
                f"The server at {self.url} serves another judge, or another version of it, than "
                f"{self.name!r} as it was when this client began. Make a new RemoteReward."
            )


def _levels(image: Tensor) -> Tensor:
    return image.mul(255).round().clamp(0, 255).to(torch.uint8).cpu()


def _complaint(reply: Any) -> str:
    try:
        return str(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:200]


def _unknown(size: int, why: str) -> Preferences:
    return Preferences(
        prob=torch.full((size,), torch.nan), valid=torch.zeros(size, dtype=torch.bool), reason=[why] * size
    )


def _columns(found: Sequence[Any], name: str, rows: Sequence[int], size: int) -> Tensor | None:
    if all(getattr(answer, name) is None for answer in found):
        return None
    own = [
        torch.full((len(answer),), torch.nan) if getattr(answer, name) is None else getattr(answer, name)
        for answer in found
    ]
    return scatter(torch.cat(own), rows, size)


def _parts(found: Sequence[Any], rows: Sequence[int], size: int) -> dict[str, Tensor]:
    names = dict.fromkeys(name for answer in found for name in answer.parts)
    empty = torch.nan
    return {
        name: scatter(torch.cat([a.parts.get(name, torch.full((len(a),), empty)) for a in found]), rows, size)
        for name in names
    }


def _words(found: Sequence[Any], name: str, rows: Sequence[int], size: int) -> list[Any]:
    said = [word for answer in found for word in (getattr(answer, name) or [None] * len(answer))]
    full: list[Any] = [None] * size
    for row, word in zip(rows, said, strict=True):
        full[row] = word
    return full


def _merged(found: Sequence[Any], rows: Sequence[int], reasons: list[str | None]) -> dict[str, Any]:
    """What scores and preferences have in common, spread over all rows."""
    size = len(reasons)
    valid = torch.zeros(size, dtype=torch.bool)
    said = _words(found, "reason", rows, size)
    if rows:
        valid[torch.tensor(rows)] = torch.cat([answer.valid for answer in found])
    text = _words(found, "text", rows, size)
    return {
        "valid": valid,
        "std": _columns(found, "std", rows, size) if found else None,
        "parts": _parts(found, rows, size),
        "text": [word or "" for word in text] if any(text) else None,
        "reason": [own or other for own, other in zip(reasons, said, strict=True)],
    }


def _spread(found: list[Scores], rows: list[int], reasons: list[str | None], unit: str) -> Scores:
    value = _columns(found, "value", rows, len(reasons)) if found else None
    value = torch.full((len(reasons),), torch.nan) if value is None else value
    return Scores(value=value, unit=unit, **_merged(found, rows, reasons))


def _spread_preferences(found: list[Preferences], rows: list[int], reasons: list[str | None]) -> Preferences:
    prob = _columns(found, "prob", rows, len(reasons)) if found else None
    prob = torch.full((len(reasons),), torch.nan) if prob is None else prob
    log_odds = _columns(found, "log_odds", rows, len(reasons)) if found else None
    return replace(Preferences(prob=prob, **_merged(found, rows, reasons)), log_odds=log_odds)
