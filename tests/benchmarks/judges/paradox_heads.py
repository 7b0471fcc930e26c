# SPDX-License-Identifier: Apache-2.0
"""The ICT paradox in other rewards than a CLIP score: heads for matching, for preference, and CLIP's products.

    python tests/benchmarks/judges/paradox_heads.py --output runs/paradox --seeds 0 1 2

Heads are fitted on the shapes world: ITM (does the image show the prompt, against near prompts) and
ImageReward's kind (Bradley-Terry on votes) on frozen states of `shapes-vlm`, PickScore's kind (the same
votes) on the products of `shapes-clip`'s embeddings, dimension by dimension. Each then scores held-out
scenes in four styles, and with 0 to 4 extra objects that the prompts do not name (`ict_paradox`).

What was decided before the runs, and how they came out: docs/evidence/claims.md#ict.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.benchmarks.judges.ict_paradox import World, draw, draw_clutter, free, interval, sample_scene
from tests.benchmarks.judges.linear_reward import features, fit, strength_of
from tests.support.benchmarks import run_parser
from visalign.data.shapes.preferences import ShapesPreferences
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import STYLES
from visalign.data.shapes.verifier import verify_scene
from visalign.rewards.base.contract import read_request
from visalign.rewards.clip.towers import ClipTowers

CLIP = ClipTowers("shapes-clip")


def products(images: Any, prompts: Sequence[str]) -> Tensor:
    """[N, D] products of CLIP's normalised embeddings; their sum is the cosine."""
    request = read_request("products", images, prompts, None)
    image = CLIP.image_features(request, list(request.images.reasons))[1]
    return (F.normalize(image, dim=-1) * F.normalize(CLIP.text_features(list(prompts)), dim=-1)).double()


def matches(count: int, seed: int) -> tuple[list[np.ndarray], list[str]]:
    """Right images, then wrong ones, of as many training prompts, in styles by lot; the prompts."""
    world, rng = ShapesPreferences(seed), np.random.default_rng([seed, 64])
    right, wrong, prompts = [], [], []
    while len(prompts) < count:
        record = world.record(rng)
        pair = [sample_scene(r, rng, style=str(rng.choice(STYLES))) for r in (record, world.near(record, rng))]
        if not verify_scene(pair[1], free(record)).correct:
            right.append(render(pair[0]))
            wrong.append(render(pair[1]))
            prompts.append(record["prompt"])
    return right + wrong, prompts


def heads(count: int, seed: int) -> dict[str, Callable[[Any, Sequence[str]], Tensor]]:
    """Head -> the scores [N] of images and prompts."""
    fold, one = torch.arange(count) % 5, torch.ones(())
    images, prompts = matches(count, seed)
    states = torch.cat((features(images, prompts * 2), torch.ones(2 * count, 1, dtype=torch.float64)), 1)
    shows, none = torch.arange(2 * count) < count, torch.zeros_like(states)
    strength = strength_of(states, none, shows.double(), fold.repeat(2))
    itm = fit(states, none, shows.double(), one, strength)[:-1]
    pairs = [*map(ShapesPreferences(seed + 100).pair, range(count))]
    votes = torch.tensor([pair.votes[0] / sum(pair.votes) for pair in pairs], dtype=torch.float64)
    sides = [image for side in (0, 1) for image in (pair.images()[side] for pair in pairs)]
    scorers: dict[str, Callable[[Any, Sequence[str]], Tensor]] = {
        "CLIP score": lambda i, p: products(i, p).sum(1), "ITM": lambda i, p: features(i, p) @ itm,
    }  # fmt: skip
    for name, states_of in (("PickScore's kind", products), ("ImageReward's kind", features)):
        left, right = states_of(sides, [pair.prompt for pair in pairs] * 2).split(count)
        weights = fit(left, right, votes, one, strength_of(left, right, votes, fold))
        scorers[name] = lambda i, p, states_of=states_of, weights=weights: states_of(i, p) @ weights
    return scorers


def measured(score: Callable[[Any, Sequence[str]], Tensor], world: World) -> tuple[np.ndarray, np.ndarray]:
    """[S] slope of the score over the axis in its deviations, and whether the right images without extra win."""
    count, steps = len(world.prompts), len(world.places)
    prompts = [prompt for prompt in world.prompts for _ in world.places]
    grid = score(world.images.reshape(-1, *world.images.shape[2:]), prompts).numpy().reshape(count, steps)
    centred = np.linspace(-0.5, 0.5, steps)
    column, wrong = next(iter(world.wrong.values()))
    wins = grid[np.arange(count), column] > score(wrong, world.prompts).numpy()
    return (grid @ centred) / (centred @ centred) / grid.std(), wins.astype(float)


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--train", type=int, default=1500, help="prompts of ITM, and pairs of the others")
    parser.add_argument("--scenes", type=int, default=250)
    options = parser.parse_args()
    outcomes: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    options.output.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        table = options.output / f"{options.train}_{options.scenes}_{seed}.npz"
        if not table.is_file():
            worlds = {"styles": draw(options.scenes, seed), "extra objects": draw_clutter(options.scenes, seed)}
            parts = {}
            for name, score in heads(options.train, seed).items():
                parts |= {f"{axis}: {name}": np.stack(measured(score, world)) for axis, world in worlds.items()}
            np.savez(table, **parts)
        for key, (slopes, wins) in np.load(table).items():
            axis, name = key.split(": ")
            outcomes.setdefault((axis, name), []).append((slopes, wins))
            print(f"seed {seed}, {key}: slope {slopes.mean():+.3f}", flush=True)
    print("\n| axis | reward | slope | of each seed | a right image beats a wrong one |\n|---|---|---|---|---|")
    for (axis, name), parts in outcomes.items():
        slopes, wins = (np.concatenate(part) for part in zip(*parts, strict=True))
        by_seed = ", ".join(f"{part[0].mean():+.3f}" for part in parts)
        print(f"| {axis} | {name} | {interval(slopes)} | {by_seed} | {interval(wins).replace('+', '')} |")


if __name__ == "__main__":
    main()
