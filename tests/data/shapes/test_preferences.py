# SPDX-License-Identifier: Apache-2.0
"""Pairs, votes and ratings of the shapes world: their truth, their noise, their splits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from visalign.data.shapes.neighbours import Neighbours
from visalign.data.shapes.preferences import CLEAR, KINDS, ShapesPreferences, annotator_noise, utility
from visalign.data.shapes.prompts import parse_prompt, train_prompts
from visalign.data.shapes.scenes import sample_scene
from visalign.errors import UserError

WORLD = ShapesPreferences(0)
PAIRS = [WORLD.pair(n) for n in range(800)]


def test_utility_by_hand():
    record = parse_prompt("two red circles")
    scene = sample_scene(record, np.random.default_rng(0), style="textured")
    assert utility(scene, record) == 2 + 1 + 0.5 + 1
    assert utility(scene.distorted("blur", 0.4), record) == pytest.approx(4.5 - 0.4)
    # two of three: the count's partial credit is 2/3 twice (shape and color), nothing is too many
    assert utility(scene, parse_prompt("three red circles")) == pytest.approx((2 / 3 + 2 / 3 + 1 + 1) / 4 + 1.5)
    assert annotator_noise(scene) == pytest.approx(0.15)
    assert annotator_noise(scene.distorted("noise", 0.5)) == pytest.approx(0.75)


def test_a_reason_names_the_faults_of_each_image():
    record, draws = parse_prompt("two red circles"), np.random.default_rng(0)
    right = sample_scene(record, draws, style="textured")
    wrong = sample_scene(parse_prompt("a blue cross"), draws, style="flat").distorted("blur", 0.4)
    pair = replace(PAIRS[0], record=record, left=right, right=wrong)
    assert pair.reason == "picture 1: textured; picture 2: expected 2 circle, found 0, blurred, flat"
    faint = replace(pair, right=right.distorted("jpeg", 0.2))
    assert faint.reason == "picture 1: textured; picture 2: textured"


def test_a_pair_is_a_function_of_its_number():
    again = ShapesPreferences(0).pair(5)
    assert again == PAIRS[5] and again != ShapesPreferences(1).pair(5)
    assert again != ShapesPreferences(0, split="heldout").pair(5)
    with pytest.raises(UserError, match=r"no split 'test'; allowed: train, heldout"):
        ShapesPreferences(0, split="test")


def test_kinds_differ_in_what_they_say():
    by_kind = {kind: [pair for pair in PAIRS if pair.kind == kind] for kind in KINDS}
    assert all(len(pairs) > 150 for pairs in by_kind.values())
    for pair in by_kind["quality"]:
        assert pair.left.objects == pair.right.objects and pair.left.style == pair.right.style
    for pair in by_kind["richness"]:
        assert pair.left.style != pair.right.style and pair.left.quality == pair.right.quality == 1
    for pair in by_kind["alignment"]:
        assert pair.left.style == pair.right.style and pair.left.quality == pair.right.quality == 1
    better = [pair.utility[0] > pair.utility[1] for pair in PAIRS]
    assert 0.4 < np.mean(better) < 0.6, "the better one stands on either side"


def test_votes_have_the_stated_probability():
    undecided = [pair for pair in PAIRS if 0.05 < pair.prob < 0.95]
    assert len(undecided) > 200 and all(sum(pair.votes) == 9 for pair in PAIRS)
    z = [(pair.votes[0] - 9 * pair.prob) / np.sqrt(9 * pair.prob * (1 - pair.prob)) for pair in undecided]
    assert abs(np.mean(z)) < 0.2 and 0.85 < np.std(z) < 1.15
    clear = [pair for pair in PAIRS if pair.is_clear]
    assert all(abs(pair.utility[0] - pair.utility[1]) >= CLEAR for pair in clear)
    degraded = [pair for pair in PAIRS if max(pair.noise) > 0.8 and pair.utility[0] != pair.utility[1]]
    wrong = [[(p.votes[0] > p.votes[1]) != (p.utility[0] > p.utility[1]) for p in g] for g in (clear, degraded)]
    assert np.mean(wrong[1]) > 2 * np.mean(wrong[0]) > 0, "annotators err more on degraded images"


def test_ratings_follow_quality():
    items = [WORLD.quality(n) for n in range(600)]
    truth = np.array([1 + 4 * item.scene.quality for item in items])
    mos = np.array([item.mos for item in items])
    assert np.corrcoef(truth, mos)[0, 1] > 0.9 and mos.min() >= 1 and mos.max() <= 5
    assert np.mean([item.std for item in items if item.scene.quality < 0.5]) > 2 * np.mean(
        [item.std for item in items if item.scene.quality == 1]
    )
    assert ShapesPreferences(0, annotators=1).quality(0).std == 0


def test_neighbours_differ_in_one_word():
    near = Neighbours(train_prompts())
    rng = np.random.default_rng(0)
    for record in train_prompts()[::97]:
        for _ in range(5):
            first, second = record["prompt"].split(), near.near(record, rng)["prompt"].split()
            first, second = (["a" if word == "an" else word for word in words] for words in (first, second))
            assert len(first) == len(second) and sum(a != b for a, b in zip(first, second, strict=True)) <= 1
            assert record["prompt"] != " ".join(second)
    lonely = Neighbours([parse_prompt("a circle"), parse_prompt("two red squares")])
    assert lonely.near(parse_prompt("a big cross"), rng)["prompt"] in ("a circle", "two red squares")
