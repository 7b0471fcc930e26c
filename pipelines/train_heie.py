# SPDX-License-Identifier: Apache-2.0
"""Train HEIE-type heads on a frozen vision-language model and the shapes world.

    python -m visalign.pipelines.train_heie --model shapes-vlm --out heie_heads.safetensors

Each picture is asked about with its own prompt or one that it breaks; the truth of the map are the objects
that break the prompt, the truth of the score is the verifier's verdict. Test pictures have held-out prompts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from visalign.data.render import render
from visalign.data.scenes import sample_scene
from visalign.data.shapes_preferences import ShapesPreferences
from visalign.data.verifier import verify_scene
from visalign.data.wrong_regions import wrong_pixels
from visalign.rewards.heie_heads import HeieHeads, HeieSettings
from visalign.rewards.heie_training import HeieData, heie_data, heie_quality, train_heads
from visalign.rewards.reward_dance_questions import EXPLAIN
from visalign.rewards.vlm import Ask, VisionLanguageJudge

CHUNK = 200
"""Pictures whose views are made at once."""


def shapes_data(engine: VisionLanguageJudge, count: int, *, split: str, seed: int, tiles: int) -> HeieData:
    """Views and truth of pictures, every second one asked about with a prompt that it breaks.

    Args:
        engine: the frozen model.
        count: of pictures.
        split: of the prompts, "train" or "heldout".
        seed: of the draws.
        tiles: n of n × n.
    """
    world, rng = ShapesPreferences(seed, split=split), np.random.default_rng(seed)
    template = engine.template("explain", EXPLAIN)
    asks, heat, score = [], [], []
    for number in range(count):
        record = world.record(rng)
        scene = sample_scene(record, rng)
        for _ in range(50 if number % 2 else 0):
            record = world.near(record, rng)
            if not verify_scene(scene, record).correct:
                break
        image = torch.from_numpy(render(scene)).permute(2, 0, 1).float() / 255
        asks.append(Ask(images=[image], prompt=record["prompt"], fields={"instruction": ""}))
        heat.append(torch.from_numpy(wrong_pixels(scene, record)))
        score.append(float(verify_scene(scene, record).correct))
    parts = []
    for start in range(0, count, CHUNK):
        here = slice(start, start + CHUNK)
        truth = torch.stack(heat[here]), torch.tensor(score[here])
        parts.append(heie_data(engine, template, asks[here], *truth, tiles=tiles))
        engine.clear_features()
    return HeieData(
        seen=[view for part in parts for view in part.seen],
        heat=torch.cat([part.heat for part in parts]),
        score=torch.cat([part.score for part in parts]),
    )


def main(arguments: list[str] | None = None) -> None:
    """Train, measure on held-out prompts, save.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="shapes-vlm", help="folder, packaged name or hub id")
    parser.add_argument("--out", type=Path, required=True, help="file for the heads")
    parser.add_argument("--pictures", type=int, default=3000, help="for training")
    parser.add_argument("--test", type=int, default=400, help="pictures for the measurement")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--tiles", type=int, default=2, help="n of n × n; 1 for none")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    started = time.perf_counter()
    engine = VisionLanguageJudge.from_pretrained(given.model)
    train = shapes_data(engine, given.pictures, split="train", seed=given.seed, tiles=given.tiles)
    test = shapes_data(engine, given.test, split="heldout", seed=given.seed + 1, tiles=given.tiles)
    made = time.perf_counter()
    torch.manual_seed(given.seed)
    view = train.seen[0]
    cells = max(1, 64 // (max(view.grid) * given.tiles))
    heads = HeieHeads(HeieSettings(hidden=view.hidden.shape[1], features=view.features.shape[2], cells=cells))
    losses = train_heads(heads, train, steps=given.steps, seed=given.seed)
    heads.save(given.out)
    print(f"loss {np.mean(losses[:20]):.3f} -> {np.mean(losses[-20:]):.3f}")
    print(f"views {made - started:.0f} s, heads {time.perf_counter() - made:.0f} s")
    for name, value in asdict(heie_quality(heads, test)).items():
        print(f"{name:14} {value:.3f}")


if __name__ == "__main__":
    main()
