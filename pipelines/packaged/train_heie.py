# SPDX-License-Identifier: Apache-2.0
"""Train HEIE-type heads on a frozen vision-language model and the shapes world, as `shapes-heie` was made.

    python -m visalign.pipelines.packaged.train_heie --model shapes-vlm --out FOLDER

The folder holds the heads, a `judge.json` that names the model as base, and a card with measured numbers;
`load_reward("heie", model=FOLDER)` reads it. Each image is asked about with its own prompt or one that it
breaks, and half of them are distorted. The truth of the map are the objects that break the prompt, that of
the score is `heie.plausibility`. Test images have held-out prompts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from visalign.data.shapes.scenes import SIZE
from visalign.rewards.heie.heads import HeieHeads, HeieSettings
from visalign.rewards.heie.judge import HEADS, Heie
from visalign.rewards.heie.training import HeieData, heie_loss
from visalign.rewards.questions.reward_dance import EXPLAIN
from visalign.rewards.vlm.engine import VisionLanguageEngine
from visalign.rewards.vlm.template import JudgeSettings
from visalign.training import AdamWSettings, Algorithm, RunSettings, Trainer
from visalign.training.loop.algorithm import Collected, Context
from visalign.training.loop.processes import get_accelerator, one_process

from .heie import HeiePlan, faults_data, heie_card, heie_measures, shapes_faults
from .stage import SURROUNDINGS

NAME = "shapes-heie"
"""Folder of the packaged heads in `assets/`."""


class HeadTraining(Algorithm):
    """Trains HEIE's heads on drawn batches; an `Algorithm` for `Trainer`."""

    def __init__(self, heads: HeieHeads, data: HeieData, *, batch: int, seed: int) -> None:
        self.heads, self.data, self.batch = heads, data, batch
        one_process("HEIE's heads train")
        self.accelerator = get_accelerator(None, data.heat)
        self.draw = torch.Generator().manual_seed(seed)

    def parameters(self) -> list[tuple[str, Parameter]]:
        """All of the heads."""
        return list(self.heads.named_parameters())

    def collect(self, run: Context) -> Collected:
        """Places of the images of one update."""
        index = torch.randint(len(self.data.seen), (self.batch,), generator=self.draw)
        return Collected(experience=[index], samples=self.batch)

    def backward(self, experience: Any, step: Tensor, run: Context) -> dict[str, float]:
        """`heie_loss` of a batch."""
        data, seen = self.data, [self.data.seen[place] for place in step.tolist()]
        loss = heie_loss(self.heads, seen, data.heat[step], data.score[step])
        (loss * run.counters.loss_scale).backward()
        return {"loss": loss.item()}

    def record(self, experience: Any, sums: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        """The loss of the update."""
        return {"loss": sums[0]["loss"]}

    def restore(self, run: Context) -> None:
        """The next batch is that of an uninterrupted run."""
        for _ in range(run.counters.iteration):
            self.collect(run)


def train_heads(
    heads: HeieHeads, data: HeieData, *, steps: int, batch: int = 32, seed: int = 0
) -> list[float]:
    """Train the heads in place, AdamW with a cosine to zero; returns the loss of each step.

    Raises:
        ValueError: no steps or no data.
    """
    if steps < 1 or batch < 1 or not len(data.seen):
        raise ValueError(
            f"steps is {steps}, batch {batch}, images {len(data.seen)}; each must be at least 1."
        )
    trainer = Trainer(
        HeadTraining(heads, data, batch=batch, seed=seed),
        run=RunSettings(folder=Path(), iterations=steps),  # nothing is written
        optimizer=AdamWSettings(
            lr=2e-3, weight_decay=0.01, eps=1e-8, decay="cosine", decay_updates=steps, lr_end=0.0
        ),
    )
    heads.train()
    losses = [trainer.iterate()["loss"] for _ in range(steps)]
    heads.eval()
    return losses


def train_on_shapes(engine: VisionLanguageEngine, plan: HeiePlan) -> HeieHeads:
    """Heads trained on the shapes world."""
    faults = shapes_faults(plan.images, split="train", seed=plan.seed, surroundings=SURROUNDINGS)
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
    """Write heads in float16 and the `judge.json` that names their base: a packaged name, a hub id, or a
    folder relative to this one."""
    folder.mkdir(parents=True, exist_ok=True)
    heads.save(folder / HEADS, half=True)
    named = os.path.relpath(Path(base).resolve(), folder.resolve()) if Path(base).is_dir() else str(base)
    templates = {"explain": engine.template("explain", EXPLAIN)}
    JudgeSettings(templates=templates, positions=engine.positions, rest={"base": named}).write(folder)


def build_heie(base: str | Path, folder: Path, plan: HeiePlan | None = None) -> dict[str, float]:
    """Train heads, save them, measure the saved folder as a user loads it, write its card."""
    plan = plan or HeiePlan()
    started = time.process_time()
    engine = VisionLanguageEngine.from_pretrained(base, window=0)
    heads = train_on_shapes(engine, plan)
    seconds = time.process_time() - started
    save_heie(heads, engine, base, folder)
    test = shapes_faults(plan.test, split="heldout", seed=plan.seed + 1)
    judge = Heie(folder, write_reasons=False)
    found = heie_measures(judge, test)
    moved = shapes_faults(plan.test, split="heldout", seed=plan.seed + 1, surroundings=1.0)
    away = heie_measures(judge, moved)
    (folder / "README.md").write_text(heie_card(judge, found, away, plan, seconds), encoding="utf-8")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Train, save, measure on held-out prompts."""
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
