# SPDX-License-Identifier: Apache-2.0
"""At which denoising step it is decided what an image shows: which noise levels are worth training.

    python tests/benchmarks/images/when_decided.py --lora runs/nft/lora
    python tests/benchmarks/images/when_decided.py --tag two_objects --model runs/full/model

Of each step's predicted clean image, x̂0 = x − σ v, over the held-out prompts: the share that is right, and
the shares that already have as many objects, and the same shapes, as the image in the end.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.adapters import LoraSettings, load_policy
from visalign.data.assets import resolve_model
from visalign.data.shapes.detector import detect
from visalign.data.shapes.prompts import CATEGORIES, heldout_prompts
from visalign.data.shapes.verifier import verify
from visalign.flow.rollout import velocity_of


@torch.no_grad()
def main() -> None:
    """Print a row for each step."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default="shapes-sd3")
    parser.add_argument("--lora", type=Path, help="folder of a run's LoRA; the model itself without")
    parser.add_argument("--tag", choices=CATEGORIES, help="prompts of one kind alone")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=4, help="images of a prompt")
    options = parser.parse_args()
    start = {"lora_path": options.lora} if options.lora else {}
    policy: Any = load_policy(resolve_model(options.model), lora=LoraSettings(), **start)
    records = [record for record in heldout_prompts() if options.tag in (None, record["tag"])]
    records *= options.repeats
    condition, sigmas = policy.encode([record["prompt"] for record in records]), policy.sigmas(options.steps)
    x = torch.randn(len(records), *policy.latent_shape, generator=torch.Generator().manual_seed(0))
    images = []
    for level, next_level in pairwise(sigmas):
        sigma = level.expand(len(x))
        v = velocity_of(policy, x, sigma, condition)
        images.append(policy.decode(x - level * v))
        x = x + (next_level - level) * v
    last = shapes(images[-1])
    print(f"{len(records)} images\nstep  sigma  right  as many  same shapes")
    for step, image in enumerate(images):
        now = shapes(image)
        rows = (
            [verdict.correct for verdict in verify(image, records)],
            [len(one) == len(other) for one, other in zip(now, last, strict=True)],
            [one == other for one, other in zip(now, last, strict=True)],
        )
        right, count, same = (sum(row) / len(row) for row in rows)
        print(f"{step:4d}  {sigmas[step]:.3f}  {right:.3f}  {count:7.3f}  {same:11.3f}")


def shapes(images: Tensor) -> list[list[str]]:
    """Shapes of the objects in each."""
    return [sorted(item.shape for item in objects) for objects in detect(images)]


if __name__ == "__main__":
    main()
