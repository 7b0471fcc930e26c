# SPDX-License-Identifier: Apache-2.0
"""Update of a policy by an `Objective`, the same for tokens and for denoising steps.

The objective computes advantages, selections and denominators over all samples of an optimizer update, of all
processes; micro-batches change memory, never the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from visalign.core import Objective, PolicyOutput, Prepared, Trajectories
from visalign.core.objective.loss_statistics import LossStatistics, no_statistics
from visalign.core.objective.reward_stage import riskpo_quantiles
from visalign.core.objective.stages import sample_reward
from visalign.core.surrogates.value import explained_variance
from visalign.seeds import sample_seed

from .settings import ObjectiveSettings


@dataclass(frozen=True, kw_only=True)
class PolicyStep:
    """Optimizer update on n of the iteration's B samples, of all processes."""

    prepared: Prepared  # Prepared tensors of the n samples, on the CPU
    sample: Tensor  # [n] int64, indices among the B samples
    live: Tensor  # [n] bool: samples that have a gradient
    extra: Any = None  # Further data of the update (PPO-ptx's demonstrations)

    def local_rows(self, local: Tensor) -> Tensor:
        """Return the indices [m], among the n, of this process's live samples; `local` [B] is that of `Shares`."""
        return (self.live & (local[self.sample] >= 0)).nonzero()[:, 0]


