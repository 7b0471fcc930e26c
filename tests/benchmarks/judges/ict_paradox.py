# SPDX-License-Identifier: Apache-2.0
"""The ICT paradox: does a richer image of the same scene score lower, and what does a policy learn by that?

    python tests/benchmarks/judges/ict_paradox.py --scenes 500
    python tests/benchmarks/judges/ict_paradox.py --clutter --output runs/ict

Scenes of held-out prompts are drawn in all four styles, poorest to richest; a CLIP score falls along the axis
(Ba et al., arXiv 2507.19002). Beside it the score truncated at θ, ICT, HP, and their product; the last column
asks for the right image against one of a prompt that differs in a word. With --clutter the axis is 0 to 4
small extra objects, which the prompts allow; ICT learns from triples truncated at the CLIP's median cosine,
HP from their pairs, and a policy from each.

Before it was run: the paradox is refuted where the interval of the CLIP's slope over clutter reaches 0; the
cure where ICT's slope is not above it, or ICT tells right from wrong less often; its use as a reward where
the verified accuracy is not above the CLIP's, or images have no more extra objects (95 %, bootstrap, paired).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


from tests.support.benchmarks import argument_parser, quantile_text, read_rows, run_visalign, train_once, write_rows
from visalign.data.shapes.detector import detect
from visalign.data.shapes.preferences import ShapesPreferences
from visalign.data.shapes.prompts import COLORS, SHAPES, Record, heldout_prompts, train_prompts
from visalign.data.shapes.render import render
from visalign.data.shapes.scenes import SIZE, STYLES, Scene, SceneObject, sample_scene
from visalign.data.shapes.verifier import judge as verdict
from visalign.data.shapes.verifier import verify_scene
from visalign.rewards import load_judge
from visalign.rewards.scorers.clip_score import ClipScore
from visalign.rewards.scorers.hp import Hp
from visalign.rewards.scorers.ict import Ict
from visalign.rewards.scorers.ict_hp import IctHp

DRAWS, CLIP = 1_000, "shapes-clip"
MOST, EXTRA_RADIUS, GAP, BATCH = 4, (4.0, 5.5), 2.0, 64
"""Extra objects at most, half of their extent and their distance from others in pixels; triples an update."""
LEARNT = ("CLIP score", "ICT (trained)", "ICT · σ(HP)")
"""What policies are rewarded by."""


@dataclass(frozen=True, kw_only=True)
class World:
    """S scenes at A places of an axis, and wrong images that right ones are compared with."""

    prompts: list[str]
    places: list[str]
    """Names of the axis's places, poorest first."""
    images: np.ndarray
    """uint8 [S, A, 64, 64, 3]."""
    wrong: dict[str, tuple[np.ndarray, np.ndarray]]
    """What is asked -> ([S] place of the right image, uint8 [S, 64, 64, 3] the wrong one)."""


def scene_pairs(scenes: int, seed: int, style: str | None = None) -> list[tuple[Record, Scene, Scene, Any]]:
    """(record, scene of it, wrong scene of a near prompt, generator) of held-out prompts."""
    world, rng = ShapesPreferences(seed, split="heldout"), np.random.default_rng([seed, 61])
    pairs: list[tuple[Record, Scene, Scene, Any]] = []
    while len(pairs) < scenes:
        record = world.record(rng)
        other = world.near(record, rng)
        missed = style or STYLES[int(rng.integers(len(STYLES)))]
        scene = sample_scene(record, rng, style=style or STYLES[0])
        miss: Scene = sample_scene(other, rng, style=missed)
        if not verify_scene(miss, record).correct:
            pairs.append((record, scene, miss, rng))
    return pairs


def draw(scenes: int, seed: int) -> World:
    """Scenes of held-out prompts, undistorted, in each style; a wrong image in a random one."""
    pairs = scene_pairs(scenes, seed)
    styles = np.array([STYLES.index(miss.style) for _, _, miss, _ in pairs])
    return World(
        prompts=[record["prompt"] for record, _, _, _ in pairs],
        places=list(STYLES),
        images=np.array([[render(replace(scene, style=name)) for name in STYLES] for _, scene, _, _ in pairs]),
        wrong={"right wins": (styles, np.array([render(miss) for _, _, miss, _ in pairs]))},
    )


