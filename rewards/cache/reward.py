# SPDX-License-Identifier: Apache-2.0
"""Rewards and pairwise judges with a `ScoreCache` in front of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visalign.interfaces import Metadata, PointwiseReward, Preferences, Scores, with_capabilities
from visalign.rewards.base.contract import RewardError, answer_of, columns_of, read_metadata
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import animation_length, load_animation

from .store import ScoreCache, key_of


class _Cached:
    """A reward or judge in front of a cache."""

    def __init__(self, judge: Any, cache: ScoreCache, *, identity: Identity | None = None) -> None:
        self.judge, self.cache, self.name = with_capabilities(judge), cache, judge.name
        self._identity = identity
        if self.judge.capabilities.needs_group:
            raise RewardError(
                f"Reward {judge.name!r} scores an image against its group, so a score means nothing by "
                "itself. Cache the judge that it asks instead."
            )
        if not isinstance(identity or judge.identity, Identity):
            raise RewardError(
                f"Reward {judge.name!r} has no identity, so a cache cannot know when its scores change. Give "
                "one: identity=Identity(judge=..., model=...)."
            )

    @property
    def identity(self) -> Identity:
        """Identity of the judge at this moment: training changes it."""
        return self._identity or self.judge.identity

    def _answer(
        self, keys: Sequence[bytes | None], ask: Callable[[list[int]], Scores | Preferences], unit: str | None
    ) -> Any:
        """Answer all rows from the cache or by `ask`, which gets each unknown content once.

        `unit` is that of scores, None for preferences; a row without a key is always asked.
        """
        identity = self.identity
        entries: dict[Any, Any] = dict(self.cache.get(identity, [key for key in keys if key is not None]))
        labels = [row if key is None else key for row, key in enumerate(keys)]
        first_row: dict[bytes | int, int] = {}
        for row, label in enumerate(labels):
            if label not in entries:
                first_row.setdefault(label, row)
        failures: dict[bytes | int, str] = {}
        if first_row:
            answer = ask(list(first_row.values()))
            reasons = answer.reason or [None] * len(answer)
            rows = zip(first_row, _entries(answer), answer.valid.tolist(), reasons, strict=True)
            fresh: dict[bytes | int, dict[str, Any]] = {}
            for label, entry, valid, reason in rows:
                if valid:
                    fresh[label] = entry
                else:
                    failures[label] = reason or "no reason given"
            if self.identity == identity:  # a training step meanwhile makes answers of neither judge
                stored = {key: entry for key, entry in fresh.items() if isinstance(key, bytes)}
                self.cache.put(identity, stored)
            entries |= fresh
        return _from_entries([entries.get(label) for label in labels], [failures.get(label) for label in labels], unit)


class CachedReward(_Cached):
    """A pointwise reward whose valid scores are stored on disk; equal content is scored once.

    A file is known by its bytes, so that a known one is not even decoded; tensors and PIL images by their
    pixels. Name, unit, range and direction are the reward's own.

    `identity` says what the scores depend on, where the reward does not say so itself.
    """

    def __init__(self, reward: PointwiseReward, cache: ScoreCache, *, identity: Identity | None = None) -> None:
        super().__init__(reward, cache, identity=identity)
        self.reward, self.unit, self.range = self.judge, reward.unit, reward.range
        self.higher_is_better = reward.higher_is_better
        self.capabilities = self.judge.capabilities

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images; the unknown ones are scored in one call."""
        items, records = _as_lists(self.name, images, prompts, metadata)

        def ask(rows: list[int]) -> Scores:
            texts = [prompts[i] for i in rows], [records[i] for i in rows]
            return self.reward.score(_select(images, items, rows), *texts)

        return self._answer(_keys([items], prompts, records), ask, self.unit)


class CachedJudge(_Cached):
    """A pairwise judge whose valid preferences are stored on disk; see `CachedReward`."""

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        """Compare B pairs; the order of a pair is part of its key."""
        first, records = _as_lists(self.name, left, prompts, metadata)
        second, _ = _as_lists(self.name, right, prompts, metadata)

        def ask(rows: list[int]) -> Preferences:
            texts = [prompts[i] for i in rows], [records[i] for i in rows]
            return self.judge.compare(_select(left, first, rows), _select(right, second, rows), *texts)

        return self._answer(_keys([first, second], prompts, records), ask, None)


