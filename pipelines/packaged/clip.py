# SPDX-License-Identifier: Apache-2.0
"""The embedded CLIP: a small open_clip model, trained contrastively on rendered scenes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.data.shapes.prompts import CATEGORIES, heldout_prompts
from visalign.data.shapes.scenes import DISTORTIONS, SIZE, Scene, sample_scene
from visalign.data.shapes.surroundings import surround
from visalign.data.shapes.verifier import verify_scene
from visalign.rewards.clip.open_clip_folder import load_open_clip, save_open_clip

from .captions import MAX_TOKENS, new_tokenizer
from .stage import SURROUNDINGS, Plan, SceneFeed, fast_autocast, machine, rendered, size_of, train

MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

MILD_SHARE = 0.3
"""Share of training images with a distortion of at most half severity: a judge sees imperfect images."""


def clip_config() -> dict[str, Any]:
    """embed_dim, vision_cfg and text_cfg: a small ResNet with attention pooling; text 96 wide, 3 layers."""
    return {
        "embed_dim": 96,
        "vision_cfg": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 16, "head_width": 64},
        "text_cfg": {
            "context_length": MAX_TOKENS,
            "vocab_size": len(new_tokenizer()),
            "width": 96,
            "heads": 3,
            "layers": 3,
        },
    }


def new_clip() -> open_clip.CLIP:
    """The untrained model."""
    config = clip_config()
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
def retrieval(
    model: open_clip.CLIP, *, captions: int = 64, draws: int = 20, seed: int = 7
) -> dict[str, float]:
    """Top-1 retrieval among held-out captions in both directions, mean over draws of the captions.

    The pairs are those of `distinct_pairs`: exactly one caption is true of each image.
    """
    rng, tokenizer = np.random.default_rng(seed), new_tokenizer()
    hits = {"image_to_text": 0.0, "text_to_image": 0.0}
    for _ in range(draws):
        scenes = distinct_pairs(rng, captions)
        image = F.normalize(model.encode_image(rendered(scenes)), dim=-1)
        ids = _ids(tokenizer, [scene.record["prompt"] for scene in scenes])
        similarity = image @ F.normalize(model.encode_text(ids), dim=-1).T
        truth = torch.arange(captions)
        hits["image_to_text"] += (similarity.argmax(1) == truth).float().mean().item() / draws
        hits["text_to_image"] += (similarity.argmax(0) == truth).float().mean().item() / draws
    return hits


def _ids(tokenizer: Any, prompts: list[str]) -> Tensor:
    return tokenizer(
        prompts, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids


def train_clip(work: Path, plan: Plan, resume: bool) -> open_clip.CLIP:
    """Train and return the model with averaged weights."""
    torch.manual_seed(plan.seed + 2)
    return _train(new_clip(), work / "clip.pt", plan.clip_steps, plan, resume, lr=1.5e-3)


def widen_clip(base: Path, work: Path, plan: Plan, resume: bool) -> open_clip.CLIP:
    """Go on with the model of a folder on other grounds, with specks and on canvases."""
    torch.manual_seed(plan.seed + 7)
    model, file = load_open_clip(base)[0].float().requires_grad_(), work / "clip_grounds.pt"
    more = {"lr": 1e-3, "seed": plan.seed + 7, "surroundings": SURROUNDINGS}
    return _train(model.train(), file, plan.clip_ground_steps, plan, resume, **more)


def _train(
    model: open_clip.CLIP,
    file: Path,
    steps: int,
    plan: Plan,
    resume: bool,
    *,
    lr: float,
    seed: int | None = None,
    surroundings: float = 0.0,
) -> open_clip.CLIP:
    seed, batch, tokenizer = plan.seed + 2 if seed is None else seed, plan.clip_batch, new_tokenizer()
    feed = SceneFeed(seed, style_weights=(0.25, 0.25, 0.25, 0.25))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.02)

    def loss_of(step: int) -> Tensor:
        rng = np.random.default_rng([seed, 11, step])
        scenes = _distinct(feed, step * 8 * batch, batch, rng)
        scenes = [surround([s], rng)[0] if rng.random() < surroundings else s for s in scenes]
        ids = _ids(tokenizer, [scene.record["prompt"] for scene in scenes])
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
        file,
        steps=steps,
        resume=resume,
        decay=0.998,
        save_every=250,
        check=lambda held: retrieval(held, draws=5),
    )


def save_clip(model: open_clip.CLIP, folder: Path) -> None:
    """Write the model, its tokenizer and how its images are prepared."""
    preprocess = {"mean": MEAN, "std": STD, "interpolation": "bicubic", "resize_mode": "shortest"}
    preprocess |= {"window": SIZE}
    save_open_clip(folder, model, clip_config(), new_tokenizer(), preprocess_cfg=preprocess)


def clip_card(folder: Path, seconds: float, plan: Plan) -> str:
    """The card of `shapes-clip`."""
    model, _, _ = load_open_clip(folder)
    scores, ground_steps = retrieval(model, captions=64, draws=50), plan.clip_ground_steps
    return f"""# shapes-clip

A small contrastive model of the shapes world in open_clip's format (`local-dir:` folder): 64×64 images,
ResNet of width 16 with attention pooling; text 3 layers of width 96; 96 joint dimensions; float16,
{size_of(folder):.1f} MB. `visalign.rewards` loads it as `clip_score`.

## Training

{plan.clip_steps} steps of {plan.clip_batch} freshly rendered scenes with different captions, all four styles,
{MILD_SHARE:.0%} of them distorted up to half severity; training prompts only. Then {ground_steps} steps in
which {SURROUNDINGS:.0%} of the images have another ground, specks or a larger canvas.
{seconds / 60:.0f} minutes on {machine()}. Made by the stages `clip` and `clip_grounds` of
`visalign build-assets`.

## How good it is

Top-1 retrieval among 64 held-out captions, undistorted images, mean of 50 draws; images and captions are
drawn so that exactly one caption is true of each image:

- image to text: {scores["image_to_text"]:.3f}
- text to image: {scores["text_to_image"]:.3f}
"""
