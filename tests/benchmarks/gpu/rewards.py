# SPDX-License-Identifier: Apache-2.0
"""Images a second of `clip_score` with a CLIP ViT-H/14 of random weights: images on the device, on the host, in files.

`python tests/benchmarks/gpu/rewards.py --images 1024 --files 4096`; with --tiny a ViT-B/32, on any device. Files are
noisy JPEGs of 512², scored by the function behind `visalign score`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import open_clip
import torch
from PIL import Image

sys.path.insert(0, ".")
from visalign.pipelines.score.image_rows import ImageRow
from visalign.pipelines.score.score import score_rows
from visalign.rewards.base import ahead
from visalign.rewards.clip.encoder import ClipEncoder, ClipParts
from visalign.rewards.scorers.clip_score import ClipScore

PREPROCESS = {
    "size": 224,
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}


def from_files(reward: ClipScore, folder: Path, count: int, batch_size: int) -> float:
    """Images a second from `count` files, the start of the processes included; the second pass of two."""
    rng, rows = np.random.default_rng(0), []
    for number in range(count):
        path = folder / f"{number}.jpg"
        if not path.exists():
            coarse = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).resize((512, 512))
            noisy = np.asarray(coarse) + rng.normal(0, 12, (512, 512, 1))
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=92)
        rows.append(ImageRow(image=str(path), prompt=f"a red circle {number % 64}"))
    for _ in range(2):
        start = time.perf_counter()
        assert all(row.reason is None for row in score_rows(rows, {"clip_score": reward}, batch_size=batch_size))
        seconds = time.perf_counter() - start
    return count / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--files", type=int, default=0)
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
        for location in (device, "cpu"):
            batch, seconds = images.to(location), []
            for i in range(3):
                start = time.perf_counter()
                reward.score(batch * (1 - 0.01 * i), [f"a red circle {j % 64}" for j in range(count)])
                seconds.append(time.perf_counter() - start)
            row = {"precision": precision, "images on": location, "images/s": count / statistics.median(seconds[1:])}
            print(json.dumps(row), flush=True)
        if precision == "bf16" and options.files:
            with tempfile.TemporaryDirectory() as folder:
                for batch_size in (32, 128):
                    row = {"precision": precision, "images on": "files", "batch_size": batch_size}
                    row |= {"processes": ahead.worker_count(options.files)}
                    row["images/s"] = from_files(reward, Path(folder), options.files, batch_size)
                    print(json.dumps(row), flush=True)
        del model, parts, reward


if __name__ == "__main__":
    main()
