# SPDX-License-Identifier: Apache-2.0
"""Positions of tokens among which images stand, for models of the Qwen-VL family.

Source: M-RoPE, Qwen2-VL, arXiv 2409.12191, section 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .images import PatchedImage


def rotary_positions(
    image_mask: Tensor, mask: Tensor, images: Sequence[Sequence[PatchedImage]], merge: int
) -> tuple[Tensor, Tensor]:
    """Return positions [3, b, S] int64 of tokens on three axes, and offsets [b, 1]: a later token that has n before it
    is at n + offset.

    Text moves on by one on all axes at once. A clip of t × r × c tokens (an image has t = 1) that begins at position s
    has the axes (s + its moment, s + its row, s + its column), and the text behind it goes on at s + max(t, r, c), as
    Qwen2-VL counts; its successors space moments by seconds. Padding is at 0; `merge` patches on each side become one
    token.
    """

    def text_positions(count: int, start: int) -> Tensor:
        return (torch.arange(count) + start).expand(3, -1)

    positions = torch.zeros(3, *mask.shape, dtype=torch.int64)
    offset = torch.zeros(len(mask), 1, dtype=torch.int64)
    for row, row_images in enumerate(images):
        real = mask[row].nonzero()[:, 0]
        marks = image_mask[row, real].nonzero()[:, 0]
        parts, start, done, used = [], 0, 0, 0
        for image in row_images:
            text = int(marks[used]) - done
            frames, rows, columns = image.grid[0], image.grid[1] // merge, image.grid[2] // merge
            grid = torch.cartesian_prod(*map(torch.arange, (frames, rows, columns)))
            parts += [text_positions(text, start), grid.T + start + text]
            start += text + max(frames, rows, columns)
            done += text + image.tokens
            used += image.tokens
        parts.append(text_positions(len(real) - done, start))
        positions[:, row, real] = torch.cat(parts, 1)
        offset[row] = start - done
    return positions, offset
