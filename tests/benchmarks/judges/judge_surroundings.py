# SPDX-License-Identifier: Apache-2.0
"""How judges of the shapes world do off its own ground: accuracy on clear held-out pairs, a Markdown table.

Both images of a pair get one ground, specks, or a canvas of 128 pixels on which the 64-pixel image lies
somewhere, or are drawn at twice their size; pairs whose objects would not stand out from the ground are left
out. Pink and brown are grounds that no training image comes near.

    python tests/benchmarks/judges/judge_surroundings.py --judges clip_score ict hp --pairs 300
    python tests/benchmarks/judges/judge_surroundings.py --judges hpsv3 --surfaces own "white canvas"
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from visalign.data.shapes.preferences import ShapesPair, ShapesPreferences
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import SIZE, Scene
from visalign.data.shapes.surroundings import GROUNDS, is_visible, with_specks
from visalign.interfaces import PointwiseReward
from visalign.rewards import load_judge

SEED, SIDE = 2026, 128
KINDS = {"hp": ("quality", "richness")}
"""Judge -> what its pairs differ in; alignment where it is not named. An HP head reads no prompt."""

PatchedImage = Callable[[Scene, np.random.Generator], np.ndarray]


def on_canvas(color: tuple[int, int, int] | None) -> PatchedImage:
    """An image on a canvas of this color, or of its own ground where it is None."""

    def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
        canvas = np.empty((SIDE, SIDE, 3), dtype=np.uint8)
        canvas[:] = scene.background if color is None else color
        top, left = (int(v) for v in rng.integers(SIDE - SIZE + 1, size=2))
        canvas[top : top + SIZE, left : left + SIZE] = render(scene)
        return canvas

    return draw


def enlarged(scene: Scene, _: np.random.Generator) -> np.ndarray:
    """An image at twice its size, which must not be taken for one on a canvas."""
    image = Image.fromarray(render(scene)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(image)


def on_ground(color: tuple[int, int, int], specks: bool = False) -> PatchedImage:
    """An image on a ground of this color."""

    def draw(scene: Scene, rng: np.random.Generator) -> np.ndarray:
        scene = replace(scene, background=color)
        return render(with_specks(scene, rng) if specks else scene)

    return draw


SURFACES: dict[str, tuple[tuple[int, int, int] | None, PatchedImage]] = {
    "own": (None, lambda scene, _: render(scene)),
    **{name: (color, on_ground(color)) for name, color in GROUNDS.items()},
    "own, specks": (None, lambda scene, rng: render(with_specks(scene, rng))),
    "teal, specks": (GROUNDS["teal"], on_ground(GROUNDS["teal"], specks=True)),
    "white canvas": (None, on_canvas((255, 255, 255))),
    "teal canvas": (None, on_canvas(GROUNDS["teal"])),
    "canvas of its ground": (None, on_canvas(None)),
    "twice the size": (None, enlarged),
}
"""Column -> (ground that the objects must stand out from, how an image is drawn)."""


def clear_pairs(kinds: tuple[Any, ...], ground: tuple[int, int, int] | None) -> Iterator[ShapesPair]:
    """Endless held-out pairs with a clear truth whose objects can be seen on the ground."""
    for pair in map(ShapesPreferences(SEED, split="heldout", kinds=kinds).pair, itertools.count()):
        if pair.is_clear and (ground is None or all(is_visible(s, ground) for s in (pair.left, pair.right))):
            yield pair


def accuracy(judge: Any, surface: str, kinds: tuple[Any, ...], count: int) -> float:
    """Share of `count` pairs whose better image the judge prefers."""
    ground, draw = SURFACES[surface]
    pairs = list(itertools.islice(clear_pairs(kinds, ground), count))
    rng = np.random.default_rng([SEED, 5])
    drawn = [[draw(scene, rng) for scene in (pair.left, pair.right)] for pair in pairs]
    left, right = (np.stack(side) for side in zip(*drawn, strict=True))
    prompts = [pair.prompt for pair in pairs]
    if isinstance(judge, PointwiseReward):
        lead = judge.score(left, prompts).value - judge.score(right, prompts).value
    else:
        lead = judge.compare(left, right, prompts).log_odds
    truth = np.array([pair.utility[0] > pair.utility[1] for pair in pairs])
    return float(((lead > 0).numpy() == truth).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--judges", nargs="+", required=True, help="names of rewards, or NAME=FOLDER")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--surfaces", nargs="+", default=list(SURFACES), choices=list(SURFACES))
    arguments = parser.parse_args()
    print("| judge | " + " | ".join(arguments.surfaces) + " |")
    print("|---|" + "---|" * len(arguments.surfaces))
    for argument in arguments.judges:
        name, _, folder = argument.partition("=")
        judge, kinds = (load_judge(name, **({"model": folder} if folder else {})), KINDS.get(name, ("alignment",)))
        accuracies = [accuracy(judge, surface, kinds, arguments.pairs) for surface in arguments.surfaces]
        print(f"| {argument} | " + " | ".join(f"{value:.3f}" for value in accuracies) + " |", flush=True)


if __name__ == "__main__":
    main()
