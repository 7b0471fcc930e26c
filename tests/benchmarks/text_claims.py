# SPDX-License-Identifier: Apache-2.0
"""Claims of papers, measured on the packaged language model.

    python tests/benchmarks/text_claims.py entropy    # GRPO's entropy collapses; three rules hold it up
    python tests/benchmarks/text_claims.py collapse   # the same, until reward stalls; R = b − a e^H
    python tests/benchmarks/text_claims.py diversity  # FlowRL keeps more distinct right answers than GRPO
    python tests/benchmarks/text_claims.py ratio      # GSPO's ratio varies less than GRPO's as texts grow
    python tests/benchmarks/text_claims.py parts      # DAPO's parts gain over GRPO, one by one and together
    python tests/benchmarks/text_claims.py recent     # SPEAR, CANON, COPO, RiskPO gain over GRPO

The last two compare at equal completions and at equal tokens: held-out accuracy on the way, between the two
evaluations that lie around what the cheapest run made. A gain is refuted where its interval holds 0: means of
seeds, ± 1.96 standard errors of the difference over seeds.
Sources: Clip-Cov and KL-Cov, arXiv 2505.22617; clip-higher, DAPO, arXiv 2503.14476; FlowRL, arXiv 2509.15207;
GSPO, arXiv 2507.18071; SPEAR 2509.22601; CANON 2509.23962; COPO 2508.04138; RiskPO 2510.00911. Each prints
its table and writes it to --output as JSON, however it comes out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from visalign.config import load_config
from visalign.core import fit_entropy_curve, ratio_level
from visalign.data.text_tasks.tasks import (
    MANY_ANSWERS,
    canonical_answer,
    check_answer,
    heldout_tasks,
    text_tasks,
)
from visalign.pipelines.text import job as text_grpo
from visalign.pipelines.text.config import TextModelConfig
from visalign.pipelines.text.job import TextGRPOConfig
from visalign.pipelines.text.parts import build_text_policy
from visalign.seeds import sample_seed
from visalign.text import StoppingCriteria
from visalign.training.loop.metrics import read_metrics

COMMON = (
    "rollout.prompts_per_iteration=32",
    "rollout.group_size=8",
    "rollout.max_new_tokens=96",
    "optimizer.lr=1e-4",
    "optimizer.micro_batch=64",
    "run.device=cpu",
)
ENTROPY = {
    "grpo": ("objective.algorithm=grpo", "objective.changes={kl: 0.0, aggregation: token_mean}"),
    "clip_higher": (
        "objective.algorithm=grpo",
        "objective.changes={kl: 0.0, aggregation: token_mean, surrogate_options: {eps_high: 0.28}}",
    ),
    "clip_cov": ("objective.algorithm=clip_cov",),
    "kl_cov": ("objective.algorithm=kl_cov",),
}
"""Name -> overrides; all token means without a KL term to the reference."""
_COLLAPSE = "objective.changes={kl: 0.0, aggregation: token_mean%s}"
COLLAPSE = {
    "grpo": (_COLLAPSE % "",),
    "clip-higher": (_COLLAPSE % ", surrogate_options: {eps_high: 0.28}",),
    "entropy bonus": (_COLLAPSE % ", entropy: 0.01",),
    "clip-cov": ("objective.algorithm=clip_cov", "objective.changes={selection_options: {ratio: 0.02}}"),
    "kl-cov": ("objective.algorithm=kl_cov", "objective.changes={selection_options: {ratio: 0.02}}"),
}
"""Eight updates of a rollout; ratio is ten times that of the rows, for a rollout has few tokens."""
LONG = (
    "rollout.prompts_per_iteration=16",
    "optimizer.updates_per_iteration=8",
    "evaluation.seeds=[0]",
    "evaluation.prompts_on_the_way=null",
    "run.max_seconds=null",
)
DIVERSITY = {
    "grpo": ("objective.algorithm=grpo",),
    **{
        f"flowrl, β = {beta}": (
            "objective.algorithm=flowrl",
            "objective.heads_lr=1e-3",
            f"objective.changes={{surrogate_options: {{beta: {beta}}}}}",
        )
        for beta in (5, 15, 45)
    },
}
_PLAIN = "objective.changes={kl: 0.0%s}"
_HIGHER = ", surrogate_options: {eps_high: 0.28}"
_TOKENS = ", aggregation: token_mean"
_DYNAMIC = ("dynamic.enabled=true", "dynamic.right_at=1.0")
_OVERLONG = (
    "rewards.terms.length={name: length, options: {count: characters, max_length: 128, cache: 64}}",
    "rewards.allow_mixed_units=true",
)
PARTS = {
    "grpo": (_PLAIN % "",),
    "clip-higher": (_PLAIN % _HIGHER,),
    "token mean": (_PLAIN % _TOKENS,),
    "dynamic sampling": (_PLAIN % ", drop_zero_signal: true", *_DYNAMIC),
    "soft overlong": (_PLAIN % "", *_OVERLONG),
    "all four": (_PLAIN % (_HIGHER + _TOKENS + ", drop_zero_signal: true"), *_DYNAMIC, *_OVERLONG),
}
"""GRPO without a KL term, and each of DAPO's parts added to it; completions have up to 96 characters."""
RECENT = {
    "grpo": (_PLAIN % "",),
    "spear": (_PLAIN % "", "self_imitation={warmup: 20}"),
    "canon, entropy": ("objective.algorithm=canon",),
    "canon, length": ("objective.algorithm=canon", "objective.metric=length"),
    "copo": ("objective.algorithm=copo",),
    "riskpo": ("objective.algorithm=riskpo",),
}
"""All without a KL term; SPEAR's warm-up is shortened with the run, from 200 iterations."""
TOOLS = {
    "none": (),
    "calculator": ("rollout.tool={}",),
    "calculator, branches": ("rollout.tool={branch: {initial: 4}}",),
}
"""Evaluated with what they are trained with."""
BINS = (0, 12, 20, 30, 45, 97)
"""Tokens of a completion."""


