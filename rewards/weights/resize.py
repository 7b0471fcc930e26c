# SPDX-License-Identifier: Apache-2.0
"""Images as CLIP-type models take them: resized by open_clip's rules, cropped, padded where too small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.rewards.base.contract import Request
from visalign.vision.resize import resize_like_pil, resize_smoothly
from visalign.vision.window import seen_window

SETTINGS = "size mean std interpolation resize_mode fill_color crop_rounding resampling window".split()
"""What a preprocessing may set."""
MAX_GROWTH = 64
"""An image may be resized to at most this many times the pixels that the model sees."""


def resized_shape(height: int, width: int, config: Mapping[str, Any]) -> tuple[int, int]:
    """Compute height and width before the crop, by the rules of open_clip's evaluation transform.

    They follow from config's `size` (int or pair) and `resize_mode`: "shortest", "longest" or "squash", or
    "longest_max", as HPSv2 rounds the longest edge's scale.
    """
    tall, wide = target_shape(config)
    mode = config.get("resize_mode") or "shortest"
    if mode == "squash":
        return tall, wide
    if mode == "shortest" and tall == wide:
        short, long = min(height, width), max(height, width)
        long = int(tall * long / short)
        return (tall, long) if height <= width else (long, tall)
    if mode == "longest_max":  # differs from "longest" by one pixel where a product ends at .5
        scale = min(tall / height, wide / width)
        return max(1, round(height * scale)), max(1, round(width * scale))
    if mode not in ("shortest", "longest"):
        raise ValueError(f"resize_mode is {mode!r}; allowed are 'shortest', 'longest', 'longest_max' and 'squash'.")
    pick = min if mode == "shortest" else max
    ratio = pick(height / tall, width / wide)
    return max(1, round(height / ratio)), max(1, round(width / ratio))


def target_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """Height and width that the model sees."""
    size = config["size"]
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def model_levels(image: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Resize, center-crop and pad an image [3, H, W] in [0, 1] to the levels that the model sees.

    `config` is open_clip's preprocess_cfg, and of ours `crop_rounding` ("nearest" as torchvision has it, or "down" as
    transformers has it), `resampling`: "pil" (8-bit levels, rounded after each pass), "float" (antialiased, never
    rounded or clipped, as torchvision resizes tensors), or "aliased" (as torchvision up to 0.16 resized tensors unless
    told otherwise), and `window`, pixels on a side that are read instead of the whole where all else is a plain border
    (`seen_window`).

    Returns [3, height, width] float32, from 0 to 255; whole numbers with "pil". An image so elongated that the resized
    one would not fit into memory is a ValueError.
    """
    if side := config.get("window"):
        image = seen_window(image, side)
    return _model_levels(image[None], config)[0]


def batch_levels(images: Sequence[Tensor], config: Mapping[str, Any], device: torch.device) -> Tensor:
    """Compute `model_levels` of N images [3, H, W] on a device, [N, 3, height, width].

    On a GPU images of one size are resized together there: the values are those of PIL on the CPU.
    """
    if device.type == "cpu" or config.get("window") or len({image.shape for image in images}) > 1:
        return torch.stack([model_levels(image, config).to(device) for image in images])
    return _model_levels(torch.stack([image.to(device) for image in images]), config)


def _model_levels(images: Tensor, config: Mapping[str, Any]) -> Tensor:
    shape = checked_shape(images.shape[2], images.shape[3], config)
    levels = images.mul(255).round()
    if config.get("resampling", "pil") == "pil":
        return _centre(resize_like_pil(levels, shape, _interpolation(config)), config)
    return _centre(_resized(levels, shape, config), config)


def model_pixels(images: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return `model_levels` / 255 of images [B, 3, H, W] in [0, 1], differentiable in their pixels.

    The values are exactly those of `model_levels`; the gradient is that of the resize without rounding and
    clipping (straight through both).
    """
    if side := config.get("window"):
        windows = [seen_window(image, side) for image in images]
        if any(window.shape != images.shape[1:] for window in windows):
            return torch.cat([model_pixels(window[None], {**config, "window": 0}) for window in windows])
    shape = checked_shape(images.shape[2], images.shape[3], config)
    with torch.no_grad():
        exact = torch.stack([model_levels(image.float(), config) for image in images]) / 255
    smooth = _centre(_resized(images.float(), shape, config), config)
    return smooth + (exact - smooth).detach()


def fitting_images(request: Request, reasons: list[str | None], config: Any) -> tuple[list[int], list[Tensor]]:
    """Return (rows, images [3, H, W]) without a reason that can be resized; a refused one gets its reason."""
    rows, images = [], []
    for row, image in request.images.readable():
        if reasons[row] is not None:
            continue
        try:
            side = config.get("window")
            _, height, width = (seen_window(image, side) if side else image).shape
            checked_shape(height, width, config)
        except ValueError as error:
            reasons[row] = str(error)
            continue
        rows.append(row)
        images.append(image)
    return rows, images


def normalised(pixels: Tensor, config: Mapping[str, Any]) -> Tensor:
    """(x − mean) / std of pixels [N, 3, h, w] in [0, 1]."""
    mean, std = (torch.tensor(config[key], device=pixels.device).view(1, 3, 1, 1) for key in ("mean", "std"))
    return (pixels - mean) / std


def checked_shape(height: int, width: int, config: Mapping[str, Any]) -> tuple[int, int]:
    """Compute `resized_shape`, refused where it would not fit into memory."""
    shape = resized_shape(height, width, config)
    target = target_shape(config)
    if shape[0] * shape[1] > MAX_GROWTH * target[0] * target[1]:
        raise ValueError(
            f"an image of {width}×{height} is too elongated to be resized ({shape[1]}×{shape[0]}); crop it first"
        )
    return shape


def _resized(images: Tensor, shape: tuple[int, int], config: Mapping[str, Any]) -> Tensor:
    """Resize without rounding, antialiased unless the config says "aliased"."""
    resampling = config.get("resampling", "pil")
    if resampling == "aliased":
        return F.interpolate(images.float(), shape, mode=_interpolation(config), align_corners=False)
    if resampling not in ("pil", "float"):
        raise ValueError(f"resampling is {resampling!r}; allowed are 'pil', 'float' and 'aliased'.")
    return resize_smoothly(images, shape, _interpolation(config))


def _interpolation(config: Mapping[str, Any]) -> str:
    return "bilinear" if config.get("interpolation") == "bilinear" else "bicubic"


def _centre(levels: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Pad evenly to at least the target (the odd pixel after), then crop the centre, of [N, C, H, W]."""
    target, fill = target_shape(config), float(config.get("fill_color") or 0)
    missing = [max(0, want - have) for want, have in zip(target, levels.shape[2:], strict=True)]
    tall, wide = missing
    padding = (wide // 2, (wide + 1) // 2, tall // 2, (tall + 1) // 2)
    levels = F.pad(levels, padding, value=fill) if any(missing) else levels
    down = config.get("crop_rounding") == "down"
    spare = [have - want for want, have in zip(target, levels.shape[2:], strict=True)]
    top, left = (left_over // 2 if down else round(left_over / 2) for left_over in spare)
    return levels[:, :, top : top + target[0], left : left + target[1]]
