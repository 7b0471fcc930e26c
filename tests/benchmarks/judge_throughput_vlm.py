# SPDX-License-Identifier: Apache-2.0
"""Yes/no scores of 24 images × 8 prompts: one call of our engine against one request at a time.

    OMP_NUM_THREADS=2 python tests/benchmarks/judge_throughput_vlm.py

The other way is the usual one: for each image and prompt the library's processor prepares the request anew
and the whole model gives the logits of all positions, of which two are read. Both judge the same requests
with the same weights on the same cores, in turns; medians are printed, and the largest difference of the
log-odds. Without the packaged model a random one of its size is used: the times do not depend on the weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from visalign.data.assets import resolve_model
from visalign.data.shapes.prompts import train_prompts
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine
from visalign.rewards.vlm.template import Template

YES_NO = Template(
    name="yes_no",
    messages=[
        {
            "role": "user",
            "content": [
                {"type": "image"},
                {"type": "text", "text": "Does this picture show {prompt}? Answer yes or no."},
            ],
        }
    ],
)


def load(model: str) -> tuple[VisionLanguageEngine, str]:
    """The model of that name or folder, or a random one of the packaged one's size."""
    try:
        if not isinstance(place := resolve_model(model), str):
            return VisionLanguageEngine.from_pretrained(place), place.name
    except FileNotFoundError:
        pass
    from visalign.pipelines.packaged.judge import new_judge
    from visalign.pipelines.packaged.judge_card import judge_processor

    torch.manual_seed(0)
    processor: Any = judge_processor()
    return VisionLanguageEngine(new_judge(processor.tokenizer).eval(), processor), "random weights"


def inputs(images: int, prompts: int, side: int) -> tuple[list[Tensor], list[str]]:
    """Noise of whole levels, and prompts of the shapes world."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, side, side), generator=generator, dtype=torch.uint8)
    texts = list(dict.fromkeys(str(record["prompt"]) for record in train_prompts()))[:prompts]
    return list(pixels.float() / 255), texts


def in_one_call(
    judge: VisionLanguageEngine, images: list[Tensor], prompts: list[str], ids: list[int]
) -> Tensor:
    """[images · prompts, 2] logits."""
    judge.clear_features()
    judge.rows.refresh()
    template = judge.template("yes_no", YES_NO)
    asks = [Query(images=[image], prompt=prompt) for image in images for prompt in prompts]
    return judge.answer_logits(template, asks, ids).logits


@torch.no_grad()
def one_at_a_time(
    judge: VisionLanguageEngine, images: list[Tensor], prompts: list[str], ids: list[int]
) -> Tensor:
    """[images · prompts, 2] logits, as the library's own classes give them."""
    template = judge.template("yes_no", YES_NO)
    processor: Any = judge.processor
    found = []
    for image in images:
        for prompt in prompts:
            picture = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
            text = processor.apply_chat_template(
                template.filled({"prompt": prompt}), tokenize=False, add_generation_prompt=True
            )
            given = processor(text=[text + template.answer_prefix], images=[picture], return_tensors="pt")
            found.append(judge.model(**given).logits[0, -1, ids])
    return torch.stack(found)


def timed(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="shapes-vlm", help="a packaged name or a folder")
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--side", type=int, default=64, help="pixels of each picture")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    judge, weights = load(chosen.model)
    images, prompts = inputs(chosen.images, chosen.prompts, chosen.side)
    ids = judge.token_ids(["yes", "no"], skip_missing=True)
    ids = ids if len(ids) == 2 else [5, 6]
    ways = {"one call": in_one_call, "one at a time": one_at_a_time}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    logits: dict[str, Tensor] = {}
    for number in range(chosen.rounds + 1):
        for name, way in ways.items():
            took, logits[name] = timed(lambda way=way: way(judge, images, prompts, ids))
            if number:  # the first round warms up
                seconds[name].append(took)
    middle = {name: statistics.median(of) for name, of in seconds.items()}
    count = len(images) * len(prompts)
    print(f"{weights}, {len(images)} images × {len(prompts)} prompts, {torch.get_num_threads()} threads")
    for name, took in middle.items():
        print(f"{name:14s} {took:7.3f} s  {count / took:8.1f} scores/s")
    odds = [found[:, 0] - found[:, 1] for found in logits.values()]
    print(f"ratio          {middle['one at a time'] / middle['one call']:7.2f} ×")
    print(f"largest difference of the log-odds {float((odds[0] - odds[1]).abs().max()):.1e}")


if __name__ == "__main__":
    main()
