# SPDX-License-Identifier: Apache-2.0
"""Rows put together so that nothing is read twice: packs of rows with a common beginning, batches of packs.

A pack holds the common beginning once and the rows' endings behind each other; an ending sees the beginning
and itself alone (a block-diagonal mask), at the positions that it has when it stands alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.vision.positions import rotary_positions

from .requests import SeenImage, TokenRow

PACK = 1024
"""Tokens of a pack at most, where it holds more than one row: attention costs their square."""
SHORTEST = 8
"""Tokens that a common beginning must have."""
MASK = 1 << 25
"""Numbers of a mask at most."""


@dataclass(frozen=True)
class Pack:
    """Rows with the same images and a common beginning."""

    rows: tuple[TokenRow, ...]
    numbers: tuple[int, ...]
    """Places of the rows among all."""
    shared: int
    """Tokens of the common beginning; all of them for a single row."""

    @property
    def length(self) -> int:
        return self.shared + sum(len(row.ids) - self.shared for row in self.rows)


@dataclass(frozen=True)
class Batch:
    """Packs padded on the right."""

    ids: Tensor
    """[b, S] int64."""
    mask: Tensor
    """[b, S], 0 for padding."""
    places: Tensor
    """bool [b, S], True for tokens that stand for images."""
    positions: Tensor | None
    """[3, b, S] or [b, S] int64; None where they count tokens and no pack holds several rows."""
    segments: Tensor | None
    """[b, S]: 0 in the common beginning, n in the n-th ending, -1 in padding; None without packs."""
    shown: list[SeenImage]
    """Images, pack by pack."""
    marks: Tensor
    """[n, 2] where the rows are read: pack and position."""
    numbers: list[int]
    """The n rows' places among all."""


def pack_rows(rows: Sequence[TokenRow], image_token: int, *, share: bool = True) -> list[Pack]:
    """N rows by common beginnings, in which all image tokens stand, longest packs first; `share` says whether
    rows may share a pack.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        key = tuple(shown.digest for shown in row.shown) if share and row.shown else (f"row {number}",)
        groups.setdefault(key, []).append(number)
    packs: list[Pack] = []
    for members in groups.values():
        # sorted by tokens, rows with long common beginnings are neighbours
        members = sorted(members, key=lambda number: rows[number].ids)
        packs += _split(rows, members, image_token)
    return sorted(packs, key=lambda pack: -pack.length)


def _split(rows: Sequence[TokenRow], members: Sequence[int], image_token: int) -> Iterable[Pack]:
    """Rows with the same images as packs of at most `PACK` tokens."""
    open_rows: list[int] = []
    shared = 0
    for number in members:
        ids = rows[number].ids
        common = _common(ids, rows[open_rows[0]].ids) if open_rows else len(ids)
        # the last token is the row's own, so that it has a place to be read at
        common = min(common, shared, len(ids) - 1) if open_rows else len(ids) - 1
        size = common + sum(len(rows[one].ids) - common for one in [*open_rows, number])
        if open_rows and (
            common < max(SHORTEST, _images_end(ids, image_token)) or size > max(PACK, 2 * len(ids))
        ):
            yield _close(rows, open_rows, shared)
            open_rows, common = [], len(ids) - 1
        open_rows.append(number)
        shared = common
    if open_rows:
        yield _close(rows, open_rows, shared)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two rows begin with."""
    return next(
        (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _close(rows: Sequence[TokenRow], numbers: Sequence[int], shared: int) -> Pack:
    if len(numbers) == 1:
        shared = len(rows[numbers[0]].ids)
    return Pack(tuple(rows[number] for number in numbers), tuple(numbers), shared)


def _images_end(ids: Sequence[int], image_token: int) -> int:
    """Tokens up to the last one of an image."""
    return next((len(ids) - place for place, one in enumerate(reversed(ids)) if one == image_token), 0)


def batch_packs(packs: Sequence[Pack], max_tokens: int) -> list[list[Pack]]:
    """Packs, longest first, in batches of at most so many tokens with padding, one pack at least."""
    batches: list[list[Pack]] = []
    for pack in packs:
        if batches:
            longest, count = batches[-1][0].length, len(batches[-1]) + 1
            if longest * count <= max_tokens and longest**2 * count <= MASK:
                batches[-1].append(pack)
                continue
        batches.append([pack])
    return batches


def collate(packs: Sequence[Pack], image_token: int, pad: int, merge: int) -> Batch:
    """Packs as one block, filled up with `pad` on the right; `merge` is how many patches become one token on
    each side where positions have three axes, else 0.
    """
    width, several = max(pack.length for pack in packs), any(len(pack.rows) > 1 for pack in packs)
    ids = torch.full((len(packs), width), pad, dtype=torch.int64)
    mask, segments = torch.zeros_like(ids), torch.full_like(ids, -1)
    positions = torch.arange(width).expand(3, len(packs), -1).clone()
    marks, numbers = [], []
    for place, pack in enumerate(packs):
        tokens, parts, steps = list(pack.rows[0].ids[: pack.shared]), [0] * pack.shared, []
        along = _positions(pack, image_token, merge)
        steps.append(along[:, : pack.shared])
        for part, row in enumerate(pack.rows, 1):
            tokens += row.ids[pack.shared :]
            marks.append((place, len(tokens) - 1))
            parts += [part] * (len(row.ids) - pack.shared)
            steps.append(along[:, pack.shared : len(row.ids)])
        numbers += pack.numbers
        length = len(tokens)
        ids[place, :length], mask[place, :length] = torch.tensor(tokens), 1
        segments[place, :length] = torch.tensor(parts)
        positions[:, place, :length] = torch.cat(steps, 1)
    plain = None if not several else positions[0]
    return Batch(
        ids=ids,
        mask=mask,
        places=(ids == image_token) & (mask != 0),
        positions=positions if merge else plain,
        segments=segments if several else None,
        shown=[shown for pack in packs for shown in pack.rows[0].shown],
        marks=torch.tensor(marks),
        numbers=numbers,
    )


def _positions(pack: Pack, image_token: int, merge: int) -> Tensor:
    """[3, length of the longest row]; shorter rows have the beginning of it: their images are the same."""
    longest = max(pack.rows, key=lambda row: len(row.ids))
    if not merge:
        return torch.arange(len(longest.ids)).expand(3, -1)
    ids = torch.tensor([longest.ids])
    positions, _ = rotary_positions(ids == image_token, torch.ones_like(ids), [longest.shown], merge)
    return positions[:, 0]


def attention_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """[b, 1, S, S] added to attention scores, of segments [b, S]: 0 where a token is seen, the lowest number
    where not."""
    size = segments.shape[1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    same = segments[:, None, :] == segments[:, :, None]
    seen = earlier & ((segments[:, None, :] == 0) | same)
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]