def train(overrides: Sequence[str], folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, metrics) of one run."""
    config, done = load_config(TextGRPOConfig, None, [*COMMON, *overrides]), folder / "summary.json"
    if done.is_file():
        summary = json.loads(done.read_text())
    else:
        summary = text_grpo.run(config, folder, resume=(folder / "config.yaml").is_file())
    return summary, read_metrics(folder / "metrics.jsonl")


def entropy(folder: Path, iterations: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Entropy and held-out accuracy at the end of equal runs; four updates per iteration, so that ratios
    leave 1 and a clip can act."""
    rows = []
    for name, overrides in ENTROPY.items():
        runs = []
        for seed in seeds:
            more = (f"seed={seed}", f"run.iterations={iterations}", "optimizer.updates_per_iteration=4")
            summary, records = train([*overrides, *more], folder / f"{name}_{seed}")
            runs.append((summary, records))
        first = [r[0]["entropy"] for _, r in runs]
        last = [float(np.mean([record["entropy"] for record in r[-5:]])) for _, r in runs]
        rows.append(
            {
                "rule": name,
                "entropy at the start": float(np.mean(first)),
                "at the end": float(np.mean(last)),
                "sd": float(np.std(last)),
                "accuracy before": float(np.mean([s["before"]["accuracy"] for s, _ in runs])),
                "after": float(np.mean([s["after"]["accuracy"] for s, _ in runs])),
                "sd after": float(np.std([s["after"]["accuracy"] for s, _ in runs])),
            }
        )
    return rows


