# SPDX-License-Identifier: Apache-2.0
"""Which labels help a judge most once the policy has moved: UGDA's, the uncertain ones, or lots; and OCRM.

    python tests/benchmarks/judges/which_labels.py --output runs/labels --seeds 0 1 2

A policy follows an ensemble of few labels; as many pairs of its samples are labelled for each way to choose
them, and the ensemble is fitted anew. Measured is how often its mean prefers the better image of pairs of
that policy on held-out prompts. UGDA's choice (Sun et al., ICLR 2025) is refuted where the interval of its
lead over lots holds 0 or lies below, OCRM's weights (arXiv 2507.15507) where that over equal weights does;
bootstrap over the prompts of all seeds, paired.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import quantile_text, read_rows, run_parser, train_once, write_rows
from visalign.data.shapes.prompts import Record, heldout_prompts, parse_prompt, train_prompts
from visalign.pipelines.collect.tasks import Task, read_tasks
from visalign.pipelines.sample.job import SampleSettings, sample_images
from visalign.pipelines.ugda.selection import Candidate, log_ratios, member_scores, score_candidates, select_candidates
from visalign.rewards.catalogue import load_reward
from visalign.rewards.combine.ensemble import Ensemble

ARMS = ("none", "random", "uncertainty", "ugda", "ugda, OCRM")
MEMBERS = 3
IMAGES = 4
"""Of each prompt."""


def first_round(folder: Path, seed: int, labels: int) -> None:
    """Few labels, an ensemble, and a policy that follows it."""
    changes = (
        "{run.iterations: 24, optimizer.decay_updates: 192, evaluation.every: 0, run.max_seconds: null, "
        "objective.changes_for.diffusion_nft_closed.reference_guidance: null}"
    )
    overrides = [f"seed={seed}", "rounds=1", f"labels.first={labels}", f"policy.changes={changes}"]
    train_once(folder, "shapes_ugda", *overrides)


def sampled(folder: Path, records: list[Record], lora: Path | None, seed: int, prompts: int) -> list[Task]:
    """All pairs of the policy's images of some prompts."""
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed)).tolist()
    if not (folder / "images.jsonl").is_file():
        sample_images([records[index] for index in order[:prompts]], sampling(lora), folder)
    return list(read_tasks([str(folder)], single=False, per_prompt=10**6))


def sampling(lora: Path | None) -> SampleSettings:
    return SampleSettings(
        model="shapes-sd3", lora=[lora] if lora else [], seeds=range(IMAGES), steps=10, batch_size=96
    )


def truth(tasks: list[Task]) -> np.ndarray:
    """1 where the verifier finds the left image nearer to its prompt, 0 the right one, 1/2 neither."""
    verifier, labels = load_reward("shapes_verifier", mode="mixed"), []
    for task in tasks:
        left, right = verifier.score(list(task.images), [task.prompt] * 2, [parse_prompt(task.prompt)] * 2).value
        labels.append(float(np.sign(float(left - right)) / 2 + 0.5))
    return np.array(labels)


def chosen(arm: str, candidates: list[Candidate], count: int, seed: int) -> list[Candidate]:
    return [] if arm == "none" else select_candidates(candidates, count, arm.partition(",")[0], seed=seed)


def fitted(folder: Path, rows: list[dict[str, Any]], seed: int, *, weighed: bool) -> Ensemble:
    """The ensemble on these labels."""
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "pairs.jsonl", rows)
    for member in range(MEMBERS):
        train_once(
            folder / str(member), "shapes_reward_dance", f"data.train={folder / 'pairs.jsonl'}", "data.heldout=null",
            f"seed={seed + member}", "run.iterations=3", "optimizer.decay_updates=36",
            *(["data.off_policy={}"] if weighed else []), command="train-reward",
        )  # fmt: skip
    return ensemble_of([folder / str(member) for member in range(MEMBERS)])


def ensemble_of(members: list[Path]) -> Ensemble:
    return Ensemble({str(n): load_reward("reward_dance", model=str(m / "judge")) for n, m in enumerate(members)})


