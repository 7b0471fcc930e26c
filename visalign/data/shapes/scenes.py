# SPDX-License-Identifier: Apache-2.0
"""Scenes of the shapes world: a prompt, a layout, a style (richness) and a distortion (quality).

Lengths are pixels of the 64×64 image, y grows downwards, positions are centres of bounding boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from .prompts import COLORS, Record

SIZE = 64  # Height and width of an image in pixels

STYLES = ("flat", "outlined", "shaded", "textured")  # The richness axis, poorest first: detail that no prompt asks for

DISTORTIONS = ("none", "blur", "noise", "jpeg", "contrast")
"""The quality axis; each but "none" has a severity in [0, 1]."""

MILD = 0.2  # Up to this severity of blur or noise the verifier is specified

RADIUS = {"small": (6.0, 7.6), "medium": (9.0, 9.6), "big": (11.2, 13.0)}
"""Half of an object's extent; the gaps keep the size words unambiguous in the pixels."""
SMALL_BELOW, BIG_ABOVE = 8.3, 10.4

POSITION_THRESHOLD = 0.5
"""GenEval: "left of" holds when the x part of the unit offset is below −0.5 (within 60° of the axis)."""

_MARGIN, _GAP = 2.0, 3.0
_RELATION_AXIS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
_AMBIGUOUS = math.radians(8.0)


@dataclass(frozen=True, kw_only=True)
class SceneObject:
    """A shape in a scene."""

    shape: str
    color: str
    x: float
    y: float
    radius: float  # Half of the width and of the height


@dataclass(frozen=True, kw_only=True)
class Distortion:
    """A degradation of the finished image."""

    kind: str = "none"
    severity: float = 0.0  # 0 is none, 1 the worst


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """A larger plain image around the scene's image, scaled to 64×64 pixels as a whole."""

    share: float  # Share of the canvas's side that the image takes, in (0, 1]
    x: float  # Place of the image in [0, 1]: 0 at the left edge, 1 at the right one
    y: float  # Place from top to bottom
    color: tuple[int, int, int]  # RGB, 0-255

    def box(self) -> tuple[int, int, int]:
        """(left, top, side) of the image in pixels."""
        side = round(SIZE * self.share)
        return round(self.x * (SIZE - side)), round(self.y * (SIZE - side)), side


@dataclass(frozen=True, kw_only=True)
class Scene:
    """All content of an image."""

    record: Record
    objects: tuple[SceneObject, ...]
    background: tuple[int, int, int]  # RGB of the ground, 0-255
    style: str
    texture_seed: int  # Seed of the textured style's pattern and of the noise distortion
    distortion: Distortion = Distortion()
    specks: tuple[SceneObject, ...] = ()  # Too small to count as objects, neither for a prompt nor for the verifier
    canvas: Canvas | None = None  # None: the image fills the frame

    @property
    def richness(self) -> float:
        """Rank of the style in [0, 1]."""
        return STYLES.index(self.style) / (len(STYLES) - 1)

    @property
    def quality(self) -> float:
        """1 for an undistorted image, down to 0."""
        return 1.0 - self.distortion.severity

    def distorted(self, kind: str, severity: float) -> Scene:
        """Replace the distortion."""
        return replace(self, distortion=Distortion(kind=kind, severity=severity))


def relations(subject: tuple[float, float], target: tuple[float, float]) -> set[str]:
    """List GenEval's relations (two for a diagonal) of the subject's centre (x, y) to the target's."""
    dx, dy = subject[0] - target[0], subject[1] - target[1]
    norm = math.hypot(dx, dy)
    if norm == 0.0:
        return set()
    return {name for name, (ax, ay) in _RELATION_AXIS.items() if (dx * ax + dy * ay) / norm > POSITION_THRESHOLD}


def size_word(radius: float) -> str:
    """Name the size, "small", "medium" or "big", of half an object's extent in pixels."""
    return "small" if radius < SMALL_BELOW else "big" if radius > BIG_ABOVE else "medium"


def sample_scene(
    record: Record, rng: np.random.Generator, *, style: str | None = None, style_weights: Sequence[float] | None = None
) -> Scene:
    """Draw a scene that satisfies a prompt record; a style of None is drawn by `style_weights` of STYLES."""
    if style is None:
        style = str(rng.choice(STYLES, p=style_weights))
    entries = [entry for entry in record["include"] for _ in range(entry["count"])]
    shared = {id(entry): str(rng.choice(COLORS)) for entry in record["include"]}
    colors = [entry.get("color") or shared[id(entry)] for entry in entries]
    centres = None
    while centres is None:
        radii = [_radius(entry, len(entries), rng) for entry in entries]
        centres = _place(record, radii, rng)
    objects = tuple(
        SceneObject(shape=entry["class"], color=color, x=x, y=y, radius=radius)
        for entry, color, radius, (x, y) in zip(entries, colors, radii, centres, strict=True)
    )
    grey = rng.integers(30, 91)
    tint = rng.integers(-8, 9, size=3)
    red, green, blue = (int(grey + t) for t in tint)
    return Scene(
        record=record,
        objects=objects,
        background=(red, green, blue),
        style=style,
        texture_seed=int(rng.integers(2**31)),
    )


def _radius(entry: Record, count: int, rng: np.random.Generator) -> float:
    names = ("small", "medium") if count > 2 else ("small", "medium", "big")
    low, high = RADIUS[entry.get("size") or str(rng.choice(names))]
    return float(rng.uniform(low, high))


def _place(record: Record, radii: list[float], rng: np.random.Generator) -> list[tuple[float, float]] | None:
    """Draw centres without overlap and with clear relations; None when 40 tries failed."""
    relation = next((entry["position"] for entry in record["include"] if "position" in entry), None)
    for _ in range(40):
        centres: list[tuple[float, float]] = []
        for radius in radii:
            low, high = _MARGIN + radius, SIZE - _MARGIN - radius
            centres.append((float(rng.uniform(low, high)), float(rng.uniform(low, high))))
        if _separate(centres, radii) and _clear(centres, relation[0] if relation else None):
            return centres
    return None


def _separate(centres: list[tuple[float, float]], radii: list[float]) -> bool:
    objects = combinations(zip(centres, radii, strict=True), 2)
    return not any(max(abs(x - u), abs(y - v)) < r + s + _GAP for ((x, y), r), ((u, v), s) in objects)


def _clear(centres: list[tuple[float, float]], relation: str | None) -> bool:
    """Check that two objects have the relation within 40° of its axis, or none near the threshold."""
    if len(centres) != 2:
        return True
    (tx, ty), (sx, sy) = centres
    angle = math.atan2(sy - ty, sx - tx)
    if relation is not None:
        ax, ay = _RELATION_AXIS[relation]
        return math.cos(angle - math.atan2(ay, ax)) > math.cos(math.radians(40.0))
    edge = math.acos(POSITION_THRESHOLD)
    axes = (math.atan2(ay, ax) for ax, ay in _RELATION_AXIS.values())
    turns = (abs(math.remainder(angle - axis, math.tau)) for axis in axes)
    return min(abs(turn - edge) for turn in turns) > _AMBIGUOUS
