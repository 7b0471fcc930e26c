# SPDX-License-Identifier: Apache-2.0
"""Grounds, specks and canvases: what a prompt says of an image stays true, held-out grounds stay unseen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from visalign.data.shapes.detector import MIN_AREA
from visalign.data.shapes.preferences import ShapesPreferences
from visalign.data.shapes.render import render, render_many
from visalign.data.shapes.scenes import SIZE, Canvas, sample_scene
from visalign.data.shapes.surroundings import HELDOUT_GROUNDS, is_visible, surround, with_specks
from visalign.data.shapes.verifier import verify


def scenes(count: int, seed: int = 5) -> list:
    world, rng = ShapesPreferences(seed), np.random.default_rng(seed)
    return [sample_scene(world.record(rng), rng) for _ in range(count)]


def test_specks_are_no_objects_to_the_verifier() -> None:
    rng = np.random.default_rng(3)
    drawn = scenes(75)
    speckled = [with_specks(scene, rng) for scene in drawn]
    assert sum(len(scene.specks) for scene in speckled) > 150
    plain, changed = (
        [verdict.correct for verdict in verify(render_many(some), [s.record for s in drawn])]
        for some in (drawn, speckled)
    )
    assert changed == plain
    touched = (render_many(speckled) != render_many(drawn)).any(-1).sum((1, 2))
    assert (touched <= [MIN_AREA * len(scene.specks) for scene in speckled]).all()


def test_no_drawn_ground_comes_near_a_held_out_one() -> None:
    rng, drawn = np.random.default_rng(4), scenes(300)
    surrounded = [surround([scene], rng)[0] for scene in drawn]
    changed = [new for new, old in zip(surrounded, drawn, strict=True) if new.background != old.background]
    assert len(changed) > 150 and all(is_visible(scene, scene.background) for scene in changed)
    colors = [s.background for s in changed]
    colors += [s.canvas.color for s in surrounded if s.canvas and s.canvas.color != s.background]
    for ground in HELDOUT_GROUNDS.values():
        assert np.linalg.norm(np.array(colors, dtype=float) - ground, axis=1).min() >= 48.0
    kinds = {(bool(s.specks), s.canvas is not None) for s in surrounded}
    assert len(kinds) == 4, "specks and canvases come together and alone"


def test_an_image_lies_on_its_canvas() -> None:
    (scene,) = scenes(1)
    laid = replace(scene, canvas=Canvas(share=0.5, x=1.0, y=0.0, color=(1, 2, 3)))
    image = render(laid)
    assert image.shape == (SIZE, SIZE, 3)
    assert (image[:, :32] == (1, 2, 3)).all() and (image[32:] == (1, 2, 3)).all()
    mean = render(scene).mean((0, 1))
    assert image[:32, 32:].mean((0, 1)) == pytest.approx(mean, abs=1.0)


def test_images_without_surroundings_stay_and_votes_always_do() -> None:
    plain, wide = ShapesPreferences(7), ShapesPreferences(7, surroundings=1.0)
    pairs = [(plain.pair(n), wide.pair(n)) for n in range(20)]
    for first, second in pairs:
        assert (first.votes, first.utility, first.record) == (second.votes, second.utility, second.record)
        assert first.left.objects == second.left.objects and first.left.canvas is None and not first.left.specks
    assert sum((a.images()[0] != b.images()[0]).any() for a, b in pairs) >= 15
    assert any(b.left.background == b.right.background for _, b in pairs)
