# SPDX-License-Identifier: Apache-2.0
"""Writes the embedded vision-language model as transformers reads it, measures it, and writes its card."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from visalign.data.shapes.preferences import CLEAR, ShapesPreferences
from visalign.data.shapes.prompts import CATEGORIES, Record
from visalign.data.shapes.render import render_many
from visalign.data.shapes.scenes import SIZE, Scene, sample_scene
from visalign.data.shapes.verifier import verify_scene
from visalign.rewards.questions.reward_dance import RewardDance, RewardDancePairs
from visalign.rewards.questions.visual_quality_r1 import VisualQuality
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.template import JudgeSettings, Template

from .judge_inputs import CHAT_TEMPLATE, MERGE, PATCH, judge_settings, new_judge_tokenizer
from .stage import SURROUNDINGS, Plan, machine

CHECK_SEED = 77
_NEAR_TRIES = 50
NAME = "shapes-vlm"
"""Folder of the model in `assets/`."""


def judge_processor() -> Qwen2VLProcessor:
    """Every image is resized to about 64 × 64 pixels, its aspect kept, and becomes about 16 tokens."""
    sizes: dict[str, Any] = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "size": {"shortest_edge": SIZE * SIZE, "longest_edge": SIZE * SIZE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=new_judge_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(patch_size=PATCH, merge_size=MERGE),
        chat_template=CHAT_TEMPLATE,
    )


def judge_engine(model: Qwen2VLForConditionalGeneration) -> VisionLanguageEngine:
    """The model in memory, to be asked as the saved one will be."""
    given = judge_settings()["templates"]
    templates = {name: Template.from_dict(name, value) for name, value in given.items()}
    return VisionLanguageEngine(model, judge_processor(), settings=JudgeSettings(templates=templates))


def save_judge(model: Qwen2VLForConditionalGeneration, folder: Path) -> None:
    """Write weights in float16, processor, tokenizer, and `judge.json` with the judges' texts."""
    model.half().save_pretrained(folder)
    judge_processor().save_pretrained(folder)
    (folder / "judge.json").write_text(json.dumps(judge_settings(), indent=2) + "\n", encoding="utf-8")
    model.float()


def judge_card(folder: Path, seconds: float, plan: Plan) -> str:
    """The card: what it was trained on, how long, how good the saved model is."""
    batch, check = plan.judge_batch, plan.judge_check
    engine = VisionLanguageEngine.from_pretrained(folder)
    tokens = len(engine.processor.tokenizer)
    found = answer_accuracy(engine, images=check, pairs=check)
    size = (folder / "model.safetensors").stat().st_size / 1e6
    rows = "\n".join(f"| {name} | {found[name]:.3f} |" for name in CATEGORIES if name in found)
    count = sum(parameter.numel() for parameter in engine.model.parameters()) / 1e6
    return f"""# {NAME}

A small vision-language model of the shapes world in transformers' format (Qwen2-VL):
`AutoModelForImageTextToText` and `AutoProcessor` load the folder. Vision 4 layers of width 128 (patches of 8,
merged 2 × 2), language 4 layers of width 160, {count:.1f} M parameters, {tokens} tokens, float16,
{size:.1f} MB. It answers yes or no, rates quality from 1 to 5, compares two images, says what is wrong, and
describes. `judge.json` holds the texts it was trained with; the rewards of `visalign.rewards` read them.

## Training

{plan.judge_vision_steps} steps of {3 * batch} rendered scenes for the vision part alone (what is in which
cell, style, distortion), then {plan.judge_steps} steps of {batch} scenes with 8 questions each and {batch}
pairs with 3 votes each; training prompts only, half of the scenes distorted. Then {plan.judge_ground_steps}
such steps in which {SURROUNDINGS:.0%} of the images have another ground, specks or a larger canvas.
{seconds / 60:.0f} minutes on {machine()}. Made by the stages `judge` and `judge_grounds` of
`visalign build-assets`.

## How good it is

{check} undistorted images of held-out prompts, each asked for its own prompt and for one that differs in
one word (a few: in more) and is not true; share of right answers, {found["yes/no"]:.3f} in all:

| category | right |
|---|---|
{rows}

{check} held-out pairs whose utilities differ by at least {CLEAR}, both orders, log-odds averaged:
{found["pair"]:.3f} right. Expected rating against 1 + 4 · quality, {check} images: mean absolute error
{found["rating error"]:.2f}; of the pairs among them whose qualities differ by at least {CLEAR}, the ratings
order {found["rating order"]:.3f} correctly.
"""


def answer_accuracy(
    engine: VisionLanguageEngine, *, images: int = 300, pairs: int = 300, seed: int = CHECK_SEED
) -> dict[str, float]:
    """Held-out accuracy of yes/no by category, of pairs with a clear truth; error and order of ratings.

    Args:
        engine: the model.
        images: undistorted images, each asked for its own prompt and for a neighbour that is not true.
        pairs: clear pairs, each asked in both orders.
        seed: of the draws.
    """
    world, rng = ShapesPreferences(seed, split="heldout"), np.random.default_rng(seed)
    drawn = []
    for _ in range(images):
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

    rated = [world.quality(number).scene for number in range(images)]
    ratings = VisualQuality(engine, min_mass=0.0).score(render_many(rated), [""] * images).value
    truth = torch.tensor([1.0 + 4.0 * scene.quality for scene in rated])
    apart = truth[:, None] - truth >= 4.0 * CLEAR
    found["rating error"] = float((ratings - truth).abs().mean())
    found["rating order"] = float((ratings[:, None] > ratings)[apart].float().mean())
    return found


def _untrue(world: ShapesPreferences, scene: Scene, record: Record, rng: np.random.Generator) -> Record:
    """A prompt that is not true of the image: one word from its own if there is such a one."""
    near = (world.near(record, rng) for _ in range(_NEAR_TRIES))
    drawn = itertools.chain(near, (world.record(rng) for _ in itertools.count()))
    return next(other for other in drawn if not verify_scene(scene, other).correct)
