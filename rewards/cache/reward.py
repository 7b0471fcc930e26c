# SPDX-License-Identifier: Apache-2.0
"""Judges that remember: a pointwise or pairwise judge with a `ScoreCache` before it."""

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
from visalign.rewards.base.contract import RewardError, answer_of, columns_of
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import animation_length, load_animation

from .store import ScoreCache, key_of


class _Remembering:
    """What both share: a judge that has an identity, or was given one, and where its answers are kept."""

    def __init__(self, judge: Any, cache: ScoreCache, *, identity: Identity | None = None) -> None:
        self.judge, self.cache, self.name = judge, cache, judge.name
        self._given = identity
        _identity(judge, identity)

    @property
    def identity(self) -> Identity:
        """The judge's own at this moment: weights that are trained change it."""
        return _identity(self.judge, self._given)


class CachedReward(_Remembering):
    """A pointwise reward whose valid scores are kept on disk; equal content is judged once.

    A file is known by its bytes, so a known one is not even decoded; pixels given as tensors or PIL images by
    themselves. Name, unit, range and direction are the reward's own.

    Args:
        reward: has an `identity`, or one is given.
        cache: where scores are kept.
        identity: what the scores depend on, where the reward does not say so itself.

    Raises:
        RewardError: the reward has no identity, or its scores depend on the rest of their group.
    """

    def __init__(
        self, reward: PointwiseReward, cache: ScoreCache, *, identity: Identity | None = None
    ) -> None:
        super().__init__(reward, cache, identity=identity)
        self.reward, self.unit, self.range = reward, reward.unit, reward.range
        self.higher_is_better = reward.higher_is_better
        self.capabilities = reward.capabilities

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Scores of B images; what is not known yet is asked in one call, each content once."""
        items, records = _listed(self.name, images, prompts, metadata)

        def ask(rows: list[int]) -> Scores:
            told = [prompts[i] for i in rows], [records[i] for i in rows]
            return self.reward.score(_rows_of(images, items, rows), *told)

        keys = _keys([items], prompts, records)
        return _remembered(self, keys, ask, self.unit)


class CachedJudge(_Remembering):
    """A pairwise judge whose valid preferences are kept on disk. See `CachedReward`."""

    def compare(
        self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Preferences of B pairs; the order of a pair is part of its address."""
        first, records = _listed(self.name, left, prompts, metadata)
        second, _ = _listed(self.name, right, prompts, metadata)

        def ask(rows: list[int]) -> Preferences:
            told = [prompts[i] for i in rows], [records[i] for i in rows]
            return self.judge.compare(_rows_of(left, first, rows), _rows_of(right, second, rows), *told)

        keys = _keys([first, second], prompts, records)
        return _remembered(self, keys, ask, None)


def _keys(
    sides: Sequence[Sequence[Any]], prompts: Sequence[str], records: Sequence[Mapping[str, Any] | None]
) -> list[bytes | None]:
    """The address of each row; None where an image cannot be read, which the judge shall explain."""
    contents = zip(*(map(content_digest, side) for side in sides), strict=True)
    return [
        None if None in digests else key_of(digests, prompt, record)
        for digests, prompt, record in zip(contents, prompts, records, strict=True)
    ]


def _remembered(
    judge: _Remembering,
    keys: Sequence[bytes | None],
    ask: Callable[[list[int]], Scores | Preferences],
    unit: str | None,
) -> Any:
    """The answer to all rows; what is not known is asked about in one call, each key once. `unit` is that of
    scores, None for preferences.
    """
    identity = judge.identity
    known: dict[Any, Any] = dict(judge.cache.get(identity, [key for key in keys if key is not None]))
    marks = [row if key is None else key for row, key in enumerate(keys)]
    first: dict[bytes | int, int] = {}
    for row, mark in enumerate(marks):
        if mark not in known:
            first.setdefault(mark, row)
    rows = list(first.values())
    failed: dict[bytes | int, str] = {}
    if rows:
        answer = ask(rows)
        told = answer.reason or [None] * len(answer)
        fresh: dict[bytes | int, dict[str, Any]] = {}
        for row, entry, valid, why in zip(rows, _entries(answer), answer.valid.tolist(), told, strict=True):
            if valid:
                fresh[marks[row]] = entry
            else:
                failed[marks[row]] = why or "no reason given"
        if judge.identity == identity:  # a step in the middle makes answers of neither
            judge.cache.put(identity, {key: entry for key, entry in fresh.items() if isinstance(key, bytes)})
        known |= fresh
    return _answer([known.get(mark) for mark in marks], [failed.get(mark) for mark in marks], unit)


