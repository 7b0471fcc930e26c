# SPDX-License-Identifier: Apache-2.0
"""Shapes images with what is wrong in them, for HEIE-type heads; how good heads are on them; their card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from visalign.data.shapes.preferences import ShapesPreferences, degraded
from visalign.data.shapes.prompts import Record
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import Scene, sample_scene
from visalign.data.shapes.surroundings import surround
from visalign.data.shapes.verifier import verify_scene
from visalign.data.shapes.wrong_regions import right_pixels, wrong_pixels
from visalign.evaluation.statistics.correlations import srcc
from visalign.evaluation.statistics.heatmaps import THRESHOLD, heatmap_quality, laplace_coverage
from visalign.evaluation.statistics.selective import auroc
from visalign.rewards.heie.heads import Maps, draw_maps, enlarged
from visalign.rewards.heie.judge import Heie
from visalign.rewards.heie.training import HeieData, heie_data, pooled
from visalign.rewards.questions.reward_dance import EXPLAIN
from visalign.rewards.vlm.engine import Query, VisionLanguageEngine

from .stage import SURROUNDINGS, machine

CHUNK = 200
"""Images whose views are made at once."""
_TRIES = 50


@dataclass(frozen=True, kw_only=True)
class HeiePlan:
    """Sizes of a training; the defaults made `shapes-heie`."""

    images: int = 3000
    """For training."""
    steps: int = 800
    batch: int = 32
    width: int = 64
    """Of the heads; 64 stays below 0.3 MB in float16."""
    tiles: int = 2
    """n of n × n; 1 for none."""
    test: int = 600
    """Held-out images that the card is measured on."""
    seed: int = 6


@dataclass(frozen=True, kw_only=True)
class ShapesFaults:
    """N images, what they are asked about with, and what is wrong with them."""

    images: Tensor
    """[N, 3, 64, 64] in [0, 1]."""
    prompts: list[str]
    heat: Tensor
    """[N, 64, 64] in [0, 1], 1 on the objects that break the prompt."""
    kept: Tensor
    """[N, 64, 64] in [0, 1], 1 on the other objects."""
    score: Tensor
    """[N] `plausibility`."""
    correct: Tensor
    """bool [N], whether the image keeps its prompt."""
    quality: Tensor
    """[N] in [0, 1], 1 where nothing is distorted."""

    def __len__(self) -> int:
        return len(self.prompts)


def plausibility(scene: Scene, record: Record) -> float:
    """Truth of the score: quality × (1 if the prompt is kept, else half the share of its checks)."""
    verdict = verify_scene(scene, record)
    return scene.quality * (verdict.correct + verdict.score) / 2


def shapes_faults(count: int, *, split: str, seed: int, surroundings: float = 0.0) -> ShapesFaults:
    """Images of which every second breaks its prompt, and two of four are distorted.

    A share of them, `surroundings`, has another ground or specks; none a canvas, on which the map would lie
    elsewhere.
    """
    world, rng = ShapesPreferences(seed, split=split), np.random.default_rng(seed)
    images, prompts, heat, kept, truth = [], [], [], [], []
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
        kept.append(right_pixels(scene, record))
        correct = float(verify_scene(scene, record).correct)
        truth.append((plausibility(scene, record), correct, scene.quality))
    score, correct, quality = torch.tensor(truth).T
    return ShapesFaults(
        images=torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255,
        prompts=prompts,
        heat=torch.from_numpy(np.stack(heat)),
        kept=torch.from_numpy(np.stack(kept)),
        score=score,
        correct=correct > 0,
        quality=quality,
    )


def faults_data(engine: VisionLanguageEngine, faults: ShapesFaults, *, tiles: int) -> HeieData:
    """What the heads read of images, with their truth."""
    template = engine.template("explain", EXPLAIN)
    parts = []
    for start in range(0, len(faults), CHUNK):
        here = slice(start, start + CHUNK)
        shown = zip(faults.images[here], faults.prompts[here], strict=True)
        asks = [Query(images=[image], prompt=prompt, fields={"instruction": ""}) for image, prompt in shown]
        parts.append(heie_data(engine, template, asks, faults.heat[here], faults.score[here], tiles=tiles))
        engine.clear_features()
    return HeieData(
        seen=[view for part in parts for view in part.seen],
        heat=torch.cat([part.heat for part in parts]),
        score=torch.cat([part.score for part in parts]),
    )


LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Of the Laplace intervals whose coverage is measured."""


def ways_to_fuse(maps: Maps) -> dict[str, Tensor]:
    """Maps [N, h, w] of the same heads: "" fused by their deviations, "mean ", "whole " and "tiles " alone.

    Raises:
        ValueError: there are no tiles.
    """
    if maps.tiles is None:
        raise ValueError("Heads without tiles have one map of an image; there is nothing to fuse.")
    tiles = maps.tiles[0].sigmoid()
    whole = enlarged(maps.whole[0], (tiles.shape[1], tiles.shape[2])).sigmoid()
    return {"": maps.heat, "mean ": (whole + tiles) / 2, "whole ": whole, "tiles ": tiles}


