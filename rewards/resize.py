# SPDX-License-Identifier: Apache-2.0
"""Resizing on tensors that equals PIL's, bit for bit: the score of a tensor is the score of its PNG.

PIL resizes 8-bit images in two passes with fixed-point weights and rounds after each. Here the width always
comes first, as in Pillow up to 12, with which the published models were trained; Pillow 13 begins with the
height where it shrinks much (pull request 9549), which moves hard edges of tall pictures by a few levels. The
passes are matrix products, because `torch.nn.functional.interpolate(antialias=True)` on the CPU gives wrong
pixels for some layouts (torch 2.15: pictures of width 1, by up to 166 levels).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_GROWTH = 64
"""A picture may be resized to at most this many times the pixels that the model sees."""

_ONE = float(2**22)
"""PIL's fixed-point 1."""


def resize_like_pil(levels: Tensor, size: tuple[int, int], interpolation: str = "bicubic") -> Tensor:
    """Antialiased resize of 8-bit levels, the width first, as `PIL.Image.resize` does it.

    Args:
        levels: [N, C, H, W], whole numbers from 0 to 255 in any float dtype.
        size: height and width of the result.
        interpolation: "bicubic" or "bilinear".

    Returns:
        [N, C, *size] float32 whole numbers from 0 to 255.
    """
    height, width = size
    levels = levels.double()  # holds the integer sums exactly
    if levels.shape[3] != width:
        across = resize_weights(levels.shape[3], width, interpolation).to(levels.device)
        levels = _to_levels(levels @ across.T)
    if levels.shape[2] != height:
        down = resize_weights(levels.shape[2], height, interpolation).to(levels.device)
        levels = _to_levels(down @ levels)
    return levels.float()


def _to_levels(sums: Tensor) -> Tensor:
    """Fixed-point sums rounded to levels, halves upwards."""
    return ((sums + _ONE / 2) / _ONE).floor().clamp(0, 255)


@lru_cache(maxsize=64)
def resize_weights(source: int, target: int, interpolation: str) -> Tensor:
    """The matrix W of a one-dimensional antialiased resize y = W x, in units of 2⁻²².

    W_ij ∝ k((j + ½ − c_i) / s) with c_i = (i + ½)·source/target and s = max(source/target, 1), rows summing
    to 1; k is the triangle ("bilinear") or Keys' cubic with a = −½ ("bicubic"), as PIL has them.

    Args:
        source: number of pixels given.
        target: number of pixels wanted.
        interpolation: "bicubic" or "bilinear".

    Returns:
        [target, source] float64 whole numbers.

    Source: Keys, "Cubic convolution interpolation for digital image processing", IEEE TASSP 1981, eq. 15.
    """
    scale = source / target
    centre = (torch.arange(target, dtype=torch.float64) + 0.5) * scale
    x = ((torch.arange(source, dtype=torch.float64) + 0.5 - centre[:, None]) / max(scale, 1.0)).abs()
    if interpolation == "bilinear":
        kernel = (1 - x).clamp(min=0)
    else:
        near = (1.5 * x - 2.5) * x * x + 1
        far = ((-0.5 * x + 2.5) * x - 4) * x + 2
        kernel = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    return (kernel / kernel.sum(1, keepdim=True) * _ONE).round()


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
