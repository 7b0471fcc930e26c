# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning without supervised fine-tuning before it, and with a random reward.

    python tests/benchmarks/text/starts.py --output runs/starts --seeds 0 1 2

The packaged language model with noise on its weights is a weak start. It learns by GRPO alone, or first from 40
batches of solutions and then by half as many GRPO iterations. The random reward trains the packaged model as it is.

What was decided before the runs, and how they came out: docs/evidence/claims.md#starts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import lead_text, run_parser, train_once
from visalign.adapters.causal_lm.loading import load_causal_lm
from visalign.data.assets import resolve_model
from visalign.evaluation.heldout.result import load_heldout
from visalign.training.loop.metrics import read_metrics

NOISE = 0.5
"""Standard deviation of the noise over that of each matrix."""


def weak(folder: Path, seed: int) -> Path:
    """The packaged model with noise on its matrices."""
    if not folder.is_dir():
        model, tokenizer = load_causal_lm(resolve_model("tasks-qwen3"), dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        for weight in (weight for weight in model.parameters() if weight.ndim == 2):
            weight.data += NOISE * weight.data.std() * torch.randn(weight.shape, generator=generator)
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return folder


def grpo(folder: Path, model: str | Path, seed: int, iterations: int, *more: str) -> Path:
    train_once(
        folder, "text_grpo", f"model.path={model}", f"seed={seed}", "rollout.prompts_per_iteration=16",
        "optimizer.micro_batch=64", "objective.changes={kl: 0.0}", f"run.iterations={iterations}",
        "run.max_seconds=null", "evaluation={every: 0, seeds: [0]}", *more,
    )  # fmt: skip
    return folder


def supervised(folder: Path, model: Path, seed: int) -> Path:
    train_once(
        folder, "text_sft", f"model.path={model}", f"seed={seed}", "run.iterations=40", "optimizer.decay_updates=40",
        "run.max_seconds=null", "evaluation={every: 0, seeds: [0]}",
    )  # fmt: skip
    return folder


def lead(one: list[np.ndarray], other: list[np.ndarray], prompts: list[str]) -> str:
    return lead_text(np.concatenate(one), np.concatenate(other), prompts)


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--iterations", type=int, default=32)
    options = parser.parse_args()
    outcomes: dict[str, list[np.ndarray]] = {}
    spent: dict[str, list[float]] = {}
    prompts: list[str] = []
    for seed in options.seeds:
        folder = options.output / f"seed{seed}"
        start = weak(folder / "weak", seed)
        first = supervised(folder / "sft", start, seed)
        runs = {
            "GRPO alone": [grpo(folder / "alone", start, seed, options.iterations)],
            "SFT, then GRPO": [first, grpo(folder / "both", first / "model", seed, options.iterations // 2)],
            "random reward": [
                grpo(folder / "random", "tasks-qwen3", seed, options.iterations, "rewards.terms={lot: {name: random}}")
            ],
        }
        for name, parts in runs.items():
            outcomes.setdefault(f"{name}, before", []).append(load_heldout(parts[0] / "before.npz").outcome())
            outcomes.setdefault(name, []).append(load_heldout(parts[-1] / "after.npz").outcome())
            rows = [row for part in parts for row in read_metrics(part / "metrics.jsonl")]
            spent.setdefault(name, []).append(sum(row["seconds"] for row in rows))
            print(f"seed {seed}, {name}: {outcomes[name][-1].mean():.3f}, {spent[name][-1]:.0f} s", flush=True)
        outcomes.setdefault("SFT alone", []).append(load_heldout(first / "after.npz").outcome())
        prompts += load_heldout(first / "after.npz").prompts
    for name, by_seed in outcomes.items():
        print(f"| {name} | {np.mean(by_seed):.3f} ({', '.join(f'{part.mean():.3f}' for part in by_seed)}) |")
    print("GRPO alone over both:", lead(outcomes["GRPO alone"], outcomes["SFT, then GRPO"], prompts))
    print("random over its start:", lead(outcomes["random reward"], outcomes["random reward, before"], prompts))


if __name__ == "__main__":
    main()
