# SPDX-License-Identifier: Apache-2.0
"""Perturbations that no prompt asks for: pure functions of one image [3, H, W] in [0, 1].

Every result is on the 8-bit grid of a file, so that a reward sees nothing it could not be given.
"""

from __future__ import annotations

import io

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from scipy import ndimage
from torch import Tensor

from visalign.vision.pixels import read_pixels, to_levels

LUMA = (0.299, 0.587, 0.114)
COLOURS = {
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
    "grey": (0.5, 0.5, 0.5),
    "red": (0.87, 0.16, 0.16),
    "teal": (0.0, 0.5, 0.5),
    "pink": (0.92, 0.67, 0.76),
}
"""Fills of blanks, borders, grounds and canvases."""

GROUND_TOLERANCE = 0.1
"""Largest distance of a ground pixel from the border's median colour in each channel."""


def on_grid(image: Tensor) -> Tensor:
    """Round to 256 levels."""
    return image.clamp(0, 1).mul(255).round().div(255)


def blank(image: Tensor, colour: str) -> Tensor:
    """Fill with one even colour: a name of `COLOURS`, or "mean", the image's own mean colour."""
    fill = image.mean((1, 2)) if colour == "mean" else image.new_tensor(COLOURS[colour])
    return on_grid(fill[:, None, None].expand_as(image))


def pure_noise(image: Tensor, generator: torch.Generator) -> Tensor:
    """Draw uniform levels for every pixel and channel; nothing of the image is left."""
    return on_grid(torch.rand(image.shape, generator=generator))


def shuffled(image: Tensor, generator: torch.Generator) -> Tensor:
    """Move the pixels to random places: the colours of the image without its content."""
    order = torch.randperm(image[0].numel(), generator=generator)
    return image.flatten(1)[:, order].reshape(image.shape).contiguous()