def _keys(
    sides: Sequence[Sequence[Any]], prompts: Sequence[str], records: Sequence[Mapping[str, Any] | None]
) -> list[bytes | None]:
    """Compute the key of each row; None where an image cannot be read, which the judge shall explain."""
    contents = zip(*(map(content_digest, side) for side in sides), strict=True)
    return [
        None if None in digests else key_of(digests, prompt, record)
        for digests, prompt, record in zip(contents, prompts, records, strict=True)
    ]


def content_digest(item: Any) -> bytes | None:
    """Hash an image's content: a file's bytes, else shape and pixels (SHA-256); None if it cannot be read."""
    if isinstance(item, str | os.PathLike):
        try:
            return hashlib.sha256(b"file" + Path(item).read_bytes()).digest()
        except OSError:
            return None
    if (length := animation_length(item)) > 1 and isinstance(item, Image.Image):
        frames = load_animation(item, range(length)).images
        item = [frame for frame in frames if frame is not None]
        if not item:
            return None
    if isinstance(item, Image.Image):
        try:
            details = f"{item.mode}{item.size}{item.info.get('transparency')}{item.getexif().get(0x0112)}"
            content = item.tobytes()  # loads it; a palette is known only then
            details += f"{None if item.palette is None else item.getpalette('RGBA')}"
            return hashlib.sha256(b"pil" + details.encode() + content).digest()
        except (OSError, SyntaxError, ValueError):
            return None
    if isinstance(item, list | tuple):  # a clip
        frames = [content_digest(frame) for frame in item]
        joined = b"".join(digest for digest in frames if digest is not None)
        return None if None in frames else hashlib.sha256(b"clip" + joined).digest()
    array = item.detach().cpu().contiguous() if isinstance(item, Tensor) else np.ascontiguousarray(item)
    raw = array.view(torch.uint8).numpy() if isinstance(array, Tensor) else array
    head = f"{tuple(item.shape)}{item.dtype}".replace("torch.", "").encode()
    return hashlib.sha256(b"pixels" + head + raw.tobytes()).digest()


def _as_lists(
    name: str, images: Any, prompts: Sequence[str], metadata: Metadata | None
) -> tuple[list[Any], list[Mapping[str, Any] | None]]:
    """Single images and records; the lengths are checked, all else is left to the judge."""
    if isinstance(prompts, str):
        raise TypeError(f"{name}: prompts is a str, needed is a list with one string per image.")
    if isinstance(images, str | os.PathLike | Image.Image):
        raise TypeError(f"{name}: images is a single {type(images).__name__}; put it into a list.")
    items = list(images)
    if len(items) != len(prompts):
        raise ValueError(f"{name}: {len(items)} images and {len(prompts)} prompts; give one prompt per image.")
    return items, read_metadata(name, metadata, len(items), noun="image")


def _select(images: Any, items: list[Any], rows: list[int]) -> Any:
    """Select images in the container they came in, since the layout of a tensor is checked as a whole."""
    return images[rows] if isinstance(images, Tensor | np.ndarray) else [items[row] for row in rows]


def _entries(answer: Scores | Preferences) -> list[dict[str, Any]]:
    """Convert each row to plain numbers and its text."""
    columns = {name: column.tolist() for name, column in columns_of(answer).items()}
    texts = answer.text or [None] * len(answer)
    return [
        {"columns": {name: column[row] for name, column in columns.items()}, "text": texts[row]}
        for row in range(len(answer))
    ]


def _from_entries(
    entries: Sequence[dict[str, Any] | None], reasons: Sequence[str | None], unit: str | None
) -> Scores | Preferences:
    """Reverse `_entries`; a row without an entry is invalid."""
    rows: list[dict[str, float]] = [{} if entry is None else entry["columns"] for entry in entries]
    names = dict.fromkeys(["main", *(name for row in rows for name in row)])
    columns = {name: torch.tensor([row.get(name, torch.nan) for row in rows]).float() for name in names}
    valid = torch.tensor([entry is not None for entry in entries], dtype=torch.bool)
    texts = [None if entry is None else entry["text"] for entry in entries]
    text = None if all(text is None for text in texts) else [text or "" for text in texts]
    return answer_of(columns, valid, unit, text, reasons)
