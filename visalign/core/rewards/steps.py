# SPDX-License-Identifier: Apache-2.0
"""Rewards of single steps: bounded process rewards, rewards read off a log-ratio, and turning points.

T counts reasoning steps, tokens or denoising steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid, pad

from visalign.core.checks import check_axes
from visalign.core.groups.labels import Labels, group_index
from visalign.core.groups.moments import centre, spread
from visalign.core.precision import float32, float32_dtype


def clip_step_rewards(step_reward: Tensor, weight: Tensor | None = None, *, eta: float) -> Tensor:
    """Clip step rewards so that a step can only cost: r_k ← min(r_k − η, 0).

    The sum over steps is at most 0 and no longer grows with their number. η is the reward that a step must
    reach to cost nothing. The paper's tasks use their own; for another reward take a quantile of it. Gao et
    al., On designing effective RL reward at training time for LLM reasoning, arXiv 2410.15115.
    """
    value, inside = _present(step_reward.detach(), weight)
    return torch.where(inside, (value - eta).clamp(max=0), 0.0)


def delta_step_rewards(step_reward: Tensor, weight: Tensor | None = None) -> Tensor:
    """Count only the difference to the next present step, so that repeating good steps earns nothing (Delta).

    r_k ← r_k − r_{k+1} for k < K − 1, r_{K−1} ← r_{K−1}, r_K ← 0, with K the row's own last present step: the
    undiscounted return from step k < K is r_k. The published order is clip, then delta; the outcome reward is
    added at the last step. Not TP-GRPO's increment R_k − R_{k−1}, which has the opposite sign. Gao et al., On
    designing effective RL reward at training time for LLM reasoning, arXiv 2410.15115.
    """
    value, inside = _present(step_reward.detach(), weight)
    following = next_present(inside)
    last = inside & (following == value.shape[1])
    level = torch.where(last, 0.0, value)
    ahead = pad(level, (0, 1)).gather(1, following)
    return torch.where(inside, level - ahead, 0.0)


@dataclass(frozen=True)
class ImplicitRewards:
    """Rewards r_t = β w_t log(π_φ/π_ref)_t, values Q_t = Σ_{s≤t} r_s, outcome reward q = Σ_t r_t [B]."""

    step: Tensor
    prefix: Tensor
    total: Tensor


def implicit_step_rewards(log_ratio: Tensor, weight: Tensor | None = None, *, beta: float = 0.05) -> ImplicitRewards:
    """Read step rewards off a reward model that is a policy: r_t = β log(π_φ/π_ref)_t.

    `log_ratio` is log π_φ − log π_ref in nats; PRIME uses β = 0.05. Yuan et al., Free process rewards without
    process labels, arXiv 2412.01981; Cui et al., PRIME, arXiv 2502.01456.
    """
    value, _ = _present(log_ratio.detach(), weight)
    step = beta * (value if weight is None else value * weight)
    return ImplicitRewards(step=step, prefix=step.cumsum(1), total=step.sum(1))


def implicit_prm_loss(
    log_ratio: Tensor,
    label: Tensor,
    weight: Tensor | None = None,
    *,
    beta: float = 0.05,
    form: Literal["cross_entropy", "nca", "kto"] = "cross_entropy",
) -> Tensor:
    """Train the implicit reward model on outcomes: ℓ = −y ln σ(q) − (1 − y) ln σ(−q), q = β Σ_t w log r_t.

    "nca" is −y ln σ(q) − ½ ln σ(−q) (of a right and a wrong completion together, arXiv 2402.05369, eq. 12), "kto"
    y σ(z − q) + (1 − y) σ(q − z) with z = max(0, mean q) of the batch, without gradient (arXiv 2402.01306).
    `log_ratio` is log π_φ − log π_ref in nats, differentiable; `label` [B] is y in [0, 1], NaN if missing:
    loss and gradient are 0 there, so divide the sum by the number of labels. A large β saturates the loss.
    Returns [B]; by cross-entropy ln 2 where π_φ = π_ref.

    Yuan et al., Free process rewards without process labels, arXiv 2412.01981; Cui et al., PRIME, arXiv 2502.01456.
    """
    check_axes(log_ratio=(log_ratio, "B T"), label=(label, "B"))
    value, _ = _present(log_ratio, weight)
    q = beta * (value if weight is None else value * weight).sum(1)
    labelled = torch.isfinite(label)
    target = torch.where(labelled, label, 0.5).to(q.dtype).detach()
    if form == "kto":
        level = q.detach()[labelled].mean().nan_to_num().clamp(min=0)
        loss = target * (level - q).sigmoid() + (1 - target) * (q - level).sigmoid()
    elif form == "nca":
        loss = -target * logsigmoid(q) - 0.5 * logsigmoid(-q)
    else:
        loss = binary_cross_entropy_with_logits(q, target, reduction="none")
    return torch.where(labelled, loss, 0.0)


def progress_loss(contribution: Tensor, outcome: Tensor, weight: Tensor | None = None) -> Tensor:
    """Train contributions c of steps to add up to the outcome: ℓ = (Σ_k w_k c_k − R)², [B].

    A missing `outcome` [B] R has loss and gradient 0: divide the sum by the number of present outcomes. Wang
    et al., SPA-RL, arXiv 2505.20732: the progress estimator.
    """
    check_axes(contribution=(contribution, "B T"), outcome=(outcome, "B"))
    value, _ = _present(contribution, weight)
    total = (value if weight is None else value * weight).sum(1)
    present = torch.isfinite(outcome)
    target = torch.where(present, outcome, 0.0).to(total.dtype).detach()
    return torch.where(present, total - target, 0.0).square()


@dataclass(frozen=True)
class TurningPoints:
    """Step rewards of TP-GRPO with their parts, [B, n].

    `step_reward` enters the advantage of step k; standardise each column within its group. `increment`
    d_k = R_k − R_{k−1}; `sign` s_k = sgn(d_k) sgn(R − R_0), 1 where the step goes the way of the whole
    trajectory; `turn` marks paid bonuses, after balancing; `bonus` η (R − R_{k−1}) at turning points, else 0.
    """

    step_reward: Tensor
    increment: Tensor
    sign: Tensor
    turn: Tensor
    bonus: Tensor


def turning_point_rewards(
    reward: Tensor,
    reward_ode: Tensor,
    reward_mid: Tensor,
    *,
    eta: float = 1.0,
    replace: bool = True,
    balanced: bool = True,
) -> TurningPoints:
    """Reward a noisy step with its increment, a turning point with all that is still to come (TP-GRPO).

    With `reward` [B] R of the rollout, `reward_ode` [B] R_0 of the deterministic image from the same start
    noise, and `reward_mid` [B, n] R_k of k noisy steps and a deterministic rest: d_k = R_k − R_{k−1},
    s_k = sgn(d_k) sgn(R − R_0). Step 1 turns if sgn(d_1) = sgn(R − R_1) ≠ 0; step k > 1 if also
    s_{k−1} < 0 < s_k. Reward of a turn: η (R − R_{k−1}), added to d_k unless `replace`; else d_k.

    Balancing keeps as many positive as negative turns, those with the largest |R − R_0| first and, among
    equals, the later entries of [B, n]; if one sign is absent all stay. It needs the whole batch. NaN where
    one of the R they need is missing, and no turn there. Alleviating sparse rewards in flow-based GRPO, arXiv
    2602.06422; constants of its launch script.
    """
    check_axes(reward=(reward, "B"), reward_ode=(reward_ode, "B"), reward_mid=(reward_mid, "B n"))
    final = float32(reward).detach()[:, None]
    levels = torch.cat([float32(reward_ode).detach()[:, None], float32(reward_mid).detach()], 1)
    before, after = levels[:, :-1], levels[:, 1:]
    increment = after - before
    total_change = final - levels[:, :1]
    sign = increment.sign() * total_change.sign()
    turn = increment.sign() * (final - after).sign() > 0
    crosses = (sign[:, :-1] < 0) & (sign[:, 1:] > 0)
    turn = turn & pad(crosses, (1, 0), value=True)
    if balanced:
        turn = turn & _balance(turn, total_change.expand_as(turn))
    bonus = torch.where(turn, eta * (final - before), 0.0)
    base = torch.where(turn, 0.0, increment) if replace else increment
    return TurningPoints(step_reward=base + bonus, increment=increment, sign=sign, turn=turn, bonus=bonus)


def branch_rewards(reward: Tensor, node: Tensor) -> Tensor:
    """Reward a step that samples share with the mean of their rewards: r_e = mean_{i ∈ e} R_i, [B, T].

    `node` [B, T] holds integers in [0, B), equal in a column where samples share the step. The paper weighs the
    samples by the probability of their paths; they were drawn by it already, and the plain mean, the default of its
    released code, has E[R | step] for its expectation. Li et al., BranchGRPO, arXiv 2509.06040: reward fusion.
    """
    check_axes(reward=(reward, "B"), node=(node, "B T"))
    value = float32(reward).detach()[:, None].expand(node.shape)
    present = torch.isfinite(value)
    # lowest + mean(R − lowest): the mean of equal rewards is exactly their value
    finite = torch.where(present, value, torch.inf)
    lowest = torch.full_like(value, torch.inf).scatter_reduce(0, node, finite, "amin")
    above = torch.where(present, value - lowest.gather(0, node), 0.0)
    zero = torch.zeros_like(value)
    total, count = zero.scatter_add(0, node, above), zero.scatter_add(0, node, present.to(value.dtype))
    return (lowest + total / count).gather(0, node)


def branch_advantages(reward: Tensor, node: Tensor, group: Labels) -> Tensor:
    """Standardise `branch_rewards` over the distinct nodes of a group at each step: (r − mean)/(std + 1e-8), [B, T].

    A node counts once, however many samples share it, and the std has ddof 1; `node` holds the first sample that
    shares the step. 0 where the std is below 1e-6, NaN where all rewards of a node are missing. Li et al.,
    BranchGRPO, arXiv 2509.06040: depth-wise advantage, numbers of its released code.
    """
    value = branch_rewards(reward, node).double()
    index, groups = group_index(group, len(reward), reward.device)
    distinct = (node == torch.arange(len(node), device=node.device)[:, None]) & torch.isfinite(value)
    _, centred = centre(torch.where(distinct, value, 0.0), distinct, index, groups)
    std = spread(centred, distinct, index, groups, ddof=1)
    result = torch.where(std < 1e-6, 0.0, centred / (std + 1e-8)).gather(0, node)
    return torch.where(torch.isfinite(value), result, torch.nan).to(float32_dtype(reward))


def next_present(inside: Tensor) -> Tensor:
    """Find the position of the next present step after each, [B, T]; T where there is none."""
    length = inside.shape[1]
    position = torch.where(inside, torch.arange(length, device=inside.device), length)
    return pad(position, (0, 1), value=length)[:, 1:].flip(1).cummin(1).values.flip(1)


def _balance(turn: Tensor, total_change: Tensor) -> Tensor:
    """Select turns so that both signs are equally many."""
    positive, negative = (turn & (total_change > 0)).flatten(), (turn & (total_change < 0)).flatten()
    fewer = torch.minimum(positive.sum(), negative.sum())
    size = total_change.abs().flatten()

    def largest(among: Tensor) -> Tensor:
        order = torch.where(among, size, -1.0).argsort(stable=True).flip(0)
        return among & (order.argsort() < fewer)

    selected = torch.where(fewer > 0, largest(positive) | largest(negative), True)
    return selected.reshape(turn.shape)


def _present(values: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the values, 0 where absent, and where they are present."""
    check_axes(steps=(values, "B T"), weight=(weight, "B T"))
    inside = torch.ones_like(values, dtype=torch.bool) if weight is None else weight != 0
    return torch.where(inside, float32(values), 0.0), inside
