# SPDX-License-Identifier: Apache-2.0
"""The cards of the embedded models: training data and time, and how good the saved files are.

Every number is measured on the saved folder, loaded with the library whose format it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from visalign.data.shapes.prompts import CATEGORIES, all_prompts, heldout_prompts, train_prompts
from visalign.data.shapes.verifier import verify

from .stage import Plan, machine, size_of

SEEDS = (0, 1)


def pipeline_accuracy(folder: Path, guidance: float, *, steps: int = 10) -> dict[str, float]:
    """Share of correct held-out pictures of a saved pipeline, called as a user calls it."""
    from diffusers import StableDiffusion3Pipeline

    pipe: Any = StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    records = heldout_prompts()
    correct, tags = [], []
    for seed in SEEDS:
        for start in range(0, len(records), 52):
            part = records[start : start + 52]
            noise = [torch.Generator().manual_seed(10_000 * seed + start + i) for i in range(len(part))]
            with torch.autocast("cpu", torch.bfloat16):
                images = pipe(
                    [record["prompt"] for record in part],
                    num_inference_steps=steps,
                    guidance_scale=guidance,
                    generator=noise,
                    height=64,
                    width=64,
                    output_type="pt",
                ).images
            correct += [verdict.correct for verdict in verify(images.float(), part)]
            tags += [record["tag"] for record in part]
    hits, names = np.array(correct), np.array(tags)
    return {"all": float(hits.mean())} | {tag: float(hits[names == tag].mean()) for tag in CATEGORIES}


def generator_card(folder: Path, seconds: float, plan: Plan) -> str:
    """The card of `shapes-sd3`."""
    from .generator import POOL, SHIFT

    plain, guided = (pipeline_accuracy(folder, scale) for scale in (1.0, 2.0))
    rows = "\n".join(f"| {name} | {plain[name]:.3f} | {guided[name]:.3f} |" for name in ("all", *CATEGORIES))
    splits = (all_prompts(), train_prompts(), heldout_prompts())
    counts = {name: [sum(r["tag"] == name for r in split) for split in splits] for name in CATEGORIES}
    prompts = "\n".join(f"| {name} | {a} | {b} | {c} |" for name, (a, b, c) in counts.items())
    worst = sorted(CATEGORIES, key=lambda name: plain[name])
    return f"""# shapes-sd3

A small text-to-image model of the shapes world in diffusers' format:
`StableDiffusion3Pipeline.from_pretrained("assets/shapes-sd3")` loads and runs it as it is, 64×64 pictures.
SD3 transformer (7 layers, width 160, 16 image tokens, 6.3 M parameters), autoencoder (8×8 latents of 8
channels, 0.95 M), two CLIP text encoders (0.34 M), a null T5, float16, {size_of(folder):.1f} MB.

## Training

- Autoencoder: {plan.autoencoder_steps} steps of {plan.autoencoder_batch} rendered scenes.
- Transformer and text encoders: flow matching, {plan.generator_steps} steps of {plan.generator_batch} from a
  pool of {POOL:,} encoded scenes; scheduler shift {SHIFT}.
- {seconds / 60:.0f} minutes in all on {machine()}.
- Made by `visalign build-assets`.

## Data

Scenes rendered from the training prompts; no held-out combination (shapes, colors, sizes, count, relation)
occurs among them.

| category | prompts | training | held out (evaluated) |
|---|---|---|---|
{prompts}

## How good it is

Held-out prompts × {len(SEEDS)} seeds, 10 Euler steps, share of pictures that the verifier finds correct in
every check:

| category | guidance 1.0 | guidance 2.0 |
|---|---|---|
{rows}

It is meant to be improvable; it fails most often at {worst[0]} and {worst[1]}.
"""


def clip_card(folder: Path, seconds: float, plan: Plan) -> str:
    """The card of `shapes-clip`."""
    from visalign.rewards.clip.open_clip_folder import load_open_clip

    from .clip import MILD_SHARE, retrieval

    model, _, _ = load_open_clip(folder)
    scores = retrieval(model, captions=64, draws=50)
    return f"""# shapes-clip

A small contrastive model of the shapes world in open_clip's format (`local-dir:` folder): 64×64 pictures,
ResNet of width 16 with attention pooling; text 3 layers of width 96; 96 joint dimensions; float16,
{size_of(folder):.1f} MB. `visalign.rewards` loads it as `clip_score`.

## Training

{plan.clip_steps} steps of {plan.clip_batch} freshly rendered scenes with different captions, all four styles,
{MILD_SHARE:.0%} of them distorted up to half severity; training prompts only. {seconds / 60:.0f} minutes on
{machine()}. Made by `visalign build-assets`.

## How good it is

Top-1 retrieval among 64 held-out captions, undistorted pictures, mean of 50 draws; pictures and captions are
drawn so that exactly one caption is true of each picture:

- picture to text: {scores["image_to_text"]:.3f}
- text to picture: {scores["text_to_image"]:.3f}
"""