def collapse(folder: Path, iterations: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Entropy, accuracy and pass@16 on held-out problems along and after long runs; the ceiling b − a that
    R = −a e^H + b foresees from the first half of a run, beside what the run reached."""
    records, rows = heldout_tasks(), []
    for name, overrides in COLLAPSE.items():
        found: list[dict[str, float]] = []
        for seed in seeds:
            every = max(1, iterations // 10)
            more = (*LONG, f"seed={seed}", f"run.iterations={iterations}", f"evaluation.every={every}")
            where = folder / f"{name}_{seed}"
            _, log = train([*overrides, *more], where)
            entropies = np.array([record["entropy"] for record in log])
            at = [i for i, record in enumerate(log) if record.get("heldout/accuracy") is not None]
            spent = torch.tensor([entropies[max(0, i - 4) : i + 1].mean() for i in at])
            accuracy = torch.tensor([log[i]["heldout/accuracy"] for i in at])
            fit = fit_entropy_curve(spent, accuracy, torch.arange(len(at)) < len(at) / 2)
            after = _distinct(where / "model", records, 16)
            found.append(
                {
                    "entropy, start": float(entropies[:5].mean()),
                    "half": float(spent[len(at) // 2 - 1]),
                    "end": float(spent[-1]),
                    "accuracy, half": float(accuracy[len(at) // 2 - 1]),
                    "end, 16 samples": after["accuracy"],
                    "pass@16": after["solved"],
                    "foreseen ceiling": float(fit.ceiling),
                    "best reached": float(accuracy.max()),
                }
            )
        rows.append({"rule": name, **{k: float(np.mean([f[k] for f in found])) for k in found[0]}})
        rows[-1]["sd of the end"] = float(np.std([f["end, 16 samples"] for f in found]))
    rows.append({"rule": "before", "pass@16": _distinct(None, records, 16)["solved"]})
    return rows


def diversity(folder: Path, iterations: int, seeds: Sequence[int], samples: int = 32) -> list[dict[str, Any]]:
    """Distinct right answers among 32 samples of held-out problems that have many."""
    records = heldout_tasks(15, tasks=tuple(MANY_ANSWERS))
    tasks = f"data.tasks=[{', '.join(MANY_ANSWERS)}]"
    rows = [{"policy": "base", **_distinct(None, records, samples)}]
    for name, overrides in DIVERSITY.items():
        found = []
        for seed in seeds:
            more = (f"seed={seed}", f"run.iterations={iterations}", tasks, "data.size=640")
            more += ("optimizer.updates_per_iteration=2",)
            train([*overrides, *more], folder / f"{name}_{seed}")
            found.append(_distinct(folder / f"{name}_{seed}" / "model", records, samples))
        keys = found[0]
        means: dict[str, Any] = {key: float(np.mean([f[key] for f in found])) for key in keys}
        spread = float(np.std([f["distinct right"] for f in found]))
        rows.append({"policy": name, **means, "sd": spread})
    return rows


def _distinct(model: Path | None, records: Sequence[Mapping[str, Any]], samples: int) -> dict[str, float]:
    policy = build_text_policy(
        TextModelConfig(path="tasks-qwen3" if model is None else str(model)), torch.device("cpu"), 0
    )
    prompts = [record["prompt"] for record in records]
    with torch.no_grad():
        rollout = policy.generate(
            prompts,
            seeds=sample_seed("claims"),
            num_generations=samples,
            stopping=StoppingCriteria(max_new_tokens=96),
        )
    texts = np.array(rollout.text, dtype=object).reshape(len(records), samples)
    right, distinct = [], []
    for record, completions in zip(records, texts, strict=True):
        good = [text for text in completions if check_answer(text, dict(record))[0]]
        right.append(len(good) / samples)
        distinct.append(len({canonical_answer(text, dict(record)) for text in good}))
    per_right = np.array(distinct)[np.array(right) > 0] / (np.array(right)[np.array(right) > 0] * samples)
    return {
        "accuracy": float(np.mean(right)),
        "solved": float(np.mean(np.array(right) > 0)),
        "distinct right": float(np.mean(distinct)),
        "distinct per right answer": float(per_right.mean()),
    }


def ratio(folder: Path, iterations: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Spread of log-ratios by a completion's length, after GRPO steps away from the policy that sampled."""
    collected: list[tuple[float, float, float]] = []
    for seed in seeds:
        more = (f"seed={seed}", f"run.iterations={iterations}", "optimizer.updates_per_iteration=4")
        train(["objective.algorithm=grpo", *more], folder / f"ratio_{seed}")
        base = build_text_policy(TextModelConfig(), torch.device("cpu"), 0)
        moved_to = TextModelConfig(path=str(folder / f"ratio_{seed}" / "model"))
        moved = build_text_policy(moved_to, torch.device("cpu"), 0)
        records = text_tasks(400, seed=seed + 1000)
        with torch.no_grad():
            rollout = base.generate(
                [r["prompt"] for r in records],
                seeds=seed,
                num_generations=4,
                stopping=StoppingCriteria(max_new_tokens=96),
            )
            log_ratio = moved.log_probs(rollout).log_prob - rollout.log_prob
        whole = ratio_level(log_ratio, rollout.loss_mask, "sequence")[:, 0]
        for row, length in enumerate(rollout.loss_mask.sum(1).long().tolist()):
            tokens = log_ratio[row, :length]
            collected.append((length, float(tokens.square().mean()), float(whole[row] ** 2)))
    table = np.array(collected)
    rows = []
    for low, high in itertools.pairwise(BINS):
        part = table[(table[:, 0] > low) & (table[:, 0] <= high)]
        if len(part) >= 20:
            token, sequence = np.sqrt(part[:, 1].mean()), np.sqrt(part[:, 2].mean())
            rows.append(
                {
                    "tokens": f"{low + 1}-{high}",
                    "completions": len(part),
                    "token ratio, rms of log r (GRPO)": float(token),
                    "sequence ratio (GSPO)": float(sequence),
                    "GSPO / GRPO": float(sequence / token),
                }
            )
    return rows


def compared(arms: Mapping[str, Sequence[str]]) -> Callable[..., list[dict[str, Any]]]:
    """Held-out accuracy of each arm at equal completions and at equal tokens, beside the first one's."""

    def run(folder: Path, iterations: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
        runs: dict[str, list[list[dict[str, Any]]]] = {}
        for seed in seeds:
            for name, overrides in arms.items():
                more = [f"seed={seed}", f"run.iterations={iterations}", "optimizer.updates_per_iteration=2",
                        "evaluation.every=10", "evaluation.prompts_on_the_way=null"]  # fmt: skip
                _, records = train([*overrides, *more], folder / f"{name.replace(', ', '_')}_{seed}")
                runs.setdefault(name, []).append([r for r in records if "heldout/accuracy" in r])
        found: dict[str, dict[str, Any]] = {name: {"rule": name} for name in arms}
        prompts = len(heldout_tasks())
        for unit in ("samples", "tokens"):
            budget = min(one[-1][unit] for each in runs.values() for one in each)
            first: np.ndarray | None = None
            for name, each in runs.items():
                curves = [([r[unit] for r in one], [r["heldout/accuracy"] for r in one]) for one in each]
                at = np.array([np.interp(budget, *curve) for curve in curves])
                first = at if first is None else first
                share = float(at.mean())
                error = math.sqrt(
                    (at.var(ddof=1) + first.var(ddof=1)) / len(at) if len(at) > 1
                    else 2 * share * (1 - share) / prompts
                )  # fmt: skip
                found[name] |= {
                    f"at {budget / 1e3:.0f}k {unit}": share,
                    f"gain, {unit}": f"{share - first.mean():+.3f} ± {1.96 * error:.3f}",
                }
        for name, each in runs.items():
            found[name]["entropy at the end"] = float(np.mean([one[-1]["entropy"] for one in each]))
            found[name]["length at the end"] = float(np.mean([one[-1]["length_mean"] for one in each]))
        return list(found.values())

    return run


CLAIMS = {
    "entropy": entropy,
    "collapse": collapse,
    "diversity": diversity,
    "ratio": ratio,
    "parts": compared(PARTS),
    "recent": compared(RECENT),
    "tools": compared(TOOLS),
}
ITERATIONS = {
    "entropy": 60,
    "collapse": 250,
    "diversity": 50,
    "ratio": 5,
    "parts": 60,
    "recent": 60,
    "tools": 40,
}


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows as a table."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*keys, title=title)
    for row in rows:
        cells = [row.get(key, "") for key in keys]
        table.add_row(*(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=160).print(table)


def main() -> None:
    """Measure one claim."""
    parser = argparse.ArgumentParser(description="Measure a claim on the packaged language model.")
    parser.add_argument("claim", choices=list(CLAIMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=None, help="of each run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=None, help="a new JSON file")
    parser.add_argument("--runs", type=Path, help="keep the runs here; those that are there are not repeated")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    iterations = given.iterations or ITERATIONS[given.claim]
    with tempfile.TemporaryDirectory() as folder:
        rows = CLAIMS[given.claim](given.runs or Path(folder), iterations, given.seeds)
    show(f"{given.claim}: {iterations} iterations, seeds {given.seeds}", rows)
    if given.output is not None:
        given.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
