# SPDX-License-Identifier: Apache-2.0
"""Judges that remember: a pointwise or pairwise judge with a `ScoreCache` before it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visalign.interfaces import Metadata, PairwiseReward, PointwiseReward, Preferences, Scores
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.identity import Identity

from .store import ScoreCache, key_of


class CachedReward:
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
        self.reward, self.cache = reward, cache
        self._given = identity
        _identity(reward, identity)
        self.name, self.unit, self.range = reward.name, reward.unit, reward.range
        self.higher_is_better = reward.higher_is_better

    @property
    def identity(self) -> Identity:
        """The reward's own at this moment: weights that are trained change it."""
        return _identity(self.reward, self._given)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Scores of B images; what is not known yet is asked in one call, each content once."""
        items, records = _listed(self.name, images, prompts, metadata)
        keys = [
            None if content is None else key_of([content], prompt, record)
            for content, prompt, record in zip(map(content_digest, items), prompts, records, strict=True)
        ]
        judge = self.identity
        known = self.cache.get(judge, [key for key in keys if key is not None])
        first = _first_unknown(keys, known)
        reasons: dict[int, str | None] = {}
        if first:
            scores = self.reward.score(
                _rows_of(images, items, first), [prompts[i] for i in first], [records[i] for i in first]
            )
            said = failure_reasons(scores)
            fresh = {keys[row]: _entry(scores, i) for i, row in enumerate(first) if said[i] is None}
            if self.identity == judge:  # a step in the middle makes scores of neither
                self.cache.put(judge, {key: entry for key, entry in fresh.items() if key is not None})
            known |= {key: entry for key, entry in fresh.items() if key is not None}
            failed = {keys[row]: said[i] for i, row in enumerate(first) if keys[row] is not None}
            alone = {row: i for i, row in enumerate(first)}
            for row, key in enumerate(keys):
                if key not in known:
                    reasons[row] = failed[key] if key is not None else said[alone[row]]
        return _scores([known.get(key) if key else None for key in keys], reasons, self.unit)


class CachedJudge:
    """A pairwise judge whose valid preferences are kept on disk. See `CachedReward`."""

    def __init__(self, judge: PairwiseReward, cache: ScoreCache, *, identity: Identity | None = None) -> None:
        self.judge, self.cache = judge, cache
        self._given = identity
        _identity(judge, identity)
        self.name = judge.name

    @property
    def identity(self) -> Identity:
        """The judge's own at this moment: weights that are trained change it."""
        return _identity(self.judge, self._given)

    def compare(
        self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Preferences of B pairs; the order of a pair is part of its address."""
        first_items, records = _listed(self.name, left, prompts, metadata)
        second_items, _ = _listed(self.name, right, prompts, metadata)
        keys: list[bytes | None] = []
        for one, two, prompt, record in zip(first_items, second_items, prompts, records, strict=True):
            contents = content_digest(one), content_digest(two)
            ready = [content for content in contents if content is not None]
            keys.append(key_of(ready, prompt, record) if len(ready) == 2 else None)
        judge = self.identity
        known = self.cache.get(judge, [key for key in keys if key is not None])
        rows = _first_unknown(keys, known)
        reasons: dict[int, str | None] = {}
        if rows:
            told = self.judge.compare(
                _rows_of(left, first_items, rows),
                _rows_of(right, second_items, rows),
                [prompts[i] for i in rows],
                [records[i] for i in rows],
            )
            given = told.reason or [None] * len(told)
            said = [
                None if ok else (why or "no reason given")
                for ok, why in zip(told.valid.tolist(), given, strict=True)
            ]
            fresh = {
                key: _preference(told, i) for i, row in enumerate(rows) if (key := keys[row]) and not said[i]
            }
            if self.identity == judge:  # a step in the middle makes preferences of neither
                self.cache.put(judge, fresh)
            known |= fresh
            of_key = {keys[row]: said[i] for i, row in enumerate(rows) if keys[row] is not None}
            alone = {row: i for i, row in enumerate(rows)}
            for row, key in enumerate(keys):
                if key not in known:
                    reasons[row] = of_key[key] if key is not None else said[alone[row]]
        return _preferences([known.get(key) if key else None for key in keys], reasons)


def content_digest(item: Any) -> bytes | None:
    """SHA-256 of an image's content: of a file's bytes, else of its shape and pixels.

    Args:
        item: path, PIL image, tensor or array of one image.

    Returns:
        32 bytes; None for a file that cannot be read, which the judge shall explain.
    """
    if isinstance(item, str | os.PathLike):
        try:
            return hashlib.sha256(b"file" + Path(item).read_bytes()).digest()
        except OSError:
            return None
    if isinstance(item, Image.Image):
        try:
            details = f"{item.mode}{item.size}{item.info.get('transparency')}{item.getexif().get(0x0112)}"
            content = item.tobytes()  # loads it; a palette is known only then
            details += f"{None if item.palette is None else item.getpalette('RGBA')}"
            return hashlib.sha256(b"pil" + details.encode() + content).digest()
        except (OSError, SyntaxError, ValueError):
            return None
    array = item.detach().cpu().contiguous() if isinstance(item, Tensor) else np.ascontiguousarray(item)
    raw = array.view(torch.uint8).numpy() if isinstance(array, Tensor) else array
    head = f"{tuple(item.shape)}{item.dtype}".replace("torch.", "").encode()
    return hashlib.sha256(b"pixels" + head + raw.tobytes()).digest()


def _identity(judge: Any, given: Identity | None) -> Identity:
    if getattr(judge, "needs_group", False):
        raise RewardError(
            f"Reward {judge.name!r} scores an image against its group, so a score means nothing by itself. "
            "Cache the judge that it asks instead: CachedJudge(judge, cache)."
        )
    found = given or getattr(judge, "identity", None)
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


def _first_unknown(keys: Sequence[bytes | None], known: Mapping[bytes, Any]) -> list[int]:
    """Rows to ask about: the first of each unknown key, and every row without one."""
    seen: set[bytes] = set()
    rows = []
    for row, key in enumerate(keys):
        if key is None or (key not in known and key not in seen):
            rows.append(row)
        if key is not None:
            seen.add(key)
    return rows


def _rows_of(images: Any, items: list[Any], rows: list[int]) -> Any:
    """The chosen images in the container in which they came: a tensor's layout is checked as a whole."""
    return images[rows] if isinstance(images, Tensor | np.ndarray) else [items[row] for row in rows]


def _entry(scores: Scores, row: int) -> dict[str, Any]:
    return {
        "value": float(scores.value[row]),
        "std": None if scores.std is None else float(scores.std[row]),
        "parts": {name: float(part[row]) for name, part in scores.parts.items()},
        "text": None if scores.text is None else scores.text[row],
    }


def _preference(told: Preferences, row: int) -> dict[str, Any]:
    return {
        "prob": float(told.prob[row]),
        "std": None if told.std is None else float(told.std[row]),
        "log_odds": None if told.log_odds is None else float(told.log_odds[row]),
        "parts": {name: float(part[row]) for name, part in told.parts.items()},
        "text": None if told.text is None else told.text[row],
    }


def _scores(entries: list[dict[str, Any] | None], reasons: Mapping[int, str | None], unit: str) -> Scores:
    return Scores(
        value=_column(entries, "value"),
        valid=torch.tensor([entry is not None for entry in entries], dtype=torch.bool),
        unit=unit,
        std=_optional(entries, "std"),
        parts=_parts(entries),
        text=_texts(entries),
        reason=[reasons.get(row) for row in range(len(entries))],
    )


def _preferences(entries: list[dict[str, Any] | None], reasons: Mapping[int, str | None]) -> Preferences:
    return Preferences(
        prob=_column(entries, "prob"),
        valid=torch.tensor([entry is not None for entry in entries], dtype=torch.bool),
        std=_optional(entries, "std"),
        log_odds=_optional(entries, "log_odds"),
        parts=_parts(entries),
        text=_texts(entries),
        reason=[reasons.get(row) for row in range(len(entries))],
    )


def _column(entries: list[dict[str, Any] | None], name: str) -> Tensor:
    missing = float("nan")
    found = [missing if entry is None or entry[name] is None else entry[name] for entry in entries]
    return torch.tensor(found, dtype=torch.float32)


def _optional(entries: list[dict[str, Any] | None], name: str) -> Tensor | None:
    if not any(entry is not None and entry[name] is not None for entry in entries):
        return None
    return _column(entries, name)


def _parts(entries: list[dict[str, Any] | None]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for entry in entries if entry for name in entry["parts"])
    nan = float("nan")
    return {
        name: torch.tensor(
            [nan if entry is None else entry["parts"].get(name, nan) for entry in entries],
            dtype=torch.float32,
        )
        for name in names
    }


def _texts(entries: list[dict[str, Any] | None]) -> list[str] | None:
    found = [None if entry is None else entry["text"] for entry in entries]
    return None if all(text is None for text in found) else [text or "" for text in found]
