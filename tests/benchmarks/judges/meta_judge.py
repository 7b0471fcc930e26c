# SPDX-License-Identifier: Apache-2.0
"""Votes of a judge that writes, with and without a trained meta judge that says which of them are right.

    python tests/benchmarks/judges/meta_judge.py --output runs/meta --seeds 0 1 2

The packaged model writes yes or no and the reason several times for each image; the meta judge learns which
votes the verifier shares (SPCT, arXiv 2504.02495). On held-out pairs of which one image shows the prompt, the
sum of all K votes is set against that of the half that the meta judge rates highest (`deepseek_grm`'s
k_meta); beside it the untrained meta judge, lots, the right half, and P(yes). A meta judge is refuted where
the interval of its half's lead over all votes holds 0: 95 %, bootstrap over the pairs of all seeds, paired.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import first_pairs, quantile_text, run_parser, write_rows
from visalign.data.shapes.preferences import ShapesPair, ShapesPreferences
from visalign.data.shapes.verifier import verify_scene
from visalign.pipelines.jobs import load_job
from visalign.rewards import load_judge
from visalign.rewards.base.images import load_images
from visalign.rewards.chat.deepseek_grm import DeepSeekGRM
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.requests import Query

MODEL, QUESTION = "shapes-vlm", "Does the picture show {prompt}? Answer, then say why."
WORLD: dict[str, Any] = {"kinds": ("alignment", "mixed"), "surroundings": 0.7}
SAMPLES, TOKENS = 4, 40
"""Votes of each image that the meta judge learns from; tokens of one at most."""


def done(name: str, folder: Path, *changes: str) -> dict[str, Any]:
    """The summary of a job, which is run where it is not there."""
    if not (folder / "summary.json").is_file():
        job = load_job(name, [change for change in changes if change])
        job.run(job.config, output=folder, resume=folder.is_dir())
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def voted(folder: Path, name: str, split: str, seed: int, count: int) -> Path:
    """A file of judged votes on images, each the first or second of a pair by lot."""
    output = folder / name
    if not (output / "summary.json").is_file():
        world, rng, rows = ShapesPreferences(seed, split=split, **WORLD), np.random.default_rng(seed), []
        images = folder / f"{name}_images"
        images.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pair, side = world.pair(number), int(rng.integers(2))
            path = images / f"{number}.png"
            Image.fromarray(pair.images()[side]).save(path)
            rows.append({"image": str(path), "prompt": pair.prompt, "mos": float(shown(pair)[side])})
        table = write_rows(folder / f"{name}.jsonl", rows)
        done(
            "text_sample", output, f"model.path={MODEL}", f"data.train={table}", f"data.size={count}",
            f"data.question={QUESTION}", f"seed={seed}", f"rollout.samples={SAMPLES}",
            "rollout.temperatures=[1.0]", f"rollout.max_new_tokens={TOKENS}", "selection.rule=all",
            "rewards.terms={rating: {options: {reads: yes_no, rule: regression}}}",
        )  # fmt: skip
    return output / "dataset.jsonl"


def shown(pair: ShapesPair) -> tuple[bool, bool]:
    """Whether each image shows the prompt."""
    left, right = (verify_scene(scene, pair.record).correct for scene in (pair.left, pair.right))
    return left, right


def meta_judge(folder: Path, seed: int, votes: Path, heldout: Path) -> Path:
    """The folder of the meta judge."""
    output = folder / "meta"
    overrides = [f"data.train={votes}", f"data.heldout={heldout}", f"seed={seed}"]
    print(f"seed {seed}: {done('shapes_meta_judge', output, *overrides)['after']}", flush=True)
    return output / "judge"


def asked(metas: dict[str, str], pairs: list[ShapesPair], votes: int) -> dict[str, np.ndarray]:
    """ "votes", the meta judges' names and "P(yes)" -> [2 N, K], left images first; NaN: cannot be read."""
    prompts = [pair.prompt for pair in pairs] * 2
    both = [pair.images() for pair in pairs]
    images = [i for i in load_images([two[side] for side in range(2) for two in both]).images if i is not None]
    queries = [Query(images=[i], prompt=p) for i, p in zip(images, prompts, strict=True)]
    options: dict[str, Any] = {"model": MODEL, "template": QUESTION, "reads": "yes_no"}
    columns: dict[str, np.ndarray] = {"votes": np.full((len(images), votes), np.nan)}
    readable: list[list[tuple[float, str]]] = []
    for name, meta in metas.items():
        judge = DeepSeekGRM(answers=votes, k_meta=votes // 2, meta=meta, max_new_tokens=TOKENS, **options)
        if not readable:
            drawn = judge.server.ask(judge.template, queries, read=judge._read, **judge.sampling)
            readable = [[answer for answer in row if not isinstance(answer, AnswerError)] for row in drawn]
            readable = [row if len(row) >= judge.min_readable else [] for row in readable]
        columns[name] = np.full((len(images), votes), np.nan)
        rated = judge.meta_judge.rate(queries, [[text for _, text in row] for row in readable])
        for index, (row, ratings) in enumerate(zip(readable, rated, strict=True)):
            columns["votes"][index, : len(row)] = [score for score, _ in row]
            columns[name][index, : len(row)] = [np.nan if isinstance(m, AnswerError) else m for m in ratings]
        mine = summed(columns["votes"], columns[name], votes // 2)
        scores = judge.score(images[:20], prompts[:20]).value.double().numpy()  # what users get
        np.testing.assert_allclose(scores, votes // 2 * mine[:20], rtol=1e-5)
    plain: Any = load_judge("reward_dance", model=MODEL, decision_first=True)
    columns["P(yes)"] = plain.score(images, prompts).value.double().numpy()[:, None]
    return columns


def summed(votes: np.ndarray, order: np.ndarray, count: int) -> np.ndarray:
    """Mean of the `count` votes of highest `order`, [2 N]; NaN where too few can be read."""
    order = np.where(np.isnan(votes) | np.isnan(order), -np.inf, order)
    best = np.argsort(-order, axis=1, kind="stable")[:, :count]
    chosen = np.take_along_axis(votes, best, 1)
    valid = np.isfinite(np.take_along_axis(order, best, 1))
    total = np.where(valid, chosen, 0.0).sum(1)
    return np.where(valid.any(1), total / np.maximum(valid.sum(1), 1), np.nan)


def hits(value: np.ndarray, better: np.ndarray) -> np.ndarray:
    """Whether each pair is the right way round; a tie, or an image without votes, is half right."""
    left, right = np.split(value, 2)
    return (1 + np.nan_to_num(np.sign(left - right)) * better) / 2


def one_seed(output: Path, seed: int, options: argparse.Namespace) -> dict[str, np.ndarray]:
    """Way of summing -> whether each pair is right."""
    folder = output if seed == 0 else output / f"seed{seed}"
    saved = folder / f"right_{options.images}_{options.heldout}_{options.votes}.json"
    if saved.is_file():
        return {name: np.array(row) for name, row in json.loads(saved.read_text(encoding="utf-8")).items()}
    votes = voted(folder, "votes", "train", seed, options.images)
    heldout = voted(folder, "heldout", "heldout", seed, 100)
    meta = meta_judge(folder, seed, votes, heldout)
    pairs = told_apart(seed, options.heldout)
    columns = asked({"trained": str(meta), "untrained": MODEL}, pairs, options.votes)
    truth = np.array([shown(pair) for pair in pairs]).astype(float)
    better, labels = np.sign(truth[:, 0] - truth[:, 1]), truth.T.reshape(-1)
    drawn, half = columns["votes"], options.votes // 2
    lots = np.random.default_rng(seed).random(drawn.shape)
    orders = {
        f"all {options.votes} votes": (lots, options.votes),
        f"{half} by the meta judge": (columns["trained"], half),
        f"{half} by the untrained one": (columns["untrained"], half),
        f"{half} by lot": (lots, half),
        f"{half} that are right, where there are": (-np.abs(drawn - labels[:, None]), half),
        "1 by the meta judge": (columns["trained"], 1),
        "1 by lot": (lots, 1),
    }
    print(f"seed {seed}: {np.isnan(drawn).mean():.4f} of the votes cannot be read; "
          f"{np.nanmean(drawn == labels[:, None]):.3f} are right", flush=True)  # fmt: skip
    rows = {name: hits(summed(drawn, *how), better) for name, how in orders.items()}
    rows["P(yes), no votes"] = hits(columns["P(yes)"][:, 0], better)
    saved.write_text(json.dumps(rows, default=np.ndarray.tolist), encoding="utf-8")
    return rows


def told_apart(seed: int, count: int) -> list[ShapesPair]:
    """Held-out pairs of which one image shows the prompt."""
    world = ShapesPreferences(seed + 100, split="heldout", **WORLD)
    return first_pairs(world, count, lambda pair: sum(shown(pair)) == 1)


def main() -> None:
    parser = run_parser(__doc__, seeds=[0])
    parser.add_argument("--images", type=int, default=1500, help="with votes to learn from")
    parser.add_argument("--heldout", type=int, default=500, help="pairs")
    parser.add_argument("--votes", type=int, default=8, help="K")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [one_seed(options.output, seed, options) for seed in options.seeds]
    rows = {name: np.concatenate([outcome[name] for outcome in seeds]) for name in seeds[0]}
    first = next(iter(rows.values()))
    resamples = np.random.default_rng(0).integers(len(first), size=(10_000, len(first)))
    print("| the sum of | accuracy | over all votes |\n|---|---|---|")
    for name, right in rows.items():
        by_seed = ", ".join(f"{outcome[name].mean():.3f}" for outcome in seeds)
        lead = right - first
        gain = "" if right is first else quantile_text(lead.mean(), lead[resamples].mean(1))
        print(f"| {name} | {right.mean():.3f} ({by_seed}) | {gain} |")


if __name__ == "__main__":
    main()
