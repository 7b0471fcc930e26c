# SPDX-License-Identifier: Apache-2.0
"""The ICT paradox on the shapes world's richness axis: does a richer picture of the same scene score lower?

Each held-out scene satisfies its prompt and is drawn in all four styles, poorest to richest: what is shown is
the same, richness alone differs. A CLIP score that takes detail which no prompt asks for as mismatch falls
along the axis (Ba et al., arXiv 2507.19002). Beside it: the score truncated at θ, the towers that
were trained on truncated labels (ICT), the head on the picture alone (HP), and their product. The last column
asks whether a judge still tells a right picture from one of a prompt that differs in a word.

    python tests/benchmarks/ict_paradox.py --scenes 500
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from visalign.data.shapes.preferences import ShapesPreferences
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import STYLES, Scene, sample_scene
from visalign.data.shapes.verifier import verify_scene
from visalign.rewards.scorers.clip_score import ClipScore
from visalign.rewards.scorers.hp import Hp
from visalign.rewards.scorers.ict import Ict
from visalign.rewards.scorers.ict_hp import IctHp

DRAWS = 1_000


@dataclass(frozen=True, kw_only=True)
class World:
    """S scenes in four styles, and for each a wrong picture in a random style."""

    prompts: list[str]
    pictures: np.ndarray
    """uint8 [S, 4, 64, 64, 3]."""
    wrong: np.ndarray
    """uint8 [S, 64, 64, 3]."""
    wrong_style: np.ndarray
    """[S] index of its style."""


def draw(scenes: int, seed: int) -> World:
    """Scenes of held-out prompts, undistorted."""
    world, rng = ShapesPreferences(seed, split="heldout"), np.random.default_rng([seed, 61])
    prompts, pictures, wrong, styles = [], [], [], []
    while len(prompts) < scenes:
        record = world.record(rng)
        other = world.near(record, rng)
        style = int(rng.integers(len(STYLES)))
        scene = sample_scene(record, rng, style=STYLES[0])
        miss: Scene = sample_scene(other, rng, style=STYLES[style])
        if verify_scene(miss, record).correct:
            continue
        prompts.append(record["prompt"])
        pictures.append([render(replace(scene, style=name)) for name in STYLES])
        wrong.append(render(miss))
        styles.append(style)
    return World(
        prompts=prompts, pictures=np.array(pictures), wrong=np.array(wrong), wrong_style=np.array(styles)
    )


def scores(judge: Any, pictures: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
    """[N] of a judge."""
    found = judge.score(pictures, list(prompts))
    assert bool(found.valid.all())
    return found.value.double().numpy()


def interval(values: np.ndarray, statistic: Callable[[np.ndarray], float], seed: int = 0) -> str:
    """A number with its 95 % bootstrap interval over scenes."""
    rng = np.random.default_rng(seed)
    draws = [statistic(values[rng.integers(len(values), size=len(values))]) for _ in range(DRAWS)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return f"{statistic(values):+.3f} ({low:+.3f} to {high:+.3f})"


def mean(values: np.ndarray) -> float:
    """Over scenes."""
    return float(values.mean())


def line(name: str, judge: Any, world: World) -> str:
    """One row: mean score by style, slope, share of richer wins, right against wrong."""
    count = len(world.prompts)
    each = scores(
        judge,
        world.pictures.reshape(-1, *world.pictures.shape[2:]),
        [prompt for prompt in world.prompts for _ in STYLES],
    ).reshape(count, len(STYLES))
    miss = scores(judge, world.wrong, world.prompts)
    richness = np.linspace(0.0, 1.0, len(STYLES))
    centred = richness - richness.mean()
    slope = (each @ centred) / (centred @ centred) / each.std()
    upper = np.triu_indices(len(STYLES), 1)
    sign = np.sign(each[:, upper[1]] - each[:, upper[0]])
    wins = (sign.mean(1) + 1) / 2
    told = (np.sign(each[np.arange(count), world.wrong_style] - miss) + 1) / 2
    means = " | ".join(f"{value:.3f}" for value in each.mean(0))
    return f"| {name} | {means} | {interval(slope, mean)} | {interval(wins, mean)} | {interval(told, mean)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="The ICT paradox on the richness axis.")
    parser.add_argument("--scenes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--theta", type=float, default=0.7, help="of the truncation of the plain score")
    parser.add_argument("--ict", default="shapes-ict")
    parser.add_argument("--hp", default="shapes-hp")
    given = parser.parse_args()
    world = draw(given.scenes, given.seed)
    print(
        f"{given.scenes} held-out scenes, each in {len(STYLES)} styles; 95 % intervals by bootstrap over "
        "scenes. "
        "Slope: of the score over the whole axis, in standard deviations of the judge's scores; richer "
        "wins: of "
        "two styles of a scene the richer one scores higher; right wins: over a picture of a near prompt.\n"
    )
    print(f"| judge | {' | '.join(STYLES)} | slope | richer wins | right wins |")
    print("|---|" + "---|" * (len(STYLES) + 3))
    judges: dict[str, Any] = {
        "CLIP score": ClipScore("shapes-clip"),
        f"CLIP score, truncated at {given.theta:g}": Ict("shapes-clip", threshold=given.theta),
        "ICT (trained)": Ict(given.ict),
        "HP (trained)": Hp(given.hp),
        "ICT · σ(HP)": IctHp(given.ict, given.hp, mode="upstream"),
    }
    for name, judge in judges.items():
        print(line(name, judge, world), flush=True)


if __name__ == "__main__":
    main()
