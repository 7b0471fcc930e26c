# SPDX-License-Identifier: Apache-2.0
"""Patches of an image cut from its tensor, as the Qwen-VL family takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from .pixels import rounded_levels
from .resize import resize_like_pil, resize_smoothly
from .window import check_window, seen_window

LONGEST = 200  # longer side by shorter side at most


@dataclass(frozen=True, kw_only=True)
class PatchCutter:
    """Resizes as PIL does (bicubic, antialiased), normalises and cuts; each image by itself."""

    patch: int  # Pixels of a patch, on each side
    merge: int  # Patches that become one token, on each side
    frames: int  # Frames of a patch; a still image is repeated so often
    min_pixels: int  # Limit of the resized image, as `max_pixels`
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: str = "bicubic"
    window: int = 0  # Pixels on a side that are read instead of the whole where all else is a plain border; 0: never

    def __post_init__(self) -> None:
        check_window(self.window)

    @classmethod
    def of(cls, processor: Any, **changes: Any) -> PatchCutter:
        """Take the settings of an image processor of the Qwen-VL family, but for `changes`; refuse any other."""
        size = {**processor.size} if isinstance(processor.size, Mapping) else vars(processor.size)
        settings = {
            "patch": processor.patch_size,
            "merge": processor.merge_size,
            "frames": processor.temporal_patch_size,
            "min_pixels": size["shortest_edge"],
            "max_pixels": size["longest_edge"],
            "mean": tuple(processor.image_mean),
            "std": tuple(processor.image_std),
            "resample": {2: "bilinear", 3: "bicubic"}.get(int(processor.resample)),
        }
        used = {name: getattr(processor, name) for name in ("do_resize", "do_rescale", "do_normalize")}
        is_rescaled = math.isclose(processor.rescale_factor, 1 / 255, rel_tol=1e-6)
        if not all(used.values()) or not is_rescaled or settings["resample"] is None:
            raise ValueError(
                f"The image processor has {used}, rescale_factor={processor.rescale_factor:g} and "
                f"resample={processor.resample}; supported are True, 1/255 and bilinear (2) or bicubic (3)."
            )
        return cls(**{**settings, **changes})

    def settings(self) -> dict[str, Any]:
        """Return the settings for the identity of a judge; without `window` where there is none."""
        return {name: value for name, value in asdict(self).items() if name != "window" or value}

    def grid(self, height: int, width: int, *, frames: int = 1) -> tuple[int, int, int]:
        """Return (moments, rows, columns) of patches of an image, or of a clip."""
        tall, wide = smart_resize(height, width, self.patch * self.merge, self.min_pixels, self.max_pixels)
        return math.ceil(frames / self.frames), tall // self.patch, wide // self.patch

    def tokens(self, grid: tuple[int, int, int]) -> int:
        """Return the number of tokens that an image takes in the prompt."""
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def seen(self, pixels: Tensor) -> Tensor:
        """Cut the window that is read from an image uint8 [3, H, W]; a clip is used whole."""
        return seen_window(pixels, self.window) if self.window and pixels.ndim == 3 else pixels

    def levels(self, pixels: Tensor) -> Tensor:
        """Resize images [*, 3, H, W], uint8 or float in [0, 1], to float32 [*, 3, h, w] of whole numbers to 255.

        The gradient of a float image is that of the resize, straight through rounding and clipping.
        """
        if pixels.is_floating_point():
            exact = self.levels(rounded_levels(pixels.detach()))
            smooth = resize_smoothly(pixels.float() * 255, exact.shape[-2:], self.resample)
            return smooth + (exact - smooth).detach()
        _, rows, columns = self.grid(*pixels.shape[-2:])
        size = (rows * self.patch, columns * self.patch)
        if tuple(pixels.shape[-2:]) == size:
            return pixels.float()
        flat = pixels.float().reshape(-1, *pixels.shape[-3:])
        return resize_like_pil(flat, size, self.resample).view(*pixels.shape[:-2], *size)

    def cut(self, pixels: Tensor, *, is_clip: bool = True) -> Tensor:
        """Return patches [moments · rows · columns, 3 · frames · patch²] float32 of an image [3, H, W] or a clip
        [F, 3, H, W], as `levels` takes them. The last frame is repeated where a moment lacks one; patches of one
        token stand together. Unless `is_clip`, [F, 3, H, W] are F images, whose patches follow one another.
        """
        mean, std = (torch.tensor(of, device=pixels.device).view(3, 1, 1) for of in (self.mean, self.std))
        images = (self.levels(pixels) / 255).sub_(mean).div_(std)
        if images.ndim == 3 or not is_clip:
            images = images.view(-1, 1, *images.shape[-3:]).expand(-1, self.frames, -1, -1, -1)
        elif short := -len(images) % self.frames:
            images = torch.cat([images, images[-1:].expand(short, -1, -1, -1)])
        side, merge = self.patch, self.merge
        rows, columns = images.shape[-2] // side, images.shape[-1] // side
        parts = images.reshape(-1, self.frames, 3, rows // merge, merge, side, columns // merge, merge, side)
        # [moment, rows, columns, row, column in a token, 3, frame, side, side]
        parts = parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return parts.reshape(len(parts) * rows * columns, 3 * self.frames * side * side)


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, *, whole_tokens: bool = False
) -> tuple[int, int]:
    """Return a height and width that are multiples of `factor`, with about the image's aspect, of min_pixels to
    max_pixels (or above, where the two leave no room between).

    Halves round to even, as the published processors do; at least one multiple remains of each side. With
    `whole_tokens` a side below half a token (14 pixels of 28) counts as one token against the limits, as in
    qwen-vl-utils and the published HPSv3; in transformers' processors it counts as nothing, so that the image
    is enlarged.

    Source: Qwen2-VL, arXiv 2409.12191, section 2.1 (dynamic resolution).
    """
    if min(height, width) < 1 or max(height, width) > LONGEST * min(height, width):
        size = f"{width}×{height} pixels"
        raise ValueError(f"an image of {size}: one side may be at most {LONGEST} times the other; crop it first")
    smallest = factor if whole_tokens else 0
    tall, wide = (max(smallest, round(side / factor) * factor) for side in (height, width))
    if tall * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        tall = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif tall * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        tall = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return tall, wide
