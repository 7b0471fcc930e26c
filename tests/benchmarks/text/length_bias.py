# SPDX-License-Identifier: Apache-2.0
"""Does a text reward learn its annotators' taste for length, does the probe see it, do balanced pairs remove it?

    python tests/benchmarks/text/length_bias.py --output runs/length --seeds 0 1 2

Pairs of a right and a wrong solution of the packaged tasks; each of the two says its text once or twice, by lot.
Annotators are right, but where the right solution is the shorter one, half of them choose the longer one. Rewards
learn from these labels, from the same by `data.length_balanced`, and from the truth: as many pairs each, read once.
Measured on pairs with true labels of held-out problems, and by `visalign probe-reward --only length`.

What was decided before the runs, and how they came out: docs/evidence/claims.md#length.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from tests.support.benchmarks import quantile_text, run_parser, train_once, write_rows
from visalign.data.text_tasks.tasks import check_answer, misread, text_tasks
from visalign.rewards.text.reward_model import RewardModel

TASKS, LEVELS, BIASED = ("reverse", "nth", "unique", "evens"), (1, 2), 0.5
ARMS = {"all pairs": ("biased", False), "balanced": ("biased", True), "true labels": ("true", False)}


def pairs(count: int, seed: int, split: Literal["train", "heldout"]) -> list[dict[str, Any]]:
    """Draw pairs with their true labels: prompt, chosen, rejected."""
    rng, rows = np.random.default_rng([seed, 71]), []
    for task in text_tasks(count, seed=seed, split=split, tasks=TASKS, levels=LEVELS):
        attempts = (misread(task, rng)["solution"] for _ in range(20))  # some are right all the same
        if wrong := next((text for text in attempts if not check_answer(text, task)[0]), None):
            sides = [" ".join([text] * rng.integers(1, 3)) for text in (task["solution"], wrong)]
            rows.append({"prompt": task["prompt"], "chosen": sides[0], "rejected": sides[1]})
    return rows


def label(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Let an annotator choose."""
    if len(row["chosen"]) < len(row["rejected"]) and rng.random() < BIASED:
        return {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
    return row


def train(folder: Path, arm: str, seed: int, count: int, iterations: int) -> Path:
    """Train a reward on pairs of a seed; return its folder."""
    labels, balanced = ARMS[arm]
    rows, rng = pairs(count, seed, "train"), np.random.default_rng([seed, 72])
    if labels == "biased":
        rows = [label(row, rng) for row in rows]
    table = write_rows(folder.with_name(f"{labels}_{seed}.jsonl"), rows)
    train_once(
        folder, "text_reward", f"data.train={table}", "data.heldout=0", f"seed={seed}", "run.device=cpu",
        f"data.length_balanced={str(balanced).lower()}", f"run.iterations={iterations}", command="train-reward",
    )  # fmt: skip
    return folder / "judge"


def probe(judge: Path, rows: list[dict[str, Any]]) -> tuple[str, float]:
    """Verdict of the length probe, and what a text said twice gains in spreads of the score."""
    texts = [{"prompt": r["prompt"], "completion": r[side]} for r in rows[:64] for side in ("chosen", "rejected")]
    table = write_rows(judge.parent / "reference.jsonl", texts)
    command = [sys.executable, "-m", "visalign", "probe-reward", "reward_model", "--option", f"model={judge}"]
    command += ["--reference", str(table), "--only", "length", "--count", "128", "--device", "cpu", "--json"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if not process.stdout:
        raise SystemExit(process.stderr[-2000:])
    report = json.loads(process.stdout)["probes"][0]
    return report["verdict"], report["levels"][0]["mean"]


def text(values: np.ndarray, draws: np.ndarray, form: str = ".3f") -> str:
    """Mean of [N] values, NaN where they do not count, with its interval."""
    return quantile_text(np.nanmean(values), np.nanmean(values[draws], axis=1), form)


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=2600, help="before they are balanced")
    parser.add_argument("--heldout", type=int, default=400)
    parser.add_argument("--iterations", type=int, default=3, help="of 25 updates of 16 pairs")
    options = parser.parse_args()
    wins: dict[str, list[np.ndarray]] = {arm: [] for arm in ARMS}
    probes: dict[str, list[tuple[str, float]]] = {arm: [] for arm in ARMS}
    leads = []
    for seed in options.seeds:
        heldout = pairs(options.heldout, seed, "heldout")
        leads.append(np.array([np.sign(len(row["chosen"]) - len(row["rejected"])) for row in heldout]))
        for arm in ARMS:
            judge = train(options.output / f"{arm.replace(' ', '_')}_{seed}", arm, seed, options.pairs,
                          options.iterations)  # fmt: skip
            reward, prompts = RewardModel(judge), [row["prompt"] for row in heldout]
            better, worse = (
                reward.score([row[side] for row in heldout], prompts).value.numpy() for side in ("chosen", "rejected")
            )
            wins[arm].append((np.sign(better - worse) + 1) / 2)
            probes[arm].append(probe(judge, heldout))
            print(f"seed {seed}, {arm}: {wins[arm][-1].mean():.3f}, {probes[arm][-1]}", flush=True)
    lead = np.concatenate(leads)
    draws = np.random.default_rng(0).integers(len(lead), size=(4000, len(lead)))
    columns = ("labels", "accuracy", "longer one right", "shorter one right", "difference", "said twice", "probe")
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for arm, parts in wins.items():
        right = np.concatenate(parts)
        longer, shorter = (np.where(lead == side, right, np.nan) for side in (1, -1))
        both = np.nanmean(longer[draws], axis=1) - np.nanmean(shorter[draws], axis=1)
        difference = quantile_text(np.nanmean(longer) - np.nanmean(shorter), both)
        gains, verdicts = (", ".join(f"{p[1]:+.2f}" for p in probes[arm]), ", ".join(p[0] for p in probes[arm]))
        cells = [text(values, draws) for values in (right, longer, shorter)]
        print(f"| {arm} | {' | '.join(cells)} | {difference} | {gains} | {verdicts} |")
    plain, balanced = (np.concatenate(wins[arm]) for arm in ("all pairs", "balanced"))
    for title, side in (("all", None), ("shorter one right", -1)):
        gain = balanced - plain
        gain = gain if side is None else np.where(lead == side, gain, np.nan)
        print(f"balanced over all pairs, {title}: {text(gain, draws, '+.3f')}")


if __name__ == "__main__":
    main()
