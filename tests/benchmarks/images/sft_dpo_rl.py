# SPDX-License-Identifier: Apache-2.0
"""One model from fine-tuning over preferences to a reward: does each step gain held-out accuracy?

    python tests/benchmarks/images/sft_dpo_rl.py --output runs/chain --seeds 0 1 2

1. `sample` draws training prompts with guidance 3; `sft_images` learns, without guidance, the images that are right.
2. `sample` draws three images of each prompt from the result; `collect --judge shapes_verifier` votes on their pairs;
   `diffusion_dpo` learns the votes.
3. `shapes_nft` goes on with that LoRA by the verifier, 20 iterations.

What was decided before the runs, and how they came out: docs/trainers/sft_images.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from tests.support.benchmarks import read_rows, run_parser, run_visalign, write_rows
from visalign.data.shapes.prompts import train_prompts
from visalign.evaluation import load_heldout

PER_KIND = 300  # Prompts of each kind that are drawn, at most
MEASURED = ["data.heldout=shapes:heldout", "evaluation.correctness=shapes_verifier", "evaluation.seeds=[0, 1]"]
MEASURED += ["evaluation.rewards={shapes_verifier: {}}", "evaluation.every=0", "run.max_seconds=null"]
VOTED = ["shapes_verifier", "--option", "shapes_verifier.mode=mixed"]
DPO = [
    "rollout={prompts_per_iteration: 384, group_size: 2, merge_adapters: false}",
    "objective={algorithm: diffusion_dpo, changes: {levels: 1, density: uniform, loss_options: {beta: 100}}}",
    "optimizer={lr: 1e-3, updates_per_iteration: 1}",
]


def prompts(table: Path, seed: int) -> str:
    """Write the prompts that are drawn; their path."""
    records, rng = train_prompts(), np.random.default_rng(seed)
    kinds = [[r for r in records if r["tag"] == tag] for tag in sorted({r["tag"] for r in records})]
    return str(write_rows(table, (kind[i] for kind in kinds for i in rng.permutation(len(kind))[:PER_KIND])))


def chain(folder: Path, seed: int) -> list[Path]:
    """Run the three steps of a seed; the folders of their runs."""
    table, seeded = prompts(folder / "prompts.jsonl", seed), [*MEASURED, f"seed={seed}"]
    drawn, own = folder / "guided", folder / "own"
    if not drawn.is_dir():
        guided = ["-r", "shapes_verifier", "--option", "guidance=3", "--batch-size", "64"]
        run_visalign("sample", table, "--seeds", f"{10 * seed},{10 * seed + 1}", *guided, "-o", str(drawn))
    right = [row for row in read_rows(drawn / "images.jsonl") if row["shapes_verifier"] == 1]
    rows = ({"image": str(drawn / Path(row["image"]).name), "prompt": row["prompt"]} for row in right)
    images = f"data.images={write_rows(folder / 'right.jsonl', rows)}"
    sft, dpo, rl = (folder / name for name in ("sft", "dpo", "rl"))
    run_visalign("train", "sft_images", images, "data.images_size=null", *seeded, "--output", str(sft))
    model = str(sft / "model")
    if not own.is_dir():
        plain = ["--model", model, "--steps", "10", "--dtype", "float32", "--option", "guidance=null"]
        draws = ",".join(str(10 * seed + n) for n in range(3))
        run_visalign("sample", table, "--seeds", draws, *plain, "--batch-size", "64", "-o", str(own))
    pairs = folder / "pairs.jsonl"
    if not pairs.is_file():
        run_visalign("collect", str(folder / "votes.sqlite"), str(own), "--judge", *VOTED, "--export", str(pairs))
    start = ["shapes_nft", f"model.path={model}", "data.balance=false"]
    run_visalign("train", *start, f"data.pairs={pairs}", *DPO, *seeded, "run.iterations=24", "--output", str(dpo))
    lora = [f"model.lora_path={dpo / 'lora'}", "rollout.merge_adapters=true", "run.iterations=20"]
    run_visalign("train", *start[:2], *lora, *seeded, "--output", str(rl))
    return [sft, dpo, rl]


def gains(runs: list[Path]) -> dict[str, Any]:
    """Accuracy before and after a step, and the paired gain with its interval over the prompts of all seeds."""
    before, after = ([load_heldout(run / f"{name}.npz").correct for run in runs] for name in ("before", "after"))
    first, last = (np.concatenate([np.reshape(c, (-1, 2)).mean(1) for c in sides]) for sides in (before, after))
    rng = np.random.default_rng(0)
    change = last - first
    means = [change[rng.integers(len(change), size=len(change))].mean() for _ in range(5000)]
    low, high = np.quantile(means, [0.025, 0.975])
    return {"before": first.mean(), "after": last.mean(), "gain": change.mean(), "low": low, "high": high}


def main() -> None:
    parser = run_parser(__doc__, seeds=[0])
    args = parser.parse_args()
    by_seed = [chain(args.output / str(seed), seed) for seed in args.seeds]
    for step, runs in zip(("fine-tuning", "preferences", "reward"), zip(*by_seed, strict=True), strict=True):
        print(json.dumps({"step": step, **{k: round(float(v), 3) for k, v in gains(list(runs)).items()}}))


if __name__ == "__main__":
    main()