@torch.no_grad()
def heie_measures(judge: Heie, faults: ShapesFaults) -> dict[str, float]:
    """Agreement of heat, deviation and score with the truth, by name.

    Returns:
        "correlation", "auc", "iou", "found", "alarms", "error" of the map (`evaluation.heatmaps`), the same
        with the way of fusing before it ("mean correlation") where there are tiles; "coverage 0.9" of all
        cells and "wrong coverage 0.9" of those that are wrong; "predicted error", what the deviations
        expect; "wrong hotter", the share of images with wrong and right objects in which the wrong ones are
        hotter, with "wrong heat" and "right heat" there; "srcc" of score and plausibility, "srcc quality"
        over right images, "auc right" of right against wrong images that are not distorted.
    """
    data = faults_data(judge.engine, faults, tiles=judge.tiles)
    maps = draw_maps(judge.heads, data.seen)
    truth = pooled(data.heat, maps.heat)
    found: dict[str, float] = {}
    for way, heat in (ways_to_fuse(maps) if maps.tiles is not None else {"": maps.heat}).items():
        found |= {f"{way}{name}": value for name, value in vars(heatmap_quality(heat, truth)).items()}
    wrong = truth >= THRESHOLD
    for where, cells in (("", torch.ones_like(wrong)), ("wrong ", wrong)):
        covered = laplace_coverage(maps.heat[cells], maps.std[cells], truth[cells], LEVELS)
        found |= {f"{where}coverage {level:g}": share for level, share in covered.items()}
    found["predicted error"] = float(maps.std.mean()) / 2**0.5
    mixed = (faults.heat.amax((1, 2)) > THRESHOLD) & (faults.kept.amax((1, 2)) > THRESHOLD)
    bad, good = (_mean_on(maps.heat, where)[mixed] for where in (data.heat, faults.kept))
    found["wrong hotter"] = float((bad > good).float().mean())
    found["wrong heat"], found["right heat"] = float(bad.mean()), float(good.mean())
    plain = faults.quality == 1
    found["srcc"] = srcc(maps.score, data.score)
    found["srcc quality"] = srcc(maps.score[faults.correct], faults.quality[faults.correct])
    found["auc right"] = auroc(maps.score[plain], faults.correct[plain])
    return found


def _mean_on(heat: Tensor, cover: Tensor) -> Tensor:
    """[N] mean heat where pixels are covered; NaN where none is."""
    weight = pooled(cover, heat)
    return (heat * weight).sum((1, 2)) / weight.sum((1, 2))


def heie_card(
    judge: Heie, found: Mapping[str, float], away: Mapping[str, float], plan: HeiePlan, seconds: float
) -> str:
    """The card: `seconds` of a processor, how good the saved heads are at home and `away` from it."""
    count = sum(parameter.numel() for parameter in judge.heads.parameters())
    base = judge.engine.settings.rest.get("base", judge.engine.name)
    rows = _map_rows(found)
    covered = "\n".join(
        f"| {level:g} | {found[f'coverage {level:g}']:.3f} | {found[f'wrong coverage {level:g}']:.3f} |"
        for level in LEVELS
    )
    words = {"correlation": "correlation", "iou": "IoU", "srcc": "Spearman correlation of score and truth"}
    words["auc right"] = "AUC of right against wrong images"
    elsewhere = ", ".join(f"{name} {away[key]:.3f}" for key, name in words.items())
    parts = f" and of its {plan.tiles} × {plan.tiles} tiles" if plan.tiles > 1 else ""
    return f"""# {Path(judge.engine.name).name}

HEIE-type heads on the frozen `{base}`: a heatmap of what is wrong with its deviation, and a plausibility,
read off the hidden state where the answer begins and the features of the image{parts}.
{count:,} parameters, float16. `visalign.rewards.heie.judge.Heie` reads the folder: `load_reward("heie")`.

## Training

{plan.images:,} rendered images of training prompts, every second one asked about with a prompt that it
breaks, half of them distorted, {SURROUNDINGS:.0%} on other grounds or with specks;
{plan.steps} steps of {plan.batch}. Truth of the map: the objects to blame.
Truth of the score: quality × (1 if the prompt is kept, else half the share of its checks). {seconds:.0f} s of
processor time on {machine()}. Made by
`visalign build-assets --only heie`.

## How good it is

{plan.test} images of held-out prompts, drawn alike. Correlation, AUC and IoU (threshold {THRESHOLD:g}) over
the images in which an object is wrong, mean absolute error over all:

| map | correlation | AUC of a wrong cell | IoU | error |
|---|---|---|---|---|
{rows}

- images with a wrong object in which some cell is hot: {found["found"]:.3f}
- images without one in which some cell is hot: {found["alarms"]:.3f}
- images with wrong and right objects: the wrong ones are hotter in {found["wrong hotter"]:.3f};
  mean heat of the wrong ones {found["wrong heat"]:.3f}, of the right ones {found["right heat"]:.3f}
- Spearman correlation of score and truth: {found["srcc"]:.3f}
- Spearman correlation of score and quality, images that keep their prompt: {found["srcc quality"]:.3f}
- AUC of right against wrong images, undistorted: {found["auc right"]:.3f}
- mean error that the deviations expect: {found["predicted error"]:.3f}

Share of cells whose truth lies in the Laplace interval of a level:

| level | all cells | wrong cells |
|---|---|---|
{covered}

As many images on other grounds or with specks: {elsewhere}.
On a larger canvas: not trained, not measured.

What is missing from an image heats no cell; where two objects break a relation both are to be hot.
"""


def _map_rows(found: Mapping[str, float]) -> str:
    """A line of the card's table for each way to make the map."""
    ways = {
        "whole and tiles, weighted by their deviations": "",
        "whole and tiles, plain mean": "mean ",
        "whole image alone": "whole ",
        "tiles alone": "tiles ",
    }
    if "whole error" not in found:
        ways = {"whole image alone": ""}
    names = ("correlation", "auc", "iou", "error")
    return "\n".join(
        f"| {words} | " + " | ".join(f"{found[way + name]:.3f}" for name in names) + " |"
        for words, way in ways.items()
    )
