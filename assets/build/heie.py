# SPDX-License-Identifier: Apache-2.0
"""HEIE-type heads on the frozen vision-language model, trained and measured on faulty shapes images.

    python -m assets.build.heie --model MODEL --out FOLDER

Each image is asked about with its own prompt or with one that it breaks, and half of them are distorted. The
map's truth are the objects that break the prompt; the score's truth is `plausibility`. The folder holds the
heads and a `judge.json` that names the model as base; `load_reward("heie", model=FOLDER)` reads it.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visalign.data.shapes.preferences import ShapesPreferences, degraded
from visalign.data.shapes.prompts import Record
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import SIZE, Scene, sample_scene
from visalign.data.shapes.surroundings import surround
from visalign.data.shapes.verifier import verify_scene
from visalign.evaluation.statistics.correlations import srcc
from visalign.evaluation.statistics.selective import auroc
from visalign.rewards.heie.heads import HeieHeads, HeieSettings, View, compute_views, draw_maps, map_losses, pooled
from visalign.rewards.heie.judge import HEADS, Heie
from visalign.rewards.questions.reward_dance import EXPLAIN
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine
from visalign.rewards.vlm.template import JudgeSettings

from .heatmaps import THRESHOLD, heatmap_quality, laplace_coverage
from .stage import SURROUNDINGS, Plan
from .wrong_regions import wrong_pixels

CHUNK = 200
"""Images whose features are in memory at once."""
LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Levels of the Laplace intervals whose coverage is measured."""
TILES, WIDTH, BATCH = 2, 64, 32
"""Heads read 2 × 2 tiles beside the whole image; at width 64 they stay below 0.3 MB in float16."""
_TRIES = 50


@dataclass(frozen=True, kw_only=True)
class ShapesFaults:
    """N images, their prompts, and the truth about their faults."""

    images: Tensor
    """[N, 3, 64, 64] in [0, 1]."""
    prompts: list[str]
    heat: Tensor
    """[N, 64, 64] in [0, 1], 1 on the objects that break the prompt."""
    score: Tensor
    """[N] `plausibility`."""
    correct: Tensor
    """bool [N], true where the image matches its prompt."""
    quality: Tensor
    """[N] in [0, 1], 1 where nothing is distorted."""


def plausibility(scene: Scene, record: Record) -> float:
    """Return quality × (1 if the prompt is matched, else half the share of its checks)."""
    verdict = verify_scene(scene, record)
    return scene.quality * (verdict.correct + verdict.score) / 2


def shapes_faults(count: int, *, split: str, seed: int, surroundings: float = 0.0) -> ShapesFaults:
    """Draw images of which every second breaks its prompt and two of four are distorted.

    A share `surroundings` has another background or specks, but no canvas, which would move the map.
    """
    world, rng = ShapesPreferences(seed, split=split), np.random.default_rng(seed)
    images, prompts, heat, truth = [], [], [], []
    for number in range(count):
        record = world.record(rng)
        scene = sample_scene(record, rng)
        if surroundings and rng.random() < surroundings:
            scene = replace(surround([scene], rng)[0], canvas=None)
        for _ in range(_TRIES if number % 2 else 0):
            record = world.near(record, rng)
            if not verify_scene(scene, record).correct:
                break
        if number % 4 >= 2:
            scene = degraded(scene, rng)
        images.append(render(scene))
        prompts.append(record["prompt"])
        heat.append(wrong_pixels(scene, record))
        truth.append((plausibility(scene, record), verify_scene(scene, record).correct, scene.quality))
    score, correct, quality = torch.tensor(truth, dtype=torch.float32).T
    return ShapesFaults(
        images=torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255,
        prompts=prompts,
        heat=torch.from_numpy(np.stack(heat)),
        score=score,
        correct=correct > 0,
        quality=quality,
    )


@dataclass(frozen=True, kw_only=True)
class HeieData:
    """N images as the heads read them, with their truth."""

    views: Sequence[View]
    """Views of one grid."""
    heat: Tensor
    """[N, h, w] in [0, 1], 1 where the image is wrong."""
    score: Tensor
    """[N] in [0, 1], 1 plausible."""


def faults_data(engine: VisionLanguageEngine, faults: ShapesFaults, *, tiles: int) -> HeieData:
    """Compute the views of the images, with their truth; images that the model cannot take are left out."""
    template = engine.template("explain", EXPLAIN)
    views: list[View | None] = []
    for start in range(0, len(faults.prompts), CHUNK):
        rows = slice(start, start + CHUNK)
        pairs = zip(faults.images[rows], faults.prompts[rows], strict=True)
        queries = [Query(images=[i], prompt=prompt, fields={"instruction": ""}) for i, prompt in pairs]
        views += compute_views(engine, template, queries, tiles)[0]
        engine.clear_features()
    rows = [row for row, view in enumerate(views) if view is not None]
    valid = [view for view in views if view is not None]
    return HeieData(views=valid, heat=faults.heat[rows], score=faults.score[rows])


