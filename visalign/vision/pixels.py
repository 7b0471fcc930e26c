# SPDX-License-Identifier: Apache-2.0
"""Read images of any source into pixels.

EXIF orientation is applied, transparency is laid over white, of an animation the first frame is taken.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from visalign.errors import UserError

_DEEP_MODES = ("I", "F")
_ALPHA_MODES = ("RGBA", "LA", "PA", "La", "RGBa")
DECODING_ERRORS = (
    *(OSError, ValueError, EOFError, LookupError, TypeError, OverflowError, MemoryError),
    *(SyntaxError, RuntimeError),  # of broken PNG chunks and AVIF frames
    *(struct.error, zlib.error, Image.DecompressionBombError),
)
"""Errors that PIL raises for broken files."""


def first_frame_upright(image: Image.Image) -> Image.Image:
    """Return the first frame, turned by its EXIF orientation; the image itself is left as it was."""
    if frame := image.tell():  # n_frames would decode all of them
        image.seek(0)
    upright = ImageOps.exif_transpose(image)
    if frame:
        image.seek(frame)
    return upright


def over_white(image: Image.Image) -> Image.Image:
    """Convert to mode RGB, with transparency composited over white."""
    if image.mode in _ALPHA_MODES or "transparency" in image.info:
        straight = image.convert("LA") if image.mode == "La" else image
        rgba = straight.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def read_pixels(image: Any, where: str) -> Tensor:
    """Return uint8 [3, H, W] on the CPU of a PIL image, uint8 tensor [3, H, W], or float tensor [3, H, W] in
    [0, 1], so that a float tensor means the same as its file; `where` is its name in messages.
    """
    if isinstance(image, Tensor):
        pixels = _from_tensor(image, where)
    elif isinstance(image, Image.Image):
        pixels = _from_pil(image, where)
    else:
        raise UserError(f"{where} is a {type(image).__name__}; give a PIL image or a tensor [3, H, W].")
    if pixels.numel() == 0:
        raise UserError(f"{where} has no pixels: shape {tuple(pixels.shape)}. Leave it out.")
    return pixels


def _from_tensor(image: Tensor, where: str) -> Tensor:
    if image.ndim != 3 or image.shape[0] != 3:
        raise UserError(f"{where} has shape {tuple(image.shape)}; an image is [3, H, W] (image.permute(2, 0, 1)).")
    pixels = image.detach().cpu()
    if pixels.dtype == torch.uint8 or pixels.numel() == 0:
        return pixels.to(torch.uint8)
    if not pixels.is_floating_point():
        raise UserError(f"{where} has dtype {image.dtype}; allowed are uint8, or floats in [0, 1].")
    low, high = (float(end) for end in pixels.float().aminmax())
    if not (low >= -1e-6 and high <= 1 + 1e-6):
        raise UserError(
            f"{where} has values in [{low:.4g}, {high:.4g}], allowed is [0, 1]: pass uint8 for levels of "
            "255, and (image / 2 + 0.5).clamp(0, 1) for [-1, 1]."
        )
    return to_levels(pixels)


def to_levels(image: Tensor) -> Tensor:
    """Convert an image in [0, 1] of any layout to uint8 on the CPU, rounded to the nearest level; uint8 stays."""
    if image.dtype == torch.uint8:
        return image.cpu()
    return rounded_levels(image.detach().cpu())


def rounded_levels(image: Tensor) -> Tensor:
    """Round a float image in [0, 1] to uint8 levels on its device."""
    return image.float().mul(255).round_().clamp_(0, 255).to(torch.uint8)


def _from_pil(image: Image.Image, where: str) -> Tensor:
    if image.mode in _DEEP_MODES or image.mode.startswith("I;16"):
        raise UserError(
            f"{where} is of PIL mode {image.mode}, deeper than 8 bits. Rescale it to a float tensor [3, H, W]."
        )
    try:
        pixels = np.array(over_white(first_frame_upright(image)))
    except DECODING_ERRORS as error:
        raise UserError(
            f"{where} cannot be decoded ({type(error).__name__}: {error}). Give a PNG, JPEG or WebP that PIL "
            "opens, or leave the prompt out."
        ) from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
