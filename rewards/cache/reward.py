# SPDX-License-Identifier: Apache-2.0
"""Rewards and pairwise judges with a `ScoreCache` in front of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from tarfile import TarError
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visalign.data.sets.image_references import CompletionText, image_bytes
from visalign.data.sets.prompt_files import listed_sources
from visalign.interfaces import Metadata, PointwiseReward, Preferences, Scores, with_capabilities
from visalign.rewards.base.contract import RewardError, answer_of, read_metadata, rows_of
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import animation_length, load_animation

from .store import ScoreCache, key_of


class _Cached:
    def __init__(self, judge: Any, cache: ScoreCache, *, identity: Identity | None = None) -> None:
        self.judge, self.cache, self.name = with_capabilities(judge), cache, judge.name
        self._identity = identity
        if self.judge.capabilities.compares_samples:
            raise RewardError(f"Reward {judge.name!r} scores images against each other. Cache the judge that it asks.")
        if not isinstance(identity or judge.identity, Identity):
            raise RewardError(f"Reward {judge.name!r} has no identity. Give identity=Identity(judge=..., model=...).")

    @property
    def identity(self) -> Identity:
        """Identity of the judge at this moment: training changes it."""
        return self._identity or self.judge.identity

    def _answer(self, sides: Sequence[Any], prompts: Sequence[str], metadata: Metadata | None, unit: Any) -> Any:
        """Answer all rows from the cache or by the judge, which gets each unknown content once.

        `sides` are the images, or the left and the right ones; `unit` is that of scores, None for preferences.
        """
        if isinstance(prompts, str):  # zipped with images it would be a prompt per letter
            raise TypeError(f"{self.name}: prompts is a str, needed is a list with one string per image.")
        if any(len(side) != len(prompts) for side in sides):
            raise ValueError(f"{self.name}: {len(sides[0])} images and {len(prompts)} prompts; give one prompt each.")
        records = read_metadata(self.name, metadata, len(prompts), noun="image")
        labels: list[bytes | int] = []  # the key, or for an image that the judge shall refuse the number of the row
        for index, (prompt, record, *images) in enumerate(zip(prompts, records, *sides, strict=True)):
            digests = [digest for image in images if (digest := content_digest(image)) is not None]
            labels.append(key_of(digests, prompt, _by_content(record)) if len(digests) == len(images) else index)
        identity = self.identity
        rows: dict[Any, Any] = {**self.cache.get(identity, [key for key in labels if isinstance(key, bytes)])}
        unknown: dict[bytes | int, int] = {}  # -> the first row with this content
        for index, label in enumerate(labels):
            if label not in rows:
                unknown.setdefault(label, index)
        if unknown:
            numbers = list(unknown.values())
            ask = self.judge.compare if unit is None else self.judge.score
            answer = ask(
                *(_select(side, numbers) for side in sides),
                [prompts[number] for number in numbers],
                [records[number] for number in numbers],
            )
            answers = dict(zip(unknown, rows_of(answer), strict=True))
            if self.identity == identity:  # a training step meanwhile makes answers of neither judge
                valid = {key: row for key, row in answers.items() if isinstance(key, bytes) and row["reason"] is None}
                self.cache.put(identity, valid)
            rows |= answers
        return answer_of([rows[label] for label in labels], unit)


class CachedReward(_Cached):
    """A pointwise reward whose valid scores are stored on disk; equal content is scored once.

    A file is known by its bytes, so that a known one is not even decoded; tensors and PIL images by their
    pixels. Name, unit, range and direction are the reward's own.

    `identity` says what the scores depend on, where the reward does not say so itself.
    """

    def __init__(self, reward: PointwiseReward, cache: ScoreCache, *, identity: Identity | None = None) -> None:
        super().__init__(reward, cache, identity=identity)
        self.unit, self.range = reward.unit, reward.range
        self.higher_is_better = reward.higher_is_better
        # content is hashed on the CPU, a file's without decoding it
        self.capabilities = replace(self.judge.capabilities, takes_gpu_images=False)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images; the unknown ones are scored in one call."""
        return self._answer([images], prompts, metadata, self.unit)


class CachedJudge(_Cached):
    """A pairwise judge whose valid preferences are stored on disk; see `CachedReward`."""

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        """Compare B pairs; the order of a pair is part of its key."""
        return self._answer([left, right], prompts, metadata, None)


def content_digest(item: Any) -> bytes | None:
    """Hash an image's content: a file's bytes, else shape and pixels (SHA-256); None if it cannot be read."""
    if isinstance(item, CompletionText):
        return hashlib.sha256(b"text" + item.encode("utf-8", "surrogatepass")).digest()
    if isinstance(item, str | os.PathLike):
        try:
            return hashlib.sha256(b"file" + image_bytes(os.fspath(item))).digest()
        except (OSError, ValueError, LookupError, TarError):
            return None
    if (length := animation_length(item)) > 1 and isinstance(item, Image.Image):
        item = [frame for frame in load_animation(item, range(length)).images if frame is not None]
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
    if not isinstance(item, Tensor | np.ndarray):
        return None
    array = item.detach().cpu().contiguous() if isinstance(item, Tensor) else np.ascontiguousarray(item)
    raw = array.view(torch.uint8).numpy() if isinstance(array, Tensor) else array
    head = f"{tuple(item.shape)}{item.dtype}".replace("torch.", "").encode()
    return hashlib.sha256(b"pixels" + head + raw.tobytes()).digest()


def _by_content(record: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Put digests in the place of a record's images: a path, or the address in a `repr`, may lead to others later."""
    if record is None:
        return None
    names = [name for name in ("source", "references") if name in record]
    return {**record, **{name: [content_digest(x) or x for x in listed_sources(record[name])] for name in names}}


def _select(images: Any, rows: list[int]) -> Any:
    """Select images in the container they came in, since the layout of a tensor is checked as a whole."""
    return images[rows] if isinstance(images, Tensor | np.ndarray) else [images[row] for row in rows]