def heie_loss(
    heads: HeieHeads, views: Sequence[View], heat: Tensor, score: Tensor, *, wrong_weight: float = 4.0
) -> Tensor:
    """Sum the losses of the maps and the score's entropy.

    Args:
        heads: the heads.
        views: B views.
        heat: [B, h, w] truth in [0, 1].
        score: [B] truth in [0, 1].
        wrong_weight: additional weight of a wrong cell.
    """
    maps = draw_maps(heads, views)
    loss = F.binary_cross_entropy_with_logits(maps.score, score)
    return loss + map_losses(maps, heat, wrong_weight=wrong_weight).mean()


@torch.no_grad()
def heie_measures(judge: Heie, faults: ShapesFaults) -> dict[str, float]:
    """Measure how heat, deviation and score agree with the truth.

    Returns:
        "correlation", "auc", "iou", "found", "alarms", "error" of the map (`evaluation.heatmaps`); "coverage 0.9" of
        all cells and "wrong coverage 0.9" of the wrong ones; "srcc" of score and plausibility; "srcc quality" over
        images that match; "auc right" of matching against wrong images that are not distorted.
    """
    data = faults_data(judge.engine, faults, tiles=judge.tiles)
    maps = draw_maps(judge.heads, data.views)
    truth = pooled(data.heat, maps.heat)
    measures = dict(vars(heatmap_quality(maps.heat, truth)))
    wrong = truth >= THRESHOLD
    for name, cells in (("", torch.ones_like(wrong)), ("wrong ", wrong)):
        coverage = laplace_coverage(maps.heat[cells], maps.std[cells], truth[cells], LEVELS)
        measures |= {f"{name}coverage {level:g}": share for level, share in coverage.items()}
    plain = faults.quality == 1
    measures["srcc"] = srcc(maps.score, data.score)
    measures["srcc quality"] = srcc(maps.score[faults.correct], faults.quality[faults.correct])
    measures["auc right"] = auroc(maps.score[plain], faults.correct[plain])
    return measures


def train_heads(heads: HeieHeads, data: HeieData, *, steps: int, batch: int = BATCH, seed: int = 0) -> list[float]:
    """Train the heads in place, AdamW with a cosine to zero; return the loss of each step."""
    optimizer = torch.optim.AdamW(heads.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))
    )
    draw, losses = torch.Generator().manual_seed(seed), []
    heads.train()
    for _ in range(steps):
        index = torch.randint(len(data.views), (batch,), generator=draw)
        loss = heie_loss(heads, [data.views[i] for i in index.tolist()], data.heat[index], data.score[index])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    heads.eval()
    return losses


def build_heie(base: str | Path, folder: Path, plan: Plan | None = None) -> dict[str, float]:
    """Train heads on a vision-language model, save them, and measure the saved folder as a user loads it."""
    plan = plan or Plan()
    seed = plan.seed + 5
    engine = VisionLanguageEngine.from_pretrained(base, window=0)
    faults = shapes_faults(plan.heie_images, split="train", seed=seed, surroundings=SURROUNDINGS)
    data = faults_data(engine, faults, tiles=TILES)
    view = data.views[0]
    settings = HeieSettings(
        hidden=view.hidden.shape[1],
        features=view.features.shape[2],
        width=WIDTH,
        cells=max(1, SIZE // (max(view.grid) * TILES)),
        tiles=TILES,
    )
    torch.manual_seed(seed)
    heads = HeieHeads(settings)
    losses = train_heads(heads, data, steps=plan.heie_steps, seed=seed)
    print(f"heie: loss {np.mean(losses[:20]):.3f} -> {np.mean(losses[-20:]):.3f}", flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    heads.save(folder / HEADS, half=True)
    base_name = os.path.relpath(Path(base).resolve(), folder.resolve()) if Path(base).is_dir() else str(base)
    templates = {"explain": engine.template("explain", EXPLAIN)}
    JudgeSettings(templates=templates, positions=engine.positions, rest={"base": base_name}).write(folder)

    judge = Heie(folder, write_reasons=False)
    measures: dict[str, float] = {}
    for name, share in (("", 0.0), ("other surroundings: ", 1.0)):
        test = shapes_faults(plan.heie_check, split="heldout", seed=seed + 1, surroundings=share)
        measures |= {name + key: value for key, value in heie_measures(judge, test).items()}
    return measures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="shapes-vlm", help="folder, packaged name or hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder for heads and settings")
    options = parser.parse_args()
    for key, value in build_heie(options.model, options.out).items():
        print(f"{key:40} {value:.3f}")
