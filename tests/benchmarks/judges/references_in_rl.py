# SPDX-License-Identifier: Apache-2.0
"""Do reference images help a generative judge as the reward of RL, at equal cost?

    python tests/benchmarks/judges/references_in_rl.py --output runs/references --seeds 0 1 2

`shapes-vlm`, asked about one image (`reward_dance`), against the same model fine-tuned on pairs
(`shapes-pairs`), asked if an image beats the best 2 of 8 images that the model before training drew
(`rewards.terms.judge.references`). `shapes_nft` without guided reference, 24 prompts. The arm
without references has so many iterations more as the drawing costs. Verified accuracy on 104 held-out prompts.

What was decided before the runs, and how they came out: docs/evidence/claims.md#references-in-rl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import lead_text, run_parser, train_once, write_rows
from visalign.data.shapes.prompts import CATEGORIES, heldout_prompts, train_prompts
from visalign.evaluation import load_heldout
from visalign.training.loop.metrics import read_metrics

COUNT, PROMPTS, SIDE = 8, 24, 8
"""References drawn of a prompt; training prompts; prompts of an iteration, and images of a prompt."""
PAIR = "name: reward_dance_pairs, options: {both_orders: false}"
ARMS = {
    "one image, no references": "{name: reward_dance}",
    "the best 2 of 8, drawn once": f"{{{PAIR}, references: {{count: {COUNT}, keep: 2}}}}",
}


def train(folder: Path, term: str, seed: int, iterations: int) -> None:
    heldout = write_rows(folder.parent / "heldout.jsonl", heldout_prompts()[::2])
    by_tag = [[r for r in train_prompts() if r["tag"] == tag][: PROMPTS // len(CATEGORIES)] for tag in CATEGORIES]
    table = write_rows(folder.parent / "prompts.jsonl", [record for records in by_tag for record in records])
    row = "objective.changes_for.diffusion_nft_closed"
    train_once(
        folder, "shapes_nft", f"rewards.terms={{judge: {term}}}",
        f"data.train={table}", f"data.heldout={heldout}",
        f"{row}.reference_guidance=null", f"{row}.kl_until={iterations // 4}", f"seed={seed}",
        f"rollout.prompts_per_iteration={SIDE}", f"rollout.group_size={SIDE}", f"run.iterations={iterations}",
        f"optimizer.decay_updates={4 * iterations}", "run.max_seconds=null", "run.threads=1", "run.device=cpu",
        "evaluation={every: 0, seeds: [0], rewards: {shapes_verifier: {}}}", "monitor.features=null",
    )  # fmt: skip


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--iterations", type=int, default=6, help="of the arm with references")
    parser.add_argument("--more", type=int, default=2, help="iterations of the arm without")
    options = parser.parse_args()
    after: dict[str, np.ndarray] = {}
    print("| reward | forward-equivalents | before | after | by seed | spread left |\n|---|---|---|---|---|---|")
    for arm, term in ARMS.items():
        folders = [options.output / f"{arm.split()[0]}_{seed}" for seed in options.seeds]
        for folder, seed in zip(folders, options.seeds, strict=True):
            train(folder, term, seed, options.iterations + options.more * ("references: " not in term))
        costs = [json.loads((folder / "summary.json").read_text(encoding="utf-8")) for folder in folders]
        cost = np.mean([c["images"] * c["forward_equivalents_per_image"] for c in costs])
        before, ends = ([load_heldout(f / f"{side}.npz").outcome() for f in folders] for side in ("before", "after"))
        rows = [read_metrics(f / "metrics.jsonl") for f in folders]
        spread = np.mean([r[-1]["reward_group_std"] / r[0]["reward_group_std"] for r in rows])
        after[arm], seeds = np.concatenate(ends), ", ".join(f"{end.mean():.3f}" for end in ends)
        means = f"{np.concatenate(before).mean():.3f} | {after[arm].mean():.3f}"
        print(f"| {arm} | {cost:.0f} | {means} | {seeds} | {spread:.2f} |", flush=True)
    labels = [r["prompt"] for r in heldout_prompts()[::2]] * len(options.seeds)
    first, second = after.values()
    print(f"\nLead of references: {lead_text(second, first, labels)}")


if __name__ == "__main__":
    main()
