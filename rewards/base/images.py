# SPDX-License-Identifier: Apache-2.0
"""Image intake: what every reward accepts, turned into one form; the rest refused with a message.

Alpha is composited over white; EXIF orientation is applied; of an animation the first frame is judged; 16-bit
grey is divided by 65535, not cut to 8 bits; ICC profiles are ignored (values are read as sRGB).
"""

from __future__ import annotations

import math
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visalign.data.sets.image_references import CompletionText
from visalign.vision.pixels import DECODING_ERRORS, first_frame_upright, over_white, to_levels

from .memory import max_pixels

SLACK = 1e-6  # How far float rounding may put a value outside [0, 1]; such values are clamped

ACCEPTED = (
    "Allowed: a float tensor [B, 3, H, W] in [0, 1], uint8 [B, 3, H, W] or [B, H, W, 3], or a list of PIL "
    "images, paths, or single images as tensors. Clips of frames are for load_judge('frames', reward=...)."
)
_ANIMATED = ("GIF", "PNG", "WEBP")  # PIL's formats whose frames are moments; those of others are pages, sizes or views

_DEEP_MODES = {"I;16": 65535.0, "I;16L": 65535.0, "I;16B": 65535.0, "I;16N": 65535.0, "I": 65535.0, "F": 1.0}
"""Modes deeper than 8 bits, with the value that counts as white."""


@dataclass(frozen=True)
class ImageBatch:
    """B images, each [3, H, W] float32 in [0, 1], or None with its reason where it could not be read."""

    images: list[Tensor | None]
    reasons: list[str | None]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def valid(self) -> Tensor:
        return torch.tensor([image is not None for image in self.images], dtype=torch.bool)

    def readable(self) -> list[tuple[int, Tensor]]:
        return [(row, image) for row, image in enumerate(self.images) if image is not None]


def load_images(items: Any, *, texts: bool = False) -> ImageBatch:
    """Read B images from any accepted form; in a list, an unreadable one becomes None with its reason.

    A tensor of the wrong layout, type or range is an error of the caller: TypeError or ValueError; a row with NaN is
    None.

    Args:
        items: float tensor or array [B, 3, H, W] in [0, 1]; uint8 tensor or array [B, 3, H, W] or [B, H, W, 3]; or a
            sequence whose elements are PIL images of any mode, paths, or single images, sizes mixed at will.
        texts: keep completions (`CompletionText`) as they are; they are unreadable images otherwise.
    """
    if isinstance(items, Tensor | np.ndarray):
        return _read_batch(items, "images")
    if isinstance(items, Image.Image | str | bytes | os.PathLike) or not isinstance(items, Sequence):
        raise TypeError(f"images is a {type(items).__name__}. {ACCEPTED}")
    images: list[Tensor | None] = []
    reasons: list[str | None] = []
    for index, item in enumerate(items):
        if isinstance(item, CompletionText):
            texts_or_none: Any = item if texts else None
            batch = ImageBatch([texts_or_none], [None if texts else f"{item[:40]!r} is a text, and images are judged"])
        else:
            batch = _read_item(item, f"images[{index}]")
        images += batch.images
        reasons += batch.reasons
    return ImageBatch(images, reasons)


def to_uint8(image: Tensor) -> np.ndarray:
    """Convert an image [3, H, W] in [0, 1] to uint8 [H, W, 3], rounded to the nearest level."""
    return to_levels(image).permute(1, 2, 0).numpy()


def to_pil(image: Tensor) -> Image.Image:
    """Convert an image [3, H, W] in [0, 1] to a PIL image of mode RGB."""
    return Image.fromarray(to_uint8(image))


def as_contract(images: list[Tensor]) -> Tensor | list[Tensor]:
    """Stack images [3, H, W] of one size; a list of mixed sizes stays one, which every reward takes, too."""
    if any(isinstance(image, str) for image in images):  # completions, where a command takes both
        return images
    return torch.stack(images) if len({image.shape for image in images}) == 1 else images


def on_cpu(images: Any) -> Any:
    """Move a tensor, or the tensors of a list, to the CPU; files and PIL images stay what they are."""
    if isinstance(images, list | tuple):
        return [image.cpu() if isinstance(image, Tensor) else image for image in images]
    return images.cpu() if isinstance(images, Tensor) else images


