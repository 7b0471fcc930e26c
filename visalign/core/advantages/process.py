# SPDX-License-Identifier: Apache-2.0
"""Rewards of steps: assigned to decisions, aggregated, as advantages.

Step rewards are [B, K]. `step` [B, T] holds the step 0 … K − 1 of each decision, −1 for none; `span_index`
makes it from starts and ends. A step exists where a present decision belongs to it, so rows may have fewer
than K steps; rewards beyond them are never read.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_choice
from visalign.core.groups.labels import Labels, group_index, group_sum
from visalign.core.groups.moments import present_entries
from visalign.core.precision import float32, float32_dtype

from .group import group_advantages, whiten
from .returns import discounted_returns

Place = Literal["last", "every", "spread"]
Reduction = Literal["sum", "mean", "min", "product", "last"]


def span_index(start: Tensor, end: Tensor, length: int) -> Tensor:
    """Number the decisions by the span that holds them: step_t = k where start_k ≤ t < end_k, else −1.

    `start` and `end` are integers [B, K], end one past the last decision and ≤ start for a missing span;
    `length` is T. Returns [B, T] int64; where spans overlap, the later one.
    """
    check_axes(start=(start, "B K"), end=(end, "B K"))
    position = torch.arange(length, device=start.device)
    inside = (start[:, :, None] <= position) & (position < end[:, :, None])
    number = torch.arange(1, start.shape[1] + 1, device=start.device)[:, None]
    none = inside.new_zeros(start.shape[0], 1, length, dtype=torch.int64)
    return torch.cat([none, inside * number], 1).amax(1) - 1


def span_rewards(reward: Tensor, step: Tensor, *, place: Place, weight: Tensor | None = None) -> Tensor:
    """Assign step rewards to decisions, [B, T]; 0 outside the steps.

    `place` "last": r on the last present decision of its step, for returns and GAE. "every": r on each
    decision of the step, for advantages per token (GSPO-token). "spread": r/n_k on each, so that rows keep
    their sum. A step without a present decision leaves nothing.
    """
    check_choice("place", place, get_args(Place))
    inside, target, number = _members(reward, step, weight)
    values = float32(reward.detach())
    if place == "spread":
        values = values / number.clamp(min=1)
    if place == "last":
        position = torch.arange(step.shape[1], device=step.device).expand_as(step)
        none = target.new_full((reward.shape[0], reward.shape[1] + 1), -1)
        final = none.scatter_reduce(1, target, position, "amax")
        inside = inside & (final.gather(1, target) == position)
    values = torch.cat([values, values.new_zeros(values.shape[0], 1)], 1)
    return torch.where(inside, values.gather(1, target), 0.0)


def aggregate_steps(reward: Tensor, how: Reduction, exists: Tensor | None = None) -> Tensor:
    """Aggregate step rewards [B, K] to one reward per sample, [B].

    "min" is Math-Shepherd's, "product" that of step-wise correctness probabilities; "last" takes the last
    existing step. `exists` is bool [B, K], None if every row has K steps. The result is NaN, missing, if an
    existing step is not finite or none exists. Wang et al., Math-Shepherd, arXiv 2312.08935 (min); Lightman
    et al., arXiv 2305.20050 (product).
    """
    check_choice("how", how, get_args(Reduction))
    exists = torch.ones_like(reward, dtype=torch.bool) if exists is None else exists
    check_axes(reward=(reward, "B K"), exists=(exists, "B K"))
    values = reward.detach().double()
    count = exists.sum(1)
    neutral = {"min": float("inf"), "product": 1.0}.get(how, 0.0)
    used = exists & (exists.flip(1).cumsum(1).flip(1) == 1) if how == "last" else exists
    terms = torch.where(used, values, neutral)
    if how == "min":
        result = torch.cat([terms, terms.new_full((len(terms), 1), float("inf"))], 1).amin(1)
    else:
        result = terms.prod(1) if how == "product" else terms.sum(1)
    if how == "mean":
        result = result / count.clamp(min=1)
    complete = (torch.isfinite(values) | ~exists).all(1) & (count > 0)
    return torch.where(complete, result, float("nan")).to(float32_dtype(reward))


def process_advantages(
    reward: Tensor, step: Tensor, group: Labels, *, weight: Tensor | None = None, ddof: int = 1, eps: float = 1e-4
) -> Tensor:
    """Sum the standardised rewards of all steps that end at or after a decision (GRPO, process supervision).

    r̃_ik = (r_ik − mean)/(std + eps), over all steps of all samples of the group; A_it = Σ_{k: end_k ≥ t}
    r̃_ik, [B, T]. A sample with a missing reward of an existing step is missing; 0 after the last step. Shao
    et al., DeepSeekMath, arXiv 2402.03300, section 4.1.3.
    """
    _, _, number = _members(reward, step, weight)
    exists = number > 0
    usable = (torch.isfinite(reward) | ~exists).all(1, keepdim=True) & exists
    scores = whiten(reward, usable, group=group, ddof=ddof, eps=eps, eps_inside=False)
    return discounted_returns(span_rewards(scores, step, place="last", weight=weight), weight)


def prime_advantages(
    reward: Tensor,
    process_reward: Tensor,
    group: Labels,
    weight: Tensor,
    *,
    gamma: float = 1.0,
    ddof: int = 1,
    eps: float = 1e-8,
    valid: Tensor | None = None,
) -> Tensor:
    """Add the leave-one-out returns of process rewards and of outcomes, whitened over all decisions (PRIME).

    With μ_i the mean of r_i over its decisions and n samples in a group: r̂_it = (n r_it − Σ_j μ_j)/(n − 1);
    A_it = whiten(Σ_{s≥t} γ^{s−t} r̂_is + R_i − mean_{j≠i} R_j), [B, T]. Missing samples are left out; 0 for a sample
    alone. Cui et al., PRIME, arXiv 2502.01456, eq. 5 and its released code.
    """
    check_axes(reward=(reward, "B"), process_reward=(process_reward, "B T"), weight=(weight, "B T"))
    present = weight != 0
    values = torch.where(present, process_reward.detach().double(), 0.0)
    mean = values.sum(1) / present.sum(1).clamp(min=1)
    mask = present_entries(reward, valid) & torch.isfinite(mean) & present.any(1)
    index, groups = group_index(group, len(reward), reward.device)
    sums = group_sum(torch.stack([mask.double(), torch.where(mask, mean, 0.0)], 1), index, groups)[index]
    n, total = sums[:, :1], sums[:, 1:]
    centred = torch.where(n > 1, (n * values - total) / (n - 1).clamp(min=1), 0.0)
    outcome = group_advantages(reward.double(), group, scale="none", baseline="leave_one_out", valid=mask)
    returns = discounted_returns(centred, weight, gamma=gamma) + torch.where(mask, outcome, 0.0)[:, None]
    return whiten(returns, present & mask[:, None], ddof=ddof, eps=eps).to(float32_dtype(reward))


def _members(reward: Tensor, step: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decisions of a step [B, T], their step or K [B, T], and decisions per step [B, K]."""
    check_axes(reward=(reward, "B K"), step=(step, "B T"), weight=(weight, "B T"))
    inside = step >= 0 if weight is None else (step >= 0) & (weight != 0)
    target = torch.where(inside, step, reward.shape[1]).long()
    number = target.new_zeros(reward.shape[0], reward.shape[1] + 1).scatter_add(1, target, inside.long())
    return inside, target, number[:, :-1]
