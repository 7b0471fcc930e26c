# SPDX-License-Identifier: Apache-2.0
"""Votes of a judge that writes, with and without a trained meta judge that says which of them are right.

    python tests/benchmarks/meta_judge.py --output runs/meta --seeds 0 1 2

The packaged vision-language model first learns from a teacher of the shapes world to criticise a picture and
to box a score from 1 to 10, twice the true utility and 1. It then judges new pictures of training prompts
several times each; a vote within 1 of the truth is right, and the meta judge, the packaged model again,
learns which are by cross-entropy (SPCT, arXiv 2504.02495). Of held-out pairs whose truth is clear each
picture gets K votes, and the sum of all is set against the sum of the half of them that the meta judge rates
highest, as `deepseek_grm` does it with k_meta. Beside it: the meta judge before its training, half of the
votes by lot, and the half that is nearest to the truth, which no meta judge can beat.

That a meta judge is worth having is refuted where the interval of what the half that it keeps leads by over
all K votes holds 0: 95 %, by bootstrap over the pairs of all seeds, paired.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from visalign.data.sets.image_references import resolve_image, shapes_reference
from visalign.data.shapes.preferences import _DISTORTED, VISIBLE, ShapesPreferences
from visalign.data.shapes.scenes import Scene
from visalign.data.shapes.verifier import verify_scene
from visalign.rewards.base.images import load_images
from visalign.rewards.chat.deepseek_grm import DeepSeekGRM, _read
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.vlm.requests import Query

QUESTION = "How good is the picture for {prompt}?"
RIGHT = 1 - 1.001 / 9
"""Reward of a score that is 1 away from the truth, on a scale of 9."""
TOKENS = 40
TRUTH = 11
"""Seed of the pictures that the judge learns from; votes are of the next ones."""


def command(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "visalign", *arguments], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"visalign {' '.join(arguments)}: {done.stderr[-2000:]}")


def points(utility: float) -> float:
    """The true score from 1 to 10."""
    return 1 + 2 * utility


def critique(scene: Scene, record: Any, utility: float) -> str:
    """What a teacher says of a picture: the first fault, the distortion, the style, the score."""
    verdict = verify_scene(scene, record)
    said = "yes, all of it" if verdict.correct else f"no, {verdict.reason.partition(';')[0]}"
    seen = _DISTORTED.get(scene.distortion.kind, "") if scene.distortion.severity >= VISIBLE else ""
    return f"{', '.join(filter(None, (said, seen, scene.style)))} \\boxed{{{points(utility):.0f}}}"


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def pictures(split: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Rated pictures with the teacher's critique."""
    world, rows = ShapesPreferences(seed, split=split), []
    for number in range(count):
        pair = world.pair(number)
        rows.append({
            "image": shapes_reference(split, seed, "pair", number, "left"),
            "prompt": pair.prompt,
            "mos": points(pair.utility[0]),
            "critique": critique(pair.left, pair.record, pair.utility[0]),
        })  # fmt: skip
    return rows


def taught(folder: Path, seed: int, count: int) -> Path:
    """The judge that writes."""
    made = folder / "grm"
    if not (made / "summary.json").is_file():
        rows = pictures("train", TRUTH + 10 * seed, count)
        shown = [
            {
                "prompt": [{"role": "user", "content": [
                    {"type": "image", "image": row["image"]},
                    {"type": "text", "text": QUESTION.replace("{prompt}", row["prompt"])},
                ]}],
                "completion": row["critique"],
            }
            for row in rows
        ]  # fmt: skip
        demos = write(folder / "critiques.jsonl", shown)
        held = write(folder / "taught.jsonl", pictures("heldout", TRUTH + 10 * seed, 100))
        updates = count // 32
        command(
            "train", "text_sft", "model.path=shapes-vlm", f"data.train={demos}", f"data.heldout={held}",
            "data.heldout_size=100", f"data.question={QUESTION}", f"generation.max_new_tokens={TOKENS}",
            "evaluation={rewards: {rating: {options: {reads: boxed, rule: regression, form: 0.1}}}, "
            "correctness: null}", f"seed={seed}", "optimizer.lr=1e-3", "optimizer.warmup_updates=10",
            "optimizer.decay=cosine", f"optimizer.decay_updates={updates}", f"run.iterations={updates}",
            f"run.checkpoint_every={updates}", "-o", str(made),
        )  # fmt: skip
    return made / "model"


def voted(folder: Path, name: str, grm: Path, split: str, seed: int, count: int, samples: int) -> Path:
    """A file of judged votes on pictures that the judge has not learnt from."""
    made = folder / name
    if not (made / "summary.json").is_file():
        table = write(folder / f"{name}.jsonl", pictures(split, TRUTH + 10 * seed + 1, count))
        command(
            "train", "text_sample", f"model.path={grm}", f"data.train={table}", f"data.size={count}",
            f"data.question={QUESTION}", f"seed={seed}", f"rollout.samples={samples}",
            f"rollout.max_new_tokens={TOKENS}", "selection={rule: all, threshold: 0.888}",
            "rewards.terms={rating: {options: {reads: boxed, rule: regression}}}", "-o", str(made),
        )  # fmt: skip
    return made / "dataset.jsonl"


def meta_judge(folder: Path, seed: int, votes: Path, heldout: Path) -> Path:
    made = folder / "meta"
    if not (made / "summary.json").is_file():
        command(
            "train-reward", "shapes_meta_judge", f"data.train={votes}", f"data.heldout={heldout}",
            f"data.right={RIGHT}", f"seed={seed}", "-o", str(made),
        )  # fmt: skip
    print(f"seed {seed}: {json.loads((made / 'summary.json').read_text())['after']}", flush=True)
    return made / "judge"


