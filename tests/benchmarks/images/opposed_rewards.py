# SPDX-License-Identifier: Apache-2.0
"""Does MARBLE keep every one of three or four rewards, two of which are opposed?

    python tests/benchmarks/images/opposed_rewards.py --output runs/opposed --seeds 0 1 2

DiffusionNFT on `shapes_nft` without guidance, by MARBLE's weights (arXiv 2605.06507, measured every
two iterations) and by equal weights of the same z-scores. Contrast and few edges are opposed: on the start's
images they correlate by -0.85 within a prompt. Gains are on 104 held-out prompts, in standard deviations of
the start's images over all prompts.

What was decided before the runs, and how they came out: docs/evidence/claims.md#marble.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import quantile_text, run_parser, train_once, write_rows
from visalign.data.shapes.prompts import heldout_prompts
from visalign.evaluation.heldout.result import load_heldout
from visalign.training.loop.metrics import read_metrics

TERMS = {"verifier": "{name: shapes_verifier, options: {mode: mixed}, weight: %s}",
         "saturation": "{weight: %s}", "contrast": "{weight: %s}",
         "few edges": "{name: edge_density, options: {prefer: smaller}, weight: %s}"}  # fmt: skip
SETS = {"three": ("verifier", "contrast", "few edges"), "four": tuple(TERMS)}
ROW = "objective.changes_for.diffusion_nft"
ARMS = {"equal": f"{ROW}.signal=normalise_then_sum", "MARBLE": "objective.balance_every=2"}


def train(folder: Path, names: tuple[str, ...], arm: str, seed: int, iterations: int, bound: float) -> None:
    prompts = write_rows(folder.with_name("prompts.jsonl"), heldout_prompts()[::2])
    terms = ", ".join(f"{name}: {TERMS[name] % (1 / len(names))}" for name in names)
    levels = ["levels=1", "level_range=[0.0,0.6]", f"loss_options={{bound: {bound}}}"]
    levels += ["signal_options={ddof: 0}"] if arm == "equal" else []
    train_once(
        folder, "shapes_nft", f"rewards={{terms: {{{terms}}}, allow_mixed_units: true}}",
        "objective.algorithm=diffusion_nft", *(f"{ROW}.{level}" for level in levels), ARMS[arm], f"seed={seed}",
        "rollout.prompts_per_iteration=8", "rollout.group_size=8", f"run.iterations={iterations}",
        f"optimizer.decay_updates={4 * iterations}", "run.max_seconds=null", "evaluation={every: 0, seeds: [0]}",
        f"data.heldout={prompts}", "monitor.features=null",
    )  # fmt: skip


def gains(folder: Path, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """[P, K] gain of each reward, in the direction that it asks for; [P] change of the verdict."""
    before, after = (load_heldout(folder / f"{side}.npz") for side in ("before", "after"))
    columns = []
    for name in names:
        sign = 1 if after.higher_is_better[name] else -1
        columns.append(sign * (after.scores[name] - before.scores[name]) / before.scores[name].std())
    return np.stack(columns, 1).astype(float), after.outcome() - before.outcome()


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--bound", type=float, default=0.5, help="of advantages; published: 5")
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    options = parser.parse_args()
    for title in options.sets:
        names = SETS[title]
        print(
            f"\n| {title} | {' | '.join(names)} | the worst-off | verified accuracy | weights at the end |", flush=True
        )
        worst = {}
        for arm in ARMS:
            folders = [options.output / f"{title}_{arm}_{seed}" for seed in options.seeds]
            for folder, seed in zip(folders, options.seeds, strict=True):
                train(folder, names, arm, seed, options.iterations, options.bound)
            gain, right = (np.concatenate(part) for part in zip(*(gains(f, names) for f in folders), strict=True))
            rows = np.random.default_rng(0).integers(len(gain), size=(4000, len(gain)))
            means, value = gain[rows].mean(1), gain.mean(0)
            worst[arm] = value.min(), means.min(1)
            cells = [quantile_text(value[column], means[:, column]) for column in range(len(names))]
            cells += [quantile_text(*worst[arm]), quantile_text(right.mean(), right[rows].mean(1))]
            last = [read_metrics(folder / "metrics.jsonl")[-1] for folder in folders]
            cells.append(
                ", ".join(f"{np.mean([r.get(f'reward_weight/{n}', np.nan) for r in last]):.2f}" for n in names)
            )
            print(f"| {arm} | {' | '.join(cells)} |", flush=True)
        lead = [one - other for one, other in zip(worst["MARBLE"], worst["equal"], strict=True)]
        print(f"MARBLE over equal weights, worst-off: {quantile_text(*lead)}")


if __name__ == "__main__":
    main()
