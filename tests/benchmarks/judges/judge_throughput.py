# SPDX-License-Identifier: Apache-2.0
"""Scores of 24 images × 8 prompts: one call of our judge against one pair at a time.

    OMP_NUM_THREADS=2 python tests/benchmarks/judges/judge_throughput.py clip
    OMP_NUM_THREADS=2 python tests/benchmarks/judges/judge_throughput.py vlm

The other way is the usual one: for each image and prompt the library prepares both anew and the whole model
runs on a batch of one, of whose logits a vision-language model's yes and no are read. Both judge the same
pairs with the same weights on the same cores, in turns, our judge without features from earlier calls;
medians are printed, and the largest difference of the scores (yes/no: of the log-odds).
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
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine
from visalign.rewards.vlm.template import Template

Way = Callable[[list[Tensor], list[Image.Image], list[str]], Tensor]
"""N pairs, their images [3, H, W] and as PIL's, their prompts -> [N]."""
YES_NO = Template(
    name="yes_no",
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "text", "text": "Does this image show {prompt}? Answer yes or no."},
            ],
        }
    ],
)


def inputs(images: int, prompts: int, side: int) -> tuple[list[Tensor], list[str]]:
    """Noise of whole levels, and prompts of the shapes world; each image with each prompt."""
    generator = torch.Generator().manual_seed(0)
    samples = torch.randint(0, 256, (images, 3, side, side), generator=generator) / 255
    texts = sorted({str(prompt["prompt"]) for prompt in train_prompts()})[:prompts]
    return [image for image in samples for _ in texts], texts * images


def clip() -> tuple[Way, Way]:
    """`ClipScore`, and the library's own transform, tokenizer and towers for every pair."""
    reward, folder = ClipScore("shapes-clip"), f"local-dir:{Path(resolve_model('shapes-clip'))}"
    model: Any
    model, _, transform = open_clip.create_model_and_transforms(folder)
    tokenizer, prepare = open_clip.get_tokenizer(folder), transform
    model.eval()

    def ours(levels: list[Tensor], images: list[Image.Image], prompts: list[str]) -> Tensor:
        reward.towers.images.clear()
        reward.towers.texts.clear()
        return reward.score(images, prompts).value

    @torch.no_grad()
    def theirs(levels: list[Tensor], images: list[Image.Image], prompts: list[str]) -> Tensor:
        values = []
        for sample, prompt in zip(images, prompts, strict=True):
            image = model.encode_image(prepare(sample)[None])  # type: ignore[operator,index]
            values.append(F.cosine_similarity(image, model.encode_text(tokenizer([prompt]))))
        return torch.cat(values)

    return ours, theirs


def vlm() -> tuple[Way, Way]:
    """Yes/no of `VisionLanguageEngine`, and the library's own processor and model for every pair."""
    judge = VisionLanguageEngine.from_pretrained("shapes-vlm")
    template, processor = judge.template("yes_no", YES_NO), judge.processor
    ids = judge.token_ids(["yes", "no"])

    def ours(levels: list[Tensor], images: list[Image.Image], prompts: list[str]) -> Tensor:
        judge.clear_features()
        judge.rows.refresh()
        queries = [Query(images=[level], prompt=text) for level, text in zip(levels, prompts, strict=True)]
        logits = judge.answer_logits(template, queries, ids).logits
        return logits[:, 0] - logits[:, 1]

    @torch.no_grad()
    def theirs(levels: list[Tensor], images: list[Image.Image], prompts: list[str]) -> Tensor:
        values = []
        for image, prompt in zip(images, prompts, strict=True):
            text = processor.apply_chat_template(
                template.filled({"prompt": prompt}), tokenize=False, add_generation_prompt=True
            )
            batch = processor(text=[text + template.answer_prefix], images=[image], return_tensors="pt")
            logits = judge.model(**batch).logits[0, -1, ids]
            values.append(logits[0] - logits[1])
        return torch.stack(values)

    return ours, theirs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("judge", choices=("clip", "vlm"))
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--side", type=int, default=64, help="pixels of the images")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    levels, prompts = inputs(options.images, options.prompts, options.side)
    images = [to_pil(level) for level in levels]
    ways = dict(zip(("one call", "one pair at a time"), {"clip": clip, "vlm": vlm}[options.judge](), strict=True))
    times: dict[str, list[float]] = {name: [] for name in ways}
    values = {name: way(levels[:2], images[:2], prompts[:2]) for name, way in ways.items()}
    for _ in range(options.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            values[name] = way(levels, images, prompts)
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        print(f"{name:20} {seconds * 1000:8.1f} ms   {len(prompts) / seconds:8.0f} scores/s")
    ratio = medians["one pair at a time"] / medians["one call"]
    difference = (values["one call"] - values["one pair at a time"]).abs().max().item()
    print(f"ratio {ratio:.1f}×, largest difference {difference:.1e}, {torch.get_num_threads()} thread(s)")


if __name__ == "__main__":
    main()
