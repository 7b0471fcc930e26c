# SPDX-License-Identifier: Apache-2.0
"""Score or win rate as reward, with the same judge, over a long run.

    python tests/benchmarks/images/pref_grpo.py --output runs/pref --iterations 150 --seeds 0

trains twice from the same start (`visalign train shapes_pref_grpo`, and the same file as `flow_grpo` on the
judge's plain score), and prints what the verifier, the judge and the images' statistics say along the way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import run_parser, train_once
from visalign.config import resolve_config
from visalign.training.loop.metrics import read_metrics

WATCHED = ("clip_score", "sharpness", "saturation", "edge_density", "contrast")
"""Rewards that nobody trains on, reported to see what else moves."""


def configs(output: Path) -> dict[str, Path]:
    """Name -> the configuration of both ways; that of scores is written beside the runs."""
    win_rate, score = resolve_config("shapes_pref_grpo"), output / "score.yaml"
    output.mkdir(parents=True, exist_ok=True)
    score.write_text(win_rate.read_text(encoding="utf-8").replace("pipeline: pref_grpo", "pipeline: flow_grpo"))
    return {"win rate": win_rate, "score": score}


def table(folders: dict[str, Path]) -> str:
    """A Markdown table: one row for each evaluation of each run."""
    lines: list[str] = []
    names: list[str] = []
    for label, folder in folders.items():
        before = json.loads((folder / "summary.json").read_text())
        evaluations = [r for r in read_metrics(folder / "metrics.jsonl") if "heldout/accuracy" in r]
        if not names:
            names = [k for k in evaluations[-1] if k.startswith("heldout/") and not k.startswith("heldout/accuracy.")]
            lines += [
                "| reward | iteration | reward within groups, std | " + " | ".join(n[8:] for n in names) + " |",
                "|" + "---|" * (3 + len(names)),
            ]
        for record in evaluations:
            cells = " | ".join(f"{record[name]:.3g}" for name in names)
            lines.append(f"| {label} | {record['iteration']} | {record['reward_group_std']:.3f} | {cells} |")
        ends = [before[when]["accuracy"] for when in ("before", "after")]
        lines.append(f"| {label} | all held-out prompts | | {ends[0]} -> {ends[1]} |" + " |" * (len(names) - 1))
    return "\n".join(lines)


def main() -> None:
    parser = run_parser(__doc__, seeds=[0])
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--every", type=int, default=25)
    options = parser.parse_args()
    watched = ", ".join(f"{name}: {{}}" for name in ("shapes_verifier", *WATCHED))
    for seed in options.seeds:
        folders = {}
        for label, config in configs(options.output).items():
            folders[label] = options.output / f"{label.replace(' ', '_')}_{seed}"
            train_once(
                folders[label], str(config), f"seed={seed}", f"run.iterations={options.iterations}",
                "run.max_seconds=null", f"evaluation={{every: {options.every}, rewards: {{{watched}}}}}",
            )  # fmt: skip
        print(f"\nSeed {seed}\n\n{table(folders)}")


if __name__ == "__main__":
    main()
