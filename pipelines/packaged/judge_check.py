# SPDX-License-Identifier: Apache-2.0
"""How good the embedded vision-language model is on held-out prompts, asked as the rewards ask it."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from visalign.data.shapes.preferences import CLEAR, ShapesPreferences
from visalign.data.shapes.prompts import CATEGORIES, Record
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import Scene, sample_scene
from visalign.data.shapes.verifier import verify_scene
from visalign.rewards.questions.reward_dance import RewardDance, RewardDancePairs
from visalign.rewards.questions.visual_quality_r1 import VisualQuality
from visalign.rewards.vlm.engine import VisionLanguageEngine

CHECK_SEED = 77
_NEAR_TRIES = 50


def answer_accuracy(
    engine: VisionLanguageEngine, *, pictures: int = 300, pairs: int = 300, seed: int = CHECK_SEED
) -> dict[str, float]:
    """Held-out accuracy of yes/no by category, of pairs with a clear truth; error and order of ratings.

    Args:
        engine: the model.
        pictures: undistorted pictures, each asked for its own prompt and for a neighbour that is not true.
        pairs: clear pairs, each asked in both orders.
        seed: of the draws.
    """
    world, rng = ShapesPreferences(seed, split="heldout"), np.random.default_rng(seed)
    drawn = []
    for _ in range(pictures):
        record = world.record(rng)
        scene = sample_scene(record, rng)
        drawn.append((record, scene, _untrue(world, scene, record, rng)))
    records, scenes, others = zip(*drawn, strict=True)
    shows, shown = RewardDance(engine, min_mass=0.0), render_many(list(scenes))
    said = [
        shows.score(shown, [record["prompt"] for record in asked]).value > 0 for asked in (records, others)
    ]
    right = torch.stack([said[0], ~said[1]], 1).float().mean(1)
    tags = np.array([record["tag"] for record in records])
    found = {"yes/no": float(right.mean())}
    found |= {tag: float(right[torch.from_numpy(tags == tag)].mean()) for tag in CATEGORIES if tag in tags}

    clear = (pair for pair in map(world.pair, itertools.count()) if pair.is_clear)
    chosen = list(itertools.islice(clear, pairs))
    left, right_side = (
        render_many(list(side)) for side in zip(*((p.left, p.right) for p in chosen), strict=True)
    )
    odds = (
        RewardDancePairs(engine, min_mass=0.0).compare(left, right_side, [p.prompt for p in chosen]).log_odds
    )
    better = torch.tensor([pair.utility[0] > pair.utility[1] for pair in chosen])
    found["pair"] = float(((odds > 0) == better).float().mean())

    rated = [world.quality(number).scene for number in range(pictures)]
    ratings = VisualQuality(engine, min_mass=0.0).score(render_many(rated), [""] * pictures).value
    truth = torch.tensor([1.0 + 4.0 * scene.quality for scene in rated])
    apart = truth[:, None] - truth >= 4.0 * CLEAR
    found["rating error"] = float((ratings - truth).abs().mean())
    found["rating order"] = float((ratings[:, None] > ratings)[apart].float().mean())
    return found


def _untrue(world: ShapesPreferences, scene: Scene, record: Record, rng: np.random.Generator) -> Record:
    """A prompt that is not true of the picture: one word from its own if there is such a one."""
    near = (world.near(record, rng) for _ in range(_NEAR_TRIES))
    drawn = itertools.chain(near, (world.record(rng) for _ in itertools.count()))
    return next(other for other in drawn if not verify_scene(scene, other).correct)
