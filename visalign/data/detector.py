# SPDX-License-Identifier: Apache-2.0
"""Finds the shapes in a picture of the shapes world: color by chroma and hue, shape by overlap.

Grounds are neutral and dark (grey 30-91, chroma ≤ 16, texture ±18), colors are saturated or bright; so a
pixel is an object's when its chroma or its darkest channel stands out. A smoothed label map, connected
components per color, and the overlap of each with a bank of ideal shapes, put through the same steps, give
the detections.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy import ndimage
from torch import Tensor

from .prompts import COLORS, SHAPES
from .render import PALETTE, render_many
from .scenes import SIZE, Scene, SceneObject

UNKNOWN = "unknown"
"""Shape of a component that looks like none of SHAPES; it still counts as something in the picture."""

MIN_AREA = 24
"""Pixels; smaller components are specks. The smallest object, a cross of radius 6, covers 80."""

MIN_OVERLAP = 0.72
"""Intersection over union with the best ideal shape, below which a component's shape is UNKNOWN."""

MAX_MISFIT = 0.35
"""Relative error of height plus width against the best ideal shape, above which the shape is UNKNOWN."""

_CHROMA_SHARE = 0.42
"""A pixel belongs to a color from this share of its full chroma on: about half-covered edge pixels."""

_WHITE_FLOOR = 138.0
"""Darkest channel of a white pixel: half-way between the lightest ground and shaded white."""

_TEMPLATE = 24
"""Side of the grid on which masks are compared."""
_HUED = tuple(name for name in COLORS if name != "white")


@dataclass(frozen=True, kw_only=True)
class Detection:
    """One object found."""

    shape: str
    """One of SHAPES, or UNKNOWN."""
    color: str
    x: float
    """Centre of the bounding box in pixels."""
    y: float
    radius: float
    """Half of the extent in pixels."""
    overlap: float
    """Intersection over union with the ideal shape, in [0, 1]."""


def detect(images: Tensor | np.ndarray) -> list[list[Detection]]:
    """Detections of each picture.

    Args:
        images: [B, 3, 64, 64] float in [0, 1], or uint8 [B, 64, 64, 3].

    Raises:
        ValueError: another shape or type.
    """
    labels = label_map(as_pictures(images)).cpu().numpy()
    return [_components(picture) for picture in labels]


def as_pictures(images: Tensor | np.ndarray) -> Tensor:
    """Pictures as float32 [B, 3, 64, 64] in [0, 255]."""
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(images)
    if images.dtype == torch.uint8 and images.shape[1:] == (SIZE, SIZE, 3):
        return images.permute(0, 3, 1, 2).float()
    if images.is_floating_point() and images.shape[1:] == (3, SIZE, SIZE):
        return images.float() * 255.0
    raise ValueError(
        f"The shapes verifier takes float [B, 3, {SIZE}, {SIZE}] in [0, 1] or uint8 [B, {SIZE}, {SIZE}, 3]; "
        f"got {images.dtype} {tuple(images.shape)}. Resize other pictures first."
    )


def _hue_vectors(rgb: Tensor, dim: int) -> Tensor:
    """The color without its grey part: two opponent axes, stacked at `dim`."""
    red, green, blue = rgb.unbind(dim)
    return torch.stack([red - 0.5 * (green + blue), 0.8660254 * (green - blue)], dim)


def label_map(pictures: Tensor) -> Tensor:
    """Color label of each pixel, int64 [B, 64, 64]: 0 is ground, i is COLORS[i − 1].

    Args:
        pictures: [B, 3, 64, 64] float in [0, 255].
    """
    palette = torch.tensor([PALETTE[name] for name in _HUED], dtype=torch.float32, device=pictures.device)
    full = palette.amax(1) - palette.amin(1)
    axes = F.normalize(_hue_vectors(palette, 1), dim=1)
    # A light 3×3 smoothing: takes the noise of single pixels, leaves edges within half a pixel.
    kernel = torch.tensor([1.0, 4.0, 1.0], device=pictures.device)
    kernel = (kernel[:, None] * kernel[None, :] / 36.0).expand(3, 1, 3, 3)
    smooth = F.conv2d(F.pad(pictures, (1, 1, 1, 1), mode="replicate"), kernel, groups=3)
    chroma = smooth.amax(1) - smooth.amin(1)
    direction = F.normalize(_hue_vectors(smooth, 1), dim=1)
    likeness = torch.einsum("kc,bchw->bkhw", axes, direction)
    best = likeness.argmax(1)
    hued = chroma > _CHROMA_SHARE * full[best]
    white = (smooth.amin(1) > _WHITE_FLOOR) & (chroma < 60.0)
    index = torch.tensor([COLORS.index(name) + 1 for name in _HUED], device=pictures.device)
    labels = torch.where(hued, index[best], 0)
    labels = torch.where(white, COLORS.index("white") + 1, labels)
    return _majority(labels)


