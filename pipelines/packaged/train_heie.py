# SPDX-License-Identifier: Apache-2.0
"""Train HEIE-type heads on a frozen vision-language model and the shapes world, as `shapes-heie` was made.

    python -m visalign.pipelines.packaged.train_heie --model shapes-vlm --out FOLDER

The folder holds the heads, a `judge.json` that names the model as base, and a card with measured numbers;
`load_reward("heie", model=FOLDER)` reads it. Each picture is asked about with its own prompt or one that it
breaks, and half of them are distorted. The truth of the map are the objects that break the prompt, that of
the score is `heie_data.plausibility`. Test pictures have held-out prompts.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from visalign.data.shapes.scenes import SIZE
from visalign.rewards.heie.heads import HeieHeads, HeieSettings
from visalign.rewards.heie.judge import HEADS, Heie
from visalign.rewards.heie.training import train_heads
from visalign.rewards.questions.reward_dance import EXPLAIN
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.template import JudgeSettings

from .heie import heie_card, heie_measures
from .heie_data import HeiePlan, faults_data, shapes_faults

NAME = "shapes-heie"
"""Folder of the packaged heads in `assets/`."""


def train_on_shapes(engine: VisionLanguageEngine, plan: HeiePlan) -> HeieHeads:
    """Heads trained on the shapes world.

    Args:
        engine: the frozen model.
        plan: sizes and seed.
    """
    faults = shapes_faults(plan.pictures, split="train", seed=plan.seed)
    data = faults_data(engine, faults, tiles=plan.tiles)
    view = data.seen[0]
    settings = HeieSettings(
        hidden=view.hidden.shape[1],
        features=view.features.shape[2],
        width=plan.width,
        cells=max(1, SIZE // (max(view.grid) * plan.tiles)),
        tiles=plan.tiles,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        heads = HeieHeads(settings)
    losses = train_heads(heads, data, steps=plan.steps, batch=plan.batch, seed=plan.seed)
    print(f"heie: loss {np.mean(losses[:20]):.3f} -> {np.mean(losses[-20:]):.3f}", flush=True)
    return heads


def save_heie(heads: HeieHeads, engine: VisionLanguageEngine, base: str | Path, folder: Path) -> None:
    """Write heads in float16 and the `judge.json` that names their base.

    Args:
        heads: trained.
        engine: that they were trained on.
        base: packaged name, hub id or folder of its model; a folder is named relative to `folder`.
        folder: is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    heads.save(folder / HEADS, half=True)
    named = os.path.relpath(Path(base).resolve(), folder.resolve()) if Path(base).is_dir() else str(base)
    templates = {"explain": engine.template("explain", EXPLAIN)}
    JudgeSettings(templates=templates, positions=engine.positions, rest={"base": named}).write(folder)


def build_heie(base: str | Path, folder: Path, plan: HeiePlan | None = None) -> dict[str, float]:
    """Train heads, save them, measure the saved folder as a user loads it, and write its card.

    Args:
        base: packaged name, hub id or folder of the model.
        folder: is made.
        plan: sizes and seed.

    Returns:
        What was measured.
    """
    plan = plan or HeiePlan()
    started = time.process_time()
    engine = VisionLanguageEngine.from_pretrained(base)
    heads = train_on_shapes(engine, plan)
    seconds = time.process_time() - started
    save_heie(heads, engine, base, folder)
    test = shapes_faults(plan.test, split="heldout", seed=plan.seed + 1)
    judge = Heie(folder, write_reasons=False)
    found = heie_measures(judge, test)
    (folder / "README.md").write_text(heie_card(judge, found, plan, seconds), encoding="utf-8")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Train, save, measure on held-out prompts.

    Args:
        arguments: of the command line.
    """
    standard = HeiePlan()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="shapes-vlm", help="folder, packaged name or hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder for heads, settings and card")
    for name, value in asdict(standard).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = vars(parser.parse_args(arguments))
    model, out = given.pop("model"), given.pop("out")
    for name, value in build_heie(model, out, HeiePlan(**given)).items():
        print(f"{name:28} {value:.3f}")


if __name__ == "__main__":
    main()
