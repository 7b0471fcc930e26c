# SPDX-License-Identifier: Apache-2.0
"""From votes to a policy: simulated votes, collect's export, a judge trained on it, a policy trained by that.

    python tests/benchmarks/judges/votes_to_policy.py --output runs/votes --votes 300 --seeds 0 1 2

Three voters (VOTERS) compare images of training prompts, and prefer the one nearer to its prompt with
probability σ(γ (u_left − u_right)). The export trains a judge that says yes or no, or HPSv3's head, which the
`shapes_nft` follows alone, without the guided reference; beside it the yes/no judge untrained. The claim is
refuted where the interval of the gain on held-out prompts holds 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import run_parser, run_visalign, train_once
from visalign.data.shapes.prompts import Record, heldout_prompts, parse_prompt, train_prompts
from visalign.pipelines.collect.store import Plan, VoteStore
from visalign.pipelines.collect.tasks import Form, read_tasks
from visalign.pipelines.collect.votes import export_rows, select_votes, write_rows
from visalign.rewards.catalogue import load_reward

VOTERS = {"careful": 12.0, "quick": 6.0, "careless": 0.0}
IMAGES = 4
"""Of each prompt."""


def images(folder: Path, pool: list[Record], prompts: int, seed: int) -> None:
    """Samples of the packaged generator, with their records."""
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed)).tolist()
    records = folder.with_suffix(".jsonl")
    records.parent.mkdir(parents=True, exist_ok=True)
    write_rows(records, (pool[index] for index in order[:prompts]))
    run_visalign("sample", str(records), "-o", str(folder), "--seeds", f"0-{IMAGES - 1}", "--batch-size", "96")


def collect(folder: Path, path: Path, votes: int, seed: int) -> None:
    """Simulated voters answer what the file of votes hands them."""
    tasks = read_tasks([str(folder)], single=False, per_prompt=IMAGES, seed=seed)[:votes]
    store = VoteStore.create(path, tasks, Form(), Plan(votes=1, repeat_every=0, seed=seed))
    images = sorted({image for task in tasks for image in task.images})
    task_of = {image: task for task in tasks for image in task.images}
    scores = load_reward("shapes_verifier", mode="mixed").score(
        images, [task_of[i].prompt for i in images], [parse_prompt(task_of[i].prompt) for i in images]
    )
    utility = dict(zip(images, scores.value.tolist(), strict=True))
    draws = np.random.default_rng(seed)
    for name in VOTERS:
        store.join(name)
    left = True
    while left:
        left = False
        for name, gamma in VOTERS.items():
            if (question := store.next(name)) is None:
                continue
            left = True
            odds = gamma * (utility[question.image("left")] - utility[question.image("right")])
            side = "left" if draws.random() < 1 / (1 + np.exp(-odds)) else "right"
            store.vote(name, question.assignment, {"choice": side}, client=f"{question.assignment}", seconds=1.0)
    write_rows(path.with_suffix(".jsonl"), export_rows(store, select_votes(store)))
    store.close()


def run(output: Path, votes: int, seed: int, iterations: int, kind: str) -> None:
    folder = output / f"seed{seed}"
    if not (folder / "votes.jsonl").is_file():
        images(folder / "images", train_prompts(), votes // IMAGES, seed)
        collect(folder / "images", folder / "votes.sqlite", votes, seed)
    heldout = f"data.heldout={folder / 'test.jsonl'}"
    if not (folder / "test.jsonl").is_file():  # of the same voters, on held-out prompts
        images(folder / "test_images", heldout_prompts(), 60, seed)
        collect(folder / "test_images", folder / "test.sqlite", 240, seed)
    train_once(
        folder / "judge", f"shapes_{kind}", f"data.train={folder / 'votes.jsonl'}", heldout, f"seed={seed}",
        f"run.iterations={iterations}", "run.threads=2", f"optimizer.decay_updates={12 * iterations}",
        command="train-reward",
    )  # fmt: skip
    for name, options in (
        ("trained", f"{{model: {folder / 'judge' / 'judge'}}}"),
        *([("untrained", "{model: shapes-vlm}")] if kind == "reward_dance" else []),
    ):
        judge = f"rewards.terms={{judge: {{name: {kind}, options: {options}}}}}"
        plain = "objective.changes_for.diffusion_nft_closed.reference_guidance=null"
        train_once(folder / f"policy_{name}", "shapes_nft", judge, plain, f"seed={seed}", "run.max_seconds=null")


def main() -> None:
    parser = run_parser(__doc__, seeds=[0])
    parser.add_argument("--votes", type=int, default=300)
    parser.add_argument("--iterations", type=int, default=3, help="Of the judge; 12 updates of 64 each.")
    parser.add_argument("--judge", choices=("reward_dance", "hpsv3"), default="reward_dance")
    options = parser.parse_args()
    for seed in options.seeds:
        run(options.output, options.votes, seed, options.iterations, options.judge)


if __name__ == "__main__":
    main()
