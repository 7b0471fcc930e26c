# SPDX-License-Identifier: Apache-2.0
"""The update of a policy by an `Objective`, the same for tokens and for denoising steps.

The objective settles advantages, selections and denominators over all samples of an optimizer update, of all
processes; what a micro-batch holds changes memory, never the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from visalign.core import Objective, PolicyOutput, Prepared, Trajectories
from visalign.core.objective.loss_statistics import LossStatistics, no_statistics
from visalign.core.surrogates.value import explained_variance
from visalign.seeds import sample_seed

from .settings import ObjectiveSettings


@dataclass(frozen=True, kw_only=True)
class PolicyStep:
    """One optimizer update: n of the iteration's B samples, of all processes."""

    prepared: Prepared
    """Of the n samples, on the CPU."""
    sample: Tensor
    """[n] int64, which of the B samples they are."""
    live: Tensor
    """[n] bool: those that have a gradient."""
    extra: Any = None
    """What else the update learns from (PPO-ptx's demonstrations)."""

    def own(self, first: int, size: int) -> Tensor:
        """[m] places among the n of this process's live samples.

        Args:
            first: of this process's samples, among the B.
            size: how many it has.
        """
        mine = (self.sample >= first) & (self.sample < first + size)
        return (self.live & mine).nonzero()[:, 0]


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
) -> tuple[list[PolicyStep], dict[str, float]]:
    """Settle the optimizer updates of an iteration; those without any gradient are left out.

    Args:
        objective: the row.
        settings: epochs.
        trajectories: B samples of all processes, on the CPU.
        updates: per epoch.
        seed: of the run; the split is drawn from (seed, iteration, epoch).
        iteration: iterations finished.
        whole_groups: keep a group's samples in one update; the advantages are the same either way.
        extras: what else each update learns from.

    Returns:
        The updates, and what the advantages say of the samples (metrics).
    """
    whole = whole_groups or objective.aggregation == "group_token_mean"
    parts = list(split_updates(trajectories.group, settings.epochs, updates, seed, iteration, whole))
    prepared = objective.prepare_steps(trajectories, parts)
    every = _needs_all(objective)
    steps = []
    for number, (sample, rows) in enumerate(zip(parts, prepared, strict=True)):
        live = (rows.weight != 0).any(1)
        if not every:
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
    """The samples of each update, ascending, in a new random split for each epoch."""
    count = len(group)
    labels = group.tolist() if isinstance(group, Tensor) else list(group)
    places: dict[Any, list[int]] = {}
    for place, label in enumerate(labels):
        places.setdefault(label if whole_groups else place, []).append(place)
    units = list(places.values())
    assert sum(map(len, units)) == count
    for epoch in range(epochs):
        draw = np.random.default_rng(sample_seed(seed, "chunks", iteration, epoch))
        for chosen in np.array_split(draw.permutation(len(units)), updates):
            if len(chosen):
                yield torch.tensor(sorted(place for unit in chosen for place in units[int(unit)]))


def _needs_all(objective: Objective) -> bool:
    """Whether samples with advantage 0 have a gradient too."""
    balance = objective.surrogate in ("flow_balance", "ppo_kl", "dro")
    return bool(objective.kl or objective.entropy or objective.value or objective.selection or balance)


def couples_decisions(objective: Objective) -> bool:
    """Whether the loss of a decision depends on the other decisions of its sample, so that a micro-batch
    has to hold all of them."""
    surrogates = ("gmpo", "flow_balance")
    is_level = objective.level != "token"
    return is_level or objective.surrogate in surrogates or objective.off_policy_delta is not None


def flat_rows(rows: Prepared, sample: Tensor, decision: Tensor) -> Prepared:
    """N single decisions as rows of their own, for objectives that do not couple decisions.

    The denominators are those of the whole update, so the shares of single decisions add up to its loss.

    Args:
        rows: n samples, T decisions.
        sample: [N] places among the n.
        decision: [N] places among the T.
    """
    changes = {}
    for name, value in vars(rows).items():
        if isinstance(value, Tensor):
            changes[name] = value[sample, decision][:, None] if value.ndim == 2 else value[sample]
    return replace(rows, **changes)


@dataclass(kw_only=True)
class _Totals:
    statistics: LossStatistics | None = None
    terms: dict[str, float] = field(default_factory=dict)


