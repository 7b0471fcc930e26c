# SPDX-License-Identifier: Apache-2.0
"""The window of an image that holds its content, where the rest is a plain border."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOLERANCE = 8  # levels of 255 by which a border may differ from its color, as a compressed one does


def check_window(side: Any) -> None:
    """Raise for a side that is no whole number from 0."""
    if isinstance(side, bool) or not isinstance(side, int) or side < 0:
        raise ValueError(f"window is {side!r}; it is a whole number of pixels, or 0 to read every image whole.")


def seen_window(image: Tensor, side: int) -> Tensor:
    """Return the `side` × `side` pixels of an image [3, H, W] that hold all but its plain border, for an unscaled
    read.

    The image itself comes back where it is no larger, has no ground (a color of three corners), or has more.
    """
    height, width = image.shape[1:]
    if max(height, width) <= side:
        return image
    levels = image.detach()
    levels = levels.short() if levels.dtype == torch.uint8 else (levels * 255).round()
    corners = levels[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    alike = (corners[:, :, None] - corners[:, None]).abs().amax(0) <= TOLERANCE
    shared = alike.sum(1) >= 3
    if not shared.any():
        return image
    border = corners[:, int(shared.int().argmax())]
    content = (levels - border[:, None, None]).abs().amax(0) > TOLERANCE
    rows, columns = (torch.nonzero(content.any(axis)).flatten() for axis in (1, 0))
    if not len(rows):
        return image
    ends = [(int(indices[0]), int(indices[-1]) + 1) for indices in (rows, columns)]
    if max(last - first for first, last in ends) > side:
        return image
    (top, high), (left, wide) = (_span(*end, side, size) for end, size in zip(ends, (height, width), strict=True))
    return image[:, top : top + high, left : left + wide]


def _span(first: int, last: int, side: int, size: int) -> tuple[int, int]:
    """Return start and length of `side` of `size` pixels, around `first` to `last` as far as there is room."""
    long = min(side, size)
    return min(max((first + last - long) // 2, 0), size - long), long
