# SPDX-License-Identifier: Apache-2.0
"""Surroundings of the objects of an image that no caption names: another ground, specks, a larger canvas.

A judge that was trained on one kind of ground fails on every other; so its training images get random
ones (Tobin et al. 2017, arXiv 1703.06907). Specks are smaller than `detector.MIN_AREA`, so that to the
verifier they are none of the objects that a prompt counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .prompts import COLORS, SHAPES
from .render import PALETTE
from .scenes import SIZE, Canvas, Scene, SceneObject

HELDOUT_GROUNDS: dict[str, tuple[int, int, int]] = {"pink": (235, 170, 195), "brown": (105, 80, 50)}
"""Grounds kept away from all drawn ones."""

GROUNDS: dict[str, tuple[int, int, int]] = {
    "white": (250, 250, 250),
    "grey": (128, 128, 128),
    "teal": (0, 128, 128),
    **HELDOUT_GROUNDS,
}
"""Grounds on which judges are measured besides the world's own dark greys: name -> RGB."""

CONTRAST = 75.0  # Least Euclidean distance in RGB between a ground and an object on it, in light and in shade

SMALLEST = 0.5  # Least share of a canvas's side that its image takes: 64 pixels on 128

_HELDOUT_DISTANCE, _EDGE, _SHADE = 48.0, 40.0, 0.72
_GROUND_SHARE, _SPECKS_SHARE, _CANVAS_SHARE = 0.75, 0.4, 0.4
_SPECK_RADIUS, _MOST_SPECKS, _SPECK_GAP = (1.0, 1.8), 10, 3.0


def is_visible(scene: Scene, ground: tuple[int, int, int]) -> bool:
    """Check that each object of the scene stands out from this ground."""
    lit = np.array([PALETTE[item.color] for item in scene.objects], dtype=np.float64)
    return bool((_distance(np.concatenate([lit, _SHADE * lit]), ground) >= CONTRAST).all())


def surround(scenes: Sequence[Scene], rng: np.random.Generator) -> list[Scene]:
    """Put scenes on one ground and one canvas, each with its own specks; each of these may be left out."""
    if rng.random() < _GROUND_SHARE:
        ground = _ground(scenes, rng)
        scenes = [replace(scene, background=ground) for scene in scenes]
    if rng.random() < _SPECKS_SHARE:
        scenes = [with_specks(scene, rng) for scene in scenes]
    if rng.random() < _CANVAS_SHARE:
        canvas = sample_canvas(scenes[0], rng)
        scenes = [replace(scene, canvas=canvas) for scene in scenes]
    return list(scenes)


def with_specks(scene: Scene, rng: np.random.Generator, most: int = _MOST_SPECKS) -> Scene:
    """Add 1 to `most` specks that touch neither the objects nor each other."""
    placed: list[SceneObject] = []
    for _ in range(int(rng.integers(1, most + 1))):
        radius = float(rng.uniform(*_SPECK_RADIUS))
        x, y = (float(v) for v in rng.uniform(radius + 1, SIZE - radius - 1, size=2))
        shape, color = str(rng.choice(SHAPES[:2])), str(rng.choice(COLORS))
        if all(
            max(abs(x - item.x), abs(y - item.y)) > radius + item.radius + _SPECK_GAP
            for item in (*scene.objects, *placed)
        ):
            placed.append(SceneObject(shape=shape, color=color, x=x, y=y, radius=radius))
    return replace(scene, specks=tuple(placed))


def sample_canvas(scene: Scene, rng: np.random.Generator) -> Canvas:
    """Draw a canvas; one in five has the scene's ground, unless a size word needs the frame as measure."""
    share = float(rng.uniform(SMALLEST, 1.0))
    x, y = (float(v) for v in rng.uniform(size=2))
    sized = any("size" in entry for entry in scene.record["include"])
    if rng.random() < 0.2 and not sized:
        return Canvas(share=share, x=x, y=y, color=scene.background)
    while True:
        color = _any_color(rng)
        if _distance(np.array([color], dtype=np.float64), scene.background)[0] >= _EDGE:
            return Canvas(share=share, x=x, y=y, color=color)


def _ground(scenes: Sequence[Scene], rng: np.random.Generator) -> tuple[int, int, int]:
    while True:
        color = _any_color(rng)
        if all(is_visible(scene, color) for scene in scenes):
            return color


def _any_color(rng: np.random.Generator) -> tuple[int, int, int]:
    """Draw a color away from the held-out grounds, every third a grey."""
    heldout = np.array(list(HELDOUT_GROUNDS.values()), dtype=np.float64)
    while True:
        red, green, blue = (int(v) for v in rng.integers(256, size=3))
        color = (red, red, red) if rng.random() < 1 / 3 else (red, green, blue)
        if (_distance(heldout, color) >= _HELDOUT_DISTANCE).all():
            return color


def _distance(colors: np.ndarray, other: Sequence[float]) -> np.ndarray:
    return np.sqrt(((colors - np.asarray(other, dtype=np.float64)) ** 2).sum(-1))
