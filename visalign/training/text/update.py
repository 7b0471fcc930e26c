# SPDX-License-Identifier: Apache-2.0
"""The update of a text policy: optimizer steps on parts of an iteration's answers, and what they did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from visalign.core import Objective, PolicyOutput, Prepared, count_step
from visalign.core.surrogates.ratio_check import check_log_ratio
from visalign.seeds import sample_seed
from visalign.text import TextRollout
from visalign.training.loop.counters import Progressed
from visalign.training.loop.ema import EMA
from visalign.training.loop.optimizer import OptimizerSettings

from .collect import TextExperience
from .settings import TextObjectiveSettings
from .team import TextTeam


class WrittenAnswers(Protocol):
    """A stream of given answers, for PPO-ptx's second term: batch n is the same in every run of a seed."""

    def batch(self, number: int) -> TextRollout:
        """Given answers, with weight 1 on the tokens to be learnt."""
        ...


@dataclass(frozen=True, kw_only=True)
class _Sums:
    """Sums over the decisions of one optimizer step."""

    samples: float = 0.0
    """Answers with a present decision."""
    decisions: float = 0.0
    shift: float = 0.0
    """Σ (r − 1)."""
    square: float = 0.0
    """Σ (r − 1)²."""
    largest: float = 0.0
    """max |log r|."""
    dead_low: float = 0.0
    """Decisions with a negative advantage and no gradient."""
    dead_high: float = 0.0
    """Decisions with a positive advantage and no gradient."""
    moved: float = 0.0
    """Σ (r − 1 − log r): KL(π_old‖π), k3."""
    reference: float = 0.0
    """Σ k3 of KL(π‖π_ref); NaN without a reference."""

    def plus(self, other: _Sums) -> _Sums:
        mine, theirs = vars(self), vars(other)
        added = {k: mine[k] + theirs[k] for k in mine if k != "largest"}
        return _Sums(**added, largest=max(self.largest, other.largest))