def _read_item(item: Any, where: str) -> ImageBatch:
    if isinstance(item, Tensor | np.ndarray):
        return _read_batch(item[None], where)
    if not isinstance(item, Image.Image | str | os.PathLike):
        raise TypeError(f"{where} is a {type(item).__name__}. {ACCEPTED}")
    max_pixels()  # what is wrong with the limit is no fault of the image
    try:
        with _open(item) as image:
            return ImageBatch([_from_pil(image)], [None])
    except DECODING_ERRORS as error:
        return ImageBatch([None], [_explain(error, item)])


def animation_length(item: Any) -> int:
    """Count the frames of an animated GIF, PNG or WebP (a path or a PIL image) undecoded; else 1."""
    if isinstance(item, CompletionText) or not isinstance(item, Image.Image | str | os.PathLike):
        return 1
    try:
        with _open(item) as image:
            return getattr(image, "n_frames", 1) if image.format in _ANIMATED else 1
    except DECODING_ERRORS:
        return 1


def load_animation(item: Image.Image | str | os.PathLike[str], numbers: Sequence[int]) -> ImageBatch:
    """Read frames of an animation, all or none; those between are decoded too, so all have the pixels of one image."""
    max_pixels()  # what is wrong with the limit is no fault of the image
    length = animation_length(item)
    try:
        with _open(item) as image:
            if image.width * image.height * length > pixel_limit():
                raise Image.DecompressionBombError
            frames: list[Tensor | None] = []
            for number in numbers:
                image.seek(number)
                frames.append(_from_pil(image.copy()))
    except DECODING_ERRORS as error:
        reason = _explain(error, item, counted=f"pixels in its {length} frames")
        return ImageBatch([None] * len(numbers), [reason] * len(numbers))
    return ImageBatch(frames, [None] * len(numbers))


def pixels_of(item: Any) -> int:
    """Compute H·W of an image as `load_images` takes it in a list, undecoded; 0 where unreadable."""
    if isinstance(item, Tensor | np.ndarray):
        return math.prod(item.shape) // 3
    if isinstance(item, CompletionText):
        return 0
    try:
        with _open(item) as image:
            return image.width * image.height
    except DECODING_ERRORS:
        return 0


