# SPDX-License-Identifier: Apache-2.0
"""Images a second of `clip_score` with a CLIP ViT-H/14 of random weights: images on the device and on the host.

`python tests/benchmarks/gpu/rewards.py --images 1024`; with --tiny a ViT-B/32, on any device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import open_clip
import torch

sys.path.insert(0, ".")
from visalign.rewards.clip.encoder import ClipEncoder, ClipParts
from visalign.rewards.scorers.clip_score import ClipScore

PREPROCESS = {
    "size": 224,
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = "ViT-B-32" if options.tiny else "ViT-H-14"
    tokenizer = open_clip.get_tokenizer(name)
    for precision in ("bf16", "fp32"):
        with torch.device(device):
            model = open_clip.CLIP(**open_clip.get_model_config(name)).eval().requires_grad_(False)
        model.to(torch.bfloat16 if precision == "bf16" else torch.float32)
        parts = ClipParts(
            encoder=ClipEncoder(model).eval(), preprocess=PREPROCESS, tokenizer=tokenizer, end=49407, folder=None
        )
        reward = ClipScore(parts, device=device, precision=precision)  # pyright: ignore[reportArgumentType]
        count = options.images if precision == "bf16" else options.images // 4
        images = torch.rand(count, 3, 512, 512, device=device)
        for place in (device, "cpu"):
            batch, seconds = images.to(place), []
            for i in range(3):
                start = time.perf_counter()
                reward.score(batch * (1 - 0.01 * i), [f"a red circle {j % 64}" for j in range(count)])
                seconds.append(time.perf_counter() - start)
            row = {"precision": precision, "images on": place, "images/s": count / statistics.median(seconds[1:])}
            print(json.dumps(row))
        del model, parts, reward


if __name__ == "__main__":
    main()