def noised(image: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Add Gaussian noise of standard deviation `std`, as a share of white."""
    return on_grid(image + std * torch.randn(image.shape, generator=generator))


def blurred(image: Tensor, radius: float) -> Tensor:
    """Blur by a Gaussian with standard deviation `radius`, a share of the shorter side."""
    pixels = radius * min(image.shape[1:])
    return from_pil(to_pil(image).filter(ImageFilter.GaussianBlur(pixels)))


def jpeg(image: Tensor, quality: int) -> Tensor:
    """Compress as JPEG of quality 1 to 95."""
    buffer = io.BytesIO()
    to_pil(image).save(buffer, format="JPEG", quality=quality)
    return from_pil(Image.open(buffer))


def saturated(image: Tensor, factor: float) -> Tensor:
    """Compute Y + factor (x − Y) with the luma Y: 0 is grey, 1 the image itself."""
    grey = torch.einsum("c,chw->hw", image.new_tensor(LUMA), image)
    return on_grid(grey + factor * (image - grey))


def contrasted(image: Tensor, factor: float) -> Tensor:
    """Compute m + factor (x − m) with the mean luma m."""
    middle = torch.einsum("c,chw->hw", image.new_tensor(LUMA), image).mean()
    return on_grid(middle + factor * (image - middle))


def brightened(image: Tensor, factor: float) -> Tensor:
    """Compute factor · x: below 1 is darker."""
    return on_grid(image * factor)


def flipped(image: Tensor, axis: str) -> Tensor:
    """Mirror along the axis "horizontal" (left and right exchanged) or "vertical"."""
    return image.flip(2 if axis == "horizontal" else 1)


def cropped(image: Tensor, share: float) -> Tensor:
    """Cut out the middle with a share of each side and enlarge it to the image's size (bilinear)."""
    height, width = image.shape[1:]
    rows, columns = max(1, round(height * share)), max(1, round(width * share))
    top, left = (height - rows) // 2, (width - columns) // 2
    part = image[:, top : top + rows, left : left + columns]
    return on_grid(F.interpolate(part[None], size=(height, width), mode="bilinear", align_corners=False)[0])


def bordered(image: Tensor, width: float, colour: str) -> Tensor:
    """Paint a frame over the outermost pixels, at least one; `width` is a share of the shorter side."""
    pixels = max(1, round(width * min(image.shape[1:])))
    framed = image.new_tensor(COLOURS[colour])[:, None, None].expand_as(image).clone()
    inside = (slice(None), slice(pixels, -pixels), slice(pixels, -pixels))
    framed[inside] = image[inside]
    return on_grid(framed)


def find_ground(image: Tensor) -> Tensor | None:
    """Find the plain ground, bool [H, W]: the border's median colour, if half of it and a quarter of all is."""
    edge = torch.cat([image[:, 0], image[:, -1], image[:, :, 0], image[:, :, -1]], 1)
    close = (image - edge.median(1).values[:, None, None]).abs().amax(0) <= GROUND_TOLERANCE
    labels: np.ndarray = ndimage.label(close.numpy())[0]  # pyright: ignore[reportIndexIssue]
    border = np.concatenate([labels[0], labels[-1], labels[:, 0], labels[:, -1]])
    ground = torch.from_numpy(np.isin(labels, border[border > 0]))
    return ground if (border > 0).mean() >= 0.5 and ground.float().mean() >= 0.25 else None


def with_ground(image: Tensor, colour: str) -> Tensor | None:
    """Recolour the plain ground, keeping its pattern; None where there is no plain ground."""
    ground = find_ground(image)
    if ground is None:
        return None
    shift = image.new_tensor(COLOURS[colour]) - image[:, ground].median(1).values
    return on_grid(image + shift[:, None, None] * ground)


def with_specks(image: Tensor, count: float, generator: torch.Generator) -> Tensor:
    """Paint specks in random colours, a twentieth of the shorter side wide, on the ground if it is plain."""
    height, width = image.shape[1:]
    radius = min(height, width) / 40
    ground = find_ground(image)
    free = np.ones((height, width), dtype=bool) if ground is None else ground.numpy()
    space = torch.from_numpy(ndimage.binary_erosion(free, iterations=int(radius) + 2)).nonzero()
    rows, columns = torch.arange(height)[:, None] + 0.5, torch.arange(width)[None] + 0.5
    painted = image.clone()
    for _ in range(round(count) if len(space) else 0):
        row, column = (space[int(torch.randint(len(space), (1,), generator=generator))] + 0.5).tolist()
        cover = (radius + 0.5 - torch.hypot(rows - row, columns - column)).clamp(0, 1)
        colour = torch.rand(3, generator=generator)[:, None, None]
        painted += cover * (colour - painted)
    return on_grid(painted)


def on_canvas(image: Tensor, share: float, colour: str) -> Tensor:
    """Shrink to a share of the sides, in the middle of a plain canvas of the same size."""
    height, width = image.shape[1:]
    size = (max(1, round(height * share)), max(1, round(width * share)))
    small = F.interpolate(image[None], size=size, mode="bilinear", align_corners=False, antialias=True)[0]
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    canvas = image.new_tensor(COLOURS[colour])[:, None, None].repeat(1, height, width)
    canvas[:, top : top + size[0], left : left + size[1]] = small
    return on_grid(canvas)


def with_text(image: Tensor, text: str) -> Tensor:
    """Write text on a white strip at the lower edge, 0.16 of the height; cut off where it is too wide."""
    canvas = to_pil(image)
    strip = max(8, round(0.16 * canvas.height))
    draw = ImageDraw.Draw(canvas)
    draw.rectangle((0, canvas.height - strip, canvas.width, canvas.height), fill="white")
    font = ImageFont.load_default(size=0.75 * strip)
    draw.text((2, canvas.height - strip / 2), text, fill="black", font=font, anchor="lm")
    return from_pil(canvas)


def to_pil(image: Tensor) -> Image.Image:
    """Convert to PIL, mode RGB."""
    return Image.fromarray(to_levels(image).permute(1, 2, 0).contiguous().numpy())


def from_pil(canvas: Image.Image) -> Tensor:
    """Convert from PIL to [3, H, W] float32 in [0, 1]."""
    return read_pixels(canvas, "an image").float().div(255)
