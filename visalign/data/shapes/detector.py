# SPDX-License-Identifier: Apache-2.0
"""Detector of the shapes in an image of the shapes world: color by chroma and hue, shape by overlap.

Grounds are neutral and dark (grey 30-91, chroma ≤ 16, texture ±18), colors saturated or bright: a pixel is an
object's when its chroma or darkest channel stands out. Connected components of the smoothed label map are
compared with a bank of ideal shapes that went through the same steps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .components import Components, find_components
from .prompts import COLORS, SHAPES
from .render import PALETTE, render_many
from .scenes import SIZE, Scene, SceneObject

UNKNOWN = "unknown"  # Shape of a component that looks like none of SHAPES; it still counts as something in the image

MIN_AREA = 24  # Pixels; smaller components are specks. The smallest object, a cross of radius 6, covers 80.

MIN_OVERLAP = 0.72  # Intersection over union with the best ideal shape, below which a component's shape is UNKNOWN

MAX_MISFIT = 0.35  # Relative error of height plus width against the best ideal shape, above which the shape is UNKNOWN
_CHROMA_SHARE = 0.42  # least share of a color's full chroma: about half-covered edge pixels
_WHITE_FLOOR = 138.0  # darkest channel of a white pixel: half-way between the lightest ground and shaded white
_TEMPLATE = 24  # side of the grid on which masks are compared
_AT_ONCE = 32  # images per pass on a CPU, so few that intermediate results stay in its cache

_HUED = tuple(name for name in COLORS if name != "white")


@dataclass(frozen=True, kw_only=True)
class Detection:
    """A detected object."""

    shape: str  # One of SHAPES, or UNKNOWN
    color: str
    x: float  # Centre of the bounding box in pixels
    y: float
    radius: float  # Half of the extent in pixels
    overlap: float  # Intersection over union with the ideal shape, in [0, 1]


def detect(images: Tensor | np.ndarray) -> list[list[Detection]]:
    """Detect the objects of each image, [B, 3, 64, 64] float in [0, 1] or uint8 [B, 64, 64, 3]."""
    levels = as_images(images)
    parts = levels.split(_AT_ONCE) if levels.device.type == "cpu" else [levels]
    return [objects for part in parts for objects in _objects(label_map(part), levels.device)]


def as_images(images: Tensor | np.ndarray) -> Tensor:
    """Convert images to float32 [B, 3, 64, 64] in [0, 255]."""
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(images)
    if images.dtype == torch.uint8 and images.shape[1:] == (SIZE, SIZE, 3):
        return images.permute(0, 3, 1, 2).float()
    if images.is_floating_point() and images.shape[1:] == (3, SIZE, SIZE):
        return images.float() * 255.0
    raise ValueError(
        f"The shapes verifier takes float [B, 3, {SIZE}, {SIZE}] in [0, 1] or uint8 [B, {SIZE}, {SIZE}, 3]; "
        f"got {images.dtype} {tuple(images.shape)}. Resize other images first."
    )


@cache
def _hues() -> tuple[Tensor, Tensor, Tensor]:
    """Compute unit opponent axes [K, 2], least chroma [K] and label [K] of the colors but white."""
    palette = torch.tensor([PALETTE[name] for name in _HUED], dtype=torch.float32)
    least_chroma = _CHROMA_SHARE * (palette.amax(1) - palette.amin(1))
    label = torch.tensor([COLORS.index(name) + 1 for name in _HUED], dtype=torch.uint8)
    return F.normalize(torch.stack(_hue_vector(palette.T), 1), dim=1), least_chroma, label


def _hue_vector(rgb: Tensor) -> tuple[Tensor, Tensor]:
    """Project a color [3, ...] without its grey part onto two opponent axes."""
    red, green, blue = rgb
    return red - 0.5 * (green + blue), 0.8660254 * (green - blue)


def label_map(images: Tensor) -> np.ndarray:
    """Label pixels [B, 3, 64, 64] in [0, 255] by color: uint8 [B, 64, 64], 0 ground, i COLORS[i − 1]."""
    # A light 3×3 smoothing: takes the noise of single pixels, leaves edges within half a pixel.
    kernel = images.new_tensor([1.0, 4.0, 1.0])
    kernel = (kernel[:, None] * kernel[None, :] / 36.0).expand(3, 1, 3, 3)
    with torch.backends.cudnn.flags(enabled=False):  # cuDNN would round to TF32
        smooth = F.conv2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), kernel, groups=3)
    red, green, blue = smooth.unbind(1)
    darkest = torch.minimum(torch.minimum(red, green), blue)
    chroma = torch.maximum(torch.maximum(red, green), blue) - darkest
    axes, least_chroma, label = (table.to(images.device) for table in _hues())
    labels = torch.zeros_like(chroma, dtype=torch.uint8)
    colored = chroma > least_chroma.min()  # the others need no hue
    x, y = _hue_vector(torch.stack([red[colored], green[colored], blue[colored]]))
    best = (axes[:, :1] * x + axes[:, 1:] * y).argmax(0)
    labels[colored] = torch.where(chroma[colored] > least_chroma[best], label[best], 0)
    labels[(darkest > _WHITE_FLOOR) & (chroma < 60.0)] = COLORS.index("white") + 1
    return majority(labels.cpu().numpy())


_VOTE = np.array([0, *(1 << 8 * i for i in range(len(COLORS)))], dtype=np.int64)
"""A pixel's vote by its label: a byte per color holds a count up to 255, so that one sum counts them all."""


