# SPDX-License-Identifier: Apache-2.0
"""Advantages of single papers: CANON, PRL, online DPO and SPEAR's replay."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from visalign.core.checks import check_axes
from visalign.core.groups.group_statistics import group_centre, group_extremes, group_mean
from visalign.core.groups.labels import Labels, group_index
from visalign.core.precision import float32, float32_dtype
from visalign.core.preference.direct import direct_preference_loss
from visalign.core.rewards.steps import next_present

from .baselines import group_ranks
from .returns import discounted_returns


def conditional_advantages(
    reward: Tensor,
    metric: Tensor,
    group: Labels,
    *,
    mu: float = 1.0,
    alpha: float = 1.0,
    side: Literal["high", "low"] = "high",
) -> Tensor:
    """Split each group at the median of a second metric and compare each half with the other (CANON).

    A_i = μ (a_own R_i − a_other mean_other) + (1 − μ)(R_i − mean_own). The low half is the first ⌊n/2⌋ by the
    `metric` [B] (length, entropy, another score; a sample without one is missing). a = `alpha` on the named
    `side` and 1 on the other; below 1 it holds that side back. No direction of the metric is preferred:
    turning its sign changes nothing (even n, no ties, α = 1). μ = 1/2 and α = 1 give R − mean for even n.
    CANON, Conditional advantage estimation, arXiv 2509.23962. Deviations from the released code: a group of
    one gives 0, not R; a group of equal metrics has no halves and gives R − mean; no division by a length,
    which is the aggregation's. Equal metrics at the median are split in the order given.
    """
    check_axes(reward=(reward, "B"), metric=(metric, "B"))
    index, groups = group_index(group, reward.shape[0], reward.device)
    present = torch.isfinite(reward) & torch.isfinite(metric)
    lowest, mean, count = group_centre(reward, present, index, groups)
    value = torch.where(present, reward.detach().double() - lowest[index], 0.0)
    _, rank = group_ranks(torch.where(present, metric.detach().double(), float("inf")), index, groups)
    high = rank > (count // 2)[index]
    own_half, other_half = 2 * index + high, 2 * index + ~high
    half_mean = group_mean(value, present, own_half, 2 * groups)
    factor, unit = torch.full_like(value, alpha), torch.ones_like(value)
    a_own = torch.where(high == (side == "high"), factor, unit)
    a_other = torch.where(high == (side == "high"), unit, factor)
    # a_own R_i − a_other mean_other; the middle term puts back what α leaves of the group's lowest reward
    between = a_own * value + (a_own - a_other) * lowest[index] - a_other * half_mean[other_half]
    result = mu * between + (1 - mu) * (value - half_mean[own_half])
    smallest, largest = group_extremes(metric, present, index, groups)
    result = torch.where((smallest < largest)[index], result, value - mean[index])
    return torch.where(present, result, 0.0).to(float32_dtype(reward))


def prl_advantages(
    advantage: Tensor, log_ratio: Tensor, weight: Tensor | None = None, *, eta: float = 100.0, block: int = 1
) -> Tensor:
    """Subtract the divergence that is still to come (PRL): A_t = A − (1/η) Σ_{s≥t} w_s log(π_old/π_ref)_s.

    With block > 1 every decision of a block takes the value at the block's last one. With block = 1 and A = R
    − baseline on fresh samples this is the score-function gradient of E[R] − KL(π‖π_ref)/η, so add no KL
    loss. Blocks count present decisions, from the row's first: padding and holes change nothing, and the last
    block may be short. Released code marks block ends by non-zero values, and loses an end whose value is 0.

    `log_ratio` is log π_old − log π_ref in nats, of true log-densities (log_prob_reduction="sum"). η is in nats per
    unit of advantage; infinity switches the term off. NaN in a row whose advantage or a present log-ratio is not
    finite. Process reward learning, arXiv 2601.10201; released η 1, 100 and 200, blocks of 64, 128 and 256.
    """
    check_axes(advantage=(advantage, "B"), log_ratio=(log_ratio, "B T"))
    remaining = discounted_returns(log_ratio, weight)
    inside = torch.ones_like(log_ratio, dtype=torch.bool) if weight is None else weight != 0
    if block > 1:
        length = log_ratio.shape[1]
        number = inside.cumsum(1)
        end = inside & ((number % block == 0) | (next_present(inside) == length))
        position = torch.arange(length, device=end.device)
        nearest = torch.where(end, position, next_present(end)).clamp(max=length - 1)
        remaining = remaining.gather(1, nearest)
    gain = float32(advantage).detach()[:, None]
    return torch.where(inside, gain - remaining / eta, 0.0)


def online_dpo_advantages(
    reward: Tensor,
    log_ratio: Tensor,
    group: Labels,
    *,
    beta: float = 0.1,
    row: Literal["sigmoid", "robust", "hinge"] = "sigmoid",
    eps: float = 0.0,
) -> Tensor:
    """Treat best and worst of a group as a pair of DPO; others get 0, as does a group without a preference.

    A = −n β ℓ'(m) for the best and its negative for the worst, m = β (log π/π_ref of the best − of the
    worst), ℓ the row's loss, n the group's samples. The mean over samples of −A log π(y) has the gradient of
    the mean of ℓ over groups, each counted as often as it has samples, at the weights that sampled; where an
    iteration has several updates, m stays that of its beginning.

    The first of several best or worst rewards is taken; `log_ratio` [B] is log π − log π_ref of whole
    completions, nats; `eps` in [0, 1/2) is the share of wrong preferences, for losses that use it (`DIRECT`).
    Online AI feedback, arXiv 2402.04792, section 3; DPO, arXiv 2305.18290, eq. 7.
    """
    check_axes(reward=(reward, "B"), log_ratio=(log_ratio, "B"))
    value, ratio = reward.detach().double(), log_ratio.detach().double()
    index, groups = group_index(group, len(value), value.device)
    present = torch.isfinite(value) & torch.isfinite(ratio)
    advantage = torch.zeros_like(value)
    for number in range(groups):
        rows = (present & (index == number)).nonzero()[:, 0]
        if len(rows) < 2 or value[rows].min() == value[rows].max():
            continue
        chosen = torch.stack([rows[value[rows].argmax()], rows[value[rows].argmin()]])
        with torch.enable_grad():
            pair = ratio[chosen].requires_grad_()
            zero = torch.zeros(1, dtype=pair.dtype, device=pair.device)
            loss = direct_preference_loss(pair[:1], pair[1:], zero, zero, row=row, beta=beta, eps=eps)
            advantage[chosen] = -len(rows) * torch.autograd.grad(loss.sum(), pair)[0]
    return advantage.to(float32_dtype(reward))


def replay_advantages(reward: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """Score replayed samples by today's standard, A = R − median(history) [B], and keep A > 0.

    `history` [H] holds recent mean rewards of groups; what is not finite is left out. There is no std. SPEAR,
    arXiv 2509.22601 (capacity 10240 means, 2048 samples of age ≤ 10 steps).
    """
    check_axes(reward=(reward, "B"), history=(history, "H"))
    past = history.detach().double()
    median = torch.where(torch.isfinite(past), past, float("nan")).nanquantile(0.5)
    centred = reward.detach().double() - median
    advantage = torch.where(torch.isfinite(centred), centred, 0.0).to(float32(reward).dtype)
    return advantage, advantage > 0


def replay_weight(step: Tensor | float, *, warmup: float = 200.0, ceiling: float = 1.0) -> Tensor:
    """Compute SPEAR's weight of the replay loss, c(s) = c₀ (1 − cos(π min(s, T)/T))/2.

    It rises from 0 to the `ceiling` c₀ in `warmup` T optimizer steps; float64 of the shape of `step`. SPEAR,
    arXiv 2509.22601 (T = 200, c₀ = 1 in the released scripts).
    """
    part = torch.as_tensor(step, dtype=torch.float64).clamp(0, warmup) / warmup
    return ceiling * (1 - torch.cos(math.pi * part)) / 2
