# SPDX-License-Identifier: Apache-2.0
"""The shapes world: prompts and their split, scenes, renderer, detector and verifier against the truth."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from visalign.data.shapes import prompts, render, scenes, verifier
from visalign.data.shapes.components import find_components
from visalign.data.shapes.detector import Detection, detect

BY_CATEGORY = {name: [r for r in prompts.all_prompts() if r["tag"] == name] for name in prompts.CATEGORIES}


def draw(count: int, seed: int) -> list[scenes.Scene]:
    rng = np.random.default_rng(seed)
    drawn = []
    for i in range(count):
        group = BY_CATEGORY[prompts.CATEGORIES[i % len(prompts.CATEGORIES)]]
        drawn.append(scenes.sample_scene(group[rng.integers(len(group))], rng))
    return drawn


def wrongly_accepted(chosen: list[scenes.Scene], records: list[prompts.Record]) -> tuple[int, int]:
    """(images called correct that are not, images that truly are not)."""
    truth = [verifier.verify_scene(scene, record).correct for scene, record in zip(chosen, records, strict=True)]
    verdicts = [verdict.correct for verdict in verifier.verify(render.render_many(chosen), records)]
    return sum(s and not t for s, t in zip(verdicts, truth, strict=True)), sum(not t for t in truth)


def test_heldout_combinations_never_occur_in_training() -> None:
    train = {prompts.combination(r) for r in prompts.train_prompts()}
    heldout = {prompts.combination(r) for r in prompts.heldout_prompts()}
    assert not train & heldout
    assert len(prompts.heldout_prompts()) >= 200
    assert {r["tag"] for r in prompts.heldout_prompts()} == set(prompts.CATEGORIES)


def test_a_combination_is_the_same_in_every_wording() -> None:
    left = prompts.parse_prompt("a red circle left of a blue square")
    right = prompts.parse_prompt("a blue square right of a red circle")
    other = prompts.parse_prompt("a red circle right of a blue square")
    assert prompts.combination(left) == prompts.combination(right) != prompts.combination(other)
    one, two = (prompts.parse_prompt(text) for text in ("a cross and a circle", "a circle and a cross"))
    assert prompts.combination(one) == prompts.combination(two)


def test_parsing_a_prompt_gives_its_record_back() -> None:
    for record in prompts.all_prompts():
        assert prompts.parse_prompt(record["prompt"]) == record
    worded = prompts.parse_prompt("A red circle to the left of a blue square.")
    assert worded["include"][1]["position"] == ["left of", 0]


@pytest.mark.parametrize("prompt", ["", "a cat", "a red", "two red circle", "five circles", "a circle a square"])
def test_a_foreign_prompt_is_refused_with_examples(prompt: str) -> None:
    with pytest.raises(ValueError, match=r"not a prompt of the shapes world, such as"):
        prompts.parse_prompt(prompt)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(prompts.CATEGORIES))
def test_every_scene_satisfies_its_prompt_and_keeps_its_objects_apart(seed: int, category: str) -> None:
    rng = np.random.default_rng(seed)
    group = BY_CATEGORY[category]
    scene = scenes.sample_scene(group[rng.integers(len(group))], rng)
    assert verifier.verify_scene(scene, scene.record).correct
    for i, a in enumerate(scene.objects):
        assert 0 <= a.x - a.radius and a.x + a.radius <= scenes.SIZE
        for b in scene.objects[:i]:
            assert max(abs(a.x - b.x), abs(a.y - b.y)) >= a.radius + b.radius


def test_the_same_seed_gives_the_same_image() -> None:
    first, second = (render.render_many(draw(24, 5)) for _ in range(2))
    assert (first == second).all()
    assert (first != render.render_many(draw(24, 6))).any()


def test_style_adds_detail_and_distortion_takes_quality_away() -> None:
    base = draw(1, 3)[0]
    images = {
        style: render.render(scenes.sample_scene(base.record, np.random.default_rng(1), style=style))
        for style in scenes.STYLES
    }
    counts = {style: len(np.unique(image.reshape(-1, 3), axis=0)) for style, image in images.items()}
    assert counts["flat"] < counts["outlined"] < counts["shaded"] < counts["textured"]
    for kind in scenes.DISTORTIONS[1:]:
        change = [
            np.abs(render.render(base.distorted(kind, s)).astype(float) - render.render(base)).mean()
            for s in (0.2, 0.5, 1.0)
        ]
        assert 0 < change[0] < change[1] < change[2], kind


@pytest.mark.parametrize(("kind", "floor"), [("none", 0.999), ("blur", 0.99), ("noise", 0.99)])
def test_the_verifier_agrees_with_the_truth(kind: str, floor: float) -> None:
    chosen = [scene.distorted(kind, 0.0 if kind == "none" else scenes.MILD) for scene in draw(600, 12)]
    verdicts = verifier.verify(render.render_many(chosen), [scene.record for scene in chosen])
    assert np.mean([verdict.correct for verdict in verdicts]) >= floor


def test_an_image_of_another_prompt_of_its_category_is_wrong() -> None:
    chosen, rng = draw(900, 13), np.random.default_rng(14)
    records = [BY_CATEGORY[s.record["tag"]][rng.integers(len(BY_CATEGORY[s.record["tag"]]))] for s in chosen]
    accepted, false = wrongly_accepted(chosen, records)
    assert false > 700 and accepted <= 0.001 * false


def test_swapped_relations_and_neighbouring_counts_are_wrong() -> None:
    chosen, records = [], []
    rng = np.random.default_rng(15)
    for record in BY_CATEGORY["position"][::40]:
        chosen.append(scenes.sample_scene(record, rng))
        flipped = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
        relation = record["include"][1]["position"][0]
        records.append(prompts.parse_prompt(record["prompt"].replace(relation, flipped[relation])))
    for record in BY_CATEGORY["counting"]:
        count = record["include"][0]["count"]
        chosen.append(scenes.sample_scene(record, rng))
        words = {2: "two", 3: "three", 4: "four"}
        records.append(prompts.parse_prompt(record["prompt"].replace(words[count], words[4 if count == 3 else 3])))
    accepted, false = wrongly_accepted(chosen, records)
    assert accepted == 0 and false == len(chosen)


def circle(color: str = "red", x: float = 20, y: float = 20, radius: float = 9, shape: str = "circle") -> Detection:
    return Detection(shape=shape, color=color, x=x, y=y, radius=radius, overlap=1.0)


@pytest.mark.parametrize(
    ("prompt", "detections", "correct", "reason"),
    [
        ("a circle", [circle()], True, ""),
        (
            "a circle",
            [circle(), circle(x=45)],
            False,
            "expected at most 1 circle, found 2; expected 1 objects in all, found 2",
        ),
        ("a green circle", [circle()], False, "expected 1 green circle, found 0"),
        ("a circle left of a square", [circle(), circle(shape="square", x=50)], True, ""),
        (
            "a circle right of a square",
            [circle(), circle(shape="square", x=50)],
            False,
            "circle is not right of square",
        ),
        ("a red circle and a blue circle", [circle(), circle(x=50)], False, "expected 1 blue circle, found 0"),
    ],
)
def test_genevals_rules_by_hand(prompt: str, detections: list[Detection], correct: bool, reason: str) -> None:
    verdict = verifier.judge(detections, prompts.parse_prompt(prompt))
    assert (verdict.correct, verdict.reason) == (correct, reason)
    assert verdict.score == 1.0 if correct else verdict.score < 1.0
    assert all(verdict.checks.values()) == correct


def test_the_detector_measures_place_and_size() -> None:
    errors = []
    for scene in draw(180, 17):
        detections = {(d.shape, d.color): d for d in detect(render.render(scene)[None])[0]}
        for item in scene.objects:
            if len({(o.shape, o.color) for o in scene.objects}) == len(scene.objects):
                detected = detections[item.shape, item.color]
                errors.append((abs(detected.x - item.x), abs(detected.y - item.y), abs(detected.radius - item.radius)))
    assert len(errors) > 120
    assert np.max(errors) < 1.5 and np.mean(errors) < 0.4


def test_images_in_both_formats_are_judged_alike_and_others_refused() -> None:
    chosen = draw(12, 18)
    images = render.render_many(chosen)
    records = [scene.record for scene in chosen]
    floats = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255.0
    assert verifier.verify(images, records) == verifier.verify(floats, records)
    with pytest.raises(ValueError, match=r"takes float \[B, 3, 64, 64\].*got torch.float32 \(12, 3, 32, 32\)"):
        verifier.verify(floats[..., ::2, ::2], records)


def speckled(count: int, side: int, seed: int) -> np.ndarray:
    """Label maps [count, side, side] of every density, from empty to hardly any ground."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(1, 4, (count, side, side), dtype=np.uint8)
    return labels * (rng.random((count, side, side)) < np.linspace(0, 1, count)[:, None, None])


