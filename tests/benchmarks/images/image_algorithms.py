# SPDX-License-Identifier: Apache-2.0
"""Algorithms at equal cost on the embedded shapes world: as many forward-equivalents each, three seeds.

    python tests/benchmarks/images/image_algorithms.py --output runs/equal --budget 60000 --seeds 0 1 2

Each row trains `shapes_grpo_guard` (log-probs) or `shapes_nft` (regressions) with the changes below
for as many whole iterations as the budget buys, the rate falling to 0 over them; what the folder has is not
run again. A row is its published loss on these batches, at this rate; none was tuned.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import lead_text, read_rows, run_parser, train_once
from visalign.config import load_config, resolve_config
from visalign.core import vendi_score
from visalign.evaluation.heldout.result import load_heldout
from visalign.pipelines.flow_grpo.inputs import prepare
from visalign.pipelines.flow_grpo.job import FlowGRPOConfig, plan
from visalign.pipelines.sample.job import SampleSettings, sample_images
from visalign.rewards.catalogue import load_reward

TRAJECTORY, REGRESSION = "shapes_grpo_guard", "shapes_nft"
PLAIN = "objective.changes_for.diffusion_nft_closed.reference_guidance=null"
TWO_LEVELS = "objective.changes_for.diffusion_nft_closed.levels=2"
LEVELS = "{levels: 2, level_range: [0.0, 0.6]}"
WINDOW = ["rollout.sde_window=2", "rollout.sde_window_order=random"]
MOVING = ["rollout.sde_window=2", "rollout.sde_window_order=progressive", "rollout.sde_window_every=2"]
SIXTEEN = ["rollout.prompts_per_iteration=18", "rollout.group_size=16"]
TREE = ["rollout.branch={at: [0, 1, 2, 3], children: 2}", "objective.credit=branches"]
SMALL = ["rollout.prompts_per_iteration=8"]  # more iterations for the cost, of 96 images each
TURNING = ["objective.algorithm=flow_grpo", *SMALL]
BRIGHTNESS = 5  # at this weight brightness spreads in a group what the mixed score does, 0.30
PULLED = [
    *SMALL,
    "rewards={terms: {verifier: {name: shapes_verifier, options: {mode: mixed}}, "
    f"brightness: {{weight: {BRIGHTNESS}}}}}, allow_mixed_units: true}}",
]
GDPO = "objective.changes_for.grpo_guard={advantage: gdpo, advantage_options: {ddof: 0}}"
# taken over from texts, each against the same run without it; a reward of 0 and 1 leaves groups without signal
STRICT = [*SMALL, "rewards.terms.verifier.options.mode=correct"]
DYNAMIC = "dynamic={enabled: true, max_rounds: 3}"
PAR = "objective.changes={advantage: par, advantage_options: {k: 5}}"
FLOWRL = [
    "objective.algorithm=flowrl",
    "objective.changes={surrogate_options: {beta: 2}}",
    "objective.ratio_bound=0.5",
    "rollout.log_prob_reduction=sum",
]
CPS = ["rollout.schedule=cps", "rollout.noise_level=0.8", "objective.ratio_bound=null"]
PRECISE = ["rollout.schedule=precise", "rollout.noise_level=1.5"]
ROWS: dict[str, tuple[str, list[str]]] = {
    "Flow-GRPO": (TRAJECTORY, ["objective.algorithm=flow_grpo"]),
    "Flow-GRPO-Fast": (TRAJECTORY, ["objective.algorithm=flow_grpo", *WINDOW]),
    "MixGRPO": (TRAJECTORY, ["objective.algorithm=flow_grpo", *MOVING]),
    "GRPO-Guard": (TRAJECTORY, []),
    "GRPO-Guard, one start": (TRAJECTORY, [*SIXTEEN, "rollout.shared_noise=true"]),
    "GRPO-Guard, tree": (TRAJECTORY, [*SIXTEEN, *TREE]),
    "GRPO-Guard, 96 images": (TRAJECTORY, SMALL),
    "GRPO-Guard, Precise": (TRAJECTORY, [*SMALL, *PRECISE]),
    "GRPO-Guard, CPS": (TRAJECTORY, [*SMALL, *CPS[:2]]),
    "GRPO-Guard, PAR": (TRAJECTORY, [*SMALL, PAR]),
    "FlowRL": (TRAJECTORY, [*SMALL, *FLOWRL]),
    "GRPO-Guard, 0 or 1": (TRAJECTORY, STRICT),
    "GRPO-Guard, 0 or 1, dynamic": (TRAJECTORY, [*STRICT, DYNAMIC]),
    "Flow-GRPO, 96 images": (TRAJECTORY, TURNING),
    "TP-GRPO": (TRAJECTORY, [*TURNING, "objective.credit=turning_points"]),
    "TP-GRPO, one step": (TRAJECTORY, [*TURNING, "objective.credit=one_step"]),
    "two rewards, sum": (TRAJECTORY, PULLED),
    "two rewards, GDPO": (TRAJECTORY, [*PULLED, GDPO]),
    "two rewards, MARBLE": (TRAJECTORY, [*PULLED, "objective.balance_every=2"]),
    "Flow-CPS": (TRAJECTORY, ["objective.algorithm=flow_grpo", *CPS]),
    "DiffusionNFT": (REGRESSION, [PLAIN, TWO_LEVELS]),
    "DiffusionNFT, 96 images": (REGRESSION, [PLAIN, TWO_LEVELS, *SMALL]),
    "DiffusionNFT, replay": (REGRESSION, [PLAIN, TWO_LEVELS, *SMALL, "self_imitation={warmup: 4, batch: 48}"]),
    "DiffusionNFT, scouts": (REGRESSION, [PLAIN, TWO_LEVELS, *SMALL, "rollout.scout={pool: 24, steps: 6}"]),
    "DiffusionNFT, guided reference": (REGRESSION, [TWO_LEVELS]),
    **{
        name: (REGRESSION, [f"objective.algorithm={row}", f"objective.changes_for.{row}={LEVELS}"])
        for name, row in {
            "RAM": "ram",
            "AWM": "awm",
            "V-GRPO": "v_grpo",
            "GDRO": "gdro",
            "online DPO": "diffusion_dpo",
        }.items()
    },
}

WITHOUT = {
    "GRPO-Guard, Precise": "GRPO-Guard, 96 images",
    "GRPO-Guard, CPS": "GRPO-Guard, 96 images",
    "GRPO-Guard, PAR": "GRPO-Guard, 96 images",
    "FlowRL": "GRPO-Guard, 96 images",
    "GRPO-Guard, 0 or 1, dynamic": "GRPO-Guard, 0 or 1",
    "DiffusionNFT, replay": "DiffusionNFT, 96 images",
    "DiffusionNFT, scouts": "DiffusionNFT, 96 images",
}
"""Run with a part -> the same run without it."""


def overrides_for(name: str, seed: int, budget: float) -> tuple[str, list[str], int]:
    """(configuration, overrides, iterations) of a run that costs at most `budget` forward-equivalents."""
    base, changes = ROWS[name]
    evaluation = "evaluation.rewards={shapes_verifier: {}, clip_score: {}, sharpness: {}, brightness: {}}"
    overrides = [
        evaluation,
        f"seed={seed}",
        "evaluation.every=0",
        "run.max_seconds=null",
        "run.threads=1",
        "model.lora.target_modules=null",  # adapters of attention, as the log-prob rows have
        *changes,
    ]
    iterations = 1
    while True:  # a row may cost more in its first iterations: the mean over the run is what counts
        candidate = [*overrides, f"run.iterations={iterations + 1}"]
        cost_plan = plan(load_config(FlowGRPOConfig, resolve_config(base), candidate), measure=False)
        if cost_plan["batch"]["images"] * cost_plan["cost"]["forward_equivalents_per_image"] > budget:
            break
        iterations += 1
    updates = cost_plan["batch"]["updates_per_iteration"]
    rate = ["optimizer.decay=cosine", f"optimizer.decay_updates={iterations * updates}"]
    return base, [*overrides, f"run.iterations={iterations}", *rate], iterations


def train(name: str, seed: int, budget: float, folder: Path) -> None:
    """Train by the command that a user gives, unless the run has a summary."""
    if not (folder / "summary.json").is_file():
        base, overrides, _ = overrides_for(name, seed, budget)
        train_once(folder, base, *overrides)


def variety(folder: Path) -> float:
    """Vendi score of 8 images of a prompt by the packaged CLIP, mean over 24 held-out prompts."""
    path = folder / "variety.json"
    if not path.is_file():
        config = load_config(FlowGRPOConfig, resolve_config(REGRESSION), [])
        records = prepare(config, 1).heldout[::8][:24]
        settings = SampleSettings(lora=[folder / "lora"], seeds=range(8), batch_size=96)
        judge: Any = load_reward("clip_score")
        with tempfile.TemporaryDirectory() as scratch:
            rows = sample_images(records, settings, Path(scratch))
            samples = [np.asarray(Image.open(Path(scratch) / row["image"])) for row in rows]
            images = torch.from_numpy(np.stack(samples)).permute(0, 3, 1, 2).float() / 255
        with torch.no_grad():
            features = judge.towers.image_features_with_gradient(images)
        score = vendi_score(features.unflatten(0, (len(records), 8)))
        path.write_text(json.dumps(float(score.mean())))
    return json.loads(path.read_text())


def numbers(folders: dict[str, list[Path]]) -> dict[str, dict[str, list[float]]]:
    """Of each row that was run, a list by seed: accuracy before and after, and what the training cost."""
    results: dict[str, dict[str, list[float]]] = {}
    for name, runs in folders.items():
        finished = [run for run in runs if (run / "summary.json").is_file()]
        summaries = [json.loads((run / "summary.json").read_text()) for run in finished]
        if finished:
            results[name] = {
                "before": [round(s["before"]["accuracy"], 4) for s in summaries],
                "after": [round(s["after"]["accuracy"], 4) for s in summaries],
                "forward_equivalents": [round(s["images"] * s["forward_equivalents_per_image"]) for s in summaries],
                "seconds": [fastest(read_rows(run / "metrics.jsonl")) for run in finished],
            }
    return results


def fastest(rows: list[dict[str, float]]) -> int:
    """Seconds of a training of which each iteration took what the fastest did: other work slows some."""
    return round(len(rows) * min(row["seconds"] for row in rows))


def table(folders: dict[str, list[Path]]) -> str:
    """Markdown: one row for each algorithm, means over its seeds and what the seeds were."""
    lines = [
        "| | held-out accuracy (seeds) | iterations | forward-equivalents | training, s, fastest seed "
        "| CLIP score | sharpness | brightness | variety |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = []
    for name, runs in folders.items():
        finished = [run for run in runs if (run / "summary.json").is_file()]
        if not finished:
            continue
        summaries = [json.loads((run / "summary.json").read_text()) for run in finished]
        columns = {**numbers({name: finished})[name], "variety": [variety(run) for run in finished]}
        right = columns["after"]
        for key in ("clip_score", "sharpness", "brightness"):
            columns[key] = [s["after"]["rewards"][key]["mean"] for s in summaries]
        mean = {key: statistics.mean(values) for key, values in columns.items()}
        seeds = ", ".join(f"{value:.3f}" for value in right)
        line = (
            f"| {name} | **{statistics.mean(right):.3f}** ({seeds}) | {summaries[0]['iterations']} "
            f"| {mean['forward_equivalents']:,.0f} | {min(columns['seconds'])} | {mean['clip_score']:.3f} "
            f"| {mean['sharpness']:.0f} | {mean['brightness']:.3f} | {mean['variety']:.2f} |"
        )
        rows.append((-statistics.mean(right), line))
    return "\n".join([*lines, *(line for _, line in sorted(rows))])


def leads(folders: dict[str, list[Path]]) -> str:
    """Markdown: lead of each run with a part over the one without, 95 % by bootstrap over the prompts of all seeds."""
    lines = ["| | lead in held-out accuracy |", "|---|---|"]
    for name, plain in WITHOUT.items():
        runs = list(zip(folders.get(plain, []), folders.get(name, []), strict=False))
        runs = [pair for pair in runs if all((run / "summary.json").is_file() for run in pair)]
        if runs:
            ends = [[load_heldout(run / "after.npz") for run in side] for side in zip(*runs, strict=True)]
            prompts = [prompt for end in ends[0] for prompt in end.prompts]
            before, after = (np.concatenate([end.outcome() for end in side]) for side in ends)
            lines.append(f"| {name} | {lead_text(after, before, prompts)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = run_parser(__doc__)
    parser.add_argument("--budget", type=float, default=60000, help="forward-equivalents of a run")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="NAME")
    parser.add_argument("--numbers", type=Path, metavar="FILE", help="JSON of what the site's figure shows")
    options = parser.parse_args()
    runs = {
        name: [options.output / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}" for seed in options.seeds]
        for name in options.only
    }
    for at, seed in enumerate(options.seeds):
        for name in options.only:
            train(name, seed, options.budget, runs[name][at])
            print(f"{name}, seed {seed}", flush=True)
    print(table(runs))
    print(leads(runs))
    if options.numbers is not None:
        lines = [f"{json.dumps(name)}: {json.dumps(columns)}" for name, columns in numbers(runs).items()]
        options.numbers.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
