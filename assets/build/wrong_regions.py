# SPDX-License-Identifier: Apache-2.0
"""Pixels of a shapes image that break its prompt: truth for judges that point at faults.

An object is to blame if the verifier's score rises when this object alone is taken away, made into something that the
prompt asks for, or moved. Of three circles where two are asked for each is to blame; of a missing object no pixel is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from visalign.data.shapes.prompts import Record
from visalign.data.shapes.render import inside_distance
from visalign.data.shapes.scenes import SIZE, Scene, SceneObject
from visalign.data.shapes.verifier import verify_scene

_RADIUS = {"small": 7.0, "big": 12.0}
_FAR = 1000.0
"""Distance in pixels by which an object is moved, beyond all others."""


def find_wrong_objects(scene: Scene, record: Record) -> list[bool]:
    """Check for each object of the scene if it breaks the prompt."""
    verdict = verify_scene(scene, record)
    if verdict.correct:
        return [False] * len(scene.objects)
    blames = []
    for number in range(len(scene.objects)):
        scores = (verify_scene(other, record).score for other in _repairs(scene, number, record))
        blames.append(any(score > verdict.score + 1e-9 for score in scores))
    return blames


def wrong_pixels(scene: Scene, record: Record) -> np.ndarray:
    """Draw the objects that are to blame, [64, 64] float32 in [0, 1] with graded edges."""
    grid = np.arange(SIZE, dtype=np.float32) + 0.5
    covered = np.zeros((SIZE, SIZE), dtype=np.float32)
    for item, is_wrong in zip(scene.objects, find_wrong_objects(scene, record), strict=True):
        if is_wrong:
            distance = inside_distance(item.shape, grid[None] - item.x, grid[:, None] - item.y, item.radius)
            covered = np.maximum(covered, np.clip(distance + 0.5, 0.0, 1.0))
    return covered.astype(np.float32)


def _repairs(scene: Scene, number: int, record: Record) -> Iterator[Scene]:
    """Yield the scene with one object taken away, turned into each wanted one, or moved to each side."""
    objects = scene.objects
    item = objects[number]

    def with_one(*changed: SceneObject) -> Scene:
        return replace(scene, objects=(*objects[:number], *changed, *objects[number + 1 :]))

    yield with_one()
    for entry in record["include"]:
        radius = _RADIUS.get(entry.get("size", ""), item.radius)
        yield with_one(replace(item, shape=entry["class"], color=entry.get("color", item.color), radius=radius))
    if any("position" in entry for entry in record["include"]):
        for x, y in ((-_FAR, item.y), (_FAR, item.y), (item.x, -_FAR), (item.x, _FAR)):
            yield with_one(replace(item, x=x, y=y))
