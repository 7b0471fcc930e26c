# SPDX-License-Identifier: Apache-2.0
"""Shapes pictures with what is wrong in them: truth for HEIE-type heads, and what the heads read of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from visalign.data.shapes.preferences import ShapesPreferences, degraded
from visalign.data.shapes.prompts import Record
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import Scene, sample_scene
from visalign.data.shapes.verifier import verify_scene
from visalign.data.shapes.wrong_regions import right_pixels, wrong_pixels
from visalign.rewards.heie.training import HeieData, heie_data
from visalign.rewards.questions.reward_dance import EXPLAIN
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine

CHUNK = 200
"""Pictures whose views are made at once."""
_TRIES = 50


@dataclass(frozen=True, kw_only=True)
class HeiePlan:
    """Sizes of a training; the defaults made `shapes-heie`."""

    pictures: int = 3000
    """For training."""
    steps: int = 800
    batch: int = 32
    width: int = 64
    """Of the heads; 64 stays below 0.3 MB in float16."""
    tiles: int = 2
    """n of n × n; 1 for none."""
    test: int = 600
    """Held-out pictures that the card is measured on."""
    seed: int = 6


@dataclass(frozen=True, kw_only=True)
class ShapesFaults:
    """N pictures, what they are asked about with, and what is wrong with them."""

    images: Tensor
    """[N, 3, 64, 64] in [0, 1]."""
    prompts: list[str]
    heat: Tensor
    """[N, 64, 64] in [0, 1], 1 on the objects that break the prompt."""
    kept: Tensor
    """[N, 64, 64] in [0, 1], 1 on the other objects."""
    score: Tensor
    """[N] `plausibility`."""
    correct: Tensor
    """bool [N], whether the picture keeps its prompt."""
    quality: Tensor
    """[N] in [0, 1], 1 where nothing is distorted."""

    def __len__(self) -> int:
        return len(self.prompts)


def plausibility(scene: Scene, record: Record) -> float:
    """Truth of the score: quality × (1 if the prompt is kept, else half the share of its checks)."""
    verdict = verify_scene(scene, record)
    return scene.quality * (verdict.correct + verdict.score) / 2


def shapes_faults(count: int, *, split: str, seed: int) -> ShapesFaults:
    """Pictures of which every second breaks its prompt, and two of four are distorted."""
    world, rng = ShapesPreferences(seed, split=split), np.random.default_rng(seed)
    images, prompts, heat, kept, truth = [], [], [], [], []
    for number in range(count):
        record = world.record(rng)
        scene = sample_scene(record, rng)
        for _ in range(_TRIES if number % 2 else 0):
            record = world.near(record, rng)
            if not verify_scene(scene, record).correct:
                break
        if number % 4 >= 2:
            scene = degraded(scene, rng)
        images.append(render(scene))
        prompts.append(record["prompt"])
        heat.append(wrong_pixels(scene, record))
        kept.append(right_pixels(scene, record))
        correct = float(verify_scene(scene, record).correct)
        truth.append((plausibility(scene, record), correct, scene.quality))
    score, correct, quality = torch.tensor(truth).T
    return ShapesFaults(
        images=torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255,
        prompts=prompts,
        heat=torch.from_numpy(np.stack(heat)),
        kept=torch.from_numpy(np.stack(kept)),
        score=score,
        correct=correct > 0,
        quality=quality,
    )


def faults_data(engine: VisionLanguageEngine, faults: ShapesFaults, *, tiles: int) -> HeieData:
    """What the heads read of pictures, with their truth."""
    template = engine.template("explain", EXPLAIN)
    parts = []
    for start in range(0, len(faults), CHUNK):
        here = slice(start, start + CHUNK)
        shown = zip(faults.images[here], faults.prompts[here], strict=True)
        asks = [Query(images=[image], prompt=prompt, fields={"instruction": ""}) for image, prompt in shown]
        parts.append(heie_data(engine, template, asks, faults.heat[here], faults.score[here], tiles=tiles))
        engine.clear_features()
    return HeieData(
        seen=[view for part in parts for view in part.seen],
        heat=torch.cat([part.heat for part in parts]),
        score=torch.cat([part.score for part in parts]),
    )
