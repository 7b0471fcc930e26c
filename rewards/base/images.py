# SPDX-License-Identifier: Apache-2.0
"""Image intake: what every reward accepts, turned into one form; the rest refused with a message.

Conventions: alpha is composited over white; EXIF orientation is applied; of an animation the first frame is
judged; 16-bit grey is divided by 65535, not cut to 8 bits; ICC profiles are ignored (values are read as
sRGB).
"""

from __future__ import annotations

import math
import os
import stat
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visalign.vision.pixels import first_frame_upright, over_white, to_levels

from .memory import max_pixels

SLACK = 1e-6
"""How far float rounding may put a value outside [0, 1]; such values are clamped."""

ACCEPTED = (
    "Allowed: a float tensor [B, 3, H, W] in [0, 1], uint8 [B, 3, H, W] or [B, H, W, 3], or a list of PIL "
    "images, paths, or single images as tensors."
)

_CLIP = "This judge takes no clip of frames: load_judge('frames', reward=...) judges clips frame by frame."

_DECODE_ERRORS = (
    OSError,  # holds FileNotFoundError and PIL.UnidentifiedImageError
    SyntaxError,  # PIL raises it for broken PNG chunks
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    MemoryError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
_KINDS = {
    stat.S_IFIFO: "FIFO",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
    stat.S_IFDIR: "folder",
}
_ANIMATED = ("GIF", "PNG", "WEBP")
"""PIL's formats whose frames are moments; those of others are pages, sizes or views."""

_DEEP_MODES = {"I;16": 65535.0, "I;16L": 65535.0, "I;16B": 65535.0, "I;16N": 65535.0, "I": 65535.0, "F": 1.0}
"""Modes deeper than 8 bits, with the value that counts as white."""


@dataclass(frozen=True)
class ImageBatch:
    """B images, each [3, H, W] float32 in [0, 1] or None where it could not be read.

    Attributes:
        images: one tensor or None per sample; sizes may differ.
        reasons: why an image is None; None for those that were read.
    """

    images: list[Tensor | None]
    reasons: list[str | None]

    def __len__(self) -> int:
        return len(self.images)

    @property
    def valid(self) -> Tensor:
        """[B] bool, True where the image was read."""
        return torch.tensor([image is not None for image in self.images], dtype=torch.bool)

    def readable(self) -> list[tuple[int, Tensor]]:
        """(row, image) of the images that were read."""
        return [(row, image) for row, image in enumerate(self.images) if image is not None]


def load_images(items: Any) -> ImageBatch:
    """Read B images from any accepted form.

    An unreadable image in a list, or a row of a tensor that holds NaN, becomes None with its reason; a tensor
    of the wrong layout, type or range is an error of the caller and raises.

    Args:
        items: float tensor or array [B, 3, H, W] in [0, 1]; uint8 tensor or array [B, 3, H, W] or [B, H, W,
            3]; or a sequence whose elements are PIL images of any mode, paths, or single images (float [3, H,
            W], uint8 [3, H, W] or [H, W, 3]), sizes mixed at will.

    Returns:
        ImageBatch of length B.

    Raises:
        TypeError: the container, an element or a dtype is none of the accepted.
        ValueError: wrong layout, values outside [0, 1], or images without pixels.
    """
    if isinstance(items, Tensor | np.ndarray):
        return _read_batch(items, "images")
    if isinstance(items, Image.Image | str | bytes | os.PathLike) or not isinstance(items, Sequence):
        raise TypeError(f"images is a {type(items).__name__}. {ACCEPTED} Put a single image into a list.")
    images: list[Tensor | None] = []
    reasons: list[str | None] = []
    for index, item in enumerate(items):
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
    """Images [3, H, W] in a form that every reward takes: one tensor, or a list where the sizes differ.

    The pixels are the same in both, so that a score does not depend on the sizes of its neighbours.
    """
    return torch.stack(images) if len({image.shape for image in images}) == 1 else images


def _read_item(item: Any, where: str) -> ImageBatch:
    """Read an element of a list as an ImageBatch of length 1."""
    if isinstance(item, Tensor | np.ndarray):
        if item.ndim != 3:
            raise ValueError(
                f"{where} has shape {tuple(item.shape)}; an element of a list is one image with 3 "
                f"dimensions. {ACCEPTED}{f' {_CLIP}' if item.ndim == 4 else ''}"
            )
        return _read_batch(item[None], where)
    if not isinstance(item, Image.Image | str | os.PathLike):
        clip = f" {_CLIP}" if isinstance(item, list | tuple) else ""
        raise TypeError(f"{where} is a {type(item).__name__}. {ACCEPTED}{clip}")
    max_pixels()  # what is wrong with the limit is no fault of the image
    try:
        with warnings.catch_warnings():
            # Decoders warn about odd metadata, which does not concern the pixels; a bomb does.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            pixels = _from_pil(item) if isinstance(item, Image.Image) else _from_path(Path(item))
    except _DECODE_ERRORS as error:
        return ImageBatch([None], [_explain(error, item)])
    return ImageBatch([pixels], [None])


def animation_length(item: Any) -> int:
    """Frames of an animated GIF, PNG or WebP (a path or a PIL image), told without decoding; else 1."""
    if not isinstance(item, Image.Image | str | os.PathLike):
        return 1
    try:
        with _borrowed(item) as image:
            return getattr(image, "n_frames", 1) if image.format in _ANIMATED else 1
    except _DECODE_ERRORS:
        return 1


def load_animation(item: Image.Image | str | os.PathLike[str], numbers: Sequence[int]) -> ImageBatch:
    """Frames of an animation, as `load_images` reads images: all of them, or none with one reason.

    All its frames together may have as many pixels as a single image, since those between are decoded too.

    Args:
        item: of which `animation_length` says that it is animated.
        numbers: of the frames, from 0, best in rising order.
    """
    max_pixels()  # what is wrong with the limit is no fault of the image
    length = animation_length(item)
    try:
        with _borrowed(item) as image:
            if image.width * image.height * length > _most_pixels():
                raise Image.DecompressionBombError
            read: list[Tensor | None] = []
            for at in numbers:
                image.seek(at)
                read.append(_from_pil(image.copy()))
    except _DECODE_ERRORS as error:
        reason = _explain(error, item, having=f"pixels in its {length} frames")
        return ImageBatch([None] * len(numbers), [reason] * len(numbers))
    return ImageBatch(read, [None] * len(numbers))


@contextmanager
def _borrowed(item: Image.Image | str | os.PathLike[str]) -> Iterator[Image.Image]:
    """An image or the one of a file, with the decoders' warnings off; it is left at the frame it was at."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not isinstance(item, Image.Image):
            with _opened(Path(item)) as image:
                yield image
            return
        frame = item.tell()
        try:
            yield item
        finally:
            if item.tell() != frame:
                item.seek(frame)


def _explain(error: BaseException, item: Any, *, having: str = "pixels") -> str:
    """The reason that a row gets for a decoding error."""
    name = f"a PIL image of mode {item.mode}" if isinstance(item, Image.Image) else os.fspath(item)
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        limit, own_limit = Image.MAX_IMAGE_PIXELS, max_pixels()
        is_pil = limit is not None and limit < own_limit
        knob = "PIL.Image.MAX_IMAGE_PIXELS" if is_pil else "the environment variable VISALIGN_MAX_PIXELS"
        return (
            f"{name} has more than {limit if is_pil else own_limit} {having} and may be a decompression "
            f"bomb; shrink it, or raise {knob} if you trust it and have the memory"
        )
    if isinstance(error, FileNotFoundError):
        hint = "; URLs are not read, download it first" if "://" in name else ""
        return f"no such image file: {name}{hint}"
    return (
        f"{name} cannot be decoded ({type(error).__name__}: {error}); give a PNG, JPEG or WebP that PIL opens"
    )


def pixels_of(item: Any) -> int:
    """H·W of an image as `load_images` takes it in a list, told without decoding; 0 where unreadable."""
    if isinstance(item, Tensor | np.ndarray):
        return math.prod(item.shape) // 3
    if isinstance(item, Image.Image):
        return item.width * item.height
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _opened(Path(item)) as image:
                return image.width * image.height
    except _DECODE_ERRORS:
        return 0


def _opened(path: Path) -> Image.Image:
    """An image whose pixels are not decoded yet; what is no regular file could block or never end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"it is a {_KINDS.get(stat.S_IFMT(mode), 'special file')}, not a regular file")
    return Image.open(path)


