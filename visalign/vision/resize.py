# SPDX-License-Identifier: Apache-2.0
"""Resizing on tensors that equals PIL's, bit for bit: the score of a tensor is the score of its PNG.

PIL resizes 8-bit images in two passes with fixed-point weights and rounds after each. Here the width always
comes first, as in Pillow up to 12, with which the published models were trained; Pillow 13 begins with the
height where it shrinks much (pull request 9549), which moves hard edges of tall images by a few levels. The
CPU has PIL itself do each pass. On a GPU the passes are matrix products over a whole batch.
`torch.nn.functional.interpolate(antialias=True)` on the CPU gives wrong pixels for some layouts (torch 2.15: images
of width 1, by up to 166 levels).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_ONE = float(2**22)  # PIL's fixed-point 1


def resize_like_pil(levels: Tensor, size: tuple[int, int], interpolation: str = "bicubic") -> Tensor:
    """Resize levels [N, C, H, W] to float32 levels as `PIL.Image.resize` does ("bicubic" or "bilinear")."""
    if levels.device.type != "cpu":
        return resize_by_products(levels, size, interpolation)
    (height, width), how = size, Image.Resampling[interpolation.upper()]
    resized = np.empty((*levels.shape[:2], height, width), np.uint8)
    for index in np.ndindex(*levels.shape[:2]):
        plane = Image.fromarray(levels[index].to(torch.uint8).numpy())
        resized[index] = np.asarray(plane.resize((width, plane.height), how).resize((width, height), how))
    return torch.from_numpy(resized).float()


def resize_by_products(levels: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """Resize levels as `resize_like_pil` does, by one matrix product a side in float64, for devices that have it."""
    height, width = size
    levels = levels.double()  # holds the integer sums exactly
    if levels.shape[3] != width:
        across = resize_weights(levels.shape[3], width, interpolation).to(levels.device)
        levels = _to_levels(levels @ across.T)
    if levels.shape[2] != height:
        down = resize_weights(levels.shape[2], height, interpolation).to(levels.device)
        levels = _to_levels(down @ levels)
    return levels.float()


def resize_smoothly(images: Tensor, size: Sequence[int], interpolation: str = "bicubic") -> Tensor:
    """Resize images [*, H, W], y = W_H x W_Wᵀ with PIL's antialiased filter, unrounded, unclipped, differentiable."""
    for axis, target in ((-1, size[1]), (-2, size[0])):
        source = images.shape[axis]
        if source != target:
            weights = resize_weights(source, target, interpolation)
            weights = (weights / weights.sum(1, keepdim=True)).to(images.device, images.dtype)
            images = images @ weights.T if axis == -1 else weights @ images
    return images


def _to_levels(sums: Tensor) -> Tensor:
    """Round fixed-point sums to levels, halves upwards."""
    return ((sums + _ONE / 2) / _ONE).floor().clamp(0, 255)


@lru_cache(maxsize=64)
def resize_weights(source: int, target: int, interpolation: str) -> Tensor:
    """Return the matrix W [target, source] float64 of a one-dimensional antialiased resize y = W x, in units of 2⁻²².

    W_ij ∝ k((j + ½ − c_i) / s) with c_i = (i + ½)·source/target and s = max(source/target, 1), rows summing
    to 1; k is the triangle ("bilinear") or Keys' cubic with a = −½ ("bicubic"), as in PIL.

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
