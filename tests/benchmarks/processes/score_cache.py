# SPDX-License-Identifier: Apache-2.0
"""The second run of one scoring against the first: `python tests/benchmarks/processes/score_cache.py`."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from visalign.data.shapes.preferences import ShapesPreferences
from visalign.rewards import load_reward
from visalign.rewards.cache.reward import CachedReward
from visalign.rewards.cache.store import ScoreCache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judge", default="hpsv3")
    parser.add_argument("--images", type=int, default=2000)
    options = parser.parse_args()
    world, paths, prompts = ShapesPreferences(5, split="heldout"), [], []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.images):
            pair = world.pair(number)
            paths.append(Path(folder) / f"{number}.png")
            Image.fromarray(pair.images()[0]).save(paths[-1])
            prompts.append(pair.prompt)
        seconds, values = [], []
        for _ in range(2):
            judge = CachedReward(load_reward(options.judge), ScoreCache(Path(folder) / "cache"))
            _ = judge.identity  # loads the model in both runs, outside the clock
            begun = time.perf_counter()
            values.append(judge.score(paths, prompts).value)
            seconds.append(time.perf_counter() - begun)
    equal = torch.equal(values[0].nan_to_num(-1e9), values[1].nan_to_num(-1e9))
    print(
        f"{options.judge}, {options.images} images: first {seconds[0]:.2f} s, second {seconds[1]:.3f} s, "
        f"{seconds[0] / seconds[1]:.1f} times; equal numbers: {equal}"
    )


if __name__ == "__main__":
    main()
