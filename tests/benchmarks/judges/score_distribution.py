# SPDX-License-Identifier: Apache-2.0
"""A student of a distribution over scores, against RewardDance's answer and HPSv3's head, at equal size.

    python tests/benchmarks/judges/score_distribution.py --output runs/students --seeds 0

All start from the packaged vision-language model and see as many images of the world as often: the student and
`rating` (the mean alone) those with nine raters' mean and deviation, the others pairs with nine votes that
differ in quality. Measured on held-out pairs that differ in quality: accuracy where the truth is clear,
likelihood and calibration (ECE) of P(left better) against the votes, AUROC of the deviation for errors, and
seconds per image. **That the student's distribution helps is refuted** where its likelihood per vote is no
better than that of the mean alone, or its accuracy is lower than that of either judge of pairs by more than two
standard errors.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import argument_parser, run_visalign
from visalign.data.sets.sources import shapes_pairs
from visalign.evaluation.rewards.preferences import evaluate_preferences
from visalign.pipelines.evaluate.scores import score_pairs
from visalign.rewards import load_judge

RATED = ["shapes_visual_quality"]
JUDGES: dict[str, tuple[str, list[str]]] = {
    "student": ("visual_quality_r1", [*RATED, "objective.task=rating_distribution"]),
    "rating": ("visual_quality_r1", RATED),
    "RewardDance": ("reward_dance", ["shapes_reward_dance", "data.kinds=[quality]", "data.heldout_kinds=[quality]"]),
    "HPSv3": ("hpsv3", ["shapes_hpsv3", "data.kinds=[quality]", "data.heldout_kinds=[quality]"]),
}
"""Name -> (reward that reads it, configuration and overrides)."""


def train(folder: Path, name: str, images: int, seed: int) -> Path:
    """Train a judge on so many images; one that is there stays."""
    if not (folder / "summary.json").is_file():
        _, config = JUDGES[name]
        is_rated = "shapes_visual_quality" in config
        size, batch = (images, 64) if is_rated else (images // 2, 32)  # 64 images an update in both
        updates = images // 64
        run_visalign(
            "train-reward", *config, f"seed={seed}", f"data.size={size}", f"data.batch={batch}",
            "data.heldout_size=100",
            "data.surroundings=0", "evaluation.every=0", "optimizer.lr=1e-3", "optimizer.updates_per_iteration=1",
            f"optimizer.decay_updates={updates}", f"run.iterations={updates}", "run.threads=1", "-o", str(folder),
        )  # fmt: skip
    return folder / "judge"


def measure(name: str, judge: Path, count: int) -> dict[str, Any]:
    """Accuracy, likelihood, calibration and cost on `count` held-out pairs, of which those of quality count."""
    pairs = shapes_pairs(count, seed=11)
    pairs = replace(pairs, pairs=tuple(pair for pair in pairs.pairs if pair.extra["kind"] == "quality"), rows=None)
    reward = load_judge(JUDGES[name][0], model=judge, device="cpu")
    start = time.perf_counter()
    report = evaluate_preferences(pairs, score_pairs(pairs, reward))
    seconds = (time.perf_counter() - start) / (2 * len(pairs))
    calibration, std = report["calibration"], report["std"]
    return {"agreement": report["agreement"], "calibration": calibration, "std": std, "seconds": seconds}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="runs that are there are not repeated")
    parser.add_argument("--images", type=int, default=6400)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", choices=list(JUDGES), default=list(JUDGES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in given.seeds:
        for name in given.only:
            judge = train(given.output / f"{name}_{seed}", name, given.images, seed)
            print(seed, name, measure(name, judge, given.pairs), flush=True)


if __name__ == "__main__":
    main()
