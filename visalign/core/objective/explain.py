# SPDX-License-Identifier: Apache-2.0
"""`explain`: where the gradient of a policy loss goes, decision by decision, and why it is zero."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visalign.core.surrogates.off_policy import off_policy_mask
from visalign.core.surrogates.ratios import log_ratio, ratio_level

from .data import PolicyOutput, Prepared, Trajectories
from .objective import Objective

CAUSES = {
    "absent": "weight 0: padding, holes, steps that are not trained",
    "no reward": "the sample's reward is missing or failed",
    "no signal": "the advantage is exactly 0: an all-equal group, a single member, or the mean itself",
    "left out": "dropped by the selection, or a loss weight of 0",
    "off-policy mask": "a bad completion that the policy would hardly draw any more",
    "importance weight 0": "masked by the off-policy correction",
    "clipped": "the surrogate has no gradient there: the ratio has left its range in the direction of A",
    "live": "carries gradient",
}
"""Cause -> meaning, in the order of precedence: a decision has the first that applies."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Where the gradient goes; `str` is a table with a conclusion."""

    cause: Tensor
    """[B, T] int64, place of the decision's cause in `CAUSES`."""
    counts: dict[str, int]
    """Cause -> decisions."""
    gradient: Tensor
    """[B, T] ∂(policy term)/∂log π, selections, corrections and averaging included."""
    kl_gradient: Tensor | None
    """[B, T] ∂(KL term)/∂log π."""
    ratio: Tensor
    """[B, T] exp of the log-ratio at the level of the objective; 1 where absent."""
    effective_range: tuple[float, float] | None
    """Smallest and largest ratio among the live decisions; None without one."""
    raised: float
    """Share of Σ|gradient| that raises the probability of what was sampled."""
    loss: dict[str, float]
    """Term -> value."""
    conclusion: str
    """Why the gradient is zero or small, in words; what most decisions do otherwise."""

    def __str__(self) -> str:
        total = max(1, sum(self.counts.values()))
        lines = [
            f"{name:<20}{number:>9}  {number / total:>6.1%}  {CAUSES[name]}"
            for name, number in self.counts.items()
        ]
        terms = ", ".join(f"{name} {value:.4g}" for name, value in self.loss.items())
        return "\n".join([*lines, f"loss: {terms}", self.conclusion])


def explain(objective: Objective, trajectories: Trajectories, policy: PolicyOutput) -> Explanation:
    """Trace the gradient of every decision, without a backward pass through the model.

    Args:
        objective: the objective.
        trajectories: of the whole step.
        policy: numbers of all its samples; their values are used, not their graph.

    Returns:
        The explanation.

    Raises:
        ValueError: as `Objective.prepare` and `Objective.loss` do.
    """
    prepared = objective.prepare(trajectories)
    leaf = policy.log_prob.detach().clone().requires_grad_()
    loss = objective.loss(prepared, replace(policy, log_prob=leaf))
    gradient = _gradient(loss.terms["policy"], leaf)
    kl_gradient = _gradient(loss.terms["kl"], leaf) if "kl" in loss.terms else None
    own = log_ratio(leaf.detach(), trajectories.old_log_prob, trajectories.weight)
    levelled = ratio_level(own, prepared.weight, objective.level)
    cause = _causes(objective, trajectories, prepared, own, gradient)
    live = cause == list(CAUSES).index("live")
    ratio = levelled.exp()
    pushed = gradient.abs().sum()
    counts = {name: int((cause == i).sum()) for i, name in enumerate(CAUSES)}
    return Explanation(
        cause=cause,
        counts=counts,
        gradient=gradient,
        kl_gradient=kl_gradient,
        ratio=ratio,
        effective_range=(float(ratio[live].min()), float(ratio[live].max())) if bool(live.any()) else None,
        raised=float((-gradient).clamp(min=0).sum() / pushed) if float(pushed) > 0 else 0.0,
        loss={name: float(value.detach()) for name, value in loss.terms.items()},
        conclusion=_conclusion(counts, ratio[live], kl_gradient),
    )


def _gradient(term: Tensor, leaf: Tensor) -> Tensor:
    if not term.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(term, leaf, retain_graph=True, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found


def _causes(
    objective: Objective, t: Trajectories, prepared: Prepared, own: Tensor, gradient: Tensor
) -> Tensor:
    names = list(CAUSES)
    cause = torch.full(t.weight.shape, names.index("live"), dtype=torch.int64)

    def mark(name: str, where: Tensor) -> None:
        cause[where] = names.index(name)

    mark("clipped", gradient == 0)
    if prepared.importance_weight is not None:
        mark("importance weight 0", prepared.importance_weight == 0)
    if objective.off_policy_delta is not None:
        kept = off_policy_mask(own, prepared.advantage, prepared.weight, delta=objective.off_policy_delta)
        mark(
            "off-policy mask",
            ~kept.expand(cause.shape) if kept.ndim == 2 else ~kept[:, None].expand(cause.shape),
        )
    if prepared.keep is not None:
        mark("left out", ~prepared.keep)
    if prepared.loss_weight is not None:
        mark("left out", prepared.loss_weight == 0)
    mark("left out", (prepared.weight == 0) & (t.weight != 0))
    penalised = torch.zeros_like(cause, dtype=torch.bool) if prepared.selected is None else prepared.selected
    silent = (prepared.advantage == 0) & ~penalised & (gradient == 0)
    mark("no signal", silent)
    mark("no reward", ~t.present()[:, None].expand(cause.shape))
    mark("absent", t.weight == 0)
    return cause


def _conclusion(counts: dict[str, int], ratio: Tensor, kl_gradient: Tensor | None) -> str:
    present = sum(number for name, number in counts.items() if name != "absent")
    pull = kl_gradient is not None and bool((kl_gradient != 0).any())
    also = " The KL term still pulls towards the reference." if pull else ""
    if present == 0:
        return "The gradient is zero: no decision is present."
    if counts["live"] == 0:
        most = max((name for name in counts if name not in ("absent", "live")), key=lambda name: counts[name])
        return (
            f"The policy's gradient is zero: {counts[most]} of {present} present decisions are {most!r} "
            f"({CAUSES[most]}).{also}"
        )
    share = counts["live"] / present
    spread = (
        ""
        if bool((ratio != 1).any())
        else " Every ratio is exactly 1: the data are on-policy, nothing clips."
    )
    return (
        f"{share:.1%} of {present} present decisions carry gradient, at ratios {float(ratio.min()):.4g} to "
        f"{float(ratio.max()):.4g}.{spread}"
    )
