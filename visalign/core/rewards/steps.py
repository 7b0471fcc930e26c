# SPDX-License-Identifier: Apache-2.0
"""Rewards of single steps: bounded process rewards, rewards read off a log-ratio, and turning points.

[B, T] as everywhere; T counts reasoning steps, tokens or denoising steps. Where weight is 0 the step is
absent: results there are 0, gradients exactly 0, and removing the step would change nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from visalign.core.checks import check_axes, check_positive
from visalign.core.precision import float32


def clip_step_rewards(step_reward: Tensor, weight: Tensor | None = None, *, eta: float) -> Tensor:
    """Clip: a step can only cost, r_k ← min(r_k − η, 0).

    The sum over steps is at most 0 and no longer grows with their number.

    Args:
        step_reward: [B, T], any unit, no gradient.
        weight: [B, T], 0 for absent steps.
        eta: the reward that a step must reach to cost nothing, in the same unit. The paper's tasks use their
            own; for another reward take a quantile of it.

    Returns:
        [B, T], ≤ 0, float32 or better.

    Gao et al., On designing effective RL reward at training time for LLM reasoning, arXiv 2410.15115.
    """
    value, inside = _present(step_reward, weight)
    return torch.where(inside, (value - eta).clamp(max=0), 0.0)


def delta_step_rewards(step_reward: Tensor, weight: Tensor | None = None) -> Tensor:
    """Delta: only the difference to the next step counts, so that repeating good steps earns nothing.

    r_k ← r_k − r_{k+1} for k < K − 1, r_{K−1} ← r_{K−1}, r_K ← 0, with K the row's own last present step: the
    undiscounted return from step k < K is r_k. The published order is clip, then delta; the outcome reward
    is added at the last step. Not TP-GRPO's increment R_k − R_{k−1}, which has the opposite sign.

    Args:
        step_reward: [B, T], any unit, no gradient.
        weight: [B, T], 0 for absent steps; the next step is the next present one.

    Returns:
        [B, T], float32 or better; all 0 for a row with one step.

    Gao et al., On designing effective RL reward at training time for LLM reasoning, arXiv 2410.15115.
    """
    value, inside = _present(step_reward, weight)
    following = next_present(inside)
    last = inside & (following == value.shape[1])
    level = torch.where(last, 0.0, value)
    ahead = pad(level, (0, 1)).gather(1, following)
    return torch.where(inside, level - ahead, 0.0)


@dataclass(frozen=True)
class ImplicitRewards:
    """What a log-ratio says about each step; no gradient."""

    step: Tensor
    """[B, T] r_t = β w_t log(π_φ/π_ref)_t."""
    prefix: Tensor
    """[B, T] Q_t = Σ_{s≤t} r_s, a value of the prefix."""
    total: Tensor
    """[B] q = Σ_t r_t, the outcome reward."""


def implicit_step_rewards(
    log_ratio: Tensor, weight: Tensor | None = None, *, beta: float = 0.05
) -> ImplicitRewards:
    """Read step rewards off a reward model that is a policy: r_t = β log(π_φ/π_ref)_t.

    Args:
        log_ratio: [B, T] log π_φ − log π_ref, in nats; detached here.
        weight: [B, T], 0 for absent steps.
        beta: β > 0, reward per nat; PRIME uses 0.05.

    Returns:
        Step, prefix and outcome rewards, float32 or better; Σ_t step = total.

    Yuan et al., Free process rewards without process labels, arXiv 2412.01981; Cui et al., PRIME, arXiv
    2502.01456.
    """
    check_positive(beta=beta)
    value, _ = _present(log_ratio, weight)
    step = beta * (value if weight is None else value * weight)
    return ImplicitRewards(step=step, prefix=step.cumsum(1), total=step.sum(1))


def implicit_prm_loss(
    log_ratio: Tensor, label: Tensor, weight: Tensor | None = None, *, beta: float = 0.05
) -> Tensor:
    """Train the implicit reward model on outcomes: ℓ = −y ln σ(q) − (1 − y) ln σ(−q), q = β Σ_t w log r_t.

    Args:
        log_ratio: [B, T] log π_φ − log π_ref, in nats; differentiable.
        label: [B] y in [0, 1], soft labels allowed; NaN is a missing label, with loss and gradient 0: divide
            the sum by the number of labels that are there.
        weight: [B, T], 0 for absent steps.
        beta: β > 0; a large one saturates the loss.

    Returns:
        Loss per sample [B], to be averaged; ln 2 where π_φ = π_ref.

    Yuan et al., Free process rewards without process labels, arXiv 2412.01981; Cui et al., PRIME, arXiv
    2502.01456.
    """
    check_positive(beta=beta)
    inside = _inside(log_ratio, weight)
    check_axes(log_ratio=(log_ratio, "B T"), label=(label, "B"))
    value = torch.where(inside, float32(log_ratio), 0.0)
    q = beta * (value if weight is None else value * weight).sum(1)
    known = torch.isfinite(label)
    target = torch.where(known, label, 0.5).to(q.dtype).detach()
    return torch.where(known, binary_cross_entropy_with_logits(q, target, reduction="none"), 0.0)


def progress_loss(contribution: Tensor, outcome: Tensor, weight: Tensor | None = None) -> Tensor:
    """Train contributions of steps to add up to the outcome: ℓ = (Σ_k w_k c_k − R)².

    Args:
        contribution: [B, T] c, in the outcome's unit; differentiable.
        outcome: [B] R, any unit; NaN is a missing one, with loss and gradient 0: divide the sum by the number
            of outcomes that are there.
        weight: [B, T], 0 for absent steps.

    Returns:
        Loss per sample [B], to be averaged, in the outcome's unit squared.

    Wang et al., SPA-RL, arXiv 2505.20732: the progress estimator.
    """
    inside = _inside(contribution, weight)
    check_axes(contribution=(contribution, "B T"), outcome=(outcome, "B"))
    value = torch.where(inside, float32(contribution), 0.0)
    total = (value if weight is None else value * weight).sum(1)
    known = torch.isfinite(outcome)
    target = torch.where(known, outcome, 0.0).to(total.dtype).detach()
    return torch.where(known, torch.where(known, total - target, 0.0).square(), 0.0)


@dataclass(frozen=True)
class TurningPoints:
    """Step rewards of TP-GRPO and how they came about; all [B, n], no gradient."""

    step_reward: Tensor
    """What enters the advantage of step k; standardise each column within its group."""
    increment: Tensor
    """d_k = R_k − R_{k−1}."""
    sign: Tensor
    """s_k = sgn(d_k) sgn(R − R_0): 1 where the step goes the way of the whole trajectory."""
    turn: Tensor
    """Bool: where the bonus is paid, after balancing."""
    bonus: Tensor
    """η (R − R_{k−1}) at turning points, else 0."""


def turning_point_rewards(
    reward: Tensor,
    reward_ode: Tensor,
    reward_mid: Tensor,
    *,
    eta: float = 1.0,
    replace: bool = True,
    balanced: bool = True,
) -> TurningPoints:
    """TP-GRPO: each noisy step earns its own increment, a turning point all that is still to come.

    With R_0 the reward of the deterministic image, R_k that of k noisy steps and a deterministic rest, R
    that of the rollout: d_k = R_k − R_{k−1}, s_k = sgn(d_k) sgn(R − R_0). Step 1 turns if sgn(d_1) =
    sgn(R − R_1) ≠ 0; step k > 1 if also s_{k−1} < 0 < s_k. Reward of a turn: η (R − R_{k−1}); else d_k.

    Balancing keeps as many positive as negative turns, those with the largest |R − R_0| first and, among
    equals, the later entries of [B, n]; if one sign is absent all stay. It needs the whole batch.

    Args:
        reward: [B] R, any unit.
        reward_ode: [B] R_0, from the same start noise.
        reward_mid: [B, n] R_1 … R_n.
        eta: η, weight of the bonus.
        replace: True: the bonus replaces d_k (the released script); False: it is added.
        balanced: as above; on in the released script.

    Returns:
        Rewards float32 or better; NaN where one of the R they need is missing, and no turn there.

    Alleviating sparse rewards in flow-based GRPO, arXiv 2602.06422; constants of its launch script.
    """
    check_axes(reward=(reward, "B"), reward_ode=(reward_ode, "B"), reward_mid=(reward_mid, "B n"))
    final = float32(reward).detach()[:, None]
    levels = torch.cat([float32(reward_ode).detach()[:, None], float32(reward_mid).detach()], 1)
    before, after = levels[:, :-1], levels[:, 1:]
    increment = after - before
    whole = final - levels[:, :1]
    sign = increment.sign() * whole.sign()
    turn = increment.sign() * (final - after).sign() > 0
    crosses = (sign[:, :-1] < 0) & (sign[:, 1:] > 0)
    turn = turn & pad(crosses, (1, 0), value=True)
    if balanced:
        turn = turn & _balance(turn, whole.expand_as(turn))
    bonus = torch.where(turn, eta * (final - before), 0.0)
    base = torch.where(turn, 0.0, increment) if replace else increment
    return TurningPoints(step_reward=base + bonus, increment=increment, sign=sign, turn=turn, bonus=bonus)


def branch_rewards(reward: Tensor, node: Tensor) -> Tensor:
    """A step that several samples have in common earns the mean of what came of it: r_e = mean_{i ∈ e} R_i.

    Standardised within its group at each step, it is BranchGRPO's depth-wise advantage. The paper weighs the
    samples by the probability of their paths; they were drawn by it already, and the plain mean, which its
    released code takes unless told otherwise, has E[R | step] for its expectation.

    Args:
        reward: [B] R, any unit; entries that are not finite count as missing.
        node: [B, T] integers in [0, B): equal in a column where samples have the step in common.

    Returns:
        [B, T], float32 or better, no gradient; NaN where every sample of a step is missing.

    Li et al., BranchGRPO, arXiv 2509.06040: reward fusion.
    """
    check_axes(reward=(reward, "B"), node=(node, "B T"))
    value = float32(reward).detach()[:, None].expand(node.shape)
    known = torch.isfinite(value)
    # least + mean(R − least): equal rewards have their own value for mean, not one beside it
    least = torch.full_like(value, torch.inf).scatter_reduce(
        0, node, torch.where(known, value, torch.inf), "amin"
    )
    above = torch.where(known, value - least.gather(0, node), 0.0)
    total, count = (
        torch.zeros_like(value).scatter_add(0, node, part) for part in (above, known.to(value.dtype))
    )
    return (least + total / count).gather(0, node)


def next_present(inside: Tensor) -> Tensor:
    """Position of the next present step after each, [B, T] int64 from bool [B, T]; T where there is none."""
    length = inside.shape[1]
    place = torch.where(inside, torch.arange(length, device=inside.device), length)
    return pad(place, (0, 1), value=length)[:, 1:].flip(1).cummin(1).values.flip(1)


def _balance(turn: Tensor, whole: Tensor) -> Tensor:
    """Bool of turn's shape: the turns that stay so that both signs are equally many."""
    positive, negative = (turn & (whole > 0)).flatten(), (turn & (whole < 0)).flatten()
    fewer = torch.minimum(positive.sum(), negative.sum())
    size = whole.abs().flatten()

    def largest(among: Tensor) -> Tensor:
        order = torch.where(among, size, -1.0).argsort(stable=True).flip(0)
        return among & (order.argsort() < fewer)

    kept = torch.where(fewer > 0, largest(positive) | largest(negative), True)
    return kept.reshape(turn.shape)


def _present(values: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """(values with 0 where absent, detached, float32 or better; bool where present), both [B, T]."""
    inside = _inside(values, weight)
    return torch.where(inside, float32(values).detach(), 0.0), inside


def _inside(values: Tensor, weight: Tensor | None) -> Tensor:
    check_axes(steps=(values, "B T"), weight=(weight, "B T"))
    return torch.ones_like(values, dtype=torch.bool) if weight is None else weight != 0