def backward(
    objective: Objective,
    micro_batches: Iterable[tuple[Prepared, PolicyOutput]],
    accelerator: Accelerator,
    *,
    scale: float,
) -> dict[str, float]:
    """Add the gradient of one optimizer update; its sums over all processes.

    A log-prob that is not finite makes the gradient NaN, so that the update is left out by all processes and
    counted, and does not end the run.

    Args:
        objective: the row.
        micro_batches: prepared rows with what the policy says of them; the next one is asked for when the
            last one's backward is done.
        accelerator: of the processes, whose gradients add up.
        scale: factor of the loss.

    Returns:
        The fields of `LossStatistics`, and "loss/TERM" for each term; "reference" only with a reference.
    """
    totals = _Totals()
    for rows, output in micro_batches:
        known = torch.isfinite(output.log_prob) | (rows.weight == 0)
        if bool(known.all()):
            loss = objective.loss(rows, output)
            total, found = loss.total, loss.statistics
        else:
            log_prob = torch.where(known, output.log_prob, rows.old_log_prob)
            loss = objective.loss(rows, replace(output, log_prob=log_prob))
            total = loss.total + output.log_prob.sum() * math.nan
            found = replace(loss.statistics, largest=loss.statistics.largest * math.nan)
        # DDP averages gradients over the processes, and the loss is a sum over them
        accelerator.backward(total * (scale * accelerator.num_processes))
        totals.statistics = found if totals.statistics is None else totals.statistics.plus(found)
        for name, term in loss.terms.items():
            totals.terms[name] = totals.terms.get(name, 0.0) + float(term.detach())
    return _over_processes(totals, accelerator)


def _over_processes(totals: _Totals, accelerator: Accelerator) -> dict[str, float]:
    statistics = totals.statistics or no_statistics(accelerator.device)
    terms = torch.tensor(list(totals.terms.values()), dtype=torch.float64, device=accelerator.device)
    if accelerator.num_processes > 1:
        sums: Any = accelerator.reduce(torch.cat([statistics.stack(), terms]), "sum")
        largest: Any = accelerator.gather(statistics.largest[None])
        statistics = statistics.with_sums(sums[: len(sums) - len(terms)], largest.max())
        terms = sums[len(sums) - len(terms) :]
    found = {name: float(value) for name, value in vars(statistics).items() if value is not None}
    return found | {f"loss/{name}": float(value) for name, value in zip(totals.terms, terms, strict=True)}


def update_metrics(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of an iteration's updates; nothing where none was made."""
    if not sums:
        return {}
    names = dict.fromkeys(name for each in sums for name in each)
    total = {name: sum(each.get(name, 0.0) for each in sums) for name in names}
    count = total["decisions"] or math.nan
    terms = [name for name in total if name.startswith("loss/")]
    return {
        "loss": sum(total[name] for name in terms) / len(sums),
        **({name: total[name] / len(sums) for name in terms} if len(terms) > 1 else {}),
        "ratio_mean": 1 + total["shift"] / count,
        "ratio_std": math.sqrt(total["square"] / count),
        "ratio_max": float(np.max([each["largest"] for each in sums])),
        "ratio_floor": sums[0]["largest"],
        "clip_low": total["dead_low"] / count,
        "clip_high": total["dead_high"] / count,
        **({"kl": total["reference"] / count} if "reference" in total else {}),
        "kl_old": total["moved"] / count,
    }


def signal_metrics(prepared: Sequence[Prepared]) -> dict[str, float]:
    """What the advantages of an epoch's updates say of all samples that were handed in."""
    advantage = torch.cat([p.advantage for p in prepared])
    present = torch.cat([p.weight for p in prepared]) != 0
    any_present = bool(present.any())
    found = {
        "frac_reward_zero_std": 1 - float((advantage != 0).any(1).double().mean()),
        "advantage_abs": float(advantage[present].double().abs().mean()) if any_present else 0.0,
    }
    if prepared[0].returns is not None and prepared[0].value is not None and any_present:
        returns = torch.cat([p.returns for p in prepared if p.returns is not None])
        value = torch.cat([p.value for p in prepared if p.value is not None])
        found["value_explained"] = float(explained_variance(value, returns, present))
    return found
