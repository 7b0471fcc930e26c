# SPDX-License-Identifier: Apache-2.0
"""Resizing on tensors that equals PIL's, level for level: the score of a tensor is the score of its PNG.

PIL resizes 8-bit images in two passes, first along the width, and rounds after each; doing the same in floats
keeps every pixel within 1/255 of PIL's. Other tensor paths (no antialiasing, bilinear, one pass) do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

MAX_GROWTH = 64
"""A picture may be resized to at most this many times the pixels that the model sees (aspect ratio about "
"64)."""


def resize_like_pil(levels: Tensor, size: tuple[int, int], interpolation: str = "bicubic") -> Tensor:
    """Antialiased resize of 8-bit levels as `PIL.Image.resize` does it.

    Args:
        levels: [N, C, H, W] float32 holding whole numbers from 0 to 255.
        size: height and width of the result.
        interpolation: "bicubic" or "bilinear".

    Returns:
        [N, C, *size] float32 whole numbers from 0 to 255, at most one level from PIL's.
    """
    height, width = size
    for target in ((levels.shape[2], width), (height, width)):
        if tuple(levels.shape[2:]) != target:
            levels = (
                F.interpolate(levels, size=target, mode=interpolation, antialias=True).round().clamp(0, 255)
            )
    return levels


def resized_shape(height: int, width: int, config: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width before the crop, by the rules of open_clip's evaluation transform.

    Args:
        height: of the image.
        width: of the image.
        config: `size` (int or pair) and `resize_mode` ("shortest", "longest", "squash").

    Raises:
        ValueError: unknown resize mode.
    """
    tall, wide = target_shape(config)
    mode = config.get("resize_mode") or "shortest"
    if mode == "squash":
        return tall, wide
    if mode == "shortest" and tall == wide:
        short, long = min(height, width), max(height, width)
        long = int(tall * long / short)
        return (tall, long) if height <= width else (long, tall)
    if mode not in ("shortest", "longest"):
        raise ValueError(f"resize_mode is {mode!r}; allowed are 'shortest', 'longest' and 'squash'.")
    pick = min if mode == "shortest" else max
    ratio = pick(height / tall, width / wide)
    return max(1, round(height / ratio)), max(1, round(width / ratio))


def target_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width that the model sees."""
    size = config["size"]
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def model_levels(image: Tensor, config: Mapping[str, Any]) -> Tensor:
    """One image as the 8-bit levels that the model sees: resized, centre-cropped, padded where too small.

    Args:
        image: [3, H, W] in [0, 1].
        config: open_clip's preprocess_cfg.

    Returns:
        [3, height, width] float32, whole numbers from 0 to 255.

    Raises:
        ValueError: the picture is so elongated that the resized one would not fit into memory.
    """
    shape = resized_shape(image.shape[1], image.shape[2], config)
    target = target_shape(config)
    if shape[0] * shape[1] > MAX_GROWTH * target[0] * target[1]:
        raise ValueError(
            f"a picture of {image.shape[2]}×{image.shape[1]} is too elongated to be resized for this model "
            f"({shape[1]}×{shape[0]} before the crop); crop it first"
        )
    interpolation = "bilinear" if config.get("interpolation") == "bilinear" else "bicubic"
    levels = resize_like_pil(image[None].mul(255).round(), shape, interpolation)[0]
    return _centre(levels, target, float(config.get("fill_color") or 0))


def _centre(levels: Tensor, target: tuple[int, int], fill: float) -> Tensor:
    """Pad evenly to at least the target (the odd pixel after), then crop its centre."""
    missing = [max(0, want - have) for want, have in zip(target, levels.shape[1:], strict=True)]
    tall, wide = missing
    padding = (wide // 2, (wide + 1) // 2, tall // 2, (tall + 1) // 2)
    levels = F.pad(levels, padding, value=fill) if any(missing) else levels
    top, left = (round((have - want) / 2) for want, have in zip(target, levels.shape[1:], strict=True))
    return levels[:, top : top + target[0], left : left + target[1]]