def majority(labels: np.ndarray) -> np.ndarray:
    """Relabel object pixels, in place, by the most frequent color within 5×5: edges take the body's color."""
    votes = np.pad(_VOTE[labels], ((0, 0), (2, 2), (2, 2)))
    rows = votes[:, :-1] + votes[:, 1:]
    rows = rows[:, :-3] + rows[:, 2:-1] + votes[:, 4:]
    columns = rows[..., :-1] + rows[..., 1:]
    around = columns[..., :-3] + columns[..., 2:-1] + rows[..., 4:]
    is_object = labels > 0
    counts = around[is_object][:, None] >> np.arange(0, 8 * len(COLORS), 8) & 255
    labels[is_object] = counts.argmax(1) + 1
    return labels


@dataclass(frozen=True, kw_only=True)
class _Bank:
    """K ideal shapes after the detector's own steps, so that its erosion of thin parts cancels out."""

    masks: Tensor  # [K, 24·24] float32, each mask scaled to its bounding box
    shape: np.ndarray  # [K], positions in SHAPES
    extent: Tensor  # [K, 2] float32, height and width of the detected bounding box in pixels
    radius: np.ndarray
    """[K, 2], (slope, intercept) of the drawn radius against √(detected area), equal for all of a shape."""
    offset: np.ndarray  # [K, 2], drawn centre (x, y) minus the centre of the detected box


@cache
def _bank() -> _Bank:
    scenes, drawn = [], []
    for shape, radius, shift in itertools.product(SHAPES, np.arange(5.0, 14.6, 0.6), (0.0, 0.25, 0.5, 0.75)):
        for color, style in (("green", "flat"), ("red", "shaded"), ("white", "outlined")):
            item = SceneObject(shape=shape, color=color, x=32.0 + shift, y=32.0 + shift, radius=float(radius))
            scenes.append(Scene(record={}, objects=(item,), background=(60, 60, 60), style=style, texture_seed=0))
            drawn.append((shape, radius, 32.0 + shift))
    components = find_components(label_map(as_images(render_many(scenes))).clip(max=1), MIN_AREA)
    roots, masks = np.sqrt(components.area), components.masks(_TEMPLATE)
    centre = np.array([middle for _, _, middle in drawn])
    lines = []
    for shape in SHAPES:
        mine = [i for i, (name, _, _) in enumerate(drawn) if name == shape]
        lines.append(np.polyfit(roots[mine], [drawn[i][1] for i in mine], 1))
    shape = np.array([SHAPES.index(name) for name, _, _ in drawn])
    return _Bank(
        masks=torch.from_numpy(masks),
        shape=shape,
        extent=_extent(components),
        radius=np.array(lines)[shape],
        offset=centre[:, None] - components.centres(),
    )


def _objects(labels: np.ndarray, device: torch.device) -> list[list[Detection]]:
    """Match each component of label maps [B, 64, 64] with the best-overlapping ideal shape of its size."""
    bank, components = _bank(), find_components(labels, MIN_AREA)
    masks = torch.from_numpy(components.masks(_TEMPLATE)).to(device)
    ideal, extent, own_extent = (table.to(device) for table in (bank.masks, bank.extent, _extent(components)))
    intersection = masks @ ideal.T  # exact: whole numbers
    overlap = intersection / (ideal.sum(1) + masks.sum(1, keepdim=True) - intersection)
    misfit = (extent / own_extent[:, None] - 1.0).abs().sum(2)
    best = (overlap - 0.3 * misfit).argmax(1, keepdim=True)
    overlap, misfit = (table.gather(1, best)[:, 0].cpu().numpy() for table in (overlap, misfit))
    best = best[:, 0].cpu().numpy()
    plausible = (overlap >= MIN_OVERLAP) & (misfit <= MAX_MISFIT)
    slope, intercept = bank.radius[best].T
    columns = [
        components.image,
        np.where(plausible, bank.shape[best], len(SHAPES)),
        components.label - 1,
        *(components.centres() + bank.offset[best]).T,
        slope * np.sqrt(components.area) + intercept,
        overlap,
    ]
    names, detections = (*SHAPES, UNKNOWN), [[] for _ in labels]
    for image, shape, color, x, y, radius, share in zip(*(c.tolist() for c in columns), strict=True):
        detections[image].append(
            Detection(shape=names[shape], color=COLORS[color], x=x, y=y, radius=radius, overlap=share)
        )
    return detections


def _extent(components: Components) -> Tensor:
    sides = np.stack([components.bottom - components.top, components.right - components.left], 1)
    return torch.from_numpy(sides).float()