def optimize(
    team: TextTeam,
    experience: TextExperience,
    objective: Objective,
    settings: TextObjectiveSettings,
    optimizer: torch.optim.Optimizer,
    ema: EMA,
    pace: OptimizerSettings,
    written: WrittenAnswers | None,
    *,
    iteration: int,
    before: Progressed,
) -> tuple[Progressed, dict[str, float]]:
    """Run the optimizer steps of one iteration.

    Args:
        team: policy and heads.
        experience: what is learnt from.
        objective: the loss.
        settings: epochs, the bound of the ratio check, PPO-KL's target.
        optimizer: its parameter groups may carry "scale", a factor of the learning rate.
        ema: averaged after each step.
        pace: learning rate, steps per iteration, micro-batches.
        written: given answers for the ptx term.
        iteration: iterations finished.
        before: counters.

    Returns:
        The counters afterwards, and the metrics.

    Raises:
        RatioError: at this process's first step the ratio is not 1 within the bound.
        ValueError: what `Objective.prepare` refuses.
    """
    t = experience.trajectories
    steps = list(_parts(t.group, settings.epochs, pace.updates_per_iteration, team.seed, iteration))
    given = [None if written is None else written.batch(before.updates + i) for i in range(len(steps))]
    if given[0] is not None:
        t = replace(t, ptx_weight=given[0].weight)
    prepared = objective.prepare_steps(t, steps)
    now, rows, terms = before, [], []
    for rows_of, step, answers in zip(steps, prepared, given, strict=True):
        step = step if answers is None else replace(step, ptx_counts=count_step(answers.weight))
        lr = _begin(optimizer, pace.lr_at(now.updates))
        sums, losses = _accumulate(team, experience, objective, step, rows_of, answers, pace.micro_batch)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = float(nn.utils.clip_grad_norm_(parameters, pace.max_grad_norm))
        if not now.checked and sums.decisions:
            check_log_ratio(torch.tensor([sums.largest]), bound=settings.ratio_bound)
            now = replace(now, checked=True)
        if finite := math.isfinite(norm):
            optimizer.step()
            ema.update(now.updates + 1)
        now = replace(now, updates=now.updates + 1, skipped=now.skipped + (not finite))
        rows.append((sums, norm, lr))
        terms.append(losses)
    optimizer.zero_grad(set_to_none=True)
    found = _metrics(rows, terms, now, asked=settings.epochs * len(t.weight))
    moved = {} if settings.target_kl is None else {"kl_old": _moved(team, experience)}
    return now, found | _signal(prepared[: len(steps) // settings.epochs]) | moved


@torch.no_grad()
def _moved(team: TextTeam, experience: TextExperience) -> float:
    """KL(π_old‖π) per token after the last step, k3."""
    t = experience.trajectories
    log_ratio = (team.policy.log_probs(experience.rollout).log_prob.cpu() - t.old_log_prob).double()
    present = t.weight != 0
    return float((log_ratio.expm1() - log_ratio)[present].mean())


def _begin(optimizer: torch.optim.Optimizer, lr: float) -> float:
    """Set the rates of a step and clear its gradients; returns the rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("scale", 1.0)
    optimizer.zero_grad(set_to_none=True)
    return lr


def _parts(group: Any, epochs: int, parts: int, seed: int, iteration: int) -> Iterator[Tensor]:
    """The samples of each optimizer step: whole groups, in a new random order per epoch."""
    labels = list(dict.fromkeys(group))
    places: dict[Any, list[int]] = {label: [] for label in labels}
    for place, label in enumerate(group):
        places[label].append(place)
    for epoch in range(epochs):
        draw = np.random.default_rng(sample_seed(seed, "chunks", iteration, epoch))
        for chosen in np.array_split(draw.permutation(len(labels)), parts):
            if len(chosen):
                yield torch.tensor(sorted(i for label in chosen for i in places[labels[int(label)]]))


def _needs_all(objective: Objective) -> bool:
    """Whether samples with advantage 0 have a gradient too."""
    balance = objective.surrogate in ("flow_balance", "ppo_kl", "dro")
    return bool(objective.kl or objective.entropy or objective.value or objective.selection or balance)


def _accumulate(
    team: TextTeam,
    experience: TextExperience,
    objective: Objective,
    step: Prepared,
    chosen: Tensor,
    written: TextRollout | None,
    micro_batch: int,
) -> tuple[_Sums, dict[str, float]]:
    """Backward through one optimizer step in micro-batches; the gradients equal those of one big batch."""
    live = (step.weight != 0).any(1)
    if not _needs_all(objective):
        live &= (step.advantage != 0).any(1)
    index = live.nonzero()[:, 0]
    index = index[torch.argsort((step.weight[index] != 0).sum(1), stable=True, descending=True)]
    parts = list(index.split(micro_batch)) or [index]
    answers = [None] * len(parts) if written is None else torch.arange(len(written)).chunk(len(parts))
    sums: _Sums | None = None
    terms: dict[str, float] = {}
    for i, part in enumerate(parts):
        own = answers[i] if i < len(answers) else None
        if len(part) or own is not None:
            more, loss = _backward(team, experience, objective, step.rows(part), chosen[part], written, own)
            sums = more if sums is None else sums.plus(more)
            terms = {name: terms.get(name, 0.0) + value for name, value in loss.items()}
    return sums or _Sums(reference=math.nan), terms


def _backward(
    team: TextTeam,
    experience: TextExperience,
    objective: Objective,
    rows: Prepared,
    chosen: Tensor,
    written: TextRollout | None,
    answers: Tensor | None,
) -> tuple[_Sums, dict[str, float]]:
    """One micro-batch; the policy's outputs are cut off first, so that their gradients can be looked at."""
    out = team.policy.log_probs(experience.rollout, chosen)
    device = out.log_prob.device
    value = out.value if team.value_model is None else None
    attached = {"log_prob": out.log_prob, "entropy": out.entropy, "value": value}
    leaves = {k: v.detach().requires_grad_() for k, v in attached.items() if v is not None}
    more: dict[str, Tensor] = {}
    if objective.value and team.value_model is not None:
        more["value"] = team.value_model.values(experience.rollout, chosen)
    if team.log_partition is not None and experience.features is not None:
        more["log_z"] = team.log_partition.head(experience.features[chosen])
    if written is not None and answers is not None:
        more["ptx_log_prob"] = team.policy.log_probs(written, answers).log_prob
        more["ptx_weight"] = written.weight[answers].to(device)
    rows = rows.to(device)
    loss = objective.loss(rows, PolicyOutput(**{**leaves, **more}))
    policy_term, leaf = loss.terms["policy"], leaves["log_prob"]
    (own,) = torch.autograd.grad(policy_term, [leaf], retain_graph=True, allow_unused=True)
    loss.total.backward()
    pairs = [(attached[k], leaf.grad) for k, leaf in leaves.items() if leaf.grad is not None]
    live = [(tensor, grad) for tensor, grad in pairs if tensor is not None and tensor.requires_grad]
    if live:
        torch.autograd.backward([tensor for tensor, _ in live], [grad for _, grad in live])
    terms = {name: float(term.detach()) for name, term in loss.terms.items()}
    return _sums_of(rows, leaf.detach(), torch.zeros_like(leaf) if own is None else own), terms


@torch.no_grad()
def _sums_of(rows: Prepared, log_prob: Tensor, gradient: Tensor) -> _Sums:
    """Sums of a micro-batch; `gradient` is that of the policy's term alone, so a KL term hides no clip."""
    present = rows.weight != 0
    log_ratio = torch.where(present, log_prob - rows.old_log_prob, 0.0).double()
    shift = log_ratio.expm1()
    dead = present & (gradient == 0)
    reference = math.nan
    if rows.ref_log_prob is not None:
        away = torch.where(present, rows.ref_log_prob - log_prob, 0.0).double()
        reference = float((away.expm1() - away).sum())
    return _Sums(
        samples=float(present.any(1).sum()),
        decisions=float(present.sum()),
        shift=float(shift.sum()),
        square=float(shift.square().sum()),
        largest=float(log_ratio.abs().max()) if log_ratio.numel() else 0.0,
        dead_low=float((dead & (rows.advantage < 0)).sum()),
        dead_high=float((dead & (rows.advantage > 0)).sum()),
        moved=float((shift - log_ratio).sum()),
        reference=reference,
    )


def _metrics(
    rows: list[tuple[_Sums, float, float]], terms: list[Mapping[str, float]], now: Progressed, asked: int
) -> dict[str, float]:
    total = rows[0][0]
    for sums, _, _ in rows[1:]:
        total = total.plus(sums)
    count = total.decisions or math.nan
    norms = [norm for _, norm, _ in rows if math.isfinite(norm)]
    names = dict.fromkeys(name for each in terms for name in each)
    means = {f"loss/{name}": float(np.mean([each.get(name, 0.0) for each in terms])) for name in names}
    return {
        "updates": now.updates,
        "updates_skipped": now.skipped,
        "loss": float(np.mean([sum(each.values()) for each in terms])),
        **means,
        "ratio_mean": 1 + total.shift / count,
        "ratio_std": math.sqrt(total.square / count),
        "ratio_max": total.largest,
        "ratio_floor": rows[0][0].largest,
        "clip_low": total.dead_low / count,
        "clip_high": total.dead_high / count,
        "trained_share": total.samples / max(asked, 1),
        **({} if math.isnan(total.reference) else {"kl": total.reference / count}),
        "kl_old": total.moved / count,
        "grad_norm": float(np.mean(norms)) if norms else math.nan,
        "lr": rows[-1][2],
    }


def _signal(prepared: list[Prepared]) -> dict[str, float]:
    """What the advantages of an epoch's steps say, over all samples that were handed in."""
    advantage = torch.cat([p.advantage for p in prepared])
    live = (advantage != 0).any(1)
    present = torch.cat([p.weight for p in prepared]) != 0
    found = {
        "signal_share": float(live.double().mean()),
        "advantage_abs": float(advantage[present].double().abs().mean()) if bool(present.any()) else 0.0,
    }
    first = prepared[0]
    if first.returns is not None and first.value is not None and bool(present.any()):
        returns = torch.cat([p.returns for p in prepared if p.returns is not None])[present].double()
        value = torch.cat([p.value for p in prepared if p.value is not None])[present].double()
        spread = float(returns.var(correction=0))
        error = float((returns - value).var(correction=0))
        found["value_explained"] = 1 - error / spread if spread else math.nan
    return found