def draw_clutter(scenes: int, seed: int) -> World:
    """Scenes with 0 to 4 extra objects, and wrong ones with none or four."""
    prompts, images, wrong = [], [], []
    for record, scene, miss, rng in scene_pairs(2 * scenes, seed, style=STYLES[0]):
        right, other = (cluttered(base, record, MOST, rng) for base in (scene, miss))
        if right is None or other is None or len(prompts) == scenes:
            continue  # no room for four
        if verify_scene(miss, free(record)).correct:
            continue  # wrong only by objects too many
        assert all(verify_scene(variant, free(record)).correct for variant in right)
        assert not verify_scene(other[-1], free(record)).correct
        prompts.append(record["prompt"])
        images.append([render(variant) for variant in right])
        wrong.append([render(other[count]) for count in (0, MOST)])
    none, all_of_it = np.zeros(len(prompts), dtype=int), np.full(len(prompts), MOST)
    plain, full = np.array(wrong).swapaxes(0, 1)
    return World(
        prompts=prompts,
        places=[str(count) for count in range(MOST + 1)],
        images=np.array(images),
        wrong={
            "right wins, no clutter": (none, plain),
            "both cluttered": (all_of_it, full),
            "right one alone cluttered": (all_of_it, plain),
            "wrong one alone cluttered": (none, full),
        },
    )


def free(record: Record) -> Record:
    """The record without "nothing else may be there"."""
    return {**record, "only": False}


def cluttered(scene: Scene, record: Record, count: int, rng: np.random.Generator) -> list[Scene] | None:
    """The scene with 0, 1, ... `count` small objects of shapes that neither it nor the record has."""
    used = {entry["class"] for entry in record["include"]} | {item.shape for item in scene.objects}
    shapes, scenes = [shape for shape in SHAPES if shape not in used], [scene]
    for _ in range(200 if shapes else 0):
        if len(scenes) > count:
            return scenes
        radius = float(rng.uniform(*EXTRA_RADIUS))
        x, y = (float(v) for v in rng.uniform(radius + 1, SIZE - radius - 1, size=2))
        objects = scenes[-1].objects
        if all(max(abs(x - o.x), abs(y - o.y)) > radius + o.radius + GAP for o in objects):
            shape, color = str(rng.choice(shapes)), str(rng.choice(COLORS))
            extra = SceneObject(shape=shape, color=color, x=x, y=y, radius=radius)
            scenes.append(replace(scene, objects=(*objects, extra)))
    return None


def scores(judge: Any, images: np.ndarray, prompts: Sequence[str]) -> np.ndarray:
    """[N] of a judge."""
    answer = judge.score(images, list(prompts))
    assert bool(answer.valid.all())
    return answer.value.double().numpy()


def interval(values: np.ndarray) -> str:
    """A mean with its 95 % bootstrap interval over scenes."""
    rng = np.random.default_rng(0)
    draws = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(DRAWS)]
    return quantile_text(values.mean(), draws)


def line(name: str, judge: Any, world: World) -> str:
    """One row: mean score by place, slope, share of richer wins, right against wrong."""
    count, steps = len(world.prompts), len(world.places)
    grid = scores(
        judge,
        world.images.reshape(-1, *world.images.shape[2:]),
        [prompt for prompt in world.prompts for _ in world.places],
    ).reshape(count, steps)
    richness = np.linspace(0.0, 1.0, steps)
    centred = richness - richness.mean()
    slope = (grid @ centred) / (centred @ centred) / grid.std()
    upper = np.triu_indices(steps, 1)
    sign = np.sign(grid[:, upper[1]] - grid[:, upper[0]])
    columns = [slope, (sign.mean(1) + 1) / 2]
    for column, images in world.wrong.values():
        miss = scores(judge, images, world.prompts)
        columns.append((np.sign(grid[np.arange(count), column] - miss) + 1) / 2)
    means = " | ".join(f"{value:.3f}" for value in grid.mean(0))
    return f"| {name} | {means} | {' | '.join(interval(values) for values in columns)} |"


