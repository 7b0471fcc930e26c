# SPDX-License-Identifier: Apache-2.0
"""Save the vision-language model in transformers' format and measure it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

from visalign.data.shapes.preferences import CLEAR, ShapesPreferences
from visalign.data.shapes.prompts import CATEGORIES, Record
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import Scene, sample_scene
from visalign.data.shapes.verifier import verify_scene
from visalign.rewards.questions.reward_dance import RewardDance, RewardDancePairs
from visalign.rewards.questions.visual_quality_r1 import VisualQuality
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.template import JudgeSettings, Template

from .stage import packaged

CHECK_SEED = 77
_NEAR_TRIES = 50


def judge_engine(model: Qwen2VLForConditionalGeneration) -> VisionLanguageEngine:
    """Wrap the model in memory with the processor and the templates of the packaged one."""
    folder = packaged("shapes-vlm")
    texts = json.loads((folder / "judge.json").read_text(encoding="utf-8"))["templates"]
    templates = {name: Template.from_dict(name, value) for name, value in texts.items()}
    processor = AutoProcessor.from_pretrained(folder)
    return VisionLanguageEngine(model, processor, settings=JudgeSettings(templates=templates))


def save_judge(model: Qwen2VLForConditionalGeneration, folder: Path) -> None:
    """Write weights in float16, processor, tokenizer, and `judge.json` with the judges' texts."""
    model.half().save_pretrained(folder)
    AutoProcessor.from_pretrained(packaged("shapes-vlm")).save_pretrained(folder)
    (folder / "judge.json").write_bytes((packaged("shapes-vlm") / "judge.json").read_bytes())
    model.float()


def saved_accuracy(folder: Path, count: int) -> dict[str, float]:
    """Measure the model of a folder as a user loads it, on `count` images and pairs."""
    return answer_accuracy(VisionLanguageEngine.from_pretrained(folder), images=count, pairs=count)


def answer_accuracy(
    engine: VisionLanguageEngine, *, images: int = 300, pairs: int = 300, seed: int = CHECK_SEED
) -> dict[str, float]:
    """Held-out accuracy of yes/no by category, of pairs with a clear truth; error and order of ratings."""
    world, rng = ShapesPreferences(seed, split="heldout"), np.random.default_rng(seed)
    drawn = []
    for _ in range(images):
        record = world.record(rng)
        scene = sample_scene(record, rng)
        drawn.append((record, scene, _untrue(world, scene, record, rng)))
    records, scenes, untrue = zip(*drawn, strict=True)
    shows, rendered = RewardDance(engine, min_mass=0.0), render_many(list(scenes))
    yes = [shows.score(rendered, [r["prompt"] for r in prompts]).value > 0 for prompts in (records, untrue)]
    right = torch.stack([yes[0], ~yes[1]], 1).float().mean(1)
    tags = np.array([record["tag"] for record in records])
    measures = {"yes/no": float(right.mean())}
    measures |= {tag: float(right[torch.from_numpy(tags == tag)].mean()) for tag in CATEGORIES if tag in tags}

    clear = (pair for pair in map(world.pair, itertools.count()) if pair.is_clear)
    chosen = list(itertools.islice(clear, pairs))
    left, right_side = (render_many(list(side)) for side in zip(*((p.left, p.right) for p in chosen), strict=True))
    odds = RewardDancePairs(engine, min_mass=0.0).compare(left, right_side, [p.prompt for p in chosen]).log_odds
    better = torch.tensor([pair.utility[0] > pair.utility[1] for pair in chosen])
    measures["pair"] = float(((odds > 0) == better).float().mean())

    rated = [world.quality(number).scene for number in range(images)]
    ratings = VisualQuality(engine, min_mass=0.0).score(render_many(rated), [""] * images).value
    truth = torch.tensor([1.0 + 4.0 * scene.quality for scene in rated])
    distinct = truth[:, None] - truth >= 4.0 * CLEAR
    measures["rating error"] = float((ratings - truth).abs().mean())
    measures["rating order"] = float((ratings[:, None] > ratings)[distinct].float().mean())
    return measures


def _untrue(world: ShapesPreferences, scene: Scene, record: Record, rng: np.random.Generator) -> Record:
    """A prompt that is not true of the image: one word from its own if there is such a one."""
    near = (world.near(record, rng) for _ in range(_NEAR_TRIES))
    drawn = itertools.chain(near, (world.record(rng) for _ in itertools.count()))
    return next(other for other in drawn if not verify_scene(scene, other).correct)
