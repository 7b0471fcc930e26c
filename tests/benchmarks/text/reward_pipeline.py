# SPDX-License-Identifier: Apache-2.0
"""SFT, then a reward model, then PPO and GRPO on it: verified accuracy after each, on the packaged tasks.

    python tests/benchmarks/text/reward_pipeline.py runs/pipeline --seeds 0 1 2
    python tests/benchmarks/text/reward_pipeline.py runs/own --seeds 0 1 2 --learn-from samples --kl 0.05
    python tests/benchmarks/text/reward_pipeline.py runs/misread_kl --seeds 0 1 2 --kl 0.05 --over runs/misread

The reward model learns from solutions of misread problems, or from the SFT model's own samples with the verifier as
their annotator (InstructGPT, arXiv 2203.02155, section 3.1). In RL the verifier measures alone.
Refuted where the verified accuracy after PPO or after GRPO is not above that after SFT: the interval of the gain
(± 1.96 standard errors over seeds; of one seed, over held-out prompts) holds 0. Prints a table in Markdown.

`--over` compares the policies with those of other settings, on the same prompts. "The KL helped" is refuted where the
interval of the lead with it over without it, from the same pairs, holds 0 or lies below; "the pairs helped" where that
of samples over misread problems, at the same KL, does. 95 % by bootstrap over the held-out prompts of all seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import argument_parser, lead_text
from visalign.config import load_config
from visalign.evaluation.heldout.result import load_heldout
from visalign.pipelines.text import job, sample, supervised
from visalign.pipelines.train_reward import text as reward

KINDS = ("data.tasks=[reverse, nth, unique, evens]", "data.levels=[1, 2]", "run.device=cpu")
HELDOUT = ("data.heldout_per_task=40", "evaluation.seeds=[0]")
SHORT = ("optimizer.micro_batch=64", "optimizer.lr=5e-5", "evaluation.every=0")


def step(run: Callable[..., Any], kind: Any, folder: Path, *overrides: str) -> dict[str, Any]:
    """Run a job, unless its folder has a result; return its summary."""
    summary_file = folder / "summary.json"
    if not summary_file.is_file():
        run(load_config(kind, None, [*KINDS, *overrides]), folder, resume=(folder / "config.yaml").is_file())
    return json.loads(summary_file.read_text())


def pipeline(folder: Path, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the pair accuracy of the reward and the verified accuracies of one seed."""
    start = f"seed={seed}"
    sft = ("generation.max_new_tokens=64", "data.batch=64", "optimizer.lr=5e-5", "run.iterations=2")
    tuned = step(supervised.run, supervised.TextSFTConfig, folder / "sft", start, *sft, *HELDOUT, "data.size=1200")
    pace = ("optimizer.lr=1e-3", "optimizer.updates_per_iteration=25", "evaluation.every=0")
    pairs: tuple[str, ...] = ("data.size=5000", "data.batch=16", "data.micro_batch=16")
    if options.learn_from == "samples":
        answers = ("rollout.samples=8", "rollout.max_new_tokens=64", "selection.rule=all", "data.size=2400")
        model = f"model.path={folder / 'sft/model'}"
        step(sample.run, sample.TextSampleConfig, folder / "samples", start, model, *answers)
        pairs = (f"data.train={folder / 'samples/dataset.jsonl'}", "data.batch=16", "data.micro_batch=16")
    judge = step(reward.run, reward.TextRewardConfig, folder / "reward", start, *pairs, *pace)
    term = f"rewards.terms={{reward_model: {{options: {{model: {folder / 'reward/judge'}}}}}}}"
    more = (start, f"model.path={folder / 'sft/model'}", term, f"run.iterations={options.iterations}")
    more += (*HELDOUT, *SHORT, "data.size=1200")
    more += ("evaluation.rewards={task_answer: {}}", "evaluation.correctness=task_answer")
    more += (f"objective.changes={{kl: {options.kl}}}",)  # the default of GRPO is 0.04
    group = ("rollout.prompts_per_iteration=16", "rollout.group_size=8", "rollout.max_new_tokens=64")
    grpo = step(job.run, job.TextGRPOConfig, folder / "grpo", *more, *group)
    wide = ("rollout.prompts_per_iteration=64", "rollout.group_size=2", "rollout.max_new_tokens=64")
    ppo = step(
        job.run, job.TextPPOConfig, folder / "ppo", *more, *wide, "objective.epochs=2", "objective.heads_lr=5e-4"
    )
    row = {
        "pair accuracy": judge["after"]["accuracy"],
        "packaged": tuned["before"]["accuracy"],
        "SFT": tuned["after"]["accuracy"],
    }
    for name, summary in (("PPO", ppo), ("GRPO", grpo)):
        before, after = (summary[when]["rewards"]["reward_model"]["mean"] for when in ("before", "after"))
        row |= {name: summary["after"]["accuracy"], f"reward of {name}": after - before}
        row[f"error of {name}"] = (summary["gain"]["high"] - summary["gain"]["low"]) / 3.92
    return row


def table(rows: Sequence[dict[str, float]]) -> str:
    """Write the means over seeds, and the gains over SFT with their intervals, as Markdown."""
    lines = ["| seeds | reward, pair accuracy | packaged model | SFT | PPO | GRPO |", "|---|---|---|---|---|---|"]
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    cells = [f"{means[name]:.3f}" for name in ("pair accuracy", "packaged", "SFT")]
    for name in ("PPO", "GRPO"):
        gains = [row[name] - row["SFT"] for row in rows]
        spread = (
            float(np.std(gains, ddof=1)) / math.sqrt(len(gains)) if len(gains) > 1 else rows[0][f"error of {name}"]
        )
        cells.append(f"{means[name]:.3f} ({np.mean(gains):+.3f} ± {1.96 * spread:.3f})")
    return "\n".join([*lines, f"| {len(rows)} | {' | '.join(cells)} |"])


def lead(folder: Path, other: Path, seeds: Sequence[int], policy: str) -> str:
    """Write the lead of a policy over that of the other folder in verified accuracy."""
    ends = [[load_heldout(f / str(seed) / policy / "after.npz") for seed in seeds] for f in (other, folder)]
    prompts = [prompt for end in ends[0] for prompt in end.prompts]
    before, after = (np.concatenate([end.outcome() for end in side]) for side in ends)
    return lead_text(after, before, prompts)


def main() -> None:
    """Run the pipeline for each seed and print the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("folder", type=Path, help="run folders; finished ones are not repeated")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=10, help="of PPO and of GRPO")
    parser.add_argument("--learn-from", choices=("misread", "samples"), default="misread", help="pairs of the reward")
    parser.add_argument("--kl", type=float, default=0.0, help="weight of the KL to the SFT model")
    parser.add_argument("--over", type=Path, help="folder of other settings to compare the policies with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for seed in options.seeds:
        rows.append(pipeline(options.folder / str(seed), seed, options))
        print(json.dumps({"seed": seed, **rows[-1]}), flush=True)
        print(table(rows), flush=True)
    if options.over:
        leads = (
            f"{policy.upper()} {lead(options.folder, options.over, options.seeds, policy)}"
            for policy in ("ppo", "grpo")
        )
        print(f"over {options.over}: {', '.join(leads)}")


if __name__ == "__main__":
    main()