def content_digest(item: Any) -> bytes | None:
    """SHA-256 of an image's content: of a file's bytes, else of its shape and pixels; None for a file that
    cannot be read, which the judge shall explain.
    """
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


def _identity(judge: Any, given: Identity | None) -> Identity:
    if with_capabilities(judge).capabilities.needs_group:
        raise RewardError(
            f"Reward {judge.name!r} scores an image against its group, so a score means nothing by itself. "
            "Cache the judge that it asks instead: CachedJudge(judge, cache)."
        )
    found = given or judge.identity
    if not isinstance(found, Identity):
        raise RewardError(
            f"Reward {judge.name!r} has no identity, so a cache cannot know when its scores change. Give "
            "one: identity=Identity(judge=..., model=..., options={'version': ...})."
        )
    return found


def _listed(
    name: str, images: Any, prompts: Sequence[str], metadata: Metadata | None
) -> tuple[list[Any], list[Mapping[str, Any] | None]]:
    """Single images and records; the lengths are checked, all else is left to the judge."""
    if isinstance(prompts, str):
        raise TypeError(f"{name}: prompts is a str, needed is a list with one string per image.")
    if isinstance(images, str | os.PathLike | Image.Image):
        raise TypeError(f"{name}: images is a single {type(images).__name__}; put it into a list.")
    items = list(images)
    if len(items) != len(prompts):
        raise ValueError(
            f"{name}: {len(items)} images and {len(prompts)} prompts; give one prompt per image."
        )
    records: list[Mapping[str, Any] | None] = [None] * len(items) if metadata is None else list(metadata)
    if len(records) != len(items):
        raise ValueError(f"{name}: {len(records)} metadata records for {len(items)} images; give one each.")
    return items, records


def _rows_of(images: Any, items: list[Any], rows: list[int]) -> Any:
    """The chosen images in the container in which they came: a tensor's layout is checked as a whole."""
    return images[rows] if isinstance(images, Tensor | np.ndarray) else [items[row] for row in rows]


def _entries(answer: Scores | Preferences) -> list[dict[str, Any]]:
    """What is kept of each row: plain numbers and texts."""
    columns = {name: column.tolist() for name, column in columns_of(answer).items()}
    main, texts = columns.pop("main"), answer.text or [None] * len(answer)
    optional = {} if isinstance(answer, Scores) else {"log_odds": columns.pop("log_odds", None)}
    optional["std"] = columns.pop("std", None)
    return [
        {
            "value" if isinstance(answer, Scores) else "prob": main[row],
            **{name: None if column is None else column[row] for name, column in optional.items()},
            "parts": {name.removeprefix("part."): column[row] for name, column in columns.items()},
            "text": texts[row],
        }
        for row in range(len(answer))
    ]


def _answer(
    entries: Sequence[dict[str, Any] | None], reasons: Sequence[str | None], unit: str | None
) -> Scores | Preferences:
    """The reverse of `_entries`; a row without an entry is invalid."""
    rows: list[dict[str, Any]] = [{}] * len(entries)
    for row, entry in enumerate(entries):
        if entry is not None:
            numbers = {"main": entry["prob" if unit is None else "value"]}
            numbers |= {name: entry[name] for name in ("std", "log_odds") if entry.get(name) is not None}
            rows[row] = numbers | {f"part.{name}": part for name, part in entry["parts"].items()}
    names = dict.fromkeys(["main", *(name for row in rows for name in row)])
    columns = {name: torch.tensor([row.get(name, torch.nan) for row in rows]).float() for name in names}
    valid = torch.tensor([entry is not None for entry in entries], dtype=torch.bool)
    texts = [None if entry is None else entry["text"] for entry in entries]
    text = None if all(text is None for text in texts) else [text or "" for text in texts]
    return answer_of(columns, valid, unit, text, reasons)
