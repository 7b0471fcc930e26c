# SPDX-License-Identifier: Apache-2.0
"""Renderer of scenes: antialiased shapes by signed distance, styles, distortions; uint8 out."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from scipy import ndimage

from .scenes import SIZE, Canvas, Distortion, Scene, SceneObject

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (222, 40, 40),
    "orange": (250, 140, 20),
    "yellow": (248, 225, 50),
    "green": (40, 170, 70),
    "blue": (45, 90, 225),
    "purple": (150, 55, 190),
    "white": (245, 245, 245),
}

CROSS_ARM = 1.0 / 3.0  # Half-width of a cross's bar as a share of its half-extent

_OUTLINE_WIDTH, _OUTLINE_DARKEN = 1.5, 0.62
_GRID = (np.arange(SIZE, dtype=np.float32) + 0.5).astype(np.float32)


def inside_distance(shape: str, dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    """Compute the distance in pixels from (dx, dy), relative to the centre, to the edge, positive inside."""
    if shape == "circle":
        return radius - np.sqrt(dx * dx + dy * dy)
    if shape == "square":
        return radius - np.maximum(np.abs(dx), np.abs(dy))
    if shape == "triangle":
        # Apex (0, −r), base from (−r, r) to (r, r): slanted sides have normal (2, −1)/√5.
        return np.minimum(radius - dy, (radius + dy - 2.0 * np.abs(dx)) / np.sqrt(5.0))
    arm, ax, ay = CROSS_ARM * radius, np.abs(dx), np.abs(dy)  # a cross: an upright and a level bar
    return np.maximum(np.minimum(arm - ax, radius - ay), np.minimum(radius - ax, arm - ay))


def render(scene: Scene) -> np.ndarray:
    """Render a scene, uint8 [64, 64, 3]."""
    canvas = np.empty((SIZE, SIZE, 3), dtype=np.float32)
    canvas[:] = scene.background
    if scene.style == "textured":
        canvas += _texture(scene.texture_seed)[..., None]
    for item in (*scene.objects, *scene.specks):
        _paint(canvas, item, scene.style)
    image = _distort(canvas, scene.distortion, scene.texture_seed)
    return image if scene.canvas is None else _on_canvas(image, scene.canvas)


def _on_canvas(image: np.ndarray, canvas: Canvas) -> np.ndarray:
    left, top, side = canvas.box()
    framed = np.empty_like(image)
    framed[:] = canvas.color
    small = Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC)
    framed[top : top + side, left : left + side] = np.asarray(small)
    return framed


def render_many(scenes: list[Scene]) -> np.ndarray:
    """Render scenes to uint8 [N, 64, 64, 3]."""
    return np.stack([render(scene) for scene in scenes]) if scenes else np.empty((0, SIZE, SIZE, 3), np.uint8)


def _paint(canvas: np.ndarray, item: SceneObject, style: str) -> None:
    reach = item.radius + 1.0
    x0, x1 = max(int(item.x - reach), 0), min(int(item.x + reach) + 1, SIZE)
    y0, y1 = max(int(item.y - reach), 0), min(int(item.y + reach) + 1, SIZE)
    dx, dy = _GRID[None, x0:x1] - item.x, _GRID[y0:y1, None] - item.y
    distance = inside_distance(item.shape, dx, dy, item.radius)
    cover = np.clip(distance + 0.5, 0.0, 1.0)[..., None]
    color = np.asarray(PALETTE[item.color], dtype=np.float32)
    if style in ("shaded", "textured"):
        light = 0.9 - 0.16 * (dx + dy) / item.radius
        color = color * np.clip(light, 0.72, 1.06)[..., None]
    if style == "outlined":
        edge = np.clip(_OUTLINE_WIDTH + 0.5 - distance, 0.0, 1.0)[..., None]
        color = color * (1.0 - (1.0 - _OUTLINE_DARKEN) * edge)
    window = canvas[y0:y1, x0:x1]
    window += cover * (np.minimum(color, 255.0) - window)


def _texture(seed: int) -> np.ndarray:
    """Draw a neutral pattern [64, 64] of at most ±18 grey levels: two plane waves."""
    rng = np.random.default_rng(seed)
    waves = rng.uniform(0.15, 0.7, size=2), rng.uniform(0, np.pi, size=2), rng.uniform(0, 2 * np.pi, size=2)
    pattern = np.zeros((SIZE, SIZE), dtype=np.float32)
    for frequency, angle, phase in zip(*waves, strict=True):
        along = _GRID[None, :] * np.cos(angle) + _GRID[:, None] * np.sin(angle)
        pattern += 9.0 * np.sin(frequency * along + phase)
    return pattern


def _distort(canvas: np.ndarray, distortion: Distortion, seed: int) -> np.ndarray:
    """Distort at severity s: blur 2.5 s pixels, noise 0.25 s, JPEG quality 90 − 85 s, contrast 1 − 0.85 s."""
    kind, severity = distortion.kind, distortion.severity
    if kind == "blur" and severity > 0.0:
        canvas = ndimage.gaussian_filter(canvas, (2.5 * severity, 2.5 * severity, 0.0))
    elif kind == "noise" and severity > 0.0:
        rng = np.random.default_rng([seed, 1])
        canvas = canvas + rng.normal(0.0, 255.0 * 0.25 * severity, canvas.shape)
    elif kind == "contrast":
        canvas = 127.5 + (canvas - 127.5) * (1.0 - 0.85 * severity)
    image = np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
    if kind == "jpeg" and severity > 0.0:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, format="JPEG", quality=round(90 - 85 * severity))
        image = np.asarray(Image.open(buffer))
    return image
