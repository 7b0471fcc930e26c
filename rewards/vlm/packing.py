# SPDX-License-Identifier: Apache-2.0
"""Prefix sharing: packs of rows with a common prefix, and batches of packs.

In a pack a row's suffix attends to the common prefix and itself alone (a block-diagonal mask), at its own positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visalign.vision.positions import rotary_positions

from .requests import SeenImage, TokenRow

PACK = 1024  # Most tokens of a pack with more than one row: attention costs their square
SHORTEST = 8  # Fewest tokens of a common prefix
MASK = 1 << 25  # Most entries of a mask


@dataclass(frozen=True)
class Pack:
    """Rows with the same images and a common prefix."""

    rows: tuple[TokenRow, ...]
    numbers: tuple[int, ...]  # Indices of the rows among all
    shared: int  # Tokens of the common prefix; all tokens for a single row

    @property
    def length(self) -> int:
        return self.shared + sum(len(row.ids) - self.shared for row in self.rows)


@dataclass(frozen=True)
class Batch:
    """Packs padded on the right."""

    ids: Tensor  # [b, S] int64
    mask: Tensor  # [b, S], 0 for padding
    image_mask: Tensor  # bool [b, S], True for image tokens
    positions: Tensor | None  # [3, b, S] or [b, S] int64; None where they count tokens and no pack holds several rows
    segments: Tensor | None  # [b, S]: 0 in the common prefix, n in the n-th suffix, -1 in padding; None without packs
    images: list[SeenImage]  # Images, pack by pack
    ends: Tensor  # [n, 2] (pack, position) of the last token of each row
    numbers: list[int]  # Indices of the n rows among all


def pack_rows(rows: Sequence[TokenRow], image_token: int, *, share: bool = True) -> list[Pack]:
    """Pack N rows by common prefixes with all image tokens, longest packs first; unless `share` each row alone."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, row in enumerate(rows):
        key = tuple(image.digest for image in row.images) if share and row.images else (f"row {number}",)
        groups.setdefault(key, []).append(number)
    packs: list[Pack] = []
    for members in groups.values():
        # sorted by tokens, rows with long common prefixes are neighbours
        members = sorted(members, key=lambda number: rows[number].ids)
        packs += _split(rows, members, image_token)
    return sorted(packs, key=lambda pack: -pack.length)


def _split(rows: Sequence[TokenRow], members: Sequence[int], image_token: int) -> Iterable[Pack]:
    open_rows: list[int] = []
    shared = 0
    for number in members:
        ids = rows[number].ids
        common = len(ids) - 1  # the last token is never shared: each row is read at its own
        if open_rows:
            first, longest = rows[open_rows[0]].ids, min(shared, common)
            common = next((n for n in range(longest) if ids[n] != first[n]), longest)
        size = common + sum(len(rows[member].ids) - common for member in [*open_rows, number])
        images_end = next((n for n in range(len(ids), 0, -1) if ids[n - 1] == image_token), 0)
        if open_rows and (common < max(SHORTEST, images_end) or size > max(PACK, 2 * len(ids))):
            yield _close(rows, open_rows, shared)
            open_rows, common = [], len(ids) - 1
        open_rows.append(number)
        shared = common
    if open_rows:
        yield _close(rows, open_rows, shared)


def _close(rows: Sequence[TokenRow], numbers: Sequence[int], shared: int) -> Pack:
    if len(numbers) == 1:
        shared = len(rows[numbers[0]].ids)
    return Pack(tuple(rows[number] for number in numbers), tuple(numbers), shared)


def batch_packs(packs: Sequence[Pack], max_tokens: int) -> list[list[Pack]]:
    """Group packs, longest first, into batches of at most `max_tokens` with padding, one pack at least."""
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
    """Collate packs, padded on the right; `merge` is patches per token and side for three axes, else 0."""
    width, several = max(pack.length for pack in packs), any(len(pack.rows) > 1 for pack in packs)
    ids = torch.full((len(packs), width), pad, dtype=torch.int64)
    mask, segments = torch.zeros_like(ids), torch.full_like(ids, -1)
    positions = torch.arange(width).expand(3, len(packs), -1).clone()
    ends = []
    for index, pack in enumerate(packs):
        row_positions = _positions(pack, image_token, merge)
        tokens, parts = list(pack.rows[0].ids[: pack.shared]), [0] * pack.shared
        columns = [row_positions[:, : pack.shared]]
        for part, row in enumerate(pack.rows, 1):
            tokens += row.ids[pack.shared :]
            ends.append((index, len(tokens) - 1))
            parts += [part] * (len(row.ids) - pack.shared)
            columns.append(row_positions[:, pack.shared : len(row.ids)])
        length = len(tokens)
        ids[index, :length], mask[index, :length] = torch.tensor(tokens), 1
        segments[index, :length] = torch.tensor(parts)
        positions[:, index, :length] = torch.cat(columns, 1)
    return Batch(
        ids=ids,
        mask=mask,
        image_mask=(ids == image_token) & (mask != 0),
        positions=positions if merge else positions[0] if several else None,
        segments=segments if several else None,
        images=[image for pack in packs for image in pack.rows[0].images],
        ends=torch.tensor(ends),
        numbers=[number for pack in packs for number in pack.numbers],
    )


def _positions(pack: Pack, image_token: int, merge: int) -> Tensor:
    """Positions [3, S] of the longest row; shorter rows have its beginning, because images are the same."""
    longest = max(pack.rows, key=lambda row: len(row.ids))
    if not merge:
        return torch.arange(len(longest.ids)).expand(3, -1)
    ids = torch.tensor([longest.ids])
    images: Any = [longest.images]  # only their grids are read
    positions, _ = rotary_positions(ids == image_token, torch.ones_like(ids), images, merge)
    return positions[:, 0]


def attention_mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive mask [b, 1, S, S] of segments [b, S]: 0 for visible tokens, the lowest number for others."""
    size = segments.shape[1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=segments.device).tril()
    same = segments[:, None, :] == segments[:, :, None]
    visible = earlier & ((segments[:, None, :] == 0) | same)
    return torch.where(visible, 0.0, torch.finfo(dtype).min).to(dtype)[:, None]
