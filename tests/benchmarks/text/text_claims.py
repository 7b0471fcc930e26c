# SPDX-License-Identifier: Apache-2.0
"""Claims of papers, measured on the packaged language model.

    python tests/benchmarks/text/text_claims.py entropy   # GRPO's entropy collapses; three rules hold it up
    python tests/benchmarks/text/text_claims.py collapse  # the same, until reward stalls; R = b − a e^H
    python tests/benchmarks/text/text_claims.py mechanism # covariance drives entropy, with a KL and without
    python tests/benchmarks/text/text_claims.py diversity # FlowRL keeps more distinct right answers than GRPO
    python tests/benchmarks/text/text_claims.py ratio     # GSPO's ratio varies less than GRPO's as texts grow
    python tests/benchmarks/text/text_claims.py parts     # DAPO's parts gain over GRPO, alone and together
    python tests/benchmarks/text/text_claims.py recent    # SPEAR, CANON, COPO, RiskPO gain over GRPO
    python tests/benchmarks/text/text_claims.py tools     # a calculator gains
    python tests/benchmarks/text/text_claims.py mixture   # experts: GSPO is stable without routing replay
    python tests/benchmarks/text/text_claims.py anchors   # PPO-ptx holds what it had; PPO-KL finds its target

Parts, recent and tools compare held-out accuracy at equal completions and tokens; a gain is refuted where its
interval (± 1.96 standard errors over seeds) holds 0. PPO-ptx is refuted where the loss of the text beside
rises as much as without it; PPO-KL where half of the later divergences are off the target by more than a
factor of two; a mixture's GSPO where replay betters its end, GRPO where replay changes nothing. Sources:
Clip-Cov and KL-Cov, arXiv 2505.22617; DAPO 2503.14476; FlowRL 2509.15207; GSPO 2507.18071; SPEAR 2509.22601;
CANON 2509.23962; COPO 2508.04138; RiskPO 2510.00911.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from scipy.stats import rankdata
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.support.benchmarks import argument_parser, print_table
from visalign.adapters.causal_lm.demonstrations import demonstration_rollout
from visalign.config import load_config
from visalign.core import fit_entropy_curve, ratio_level
from visalign.data.text_tasks.kinds import MANY_ANSWERS
from visalign.data.text_tasks.tasks import TASKS, canonical_answer, check_answer, heldout_tasks, text_tasks
from visalign.pipelines.text import job as text_grpo
from visalign.pipelines.text import supervised as text_sft
from visalign.pipelines.text.config import TextModelConfig
from visalign.pipelines.text.job import TextGRPOConfig
from visalign.pipelines.text.parts import build_text_policy
from visalign.pipelines.text.supervised import TextSFTConfig
from visalign.seeds import sample_seed
from visalign.text import StoppingCriteria
from visalign.training.loop.metrics import read_metrics

COMMON = (
    "rollout.prompts_per_iteration=32", "rollout.group_size=8", "rollout.max_new_tokens=96",
    "optimizer.lr=1e-4", "optimizer.micro_batch=64", "run.device=cpu",
)  # fmt: skip
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
_SHARE = ", selection_options: {ratio: 0.02}"
COLLAPSE = {
    "grpo": (_COLLAPSE % "",),
    "clip-higher": (_COLLAPSE % ", surrogate_options: {eps_high: 0.28}",),
    "clip-higher, 0.6": (_COLLAPSE % ", surrogate_options: {eps_high: 0.6}",),
    "entropy bonus": (_COLLAPSE % ", entropy: 0.01",),
    "entropy bonus, 0.05": (_COLLAPSE % ", entropy: 0.05",),
    "clip-cov": ("objective.algorithm=clip_cov", "objective.changes={selection_options: {ratio: 0.02}}"),
    "kl-cov": ("objective.algorithm=kl_cov", "objective.changes={selection_options: {ratio: 0.02}}"),
}
"""Eight updates of a rollout; ratio is ten times that of the rows, for a rollout has few tokens."""
MECHANISM = {
    f"{row}, KL {kl:g}": (
        f"objective.algorithm={row}",
        f"objective.changes={{kl: {kl}, aggregation: token_mean{'' if row == 'grpo' else _SHARE}}}",
    )
    for row in ("grpo", "clip_cov", "kl_cov")
    for kl in (0.0, 0.1)
}
"""Shares as in COLLAPSE."""
SMALL = (
    "rollout.prompts_per_iteration=8", "optimizer.updates_per_iteration=4", "optimizer.lr=2e-4",
    "evaluation.seeds=[0]", "data.heldout_per_task=2", "data.tasks=[add, subtract, multiply]",
    "rollout.max_new_tokens=32",
)  # fmt: skip
LONG = (
    "rollout.prompts_per_iteration=16", "optimizer.updates_per_iteration=8", "evaluation.seeds=[0]",
    "evaluation.prompts_on_the_way=null", "run.max_seconds=null",
)  # fmt: skip
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
    "rewards.terms.overlong={name: length, options: {count: characters, max_length: 128, cache: 64}}",
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
    "copo": ("objective.algorithm=copo", "objective.changes={advantage_options: {consistency: rewards}}"),
    "riskpo": ("objective.algorithm=riskpo",),
}
"""All without a KL term; SPEAR's warm-up is shortened with the run, from 200 iterations."""
TOOLS = {"none": (), "calculator": ("rollout.tool={}",)}
"""Evaluated with what they are trained with."""
_EIGHT = ("optimizer.updates_per_iteration=8", "evaluation.prompts_on_the_way=null")
MIXTURE = {
    f"{row}{', routes replayed' if on else ''}": (
        *(f"objective.algorithm={row}", "objective.changes={kl: 0.0}"),
        *(f"rollout.routing_replay={str(on).lower()}", *_EIGHT),
    )
    for row in ("grpo", "gspo")
    for on in (False, True)
}
"""Eight updates of a rollout, in which the router learns too."""
_PPO = ("model.value=shared", "objective.epochs=2", "objective.heads_lr=5e-4")
_TRAINED = ("add", "subtract", "multiply", "two_step", "modulo")
ANCHORED = {
    "ppo": ("objective.algorithm=ppo",),
    "ppo_ptx, γ = 1": ("objective.algorithm=ppo_ptx", "objective.changes={ptx: 1.0}"),
    "ppo_ptx, γ = 27.8": ("objective.algorithm=ppo_ptx",),
}
"""On five kinds of problems; the text beside are solutions of the fourteen others."""
TARGETS = (5e-4, 2e-3, 8e-3)
"""Of PPO-KL, nats a token."""
BINS = (0, 12, 20, 30, 45, 97)
"""Tokens of a completion."""