@contextmanager
def _open(item: Image.Image | str | os.PathLike[str]) -> Iterator[Image.Image]:
    """Yield a PIL image, left at the frame it was at, or a file's whose pixels are not decoded yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoders warn about odd metadata; bombs are measured in `_from_pil`
        if isinstance(item, Image.Image):
            frame = item.tell()
            try:
                yield item
            finally:
                if item.tell() != frame:
                    item.seek(frame)
            return
        path = Path(item)
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO could block, a device never end
            raise ValueError("it is not a regular file")
        with Image.open(path) as image:
            yield image


def _explain(error: BaseException, item: Any, *, counted: str = "pixels") -> str:
    name = f"a PIL image of mode {item.mode}" if isinstance(item, Image.Image) else os.fspath(item)
    if isinstance(error, Image.DecompressionBombError):
        remedy = "shrink it, or raise the environment variable VISALIGN_MAX_PIXELS (and PIL.Image.MAX_IMAGE_PIXELS)"
        return f"{name} has more than {pixel_limit()} {counted} and may be a decompression bomb; {remedy}"
    if isinstance(error, FileNotFoundError):
        hint = "; URLs are not read, download it first" if "://" in name else ""
        return f"no such image file: {name}{hint}"
    return f"{name} cannot be decoded ({type(error).__name__}: {error}); give a PNG, JPEG or WebP that PIL opens"


def read_levels(item: Any, largest: int) -> Tensor | None:
    """Decode a path or PIL image to the levels uint8 [3, H, W] that `load_images` divides by 255.

    None for what it alone should read: unreadable, deeper than 8 bits, with frames or pages, above `largest` pixels.
    """
    if isinstance(item, CompletionText) or not isinstance(item, Image.Image | str | os.PathLike):
        return None
    try:
        with _open(item) as image:
            if image.width * image.height > largest or getattr(image, "n_frames", 1) > 1:
                return None
            levels = _levels(image)
    except DECODING_ERRORS:
        return None
    # as a tensor, an image of width 3 might have its channels first or last
    return levels if levels.dtype == torch.uint8 and levels.shape[2] != 3 else None


def _from_pil(image: Image.Image) -> Tensor:
    """Pixels [3, H, W] float32 in [0, 1] of a PIL image of any mode; the image itself is left as it was."""
    levels = _levels(image)
    return levels.to(torch.float32).div_(255) if levels.dtype == torch.uint8 else levels


def _levels(image: Image.Image) -> Tensor:
    """Levels uint8 [3, H, W], or float32 in [0, 1] of a mode deeper than 8 bits."""
    width, height = image.size
    if width * height == 0:
        raise ValueError(f"it has no pixels: {width}×{height}")
    if width * height > pixel_limit():
        raise Image.DecompressionBombError
    upright = first_frame_upright(image)
    if upright.mode in _DEEP_MODES:
        return _from_deep(upright)
    array = np.array(over_white(upright))
    return torch.from_numpy(array).permute(2, 0, 1)


def pixel_limit() -> int:
    """Return the largest number of pixels of an image that is read."""
    return min(max_pixels(), Image.MAX_IMAGE_PIXELS or max_pixels())


def _from_deep(image: Image.Image) -> Tensor:
    """16-bit, 32-bit and float grey as [3, H, W] float32, without a detour over 8 bits."""
    white = _DEEP_MODES[image.mode]
    grey = np.asarray(image).astype(np.float64)
    if not np.isfinite(grey).all() or grey.min() < 0 or grey.max() > white:
        raise ValueError(
            f"mode {image.mode} is grey in [0, {white:g}]; its values are {grey.min():g} to {grey.max():g}"
        )
    return torch.from_numpy((grey / white).astype(np.float32)).expand(3, -1, -1).contiguous()


def _read_batch(items: Tensor | np.ndarray, where: str) -> ImageBatch:
    """Read a tensor or array [B, ...]: layout, type and range raise; NaN costs its row only."""
    shape = tuple(items.shape)
    pixels = torch.from_numpy(np.array(items)) if isinstance(items, np.ndarray) else items.detach()
    levels = pixels.dtype == torch.uint8
    if not levels and not pixels.is_floating_point():
        raise TypeError(f"{where} has dtype {items.dtype}. {ACCEPTED}")
    channels_first, channels_last = (len(shape) == 4 and shape[axis] == 3 for axis in (1, 3))
    for problem, is_wrong in (
        ("is not a batch of images", len(shape) != 4),
        ("may have its channels first or last, so pass floats", levels and channels_first and channels_last),
        ("does not have the 3 channels where they belong", not channels_first and not (levels and channels_last)),
        ("has images without pixels", 0 in shape[1:]),
    ):
        if is_wrong:
            own_shape = shape if where == "images" else shape[1:]
            raise ValueError(f"{where} of shape {own_shape} and dtype {items.dtype} {problem}. {ACCEPTED}")
    if levels:
        pixels = (pixels if channels_first else pixels.permute(0, 3, 1, 2)).to(torch.float32).div_(255)
        return ImageBatch(list(pixels), [None] * len(pixels))
    return _check_values(pixels.to(torch.float32), where)


def _check_values(pixels: Tensor, where: str) -> ImageBatch:
    if not len(pixels):
        return ImageBatch([], [])
    smallest, largest = (end.item() for end in pixels.aminmax())  # NaN where any value is
    if smallest >= 0 and largest <= 1:  # the usual case in one pass; a copy, so that nobody's pixels change
        return ImageBatch(list(pixels.clone()), [None] * len(pixels))
    finite = torch.isfinite(pixels)
    values = pixels[finite]
    if values.numel() and (values.min() < -SLACK or values.max() > 1 + SLACK):
        low, high = values.min().item(), values.max().item()
        mend = "divide by 255 or pass uint8" if high > 2 else "use (images / 2 + 0.5).clamp(0, 1)"
        raise ValueError(f"{where} has values in [{low:.4g}, {high:.4g}], allowed is [0, 1]: for such images {mend}.")
    complete, reason = finite.flatten(1).all(1).tolist(), "the image holds NaN or infinite pixels"
    images = [image if ok else None for image, ok in zip(pixels.clamp(0, 1), complete, strict=True)]
    return ImageBatch(images, [None if ok else reason for ok in complete])