def asked(grm: Path, metas: dict[str, str], pairs: list[Any], votes: int) -> dict[str, np.ndarray]:
    """"votes" and the meta judges' names -> [2 N, K], left pictures first; NaN for what cannot be read."""
    prompts = [pair.prompt for pair in pairs] * 2
    shown = [pair.pictures()[side] for side in range(2) for pair in pairs]
    images = [image for image in load_images(shown).images if image is not None]
    options: dict[str, Any] = {"model": str(grm), "template": QUESTION, "max_new_tokens": TOKENS}
    found: dict[str, np.ndarray] = {}
    queries = [Query(images=[i], prompt=p) for i, p in zip(images, prompts, strict=True)]
    readable: list[list[tuple[float, str]]] = []
    for name, meta in metas.items():
        judge = DeepSeekGRM(answers=votes, k_meta=votes // 2, meta=meta, **options)
        if not readable:
            drawn = judge.server.ask(judge.template, queries, read=_read, **judge.drawing)
            readable = [[one for one in row if not isinstance(one, AnswerError)] for row in drawn]
        rated = judge._meta(queries, readable)
        found.setdefault("votes", np.full((len(images), votes), np.nan))
        found[name] = np.full((len(images), votes), np.nan)
        for place, (row, said) in enumerate(zip(readable, rated, strict=True)):
            found["votes"][place, : len(row)] = [score for score, _ in row]
            found[name][place, : len(row)] = [np.nan if isinstance(m, AnswerError) else m for m in said]
        mine = summed(found["votes"], found[name], votes // 2)
        scores = judge.score(images[:20], prompts[:20]).value.double().numpy()  # what users get
        np.testing.assert_allclose(scores, votes // 2 * mine[:20], rtol=1e-5)
    return found


def summed(votes: np.ndarray, order: np.ndarray, kept: int) -> np.ndarray:
    """Mean of the `kept` votes of highest `order`, [2 N]."""
    order = np.where(np.isnan(votes) | np.isnan(order), -np.inf, order)
    best = np.argsort(-order, axis=1, kind="stable")[:, :kept]
    chosen = np.take_along_axis(votes, best, 1)
    chosen[~np.isfinite(np.take_along_axis(order, best, 1))] = np.nan
    return np.nanmean(chosen, 1)


def hits(value: np.ndarray, better: np.ndarray) -> np.ndarray:
    """Whether each pair is the right way round; a tie is half right."""
    left, right = np.split(value, 2)
    return (1 + np.sign(left - right) * better) / 2


def one_seed(output: Path, seed: int, given: argparse.Namespace) -> dict[str, np.ndarray]:
    """Way of summing -> whether each pair is right."""
    folder = output if seed == 0 else output / f"seed{seed}"
    grm = taught(folder, seed, given.pictures)
    votes = voted(folder, "votes", grm, "train", seed, given.judged, 4)
    heldout = voted(folder, "heldout", grm, "heldout", seed, 250, 4)
    meta = meta_judge(folder, seed, votes, heldout)
    pairs = clear_pairs(seed, given.heldout)
    found = asked(grm, {"trained": str(meta), "untrained": "shapes-vlm"}, pairs, given.votes)
    utility = np.array([pair.utility for pair in pairs])
    better, truth = np.sign(utility[:, 0] - utility[:, 1]), points(utility.T.reshape(-1))
    drawn, half = found["votes"], given.votes // 2
    lots = np.random.default_rng(seed).random(drawn.shape)
    orders = {
        f"all {given.votes} votes": (lots, given.votes),
        f"{half} by the meta judge": (found["trained"], half),
        f"{half} by the untrained one": (found["untrained"], half),
        f"{half} by lot": (lots, half),
        f"{half} nearest to the truth": (-np.abs(drawn - truth[:, None]), half),
        "1 by the meta judge": (found["trained"], 1),
        "1 by lot": (lots, 1),
    }
    print(f"seed {seed}: {np.isnan(drawn).mean():.4f} of the votes cannot be read; "
          f"{np.nanmean(np.abs(drawn - truth[:, None]) <= 1.001):.3f} are right", flush=True)  # fmt: skip
    return {name: hits(summed(drawn, *how), better) for name, how in orders.items()}


def clear_pairs(seed: int, count: int) -> list[Any]:
    """Held-out pairs whose truth is clear."""
    world, found, number = ShapesPreferences(TRUTH + 10 * seed + 2, split="heldout"), [], 0
    while len(found) < count:
        pair = world.pair(number)
        found += [pair] if pair.is_clear else []
        number += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="runs that are there are not repeated")
    parser.add_argument("--pictures", type=int, default=8000, help="that the judge learns from")
    parser.add_argument("--judged", type=int, default=2000, help="that the meta judge's votes are on")
    parser.add_argument("--heldout", type=int, default=500, help="pairs")
    parser.add_argument("--votes", type=int, default=8, help="K")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    torch.set_num_threads(1)
    seeds = [one_seed(given.output.resolve(), seed, given) for seed in given.seeds]
    rows = {name: np.concatenate([found[name] for found in seeds]) for name in seeds[0]}
    first = next(iter(rows.values()))
    places = np.random.default_rng(0).integers(len(first), size=(10_000, len(first)))
    print("| the sum of | accuracy | over all votes |\n|---|---|---|")
    for name, right in rows.items():
        each = ", ".join(f"{found[name].mean():.3f}" for found in seeds)
        low, high = np.quantile((right - first)[places].mean(1), [0.025, 0.975])
        gain = "" if right is first else f"{(right - first).mean():+.3f} ({low:+.3f} to {high:+.3f})"
        print(f"| {name} | {right.mean():.3f} ({each}) | {gain} |")


if __name__ == "__main__":
    main()