def train(overrides: Sequence[str], folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(summary, metrics) of one run."""
    config, summary_file = load_config(TextGRPOConfig, None, [*COMMON, *overrides]), folder / "summary.json"
    if summary_file.is_file():
        summary = json.loads(summary_file.read_text())
    else:
        summary = text_grpo.run(config, folder, resume=(folder / "config.yaml").is_file())
    return summary, read_metrics(folder / "metrics.jsonl")


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each column."""
    return {key: float(np.mean([row[key] for row in rows])) for key in rows[0]}


def entropy(folder: Path, iterations: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Entropy and held-out accuracy at the end of equal runs; four updates per iteration, so that ratios
    leave 1 and a clip can act."""
    rows = []
    for name, overrides in ENTROPY.items():
        runs = []
        for seed in seeds:
            more = (f"seed={seed}", f"run.iterations={iterations}", "optimizer.updates_per_iteration=4")
            runs.append(train([*overrides, *more], folder / f"{name}_{seed}"))
        by_seed = [
            {
                "entropy at the start": log[0]["entropy"],
                "at the end": float(np.mean([record["entropy"] for record in log[-5:]])),
                "accuracy before": summary["before"]["accuracy"],
                "after": summary["after"]["accuracy"],
            }
            for summary, log in runs
        ]
        spread = {key: float(np.std([row[key] for row in by_seed])) for key in ("at the end", "after")}
        rows.append({"rule": name, **means(by_seed), "sd": spread["at the end"], "sd after": spread["after"]})
    return rows


def collapse(folder: Path, iterations: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Entropy, accuracy and pass@16 on held-out problems along and after long runs; the ceiling b − a that
    R = −a e^H + b foresees from the first half of a run, beside what the run reached."""
    records, rows = heldout_tasks(), []
    for name, overrides in COLLAPSE.items():
        by_seed: list[dict[str, float]] = []
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
            by_seed.append(
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
        rows.append({"rule": name, **means(by_seed)})
        rows[-1]["sd of the end"] = float(np.std([f["end, 16 samples"] for f in by_seed]))
    rows.append({"rule": "before", "pass@16": _distinct(None, records, 16)["solved"]})
    return rows


def mechanism(folder: Path, iterations: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Entropy along small runs, the covariance that shall drive it, and whether −ΔH follows η Cov.

    Refuted where Cov is not positive while entropy falls, where its largest 2 % are below ten times the mean, or
    where GRPO's −ΔH and η Cov (means of three iterations) have no positive rank correlation; a remedy, where its
    entropy ends no higher than GRPO's under the same KL.
    """
    rows = []
    for name, overrides in MECHANISM.items():
        by_seed = []
        for seed in seeds:
            more = (*SMALL, f"seed={seed}", f"run.iterations={iterations}")
            _, log = train([*overrides, *more], folder / f"{name.replace(' ', '_')}_{seed}")
            drop, foreseen = (np.array([r[key] for r in log[1:]]) for key in ("entropy_drop", "entropy_drop_foreseen"))
            size = len(drop) // 3 * 3
            blocks = [values[:size].reshape(-1, 3).mean(1) for values in (drop, foreseen)]
            fit = fit_entropy_curve(*(torch.tensor([r[key] for r in log]) for key in ("entropy", "reward_mean")))
            ends = {
                key: float(np.mean([r[key] for r in log[-5:]])) for key in ("entropy", "entropy_answer", "reward_mean")
            }
            cov = {key: float(np.mean([r[f"covariance/{key}"] for r in log])) for key in ("mean", "top_2", "top_50")}
            by_seed.append(
                {
                    "entropy, start": float(np.mean([r["entropy"] for r in log[:5]])),
                    **{f"{key}, end": value for key, value in ends.items()},
                    "foreseen ceiling": float(fit.ceiling),
                    **{f"Cov {key}": value for key, value in cov.items()},
                    "share Cov > 0": float(np.mean([r["covariance/mean"] > 0 for r in log])),
                    "rank correlation": float(np.corrcoef([rankdata(b) for b in blocks])[0, 1]),
                    "sum of −ΔH / sum of η Cov": float(drop.sum() / foreseen.sum()),
                }
            )
        rows.append({"rule": name, **means(by_seed)})
    return rows


def diversity(folder: Path, iterations: int, seeds: Sequence[int], samples: int = 32) -> list[dict[str, Any]]:
    """Distinct right answers among 32 samples of held-out problems that have many, along each run: at every
    checkpoint, and where a run's accuracy first reaches what all of them reach."""
    records = heldout_tasks(15, tasks=tuple(MANY_ANSWERS))
    tasks = f"data.tasks=[{', '.join(MANY_ANSWERS)}]"
    base = _distinct(None, records, samples)
    curves: dict[str, list[list[dict[str, float]]]] = {}
    for name, overrides in DIVERSITY.items():
        for seed in seeds:
            more = (f"seed={seed}", f"run.iterations={iterations}", tasks, "data.size=640")
            more += ("optimizer.updates_per_iteration=2", f"run.keep_checkpoints={iterations}")
            train([*overrides, *more], folder / f"{name}_{seed}")
            checkpoints = sorted((folder / f"{name}_{seed}" / "checkpoints").glob("step_*"))
            curves.setdefault(name, []).append([base, *(_distinct(path, records, samples) for path in checkpoints)])
    reached = min(max(point["accuracy"] for point in curve) for runs in curves.values() for curve in runs)
    rows: list[dict[str, Any]] = [{"policy": "base", **base}]
    for name, runs in curves.items():
        ends = [curve[-1] for curve in runs]
        equal = [_distinct_at(curve, reached) for curve in runs]
        row = {"policy": name, **means(ends), f"distinct at accuracy {reached:.3f}": float(np.mean(equal))}
        rows.append({**row, "of each seed": [round(value, 2) for value in equal], "curves": runs})
    return rows


def _distinct_at(curve: Sequence[Mapping[str, float]], accuracy: float) -> float:
    """Distinct right answers where a run's accuracy first reaches one, between the two checkpoints around."""
    number = next(index for index, point in enumerate(curve) if point["accuracy"] >= accuracy)
    around = curve[max(number - 1, 0) : number + 1]
    accuracies, distinct = ([point[key] for point in around] for key in ("accuracy", "distinct right"))
    return float(np.interp(accuracy, accuracies, distinct))


def _distinct(model: Path | None, records: Sequence[Mapping[str, Any]], samples: int) -> dict[str, float]:
    """Of a folder of a model, or of a checkpoint of a run of the packaged one."""
    weights = None if model is None else model / "trainable.safetensors"
    checkpoint = weights is not None and weights.is_file()
    path = "tasks-qwen3" if model is None or checkpoint else str(model)
    policy = build_text_policy(TextModelConfig(path=path), torch.device("cpu"), 0)
    if weights is not None and checkpoint:
        missing = policy.module.load_state_dict(load_file(weights), strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}, missing  # tied; further weights are FlowRL's heads
    prompts = [record["prompt"] for record in records]
    with torch.no_grad():
        rollout = policy.generate(
            prompts, seeds=sample_seed("claims"), num_generations=samples, stopping=StoppingCriteria(max_new_tokens=96)
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
        per_sequence = ratio_level(log_ratio, rollout.loss_mask, "sequence")[:, 0]
        for row, length in enumerate(rollout.loss_mask.sum(1).long().tolist()):
            tokens = log_ratio[row, :length]
            collected.append((length, float(tokens.square().mean()), float(per_sequence[row] ** 2)))
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


def anchors(folder: Path, iterations: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """PPO with and without ptx: accuracy on the kinds of problems that it trains on and on the others, and
    the loss of solutions of the others; then where PPO-KL's divergence settles."""
    other_tasks = tuple(kind for kind in TASKS if kind not in _TRAINED)
    records, text = heldout_tasks(tasks=_TRAINED), heldout_tasks(tasks=other_tasks)
    table = folder / "given.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    beside = [{"prompt": r["prompt"], "completion": r["solution"]} for r in text_tasks(1900, tasks=other_tasks)]
    table.write_text("\n".join(map(json.dumps, beside)))

    def measured(model: Path | None) -> dict[str, float]:
        return {
            "accuracy": _distinct(model, records, 4)["accuracy"],
            "on the others": _distinct(model, text, 4)["accuracy"],
            "loss of the others": _loss(model, text),
        }

    rows: list[dict[str, Any]] = [{"rule": "before", **measured(None)}]
    for name, overrides in ANCHORED.items():
        by_seed = []
        for seed in seeds:
            text_beside = (f"data.demonstrations={table}",) if "ptx" in name else ()
            more = (f"seed={seed}", f"run.iterations={iterations}", f"data.tasks=[{', '.join(_TRAINED)}]")
            train([*overrides, *_PPO, *text_beside, *more, "data.size=1900"], folder / f"{name}_{seed}")
            by_seed.append(measured(folder / f"{name}_{seed}" / "model"))
        rows.append({"rule": name, **means(by_seed)})
        rows[-1] |= {f"sd, {k}": float(np.std([f[k] for f in by_seed])) for k in by_seed[0]}
    for target in TARGETS:
        settled, used = [], []
        for seed in seeds:
            more = (f"seed={seed}", f"run.iterations={iterations}", f"objective.target_kl={target}")
            _, log = train(["objective.algorithm=ppo_kl", *_PPO, *more], folder / f"kl_{target}_{seed}")
            settled.append([record["kl_old"] for record in log[len(log) // 2 :]])
            used.append(log[-1]["penalty"])
        near = [target / 2 <= value <= 2 * target for values in settled for value in values]
        rows.append(
            {
                "rule": f"ppo_kl, target {target:g}",
                "kl, second half": float(np.mean(settled)),
                "within a factor of 2": float(np.mean(near)),
                "penalty at the end": float(np.mean(used)),
            }
        )
    return rows


def _loss(model: Path | None, records: Sequence[Mapping[str, Any]]) -> float:
    """Nats a token of the solutions."""
    path = "tasks-qwen3" if model is None else str(model)
    policy = build_text_policy(TextModelConfig(path=path), torch.device("cpu"), 0)
    texts = [record["prompt"] for record in records], [record["solution"] for record in records]
    rollout = demonstration_rollout(policy, *texts)
    with torch.no_grad():
        log_prob = policy.log_probs(rollout).log_prob
    return -float(log_prob.sum() / rollout.loss_mask.sum())


def mixture(folder: Path, iterations: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """GRPO and GSPO on a mixture of experts, with and without routing replay; beside them how far the experts
    of a rollout's tokens change in an iteration, and how far its ratios go."""
    start = folder / "start" / "model"
    if not start.is_dir():
        trained = (f"model.path={upcycled(folder / 'upcycled')}", "run.device=cpu", "data.batch=64")
        more = ("run.iterations=40", "optimizer={lr: 3e-4, decay_updates: 40, micro_batch: 64}")
        more += ("evaluation.seeds=[0]", "generation.max_new_tokens=96", "run.max_seconds=null")
        text_sft.run(load_config(TextSFTConfig, None, [*trained, *more]), start.parent)
    rows = []
    for name, overrides in MIXTURE.items():
        by_seed: list[dict[str, float]] = []
        for seed in seeds:
            more = (f"model.path={start}", f"seed={seed}", f"run.iterations={iterations}")
            more += (f"evaluation.every={max(1, iterations // 8)}",)
            where = folder / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
            summary, log = train([*overrides, *more], where)
            last = log[len(log) // 2 :]
            by_seed.append(
                {
                    "before": summary["before"]["accuracy"],
                    "after": summary["after"]["accuracy"],
                    "worst on the way": min(r["heldout/accuracy"] for r in log if "heldout/accuracy" in r),
                    "sd of log ratio": float(np.mean([r["ratio_std"] for r in last])),
                    "clipped": float(np.mean([r["clip_low"] + r["clip_high"] for r in last])),
                    "largest ratio": float(np.median([r["ratio_max"] for r in last])),
                    "grad norm": float(np.median([r["grad_norm"] for r in last])),
                }
            )
        rows.append({"rule": name, **means(by_seed)})
        rows[-1]["sd after"] = float(np.std([f["after"] for f in by_seed]))
    rows.append({"rule": "experts changed by one iteration", "share": _rerouted(start, folder / "one")})
    return rows


def upcycled(folder: Path, experts: int = 8) -> Path:
    """The packaged model as a mixture: each expert has half of the units of each layer, drawn by lot, two of
    which answer a token, so that they are the layer on the mean (Sparse upcycling, arXiv 2212.05055)."""
    dense = build_text_policy(TextModelConfig(), torch.device("cpu"), 0)
    own = dense.model.config.to_dict()
    width, generator = own["intermediate_size"] // 2, torch.Generator().manual_seed(0)
    shared = {k: v for k, v in own.items() if k not in ("model_type", "architectures", "transformers_version")}
    sizes = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shared, **sizes, "norm_topk_prob": True}))
    state = {k: v for k, v in dense.model.state_dict().items() if ".mlp." not in k}
    weights: dict[str, list[torch.Tensor]] = {}
    for number, layer in enumerate(dense.model.model.layers):  # type: ignore[union-attr, arg-type]
        at, mlp = f"model.layers.{number}.mlp", cast("Any", layer).mlp
        for _ in range(experts):
            unit = torch.randperm(own["intermediate_size"], generator=generator)[:width]
            both = torch.cat((mlp.gate_proj.weight[unit], mlp.up_proj.weight[unit]))
            weights.setdefault(f"{at}.experts.gate_up_proj", []).append(both)
            weights.setdefault(f"{at}.experts.down_proj", []).append(2 * mlp.down_proj.weight[:, unit])
        state[f"{at}.gate.weight"] = 0.1 * torch.randn(experts, own["hidden_size"], generator=generator)
    model.load_state_dict({**state, **{name: torch.stack(parts) for name, parts in weights.items()}})
    model.save_pretrained(folder)
    dense.tokenizer.save_pretrained(folder)
    return folder


def _rerouted(start: Path, folder: Path) -> float:
    """Share of the experts of the tokens of one rollout that are others after the updates on one like it."""
    overrides = ("objective.algorithm=grpo", "objective.changes={kl: 0.0}", f"model.path={start}", *_EIGHT)
    train([*overrides, "run.iterations=1", "seed=0"], folder)
    routes = []
    for path in (start, folder / "model"):
        policy = build_text_policy(TextModelConfig(path=str(path)), torch.device("cpu"), 0)
        if not routes:
            prompts = [record["prompt"] for record in text_tasks(64, seed=7)]
            rollout = policy.generate(prompts, seeds=0, stopping=StoppingCriteria(max_new_tokens=96))
        routes.append(cast("Any", policy.with_routes(rollout).routes))
    before, after = routes
    stays = (before[..., :, None] == after[..., None, :]).any(-1)[before >= 0]
    return 1 - float(stays.float().mean())


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
        rows: dict[str, dict[str, Any]] = {name: {"rule": name} for name in arms}
        prompts = len(heldout_tasks())
        for unit in ("samples", "tokens"):
            budget = min(log[-1][unit] for logs in runs.values() for log in logs)
            first: np.ndarray | None = None
            for name, logs in runs.items():
                curves = [([r[unit] for r in log], [r["heldout/accuracy"] for r in log]) for log in logs]
                at = np.array([np.interp(budget, *curve) for curve in curves])
                first = at if first is None else first
                share = float(at.mean())
                error = math.sqrt(
                    (at.var(ddof=1) + first.var(ddof=1)) / len(at) if len(at) > 1
                    else 2 * share * (1 - share) / prompts
                )  # fmt: skip
                rows[name] |= {
                    f"at {budget / 1e3:.0f}k {unit}": share,
                    f"gain, {unit}": f"{share - first.mean():+.3f} ± {1.96 * error:.3f}",
                }
        for name, logs in runs.items():
            rows[name]["entropy at the end"] = float(np.mean([log[-1]["entropy"] for log in logs]))
            rows[name]["length at the end"] = float(np.mean([log[-1]["length_mean"] for log in logs]))
        return list(rows.values())

    return run


CLAIMS = {
    "entropy": (entropy, 60),
    "collapse": (collapse, 250),
    "mechanism": (mechanism, 24),
    "diversity": (diversity, 50),
    "ratio": (ratio, 5),
    "parts": (compared(PARTS), 60),
    "recent": (compared(RECENT), 60),
    "tools": (compared(TOOLS), 40),
    "mixture": (mixture, 40),
    "anchors": (anchors, 40),
}
"""Name -> (what measures it, iterations of a run)."""


def main() -> None:
    """Measure one claim."""
    parser = argument_parser(__doc__)
    parser.add_argument("claim", choices=list(CLAIMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=None, help="of each run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=None, help="a new JSON file")
    parser.add_argument("--runs", type=Path, help="keep the runs here; those that are there are not repeated")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measure, usual = CLAIMS[options.claim]
    iterations = options.iterations or usual
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options.runs or Path(folder), iterations, options.seeds)
    shown = [{key: value for key, value in row.items() if key != "curves"} for row in rows]
    print_table(f"{options.claim}: {iterations} iterations, seeds {options.seeds}", shown)
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
