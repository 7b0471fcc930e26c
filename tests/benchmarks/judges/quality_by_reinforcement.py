# SPDX-License-Identifier: Apache-2.0
"""A judge of quality that learns by reinforcement: fidelity of order against other rewards, new distortions.

    python tests/benchmarks/judges/quality_by_reinforcement.py --output runs/quality --seeds 0 1 2

The packaged model writes six ratings an image and learns by GRPO from their order (VisualQuality-R1, arXiv
2505.14460), from whether it is right, or from the distance to the mean opinion; beside them as many updates
on the squared error. Measured is SRCC on held-out prompts, with the distortions of training and with new
ones. Fidelity is refuted where the interval of its lead over another reward on the new ones holds 0 or lies
below; 95 %, by bootstrap over images, paired, of the mean over seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import quantile_text, run_parser, train_once
from visalign.data.sets.image_references import resolve_image
from visalign.data.sets.records import QualityRecord
from visalign.data.sets.sources import shapes_quality, write_rows
from visalign.evaluation.statistics.correlations import srcc
from visalign.rewards.questions.visual_quality_r1 import VisualQuality

KNOWN, NEW = ("none", "blur", "jpeg"), ("noise", "contrast")
ARMS = ("fidelity", "binary", "regression")


def trained(output: Path, arm: str, seed: int, iterations: int, rows: Path) -> Path:
    """The folder of a judge that learnt by one reward."""
    folder = output / f"{arm}_{seed}"
    train_once(
        folder, "shapes_visual_quality_r1", f"seed={seed}", f"run.iterations={iterations}",
        f"optimizer.decay_updates={iterations}", "run.max_seconds=null",
        f"data.train={rows}", f"data.heldout={rows}", "data.heldout_size=20", "evaluation.every=0",
        f"rewards.terms={{rating: {{options: {{rule: {arm}, form: 0.1}}}}}}",
    )  # fmt: skip
    return folder / "model"


def supervised(output: Path, seed: int, updates: int, rows: Path) -> Path:
    """The same model after as many updates on the squared error of the expectation."""
    folder = output / f"supervised_{seed}"
    train_once(
        folder, "shapes_visual_quality", f"seed={seed}", f"data.train={rows}",
        "data.heldout=null", "data.surroundings=0", "data.batch=48", f"run.iterations={updates // 10}",
        "optimizer.updates_per_iteration=10", f"optimizer.decay_updates={updates}", command="train-reward",
    )  # fmt: skip
    return folder / "judge"


def ratings(model: Path | str, samples: list[QualityRecord]) -> np.ndarray:
    judge = VisualQuality(str(model))
    images = [resolve_image(image.image) for image in samples]
    parts = [judge.score(images[i : i + 100], [""] * len(images[i : i + 100])) for i in range(0, len(images), 100)]
    return np.concatenate([part.value.numpy() for part in parts])


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    options = parser.parse_args()
    output = options.output
    output.mkdir(parents=True, exist_ok=True)
    rows = output / "train.jsonl"
    if not rows.is_file():
        write_rows(rows, [r for r in shapes_quality(10000, split="train").records if r.category in KNOWN])
    images = list(shapes_quality(1500).records)
    scores: dict[str, list[np.ndarray]] = {"before": [ratings("shapes-vlm", images)] * len(options.seeds)}
    for seed in options.seeds:
        for arm in ARMS:
            scores.setdefault(arm, []).append(ratings(trained(output, arm, seed, options.iterations, rows), images))
        scores.setdefault("supervised", []).append(ratings(supervised(output, seed, options.iterations, rows), images))
    mos = np.array([image.mos for image in images])
    draws = np.random.default_rng(0)
    for kinds in (KNOWN, NEW):
        indices = np.array([n for n, image in enumerate(images) if image.category in kinds])
        samples = [draws.choice(indices, len(indices)) for _ in range(1000)]
        correlations = {
            arm: np.array([np.mean([srcc(values[p], mos[p]) for values in by_seed]) for p in (indices, *samples)])
            for arm, by_seed in scores.items()
        }
        for arm, value in correlations.items():
            lead = correlations["fidelity"] - value
            gap = quantile_text(lead[0], lead[1:])
            print(f"{', '.join(kinds)}: {arm} SRCC {value[0]:.3f}; fidelity leads by {gap}")


if __name__ == "__main__":
    main()