def _from_path(path: Path) -> Tensor:
    with _opened(path) as image:
        return _from_pil(image)


def _from_pil(image: Image.Image) -> Tensor:
    """Pixels [3, H, W] float32 in [0, 1] of a PIL image of any mode; the image itself is left as it was."""
    width, height = image.size
    if width * height == 0:
        raise ValueError(f"it has no pixels: {width}×{height}")
    if width * height > _most_pixels():
        raise Image.DecompressionBombError
    upright = first_frame_upright(image)
    if upright.mode in _DEEP_MODES:
        return _from_deep(upright)
    array = np.array(over_white(upright))
    return torch.from_numpy(array).permute(2, 0, 1).to(torch.float32) / 255


def _most_pixels() -> float:
    return min(max_pixels(), Image.MAX_IMAGE_PIXELS or math.inf)


def _from_deep(image: Image.Image) -> Tensor:
    """16-bit, 32-bit and float grey as [3, H, W] float32, without a detour over 8 bits."""
    white = _DEEP_MODES[image.mode]
    grey = np.asarray(image).astype(np.float64)
    if not np.isfinite(grey).all() or grey.min() < 0 or grey.max() > white:
        raise ValueError(
            f"mode {image.mode} is read as grey in [0, {white:g}], but its values span "
            f"[{grey.min():g}, {grey.max():g}]; rescale it"
        )
    return torch.from_numpy((grey / white).astype(np.float32)).expand(3, -1, -1).contiguous()


