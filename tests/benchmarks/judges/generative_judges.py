# SPDX-License-Identifier: Apache-2.0
"""Generative judges against a head: one image or two, with and without a teacher's reasons.

    python tests/benchmarks/judges/generative_judges.py --output runs/judges --seeds 0 1 2

Five judges, adapters of one size on the packaged vision-language model, learn the same pairs once: a head and
P(yes) of one image by Bradley-Terry; P(yes) of a pair by the vote, by written decisions, by decisions with
reasons. Measured are accuracy on clear held-out pairs, on known and on other grounds, and for judges of one
image what a policy that they reward comes to. RewardDance's claims (arXiv 2509.08826) are refuted where the
interval of a lead of LEADS, or of the spread left over the head's, holds 0 (± 1.96 standard errors).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import first_pairs, print_table, run_parser, train_once
from visalign.data.shapes.preferences import KINDS, ShapesPair, ShapesPreferences
from visalign.rewards import load_judge
from visalign.training.loop.metrics import read_metrics

WHY = "Is picture 2 better than picture 1 for {prompt}? Answer, then say why."
BETTER = "Is picture 2 better than picture 1 for {prompt}?"
JUDGES: dict[str, tuple[str, dict[str, Any]]] = {
    "head, Bradley-Terry": ("hpsv3", {}),
    "P(yes), one image": ("reward_dance", {}),
    "P(yes), pair": ("reward_dance_pairs", {}),
    "P(yes), pair, decisions written": ("reward_dance_pairs", {}),
    "P(yes), pair, decisions and reasons": ("reward_dance_pairs", {"decision_first": True}),
}
"""Name -> (reward, its options)."""
LEADS = (
    ("P(yes), one image", "head, Bradley-Terry"),
    ("P(yes), pair", "head, Bradley-Terry"),
    ("P(yes), pair", "P(yes), one image"),
    ("P(yes), pair, decisions and reasons", "P(yes), pair, decisions written"),
)
BATCH = 64


def trained(folder: Path, name: str, pairs: int, seed: int) -> Path:
    """The folder of a judge."""
    written = "decisions" in name
    updates = math.ceil(pairs / BATCH)
    common = [f"seed={seed}", f"data.size={pairs}"]
    if written:
        reasons = "reasons" in name
        train_once(
            folder, "shapes_reward_dance_reasons", f"data.question={WHY if reasons else BETTER}",
            f"data.field={'reason' if reasons else 'null'}", "data.heldout_size=20",
            f"run.iterations={updates}", f"optimizer.decay_updates={updates}", *common,
        )  # fmt: skip
        return folder / "lora"
    config = {"head": "shapes_hpsv3", "P(yes), one image": "shapes_reward_dance"}.get(name.split(", B")[0])
    overrides = ["objective.task=bradley_terry"] if config == "shapes_hpsv3" else []
    train_once(
        folder, config or "shapes_reward_dance_pairs", *overrides, "data.surroundings=0",
        "data.heldout_size=100", "evaluation.every=0", "optimizer.updates_per_iteration=1",
        "optimizer.lr=2e-3", f"optimizer.decay_updates={updates}", f"run.iterations={updates}", *common,
        command="train-reward",
    )  # fmt: skip
    return folder / "judge"


def accuracy(name: str, judge: Path, pairs: list[ShapesPair]) -> float:
    """Share of pairs whose better image the judge prefers."""
    kind, options = JUDGES[name]
    reward: Any = load_judge(kind, model=str(judge), **options)
    right: list[float] = []
    for start in range(0, len(pairs), 100):
        part = pairs[start : start + 100]
        left, right_side = zip(*(pair.images() for pair in part), strict=True)
        prompts = [pair.prompt for pair in part]
        if kind == "reward_dance_pairs":
            lead = reward.compare(list(left), list(right_side), prompts).log_odds
        else:
            lead = reward.score([*left, *right_side], prompts * 2).value.view(2, -1)
            lead = lead[0] - lead[1]
        truth = [pair.utility[0] > pair.utility[1] for pair in part]
        right += [float((value > 0) == better) for value, better in zip(lead.tolist(), truth, strict=True)]
    return float(np.mean(right))


def policy(folder: Path, name: str, judge: Path, seed: int, iterations: int) -> dict[str, float]:
    """What rewarding by it comes to."""
    terms = f"{{judge: {{name: {JUDGES[name][0]}, options: {{model: {judge}}}}}}}"
    train_once(
        folder, "shapes_grpo_guard", f"rewards.terms={terms}", f"seed={seed}", "evaluation.every=0",
        "rollout.prompts_per_iteration=12", f"run.iterations={iterations}", "run.max_seconds=null",
    )  # fmt: skip
    spread = [row["reward_group_std"] for row in read_metrics(folder / "metrics.jsonl")]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "spread left": float(np.mean(spread[-3:]) / np.mean(spread[:3])),
        "verified after": summary["after"]["accuracy"],
    }


def clear_pairs(surroundings: float, count: int, kinds: Sequence[str] = KINDS) -> list[ShapesPair]:
    """Held-out pairs that differ in one of the kinds, and whose truth is clear."""
    world = ShapesPreferences(77, split="heldout", kinds=kinds, surroundings=surroundings)
    return first_pairs(world, count, lambda pair: pair.is_clear)


def lead(rows: list[dict[str, Any]], key: str, one: str, other: str) -> str:
    at = {(row["judge"], row["seed"]): row[key] for row in rows if key in row}
    gains = [at[one, s] - at[other, s] for name, s in at if name == one and (other, s) in at]
    if not gains:
        return ""
    error = 1.96 * np.std(gains, ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
    return f"{np.mean(gains):+.3f} ± {error:.3f}"


def main() -> None:
    parser = run_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--heldout", type=int, default=600)
    parser.add_argument("--iterations", type=int, default=15, help="of the policy")
    options = parser.parse_args()
    sets = {"known grounds": clear_pairs(0.0, options.heldout), "other grounds": clear_pairs(1.0, options.heldout)}
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        for name in JUDGES:
            folder = options.output / f"seed{seed}" / "".join(c if c.isalnum() else "_" for c in name)
            judge = trained(folder, name, options.pairs, seed)
            row: dict[str, Any] = {"judge": name, "seed": seed}
            row |= {key: accuracy(name, judge, pairs) for key, pairs in sets.items()}
            if not JUDGES[name][0].endswith("pairs"):
                row |= policy(folder.with_name(folder.name + "policy"), name, judge, seed, options.iterations)
            rows.append(row)
            (options.output / "table.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    keys = [*sets, "spread left", "verified after"]
    table: list[dict[str, Any]] = []
    for name in JUDGES:
        own = [row for row in rows if row["judge"] == name]
        table.append({"judge": name, **{k: float(np.mean([r[k] for r in own])) for k in keys if k in own[0]}})
    table += [{"judge": f"{one} over {other}", **{k: lead(rows, k, one, other) for k in keys}} for one, other in LEADS]
    print_table(f"{options.pairs} pairs, seeds {options.seeds}", table)


if __name__ == "__main__":
    main()
