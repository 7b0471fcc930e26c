# SPDX-License-Identifier: Apache-2.0
"""The embedded CLIP: a small open_clip model, trained contrastively on rendered scenes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.data.shapes.prompts import CATEGORIES, heldout_prompts
from visalign.data.shapes.scenes import DISTORTIONS, Scene, sample_scene
from visalign.data.shapes.surroundings import surround
from visalign.data.shapes.verifier import verify_scene
from visalign.rewards.clip.open_clip_folder import load_open_clip, save_open_clip

from .generator import new_tokenizer, token_ids
from .stage import SURROUNDINGS, Plan, SceneFeed, fast_autocast, packaged, rendered, train

MILD_SHARE = 0.3
"""Share of training images with a distortion of at most half severity: a judge sees imperfect images."""


def clip_config() -> dict[str, Any]:
    """Read the configuration of the packaged model in open_clip's form."""
    return json.loads((packaged("shapes-clip") / "open_clip_config.json").read_text(encoding="utf-8"))


def new_clip() -> open_clip.CLIP:
    """Create the untrained model: a small ResNet with attention pooling; text 96 wide, 3 layers."""
    config = clip_config()["model_cfg"]
    return open_clip.CLIP(config["embed_dim"], config["vision_cfg"], config["text_cfg"])


def _distinct(feed: SceneFeed, start: int, count: int, rng: np.random.Generator) -> list[Scene]:
    """Scenes with different captions, a third of them of one category: neighbours are the hard negatives."""
    scenes: dict[str, Scene] = {}
    focus = str(rng.choice(CATEGORIES[1:]))
    number = start
    while len(scenes) < count:
        scene = feed.scene(number)
        number += 1
        if len(scenes) < count // 3 and scene.record["tag"] != focus and number < start + 8 * count:
            continue
        if rng.random() < MILD_SHARE:
            scene = scene.distorted(str(rng.choice(DISTORTIONS[1:])), float(rng.uniform(0.0, 0.5)))
        scenes.setdefault(scene.record["prompt"], scene)
    return list(scenes.values())


def distinct_pairs(rng: np.random.Generator, captions: int) -> list[Scene]:
    """Scenes of held-out captions such that each image satisfies its own caption and no other.

    Without that, two images in five satisfy a second caption of the 64 ("a circle and a cross" is true of
    what was drawn for "a small circle and a big cross"), and no judge can tell which one was meant.
    """
    records, chosen = heldout_prompts(), list[Scene]()
    order = iter(rng.permutation(len(records)))
    while len(chosen) < captions:
        record = records[int(next(order))]
        scene = sample_scene(record, rng)
        if not any(_either_fits(scene, other) for other in chosen):
            chosen.append(scene)
    return chosen


def _either_fits(a: Scene, b: Scene) -> bool:
    return verify_scene(a, b.record).correct or verify_scene(b, a.record).correct


@torch.no_grad()
def retrieval(model: open_clip.CLIP, *, captions: int = 64, draws: int = 20, seed: int = 7) -> dict[str, float]:
    """Top-1 retrieval among held-out captions in both directions, mean over draws of the captions.

    The pairs are those of `distinct_pairs`: exactly one caption is true of each image.
    """
    rng, tokenizer = np.random.default_rng(seed), new_tokenizer()
    hits = {"image_to_text": 0.0, "text_to_image": 0.0}
    for _ in range(draws):
        scenes = distinct_pairs(rng, captions)
        image = F.normalize(model.encode_image(rendered(scenes)), dim=-1)
        ids = token_ids(tokenizer, [scene.record["prompt"] for scene in scenes])
        similarity = image @ F.normalize(model.encode_text(ids), dim=-1).T
        truth = torch.arange(captions)
        hits["image_to_text"] += (similarity.argmax(1) == truth).float().mean().item() / draws
        hits["text_to_image"] += (similarity.argmax(0) == truth).float().mean().item() / draws
    return hits


def train_clip(plan: Plan) -> open_clip.CLIP:
    """Train and return the model with averaged weights."""
    torch.manual_seed(plan.seed + 2)
    return _train(new_clip(), "clip", plan.clip_steps, plan, lr=1.5e-3, seed=plan.seed + 2)


def widen_clip(base: Path, plan: Plan) -> open_clip.CLIP:
    """Continue training the model of a folder on other backgrounds, with specks and on canvases."""
    torch.manual_seed(plan.seed + 7)
    model = load_open_clip(base)[0].float().requires_grad_().train()
    settings: dict[str, Any] = {"lr": 1e-3, "seed": plan.seed + 7, "surroundings": SURROUNDINGS}
    return _train(model, "clip_grounds", plan.clip_ground_steps, plan, **settings)


def _train(
    model: open_clip.CLIP, name: str, steps: int, plan: Plan, *, lr: float, seed: int, surroundings: float = 0.0
) -> open_clip.CLIP:
    batch, tokenizer = plan.clip_batch, new_tokenizer()
    feed = SceneFeed(seed, style_weights=(0.25, 0.25, 0.25, 0.25))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.02)

    def loss_of(step: int) -> Tensor:
        rng = np.random.default_rng([seed, 11, step])
        scenes = _distinct(feed, step * 8 * batch, batch, rng)
        scenes = [surround([s], rng)[0] if rng.random() < surroundings else s for s in scenes]
        ids = token_ids(tokenizer, [scene.record["prompt"] for scene in scenes])
        with fast_autocast():
            image, text = model.encode_image(rendered(scenes)), model.encode_text(ids)
        scale = model.logit_scale.exp().clamp(max=100.0)
        logits = scale * F.normalize(image.float(), dim=-1) @ F.normalize(text.float(), dim=-1).T
        truth = torch.arange(batch)
        return (F.cross_entropy(logits, truth) + F.cross_entropy(logits.T, truth)) / 2

    return train(
        model,
        [optimizer],
        loss_of,
        name,
        steps=steps,
        decay=0.998,
        report_every=250,
        check=lambda module: retrieval(module, draws=5),
    )


def save_clip(model: open_clip.CLIP, folder: Path) -> None:
    """Write the model, its tokenizer and the preparation of its images."""
    config = clip_config()
    preprocess = config["preprocess_cfg"]
    save_open_clip(folder, model, config["model_cfg"], new_tokenizer(), preprocess_cfg=preprocess)
