# SPDX-License-Identifier: Apache-2.0
"""Is fusing the map of the whole picture with those of its tiles worth it, and do the deviations help?

The heads of `shapes-heie` on held-out pictures in which an object is wrong: maps joined by their Laplace
deviations, against the plain mean and each alone, and against heads that were trained on the whole picture
alone. Differences are taken picture by picture, with 95 % intervals of a bootstrap over prompts.

    python tests/benchmarks/heie_fusion.py --pictures 600 --train-whole
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor

from visalign.evaluation.statistics.heatmaps import THRESHOLD, heatmap_quality
from visalign.evaluation.statistics.intervals import paired_bootstrap
from visalign.pipelines.packaged.heie import HeiePlan, faults_data, shapes_faults, ways_to_fuse
from visalign.pipelines.packaged.train_heie import train_on_shapes
from visalign.rewards.heie.heads import draw_maps, enlarged
from visalign.rewards.heie.judge import Heie
from visalign.rewards.heie.training import pooled

MEASURES = ("correlation", "auc", "iou", "error")


def per_picture(heat: Tensor, truth: Tensor) -> dict[str, np.ndarray]:
    """Each measure of each picture, [N].

    Args:
        heat: [N, h, w].
        truth: [N, h, w], each with a wrong cell.
    """
    found = [heatmap_quality(one[None], two[None]) for one, two in zip(heat, truth, strict=True)]
    return {name: np.array([getattr(quality, name) for quality in found]) for name in MEASURES}


@torch.no_grad()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pictures", type=int, default=600, help="held out, half of them wrong")
    parser.add_argument("--train-whole", action="store_true", help="also train heads without tiles")
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    judge = Heie(write_reasons=False)
    faults = shapes_faults(given.pictures, split="heldout", seed=given.seed)
    data = faults_data(judge.engine, faults, tiles=judge.tiles)
    maps = draw_maps(judge.heads, data.seen)
    truth = pooled(data.heat, maps.heat)
    wrong = (truth >= THRESHOLD).any(2).any(1)
    ways = {(name or "weighted").strip(): heat[wrong] for name, heat in ways_to_fuse(maps).items()}
    if given.train_whole:
        with torch.enable_grad():
            alone = train_on_shapes(judge.engine, HeiePlan(tiles=1))
        seen = faults_data(judge.engine, faults, tiles=1).seen
        ways["trained on the whole"] = enlarged(draw_maps(alone, seen).heat, (64, 64))[wrong]
    clusters = [prompt for prompt, is_wrong in zip(faults.prompts, wrong.tolist(), strict=True) if is_wrong]
    found = {name: per_picture(heat, truth[wrong]) for name, heat in ways.items()}
    print(f"{len(clusters)} pictures with a wrong object; mean over pictures, and weighted minus this way")
    for name, values in found.items():
        print(f"{name:22}" + "".join(f"  {key} {values[key].mean():.4f}" for key in MEASURES))
        for key in MEASURES if name != "weighted" else ():
            generator = torch.Generator().manual_seed(0)
            change = paired_bootstrap(values[key], found["weighted"][key], clusters, generator=generator)
            print(f"    {key:12} {change.estimate:+.4f} ({change.low:+.4f} to {change.high:+.4f})")


if __name__ == "__main__":
    main()