def _read_batch(items: Tensor | np.ndarray, where: str) -> ImageBatch:
    """A whole tensor or array [B, ...]: layout, type and range raise; NaN costs its row only."""
    shape = tuple(items.shape)
    if len(shape) != 4:
        hints = {3: " Add the batch dimension: images[None].", 5: f" {_CLIP}"}
        hint = hints.get(len(shape), "")
        raise ValueError(f"{where} has shape {shape}, which is not a batch of images.{hint} {ACCEPTED}")
    pixels = _as_tensor(items, where)
    levels = pixels.dtype == torch.uint8
    if levels:
        pixels = _channels_first(pixels, where).to(torch.float32) / 255
    elif shape[1] != 3:
        hint = " Use images.permute(0, 3, 1, 2)." if shape[3] == 3 else ""
        raise ValueError(
            f"{where} has shape {shape[-3:] if where != 'images' else shape}; float images are channels "
            f"first with 3 channels.{hint} {ACCEPTED}"
        )
    if pixels.shape[2] * pixels.shape[3] == 0:
        raise ValueError(
            f"{where} has shape {shape}: images without pixels. Give height and width of at least 1."
        )
    if levels or not len(pixels):
        return ImageBatch(list(pixels), [None] * len(pixels))
    return _check_values(pixels, where)


def _as_tensor(items: Tensor | np.ndarray, where: str) -> Tensor:
    """The same numbers as uint8 or float32."""
    if isinstance(items, np.ndarray):
        if items.dtype.kind == "f":
            return torch.from_numpy(np.array(items, dtype=np.float32))
        if items.dtype == np.uint8:
            return torch.from_numpy(np.array(items))
    elif items.dtype == torch.uint8:
        return items
    elif items.is_floating_point():
        return items.detach().to(torch.float32)
    raise TypeError(f"{where} has dtype {items.dtype}. Allowed: floats in [0, 1] or uint8. {ACCEPTED}")


def _channels_first(pixels: Tensor, where: str) -> Tensor:
    """uint8 [B, 3, H, W] from either layout."""
    first, last = pixels.shape[1] == 3, pixels.shape[3] == 3
    if first and last:
        raise ValueError(
            f"{where} is uint8 of shape {tuple(pixels.shape)}, which may be [B, 3, H, W] or [B, H, W, 3]. "
            "Pass floats in [0, 1] as [B, 3, H, W] to say which."
        )
    if not first and not last:
        raise ValueError(
            f"{where} is uint8 of shape {tuple(pixels.shape)} and has no dimension of 3 channels. "
            f"Pass grey or transparent images as PIL. {ACCEPTED}"
        )
    return pixels if first else pixels.permute(0, 3, 1, 2)


def _check_values(pixels: Tensor, where: str) -> ImageBatch:
    """Refuse values outside [0, 1]; take out the rows that are not finite."""
    smallest, largest = (end.item() for end in pixels.aminmax())  # NaN where any value is
    if smallest >= 0 and largest <= 1:  # the usual case in one pass; a copy, so that nobody's pixels change
        return ImageBatch(list(pixels.clone()), [None] * len(pixels))
    finite = torch.isfinite(pixels)
    values = pixels[finite]
    if values.numel() and (values.min() < -SLACK or values.max() > 1 + SLACK):
        low, high = values.min().item(), values.max().item()
        mend = "divide by 255 or pass uint8" if high > 2 else "use (images / 2 + 0.5).clamp(0, 1)"
        raise ValueError(
            f"{where} has values in [{low:.4g}, {high:.4g}], allowed is [0, 1]: for such images {mend}."
        )
    complete = finite.flatten(1).all(1).tolist()
    pixels = pixels.clamp(0, 1)
    return ImageBatch(
        [pixels[row] if ok else None for row, ok in enumerate(complete)],
        [None if ok else "the image holds NaN or infinite pixels" for ok in complete],
    )