def prepare_steps(
    objective: Objective,
    settings: ObjectiveSettings,
    trajectories: Trajectories,
    *,
    updates: int,
    seed: int,
    iteration: int,
    whole_groups: bool,
    extras: Sequence[Any] | None = None,
    drawn: Tensor | None = None,
) -> tuple[list[PolicyStep], dict[str, float]]:
    """Prepare an iteration's optimizer updates, `updates` per epoch, and metrics of the advantages.

    The split is drawn from (seed, iteration, epoch); with `whole_groups` a group stays in one update, and the
    advantages are the same either way. Updates without any gradient are left out. `extras` are further data
    of each update, `drawn` [B] the samples that stand for the B, where they are drawn with replacement.
    """
    keep_groups = whole_groups or objective.aggregation == "group_token_mean"
    parts = list(split_updates(trajectories.group, settings.epochs, updates, seed, iteration, keep_groups))
    parts = parts if drawn is None else [drawn[part] for part in parts]
    prepared = objective.prepare_steps(trajectories, parts)
    # samples with advantage 0 have a gradient too
    needs_all = objective.kl or objective.entropy or objective.value or objective.selection
    needs_all = needs_all or objective.surrogate in ("flow_balance", "ppo_kl", "dro")
    steps = []
    for number, (sample, rows) in enumerate(zip(parts, prepared, strict=True)):
        live = (rows.weight != 0).any(1)
        if not needs_all:
            live &= (rows.advantage != 0).any(1)
        extra = None if extras is None else extras[number]
        if bool(live.any()) or extra is not None:
            steps.append(PolicyStep(prepared=rows, sample=sample, live=live, extra=extra))
    signal = signal_metrics(prepared[: len(prepared) // settings.epochs])
    trained = sum(int(step.live.sum()) for step in steps) / max(1, sum(map(len, parts)))
    return steps, {**signal, "trained_share": trained}


def split_updates(
    group: Any, epochs: int, updates: int, seed: int, iteration: int, whole_groups: bool
) -> Iterator[Tensor]:
    """Yield the samples of each update, ascending, in a new random split for each epoch."""
    labels = group.tolist() if isinstance(group, Tensor) else list(group)
    members: dict[Any, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label if whole_groups else index, []).append(index)
    units = list(members.values())
    for epoch in range(epochs):
        generator = np.random.default_rng(sample_seed(seed, "chunks", iteration, epoch))
        for chunk in np.array_split(generator.permutation(len(units)), updates):
            if len(chunk):
                yield torch.tensor(sorted(index for unit in chunk for index in units[int(unit)]))


def couples_decisions(objective: Objective) -> bool:
    """True if a decision's loss depends on the others of its sample: micro-batches hold whole samples."""
    couples = objective.surrogate in ("gmpo", "flow_balance") or objective.off_policy_delta is not None
    return objective.level != "token" or couples


def flat_rows(rows: Prepared, sample: Tensor, decision: Tensor) -> Prepared:
    """Select N single decisions (sample [N], decision [N]) as rows, for objectives that do not couple decisions.

    The denominators are those of the whole update, so the shares of single decisions add up to its loss.
    """
    changes = {}
    for name, value in vars(rows).items():
        if isinstance(value, Tensor):
            changes[name] = value[sample, decision][:, None] if value.ndim == 2 else value[sample]
    return replace(rows, **changes)


def backward(
    objective: Objective,
    micro_batches: Iterable[tuple[Prepared, PolicyOutput]],
    accelerator: Accelerator,
    *,
    scale: float,
) -> dict[str, float]:
    """Add the gradient of one optimizer update, and sum its statistics over all processes.

    Each micro-batch is computed after the backward of the one before. A log-prob that is not finite makes the
    gradient NaN, so that all processes skip and count the update, and the run continues. Returns the fields
    of `LossStatistics`, and "loss/TERM" for each term; "reference" only with a reference.
    """
    statistics: LossStatistics | None = None
    terms: dict[str, float] = {}
    for rows, output in micro_batches:
        usable = torch.isfinite(output.log_prob) | (rows.weight == 0)
        if bool(usable.all()):
            loss = objective.loss(rows, output)
            total, part = loss.total, loss.statistics
        else:
            log_prob = torch.where(usable, output.log_prob, rows.old_log_prob)
            loss = objective.loss(rows, replace(output, log_prob=log_prob))
            total = loss.total + output.log_prob.sum() * math.nan
            part = replace(loss.statistics, largest=loss.statistics.largest * math.nan)
        # DDP averages gradients over the processes, and the loss is a sum over them
        accelerator.backward(total * (scale * accelerator.num_processes))
        statistics = part if statistics is None else statistics.plus(part)
        for name, term in loss.terms.items():
            terms[name] = terms.get(name, 0.0) + float(term.detach())
    return _reduce(statistics or no_statistics(accelerator.device), terms, accelerator)


def _reduce(statistics: LossStatistics, terms: Mapping[str, float], accelerator: Accelerator) -> dict[str, float]:
    values = torch.tensor(list(terms.values()), dtype=torch.float64, device=accelerator.device)
    if accelerator.num_processes > 1:
        sums: Any = accelerator.reduce(torch.cat([statistics.stack(), values]), "sum")
        largest: Any = accelerator.gather(statistics.largest[None])
        statistics = statistics.with_sums(sums[: len(sums) - len(values)], largest.max())
        values = sums[len(sums) - len(values) :]
    fields = {name: float(value) for name, value in vars(statistics).items() if value is not None}
    return fields | {f"loss/{name}": float(value) for name, value in zip(terms, values, strict=True)}


def update_metrics(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Compute the metrics of an iteration's updates; empty without one."""
    if not sums:
        return {}
    names = dict.fromkeys(name for update in sums for name in update)
    total = {name: sum(update.get(name, 0.0) for update in sums) for name in names}
    count = total["decisions"] or math.nan
    terms = [name for name in total if name.startswith("loss/")]
    return {
        "loss": sum(total[name] for name in terms) / len(sums),
        **({name: total[name] / len(sums) for name in terms} if len(terms) > 1 else {}),
        "ratio_mean": 1 + total["shift"] / count,
        "ratio_std": math.sqrt(total["square"] / count),
        "ratio_max": float(np.max([update["largest"] for update in sums])),
        "ratio_floor": sums[0]["largest"],
        "clip_low": total["dead_low"] / count,
        "clip_high": total["dead_high"] / count,
        **({"kl": total["reference"] / count} if "reference" in total else {}),
        "kl_old": total["moved"] / count,
    }


def signal_metrics(prepared: Sequence[Prepared]) -> dict[str, float]:
    """Compute metrics of the advantages of an epoch's updates, over all samples."""
    advantage = torch.cat([p.advantage for p in prepared])
    present = torch.cat([p.weight for p in prepared]) != 0
    any_present = bool(present.any())
    metrics = {
        "frac_reward_zero_std": 1 - float((advantage != 0).any(1).double().mean()),
        "advantage_abs": float(advantage[present].double().abs().mean()) if any_present else 0.0,
    }
    if prepared[0].returns is not None and prepared[0].value is not None and any_present:
        returns = torch.cat([p.returns for p in prepared if p.returns is not None])
        value = torch.cat([p.value for p in prepared if p.value is not None])
        metrics["value_explained"] = float(explained_variance(value, returns, present))
    return metrics


def bundle_index(group: Sequence[Any], size: int) -> Tensor:
    """Number RiskPO's bundles [B]: the j-th samples of `size` prompts are one.

    N prompts make max(1, N // size) bundles for each j, as even as possible.
    """
    prompt = {label: n for n, label in enumerate(dict.fromkeys(group))}
    bundles, counts, index = max(1, len(prompt) // size), dict.fromkeys(group, 0), []
    for label in group:
        index.append(prompt[label] * bundles // len(prompt) * len(group) + counts[label])
        counts[label] += 1
    return torch.tensor(index)


def with_bundles(objective: Objective, t: Trajectories, memory: dict[str, Any]) -> Trajectories:
    """Add bundles and the quantiles of the earlier rollouts for RiskPO, and track this rollout's in `memory`."""
    if objective.advantage != "riskpo":
        return t
    labels = t.group.tolist() if isinstance(t.group, Tensor) else t.group
    bundle = bundle_index(labels, objective.advantage_options.get("bundle", 5))
    t = replace(t, bundle=bundle, quantiles=memory.get("quantiles"))
    memory["quantiles"] = riskpo_quantiles(t, sample_reward(t, objective.kl_in_reward), **objective.advantage_options)
    return t