def table(judges: dict[str, Any], world: World) -> None:
    """What each judge says of the axis, and of right and wrong."""
    print(
        f"{len(world.prompts)} held-out scenes, each at {len(world.places)} places; 95 % by bootstrap "
        "over scenes. Slope: of the score over the whole axis, in standard deviations of the judge's scores; "
        "richer wins: of two places of a scene the richer one scores higher; right wins: over an image of a "
        "near prompt.\n"
    )
    print(f"| judge | {' | '.join([*world.places, 'slope', 'richer wins', *world.wrong])} |")
    print("|---|" + "---|" * (len(world.places) + 2 + len(world.wrong)))
    for name, judge in judges.items():
        print(line(name, judge, world), flush=True)


def triples(folder: Path, seed: int, count: int) -> dict[str, Path]:
    """Tables of triples and of their pairs: a wrong image, a right one, a right one with clutter."""
    files = {name: folder / f"{name}.jsonl" for name in ("triples", "pairs")}
    if all(file.is_file() for file in files.values()):
        return files
    world, rows = ShapesPreferences(seed), {name: list[dict[str, Any]]() for name in files}
    (folder / "images").mkdir(parents=True, exist_ok=True)
    number = 0
    while len(rows["triples"]) < count:
        rng, number = np.random.default_rng([seed, 62, number]), number + 1
        record = world.record(rng)
        wrong, right, more = (
            sample_scene(r, rng, style=str(rng.choice(STYLES))) for r in (world.near(record, rng), record, record)
        )
        rich = cluttered(more, record, int(rng.integers(1, MOST + 1)), rng)
        if rich is None or verify_scene(wrong, free(record)).correct:
            continue
        names = [f"images/{number}_{index}.png" for index in range(3)]
        for name, scene in zip(names, (wrong, right, rich[-1]), strict=True):
            Image.fromarray(render(scene)).save(folder / name)
        pair = {"prompt": record["prompt"], "image_left": names[0], "image_right": names[1], "label": 0.0}
        rows["triples"].append({**pair, "image_refined": names[2]})
        rows["pairs"] += [pair, {**pair, "image_left": names[1], "image_right": names[2]}]
    for name, file in files.items():
        write_rows(file, rows[name])
    return files


