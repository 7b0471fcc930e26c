# SPDX-License-Identifier: Apache-2.0
"""Score or win rate as reward, with the same judge, over a long run.

    python tests/benchmarks/images/pref_grpo.py --output runs/pref --iterations 150 --seeds 0

trains twice from the same start (`visalign train shapes_pref_grpo`, and the same file as `flow_grpo` on the
judge's plain score), and prints what the verifier, the judge and the images' statistics say along the way.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from visalign.config import load_config, read_config, resolve_config
from visalign.pipelines.flow_grpo import job as flow_grpo
from visalign.pipelines.flow_grpo import job as pref_grpo
from visalign.training.loop.metrics import read_metrics

WATCHED = ("clip_score", "sharpness", "saturation", "edge_density", "contrast")
"""Rewards that nobody trains on, reported to see what else moves."""


def configs(iterations: int, seed: int, every: int, overrides: list[str]) -> dict[str, tuple[Any, Any]]:
    """name -> (pipeline module, configuration) of both ways."""
    path = resolve_config("shapes_pref_grpo")
    watched = ", ".join(f"{name}: {{}}" for name in ("shapes_verifier", *WATCHED))
    shared = [
        f"seed={seed}", f"run.iterations={iterations}", "run.max_seconds=null",
        f"evaluation.every={every}", f"evaluation.rewards={{{watched}}}", *overrides,
    ]  # fmt: skip
    plain = ROOT / "configs" / ".score_instead_of_win_rate.yaml"
    text = path.read_text(encoding="utf-8").replace("pipeline: pref_grpo", "pipeline: flow_grpo")
    try:
        plain.write_text(text, encoding="utf-8")
        assert read_config(plain)["pipeline"] == "flow_grpo"
        score = load_config(flow_grpo.FlowGRPOConfig, plain, shared)
    finally:
        plain.unlink(missing_ok=True)
    return {"win rate": (pref_grpo, load_config(pref_grpo.PrefGRPOConfig, path, shared)), "score": (flow_grpo, score)}


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--only", choices=("win rate", "score"), default=None)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    for seed in options.seeds:
        folders = {}
        for label, (pipeline, config) in configs(options.iterations, seed, options.every, options.overrides).items():
            folder = options.output / f"{label.replace(' ', '_')}_{seed}"
            if options.only in (None, label) and not (folder / "summary.json").is_file():
                pipeline.run(config, folder, resume=(folder / "config.yaml").is_file())
            if (folder / "summary.json").is_file():
                folders[label] = folder
        print(f"\nSeed {seed}\n\n{table(folders)}")


if __name__ == "__main__":
    main()