def right(ensemble: Ensemble, tasks: list[Task], labels: np.ndarray) -> np.ndarray:
    """Whether the mean prefers the better image of each pair; a tie is half right."""
    images = list(dict.fromkeys(image for task in tasks for image in task.images))
    prompts = {image: task.prompt for task in tasks for image in task.images}
    scores = member_scores(ensemble, images, [prompts[image] for image in images]).mean(0)
    value = dict(zip(images, scores.tolist(), strict=True))
    lead = np.array([value[task.images[0]] - value[task.images[1]] for task in tasks])
    return np.where(lead == 0, 0.5, (lead > 0) == (labels == 1)).astype(float)


def one_seed(output: Path, seed: int, first: int, more: int) -> dict[str, np.ndarray]:
    """Arm -> [prompts, 2], how many pairs of each prompt its ensemble has right, and how many there are."""
    folder = output / f"seed{seed}"
    first_round(folder / "first", seed, first)
    start = folder / "first" / "round_00"
    lora = start / "policy" / "lora"
    tasks = sampled(folder / "fresh", train_prompts(), lora, seed + 1000, 75)
    test = sampled(folder / "test", heldout_prompts(), lora, seed, 120)
    labels = truth(test)
    decided = [task for task, label in zip(test, labels, strict=True) if label != 0.5]
    before = ensemble_of([start / "members" / str(member) for member in range(MEMBERS)])
    candidates = score_candidates(tasks, before, sampling(lora), seed=seed)
    label_of = dict(zip([c.task.images for c in candidates], truth([c.task for c in candidates]), strict=True))
    old = read_rows(start / "pairs.jsonl")
    for row in old:
        row |= {side: str((start / row[side]).resolve()) for side in ("image_left", "image_right")}
    images = [row[f"image_{side}"] for side in ("left", "right") for row in old]
    ratios = log_ratios(sampling(None), sampling(lora), images, [row["prompt"] for row in old] * 2, seed=seed).tolist()
    for index, row in enumerate(old):
        row |= {"log_ratio_left": ratios[index], "log_ratio_right": ratios[index + len(old)]}
    results, names = {}, sorted({task.prompt for task in decided})
    group = np.array([names.index(task.prompt) for task in decided])
    for arm in ARMS:
        new = [
            {"prompt": c.task.prompt, "image_left": c.task.images[0], "image_right": c.task.images[1],
             "label": label_of[c.task.images], "log_ratio_left": 0.0, "log_ratio_right": 0.0}
            for c in chosen(arm, candidates, more, seed)
        ]  # fmt: skip
        after = before if arm == "none" else fitted(
            folder / arm.replace(", ", "_"), [*old, *new], seed, weighed="OCRM" in arm
        )  # fmt: skip
        hits = right(after, decided, labels[labels != 0.5])
        results[arm] = np.stack([np.bincount(group, hits), np.bincount(group)], 1)
        ties = sum(row["label"] == 0.5 for row in new)
        print(f"seed {seed}: {arm}: {hits.mean():.3f} of {len(decided)}; {ties} new ties", flush=True)
    return results


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--first", type=int, default=40, help="labels before the policy moves")
    parser.add_argument("--more", type=int, default=60, help="labels afterwards")
    options = parser.parse_args()
    output = options.output
    seeds = [one_seed(output, seed, options.first, options.more) for seed in options.seeds]
    pooled = {arm: np.concatenate([results[arm] for results in seeds]) for arm in ARMS}
    draws = np.random.default_rng(0).integers(len(pooled["none"]), size=(10_000, len(pooled["none"])))
    for arm, other in (
        ("random", "none"), ("uncertainty", "random"), ("ugda", "random"), ("ugda, OCRM", "ugda")
    ):  # fmt: skip
        drawn = [pooled[name][draws].sum(1) for name in (arm, other)]
        gaps = drawn[0][:, 0] / drawn[0][:, 1] - drawn[1][:, 0] / drawn[1][:, 1]
        ours, theirs = (pooled[name][:, 0].sum() / pooled[name][:, 1].sum() for name in (arm, other))
        print(f"{arm} {ours:.3f}, over {other}: {quantile_text(ours - theirs, gaps)}")


if __name__ == "__main__":
    main()