def _majority(labels: Tensor) -> Tensor:
    """Relabel object pixels by the most frequent color around them: edge pixels take the body's color."""
    votes = F.one_hot(labels, len(COLORS) + 1).permute(0, 3, 1, 2).float()
    around = F.avg_pool2d(votes, 5, stride=1, padding=2)
    return torch.where(labels > 0, around[:, 1:].argmax(1) + 1, 0)


def _components(labels: np.ndarray) -> list[Detection]:
    """Objects of one label map [64, 64]; neighbours of different colors are different objects."""
    found: list[Detection] = []
    for value in np.unique(labels):
        if value == 0:
            continue
        marked: Any = ndimage.label(labels == value)[0]  # type: ignore[index]  # its stub knows only the count
        for number, window in enumerate(ndimage.find_objects(marked), start=1):
            mask = marked[window] == number
            if mask.sum() >= MIN_AREA:
                found.append(_describe(mask, window, COLORS[value - 1]))
    return found


@dataclass(frozen=True)
class _Bank:
    """Ideal shapes as the detector itself sees them, so that its own erosion of thin parts cancels out."""

    masks: np.ndarray
    """[K, 24·24] float32, each mask scaled to its bounding box."""
    area: np.ndarray
    """[K], sum of each mask."""
    shape: list[str]
    height: np.ndarray
    """[K], pixels of the seen bounding box."""
    width: np.ndarray
    radius_of: dict[str, np.ndarray]
    """shape -> coefficients (slope, intercept) of the drawn radius against √(seen area)."""
    offset: np.ndarray
    """[K, 2], drawn centre (x, y) minus the centre of the seen box."""


@cache
def _bank() -> _Bank:
    scenes, drawn = [], []
    for shape, radius, shift in itertools.product(SHAPES, np.arange(5.0, 14.6, 0.6), (0.0, 0.25, 0.5, 0.75)):
        for color, style in (("green", "flat"), ("red", "shaded"), ("white", "outlined")):
            item = SceneObject(shape=shape, color=color, x=32.0 + shift, y=32.0 + shift, radius=float(radius))
            scene = Scene(record={}, objects=(item,), background=(60, 60, 60), style=style, texture_seed=0)
            scenes.append(scene)
            drawn.append((shape, radius, 32.0 + shift))
    labels = label_map(as_pictures(render_many(scenes))).numpy() > 0
    masks, sizes, offsets = [], [], []
    roots = np.sqrt(labels.sum((1, 2)))
    radius_of = {}
    for shape in SHAPES:
        mine = [i for i, (name, _, _) in enumerate(drawn) if name == shape]
        radius_of[shape] = np.polyfit(roots[mine], [drawn[i][1] for i in mine], 1)
    for seen, (_, _, centre) in zip(labels, drawn, strict=True):
        rows, columns = ndimage.find_objects(seen.astype(np.int8))[0]
        masks.append(_scaled(seen[rows, columns]))
        sizes.append((rows.stop - rows.start, columns.stop - columns.start))
        offsets.append((centre - (columns.start + columns.stop) / 2, centre - (rows.start + rows.stop) / 2))
    heights, widths = np.array(sizes, dtype=np.float32).T
    stacked = np.stack(masks)
    return _Bank(
        stacked,
        stacked.sum(1),
        [shape for shape, _, _ in drawn],
        heights,
        widths,
        radius_of,
        np.array(offsets),
    )


def _scaled(mask: np.ndarray) -> np.ndarray:
    rows = ((np.arange(_TEMPLATE) + 0.5) * mask.shape[0] / _TEMPLATE).astype(int)
    columns = ((np.arange(_TEMPLATE) + 0.5) * mask.shape[1] / _TEMPLATE).astype(int)
    return mask[np.ix_(rows, columns)].reshape(-1).astype(np.float32)


def _describe(mask: np.ndarray, window: tuple[slice, slice], color: str) -> Detection:
    """The ideal shape of about the component's size that overlaps it best; erosion depends on the size."""
    rows, columns = window
    height, width = mask.shape
    bank, scaled = _bank(), _scaled(mask)
    both = bank.masks @ scaled
    overlap = both / (bank.area + scaled.sum() - both)
    misfit = np.abs(bank.height / height - 1.0) + np.abs(bank.width / width - 1.0)
    best = int((overlap - 0.3 * misfit).argmax())
    plausible = overlap[best] >= MIN_OVERLAP and misfit[best] <= MAX_MISFIT
    return Detection(
        shape=bank.shape[best] if plausible else UNKNOWN,
        color=color,
        x=float((columns.start + columns.stop) / 2.0 + bank.offset[best, 0]),
        y=float((rows.start + rows.stop) / 2.0 + bank.offset[best, 1]),
        radius=float(np.polyval(bank.radius_of[bank.shape[best]], np.sqrt(mask.sum()))),
        overlap=float(overlap[best]),
    )
