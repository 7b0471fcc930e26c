# SPDX-License-Identifier: Apache-2.0
"""How good HEIE-type heads are on held-out shapes pictures, and the card of the packaged ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from visalign.evaluation.statistics.correlations import srcc
from visalign.evaluation.statistics.heatmaps import THRESHOLD, heatmap_quality, laplace_coverage
from visalign.evaluation.statistics.selective import auroc
from visalign.rewards.heie.heads import Maps, draw_maps, enlarged
from visalign.rewards.heie.judge import Heie
from visalign.rewards.heie.training import pooled

from .heie_data import HeiePlan, ShapesFaults, faults_data
from .stage import machine

LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Of the Laplace intervals whose coverage is measured."""


def ways_to_fuse(maps: Maps) -> dict[str, Tensor]:
    """Maps [N, h, w] of the same heads: "" fused by their deviations, "mean ", "whole " and "tiles " alone.

    Raises:
        ValueError: there are no tiles.
    """
    if maps.tiles is None:
        raise ValueError("Heads without tiles have one map of a picture; there is nothing to fuse.")
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
        expect; "wrong hotter", the share of pictures with wrong and right objects in which the wrong ones are
        hotter, with "wrong heat" and "right heat" there; "srcc" of score and plausibility, "srcc quality"
        over right pictures, "auc right" of right against wrong pictures that are not distorted.
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


def heie_card(judge: Heie, found: Mapping[str, float], plan: HeiePlan, seconds: float) -> str:
    """The card: how the heads were trained (`seconds` of a processor), how good the saved ones are."""
    count = sum(parameter.numel() for parameter in judge.heads.parameters())
    base = judge.engine.settings.rest.get("base", judge.engine.name)
    rows = _map_rows(found)
    covered = "\n".join(
        f"| {level:g} | {found[f'coverage {level:g}']:.3f} | {found[f'wrong coverage {level:g}']:.3f} |"
        for level in LEVELS
    )
    parts = f" and of its {plan.tiles} × {plan.tiles} tiles" if plan.tiles > 1 else ""
    return f"""# {Path(judge.engine.name).name}

HEIE-type heads on the frozen `{base}`: a heatmap of what is wrong with its deviation, and a plausibility,
read off the hidden state where the answer begins and the features of the picture{parts}.
{count:,} parameters, float16. `visalign.rewards.heie.judge.Heie` reads the folder: `load_reward("heie")`.

## Training

{plan.pictures:,} rendered pictures of training prompts, every second one asked about with a prompt that it
breaks, half of them distorted; {plan.steps} steps of {plan.batch}. Truth of the map: the objects to blame.
Truth of the score: quality × (1 if the prompt is kept, else half the share of its checks). {seconds:.0f} s of
processor time on {machine()}. Made by
`visalign build-assets --only heie`.

## How good it is

{plan.test} pictures of held-out prompts, drawn alike. Correlation, AUC and IoU (threshold {THRESHOLD:g}) over
the pictures in which an object is wrong, mean absolute error over all:

| map | correlation | AUC of a wrong cell | IoU | error |
|---|---|---|---|---|
{rows}

- pictures with a wrong object in which some cell is hot: {found["found"]:.3f}
- pictures without one in which some cell is hot: {found["alarms"]:.3f}
- pictures with wrong and right objects: the wrong ones are hotter in {found["wrong hotter"]:.3f};
  mean heat of the wrong ones {found["wrong heat"]:.3f}, of the right ones {found["right heat"]:.3f}
- Spearman correlation of score and truth: {found["srcc"]:.3f}
- Spearman correlation of score and quality, pictures that keep their prompt: {found["srcc quality"]:.3f}
- AUC of right against wrong pictures, undistorted: {found["auc right"]:.3f}
- mean error that the deviations expect: {found["predicted error"]:.3f}

Share of cells whose truth lies in the Laplace interval of a level:

| level | all cells | wrong cells |
|---|---|---|
{covered}

What is missing from a picture heats no cell; where two objects break a relation both are to be hot.
"""


def _map_rows(found: Mapping[str, float]) -> str:
    """A line of the card's table for each way to make the map."""
    ways = {
        "whole and tiles, weighted by their deviations": "",
        "whole and tiles, plain mean": "mean ",
        "whole picture alone": "whole ",
        "tiles alone": "tiles ",
    }
    if "whole error" not in found:
        ways = {"whole picture alone": ""}
    names = ("correlation", "auc", "iou", "error")
    return "\n".join(
        f"| {words} | " + " | ".join(f"{found[way + name]:.3f}" for name in names) + " |"
        for words, way in ways.items()
    )
