# SPDX-License-Identifier: Apache-2.0
"""CLIP scores of 24 images × 8 prompts: one call of our judge against one pair at a time.

    OMP_NUM_THREADS=2 python tests/benchmarks/judge_throughput_clip.py

The other way is the usual one: for each image and prompt the picture is resized by PIL, the prompt tokenised
and encoded anew, and both towers run on a batch of one, with the model kept in memory. Both judge the same
pairs with the same weights on the same cores, in turns, our judge without features from earlier calls;
medians are printed, and the largest difference of the scores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from visalign.data.assets import resolve_model
from visalign.data.shapes.prompts import train_prompts
from visalign.rewards.base.images import to_pil
from visalign.rewards.scorers.clip_score import ClipScore


def inputs(images: int, prompts: int, side: int) -> tuple[list[Image.Image], list[str]]:
    """Noise of whole levels, and prompts of the shapes world; each picture with each prompt."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(0, 256, (images, 3, side, side), generator=generator)
    pictures = [to_pil(level / 255) for level in levels]
    texts = sorted({str(prompt["prompt"]) for prompt in train_prompts()})[:prompts]
    return [picture for picture in pictures for _ in texts], texts * images


def one_pair_at_a_time(folder: Path) -> Callable[[list[Image.Image], list[str]], Tensor]:
    """The library's own transform, tokenizer and towers, called for every pair."""
    model: Any
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokenizer, prepare = open_clip.get_tokenizer(f"local-dir:{folder}"), transform
    model.eval()

    @torch.no_grad()
    def score(pictures: list[Image.Image], prompts: list[str]) -> Tensor:
        values = []
        for picture, prompt in zip(pictures, prompts, strict=True):
            image = model.encode_image(prepare(picture)[None])  # type: ignore[operator,index]
            text = model.encode_text(tokenizer([prompt]))
            values.append(F.cosine_similarity(image, text))
        return torch.cat(values)

    return score


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--side", type=int, default=64, help="pixels of the pictures")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    pictures, prompts = inputs(options.images, options.prompts, options.side)
    theirs = one_pair_at_a_time(Path(resolve_model("shapes-clip")))
    reward = ClipScore("shapes-clip")

    def ours(images: list[Image.Image], texts: list[str]) -> Tensor:
        reward.towers.clear_cache()
        return reward.score(images, texts).value

    sides = {"one pair at a time": theirs, "one call": ours}
    times: dict[str, list[float]] = {name: [] for name in sides}
    values: dict[str, Tensor] = {name: side(pictures[:2], prompts[:2]) for name, side in sides.items()}
    for _ in range(options.repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            values[name] = side(pictures, prompts)
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        print(f"{name:20} {seconds * 1000:8.1f} ms   {len(prompts) / seconds:8.0f} scores/s")
    slow, fast = medians.values()
    difference = (values["one call"] - values["one pair at a time"]).abs().max().item()
    print(f"ratio {slow / fast:.1f}×, largest difference of the scores {difference:.1e}, ", end="")
    print(f"{torch.get_num_threads()} thread(s)")


if __name__ == "__main__":
    main()