def trained(folder: Path, arguments: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Judge -> (reward, its options) of those that learnt here."""
    seed = arguments.seed
    files = triples(folder, seed, arguments.triples)
    theta = round(right_cosine(CLIP, seed), 2)
    updates = arguments.triples // BATCH
    for kind, changes in {
        "ict": [f"data.theta={theta}", f"data.train={files['triples']}"],
        "hp": [f"data.train={files['pairs']}", "data.kinds=[alignment,quality,richness,mixed]"],
    }.items():  # fmt: skip
        train_once(
            folder / kind, f"shapes_{kind}", f"model.path={CLIP}", "data.size=null", "data.heldout=null",
            "data.heldout_kinds=null", "data.surroundings=0", f"seed={seed}", *changes,
            "optimizer.updates_per_iteration=1", f"optimizer.decay_updates={updates}",
            f"run.iterations={updates}", "run.checkpoint_every=1000", command="train-reward",
        )  # fmt: skip
    ict, hp = str(folder / "ict" / "judge"), str(folder / "hp" / "judge")
    return {
        "CLIP score": ("clip_score", {"model": CLIP}),
        f"CLIP score, truncated at {theta:g}": ("ict", {"model": CLIP, "threshold": theta}),
        "ICT (trained)": ("ict", {"model": ict}),
        "HP (trained)": ("hp", {"model": hp}),
        "ICT · σ(HP)": ("ict_hp", {"ict": ict, "hp": hp, "mode": "upstream"}),
    }


def right_cosine(clip: str, seed: int, count: int = 500) -> float:
    """Median cosine of a CLIP for right images of training prompts: θ."""
    world, rng = ShapesPreferences(seed), np.random.default_rng([seed, 63])
    scenes = [sample_scene(world.record(rng), rng) for _ in range(count)]
    images = np.array([render(scene) for scene in scenes])
    return float(np.median(scores(Ict(clip), images, [scene.record["prompt"] for scene in scenes])))


def policies(folder: Path, judges: dict[str, tuple[str, dict[str, Any]]], arguments: argparse.Namespace) -> None:
    """A row per reward: verified accuracy and extra objects on held-out prompts, before and after."""
    prompts = {}
    heldout = heldout_prompts()
    for name, records in (("train", train_prompts()), ("heldout", heldout), ("few", heldout[::40])):
        prompts[name] = write_rows(folder / f"{name}_prompts.jsonl", map(free, records))
    loras: dict[str, list[str]] = {"before": []}
    for name, (kind, options) in judges.items():
        run = folder / "policies" / "".join(c if c.isalnum() else "_" for c in name)
        train_once(
            run, "shapes_grpo_guard", f"data.train={prompts['train']}", f"data.heldout={prompts['few']}",
            f"rewards.terms={{judge: {{name: {kind}, options: {json.dumps(options)}}}}}",
            f"seed={arguments.seed}", "evaluation.every=0", "rollout.prompts_per_iteration=12",
            f"run.iterations={arguments.iterations}", "run.max_seconds=null",
        )  # fmt: skip
        loras[name] = ["--lora", str(run / "lora")]
    outcomes = {name: counted(folder / "samples" / str(n), prompts["heldout"], lora)
                for n, (name, lora) in enumerate(loras.items())}  # fmt: skip
    first = outcomes["CLIP score"]
    print("\n| reward | verified accuracy | over the CLIP's | extra objects | over the CLIP's |")
    print("|---|---|---|---|---|")
    for name, own in outcomes.items():
        gains = ["" if name == "CLIP score" else interval((own - first)[:, column]) for column in range(2)]
        print(f"| {name} | {own[:, 0].mean():.3f} | {gains[0]} | {own[:, 1].mean():.3f} | {gains[1]} |", flush=True)


def counted(folder: Path, prompts: Path, lora: list[str]) -> np.ndarray:
    """[P, 2] of held-out prompts: share of right images, mean number of extra objects."""
    if not (folder / "images.jsonl").is_file():
        shutil.rmtree(folder, ignore_errors=True)  # an interrupted run
        run_visalign("sample", str(prompts), "--seeds", "0-1", *lora, "-o", str(folder))
    records = read_rows(prompts)
    by_prompt: dict[str, list[tuple[float, float]]] = {record["prompt"]: [] for record in records}
    record_of = {record["prompt"]: record for record in records}
    rows = read_rows(folder / "images.jsonl")
    images = np.array([np.array(Image.open(folder / row["image"]).convert("RGB")) for row in rows])
    for row, objects in zip(rows, detect(images), strict=True):
        record = record_of[row["prompt"]]
        required = sum(entry["count"] for entry in record["include"])
        right = float(verdict(objects, record).correct)
        by_prompt[row["prompt"]].append((right, float(max(len(objects) - required, 0))))
    return np.array([np.mean(outcomes, axis=0) for outcomes in by_prompt.values()])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--scenes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--theta", type=float, default=0.7, help="of the truncation of the plain score")
    parser.add_argument("--ict", default="shapes-ict")
    parser.add_argument("--hp", default="shapes-hp")
    parser.add_argument("--clutter", action="store_true", help="extra objects in place of styles; trains judges")
    parser.add_argument("--output", type=Path, help="of --clutter: runs that are there are not repeated")
    parser.add_argument("--triples", type=int, default=3200, help="that ICT learns from")
    parser.add_argument("--iterations", type=int, default=15, help="of the policies; 0: none")
    arguments = parser.parse_args()
    if arguments.clutter:
        if arguments.output is None:
            parser.error("--clutter trains judges; give --output FOLDER.")
        torch.set_num_threads(1)
        folder = arguments.output.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        rewards = trained(folder, arguments)
        judges = {name: load_judge(kind, **options) for name, (kind, options) in rewards.items()}
        table(judges, draw_clutter(arguments.scenes, arguments.seed))
        if arguments.iterations:
            policies(folder, {name: rewards[name] for name in LEARNT}, arguments)
        return
    table(
        {
            "CLIP score": ClipScore("shapes-clip"),
            f"CLIP score, truncated at {arguments.theta:g}": Ict("shapes-clip", threshold=arguments.theta),
            "ICT (trained)": Ict(arguments.ict),
            "HP (trained)": Hp(arguments.hp),
            "ICT · σ(HP)": IctHp(arguments.ict, arguments.hp, mode="upstream"),
        },
        draw(arguments.scenes, arguments.seed),
    )


if __name__ == "__main__":
    main()
