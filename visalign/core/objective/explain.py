# SPDX-License-Identifier: Apache-2.0
"""`explain`: where the gradient of a policy loss goes, decision by decision, and why it is zero."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from visalign.core.surrogates.off_policy import off_policy_mask
from visalign.core.surrogates.ratios import log_ratio, ratio_level

from .data import PolicyOutput, Trajectories
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
    """Cause of each decision's gradient; `str` is a table with a conclusion."""

    cause: Tensor
    """[B, T] int64, index of the decision's cause in `CAUSES`."""
    counts: dict[str, int]
    """Cause -> number of decisions."""
    gradient: Tensor
    """[B, T] ∂(policy term)/∂log π, selections, corrections and averaging included."""
    ratio: Tensor
    """[B, T] exp of the log-ratio at the level of the objective; 1 where absent."""
    loss: dict[str, float]
    """Term -> value."""
    conclusion: str
    """Main cause of a zero gradient, or the share of decisions that carry gradient."""

    def __str__(self) -> str:
        total = max(1, sum(self.counts.values()))
        lines = [f"{k:<20}{n:>9}  {n / total:>6.1%}  {CAUSES[k]}" for k, n in self.counts.items()]
        terms = ", ".join(f"{name} {value:.4g}" for name, value in self.loss.items())
        return "\n".join([*lines, f"loss: {terms}", self.conclusion])


def explain(objective: Objective, trajectories: Trajectories, policy: PolicyOutput) -> Explanation:
    """Trace the gradient of every decision of a step, by the policy's values for all samples, not their graph."""
    t, prepared = trajectories, objective.prepare(trajectories)
    leaf = policy.log_prob.detach().clone().requires_grad_()
    loss = objective.loss(prepared, replace(policy, log_prob=leaf))
    # the 0 keeps a graph where no decision is present
    (gradient,) = torch.autograd.grad(loss.terms["policy"] + 0 * leaf.nan_to_num().sum(), leaf, retain_graph=True)
    token_ratio = log_ratio(leaf.detach(), t.old_log_prob, t.weight)
    ratio = ratio_level(token_ratio, prepared.weight, objective.level).exp()
    causes = {
        "absent": t.weight == 0,
        "no reward": ~t.present()[:, None],
        "no signal": (prepared.advantage == 0) & (gradient == 0),
        "left out": prepared.weight == 0,
        "clipped": gradient == 0,
    }
    if prepared.penalty is not None:  # kl_cov's penalty pulls without an advantage
        causes["no signal"] &= prepared.penalty == 0
    if prepared.keep is not None:
        causes["left out"] |= ~prepared.keep
    if prepared.loss_weight is not None:
        causes["left out"] |= prepared.loss_weight == 0
    if objective.off_policy_delta is not None:
        on_policy = off_policy_mask(token_ratio, prepared.advantage, prepared.weight, delta=objective.off_policy_delta)
        causes["off-policy mask"] = ~on_policy.reshape(len(on_policy), -1)
    if prepared.importance_weight is not None:
        causes["importance weight 0"] = prepared.importance_weight == 0
    names = list(CAUSES)
    cause = torch.full(t.weight.shape, names.index("live"), dtype=torch.int64)
    for number, name in reversed([*enumerate(names)]):  # the first of CAUSES is written last and wins
        if name in causes:
            cause[causes[name].expand(cause.shape)] = number
    counts = {name: int((cause == i).sum()) for i, name in enumerate(names)}
    return Explanation(
        cause=cause,
        counts=counts,
        gradient=gradient,
        ratio=ratio,
        loss={name: float(value.detach()) for name, value in loss.terms.items()},
        conclusion=_conclude(counts, ratio[cause == names.index("live")], bool(objective.kl)),
    )


def _conclude(counts: dict[str, int], ratio: Tensor, has_kl: bool) -> str:
    present = sum(counts.values()) - counts["absent"]
    if present == 0:
        return "The gradient is zero: no decision is present."
    if counts["live"] == 0:
        commonest = max((name for name in counts if name not in ("absent", "live")), key=lambda name: counts[name])
        pull = " The KL term still pulls towards the reference." if has_kl else ""
        return (
            f"The policy's gradient is zero: {counts[commonest]} of {present} present decisions are "
            f"{commonest!r} ({CAUSES[commonest]}).{pull}"
        )
    share = f"{counts['live'] / present:.1%} of {present} present decisions carry gradient"
    if bool((ratio == 1).all()):
        return f"{share}. Every ratio is exactly 1: the data are on-policy, nothing clips."
    return f"{share}, at ratios {float(ratio.min()):.4g} to {float(ratio.max()):.4g}."