def test_components_are_those_of_scipy() -> None:
    labels = speckled(40, 17, 21)
    regions = find_components(labels, 3)
    expected = []
    for image, plane in enumerate(labels):
        for label in (1, 2, 3):
            marked, count = cast("tuple[np.ndarray, int]", ndimage.label(plane == label))
            for number in range(1, count + 1):
                rows, columns = np.nonzero(marked == number)
                if len(rows) >= 3:
                    box = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
                    expected.append((image, label, len(rows), *box))
    fields = (regions.image, regions.label, regions.area, regions.top, regions.bottom, regions.left, regions.right)
    assert len(regions) == len(expected) > 500
    assert list(zip(*(field.tolist() for field in fields), strict=True)) == expected
    sizes = np.bincount(regions.owner[regions.owner >= 0])
    assert (sizes[regions.name] == regions.area).all() and ((regions.owner < 0) == (labels == 0)).all()


def test_masks_are_the_nearest_pixels_of_the_box() -> None:
    labels = np.zeros((2, 6, 8), dtype=np.uint8)
    labels[1, 2:4, 3:7] = [[1, 1, 1, 1], [1, 2, 2, 1]]
    regions = find_components(labels, 1)
    assert regions.masks(4).reshape(2, 4, 4).tolist() == [
        [[1, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 1], [1, 0, 0, 1]],
        [[1, 1, 1, 1]] * 4,
    ]
    assert len(find_components(labels[:1], 1)) == 0
    assert find_components(labels[:1], 1).masks(4).shape == (0, 16)


def test_an_image_is_judged_alike_alone_and_among_others() -> None:
    rng = np.random.default_rng(23)
    images = np.concatenate([render.render_many(draw(60, 24)), rng.integers(0, 256, (10, 64, 64, 3), np.uint8)])
    images = images[rng.permutation(len(images))]
    assert detect(images) == [detections for image in images for detections in detect(image[None])]
    assert detect(images[:0]) == []
    assert detect(np.full((1, 64, 64, 3), 60, np.uint8)) == [[]]
