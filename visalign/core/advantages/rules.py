# SPDX-License-Identifier: Apache-2.0
"""Advantages of recent papers: CANON, PRL and online DPO. AEM has a file of its own.

As in `advantages`: float64 statistics over all that is passed in, no gradient, a missing reward leaves every
statistic and gets 0, all-equal rewards give exactly 0.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_choice, check_share
from visalign.core.groups.group_statistics import group_centre, group_extremes, group_mean
from visalign.core.groups.labels import Labels, group_index
from visalign.core.precision import float32, float32_dtype
from visalign.core.preference.direct import DIRECT, direct_preference_loss
from visalign.core.rewards.steps import next_present

from .returns import discounted_returns

Side = Literal["high", "low"]


def conditional_advantages(
    reward: Tensor,
    metric: Tensor,
    group: Labels,
    *,
    mu: float = 1.0,
    alpha: float = 1.0,
    side: Side = "high",
) -> Tensor:
    """CANON: split each group at the median of a second metric and compare each half with the other.

    A_i = μ (a_own R_i − a_other mean_other) + (1 − μ)(R_i − mean_own), the low half being the first ⌊n/2⌋ by
    the metric, a = α on the named side and 1 on the other. No direction of the metric is preferred: turning
    its sign changes nothing (even n, no ties, α = 1). μ = 1/2 and α = 1 give R − mean for even n.

    Deviations from the released code: a group of one gives 0, not R; a group whose metric is all equal has
    no halves and gives R − mean; no division by a length, which is the aggregation's. Equal metrics at the
    median are split in the order given.

    Args:
        reward: [B], any unit; what is not finite is missing.
        metric: [B], any unit (length, entropy, another score); where not finite the sample is missing.
        group: [B] labels.
        mu: μ in [0, 1], weight of the comparison between the halves.
        alpha: α, factor on the rewards of one half; below 1 it holds that half back.
        side: the half that α belongs to.

    Returns:
        [B], float32 or better; 0 where missing.

    CANON, Conditional advantage estimation, arXiv 2509.23962.
    """
    check_axes(reward=(reward, "B"), metric=(metric, "B"))
    check_share(mu=mu)
    if not math.isfinite(alpha):
        raise ValueError(f"alpha must be finite; got {alpha}.")
    check_choice("side", side, get_args(Side))
    index, groups = group_index(group, reward.shape[0], reward.device)
    present = torch.isfinite(reward) & torch.isfinite(metric)
    lowest, mean, _ = group_centre(reward, present, index, groups)
    value = torch.where(present, reward.detach().double() - lowest[index], 0.0)
    high = _high_half(metric, present, index, groups)
    own, other = 2 * index + high, 2 * index + ~high
    half = group_mean(value, present, own, 2 * groups)

    factor, one = torch.full_like(value, alpha), torch.ones_like(value)
    a_own = torch.where(high == (side == "high"), factor, one)
    a_other = torch.where(high == (side == "high"), one, factor)
    # The group's lowest reward was taken off; the middle term puts back what α leaves of it.
    between = a_own * value + (a_own - a_other) * lowest[index] - a_other * half[other]
    result = mu * between + (1 - mu) * (value - half[own])
    least, most = group_extremes(metric, present, index, groups)
    result = torch.where((least < most)[index], result, value - mean[index])
    return _finish(result, present, reward.dtype)


def prl_advantages(
    advantage: Tensor, log_ratio: Tensor, weight: Tensor | None = None, *, eta: float = 100.0, block: int = 1
) -> Tensor:
    """PRL: the divergence from the reference that is still to come, taken off each step's advantage.

    A_t = A − (1/η) Σ_{s≥t} w_s log(π_old/π_ref)_s. With block > 1 every decision of a block takes the value
    at the block's last one. With block = 1 and A = R − baseline on fresh samples this is the score-function
    gradient of E[R] − KL(π‖π_ref)/η, so add no KL loss.

    Blocks count present decisions, from the row's first: padding and holes change nothing, and the last block
    may be short. Released code marks block ends by non-zero values, and loses an end whose value is 0.

    Args:
        advantage: [B], from the outcome.
        log_ratio: [B, T] log π_old − log π_ref in nats, true log-densities
            (log_prob_reduction="sum"); no gradient.
        weight: [B, T], 0 for absent decisions.
        eta: η > 0, in nats per unit of advantage; infinity leaves the advantage as it is. Released scripts
            use 1, 100 and 200.
        block: decisions per block, ≥ 1; released scripts use 64, 128 and 256.

    Returns:
        [B, T], float32 or better; 0 where weight is 0, NaN in a row whose advantage or a present log-ratio is
        not finite.

    Process reward learning, arXiv 2601.10201.
    """
    check_axes(advantage=(advantage, "B"), log_ratio=(log_ratio, "B T"))
    if not eta > 0:
        raise ValueError(f"eta must be positive; got {eta}. Infinity switches the term off.")
    if block < 1:
        raise ValueError(f"block must be at least 1; got {block}.")
    remaining = discounted_returns(log_ratio, weight)
    inside = torch.ones_like(log_ratio, dtype=torch.bool) if weight is None else weight != 0
    if block > 1:
        length = log_ratio.shape[1]
        number = inside.cumsum(1)
        end = inside & ((number % block == 0) | (next_present(inside) == length))
        here = torch.arange(length, device=end.device)
        nearest = torch.where(end, here, next_present(end)).clamp(max=length - 1)
        remaining = remaining.gather(1, nearest)
    gain = float32(advantage).detach()[:, None]
    return torch.where(inside, gain - remaining / eta, 0.0)


def online_dpo_advantages(
    reward: Tensor,
    log_ratio: Tensor,
    group: Labels,
    *,
    beta: float = 0.1,
    row: str = "sigmoid",
    eps: float = 0.0,
) -> Tensor:
    """Online DPO: best and worst of a group are a pair; others get 0, a group without a preference too.

    A = −n β ℓ'(m) for the best and its negative for the worst, m = β (log π/π_ref of the best − of the
    worst), ℓ the row's loss, n the group's samples. The mean over samples of −A log π(y) has the gradient of
    the mean of ℓ over groups, each as often as it has samples, at the weights that drew; where an iteration
    has several updates, m stays that of its beginning.

    Args:
        reward: [B], any unit; what is not finite is missing. The first of several best or worst is taken.
        log_ratio: [B] log π − log π_ref of whole completions, nats; no gradient.
        group: [B] labels.
        beta: β > 0.
        row: of `core.preference.direct.DIRECT`, for pairs, from a reference and not per token: sigmoid,
            robust, hinge.
        eps: share of wrong preferences, in [0, 1/2), for rows that know it.

    Returns:
        [B], float32 or better.

    Online AI feedback, arXiv 2402.04792, section 3; DPO, arXiv 2305.18290, eq. 7.
    """
    check_axes(reward=(reward, "B"), log_ratio=(log_ratio, "B"))
    check_choice("row", row, [n for n, r in DIRECT.items() if r.loss and r.reference and not r.per_token])
    value, away = reward.detach().double(), log_ratio.detach().double()
    index, groups = group_index(group, len(value), value.device)
    known = torch.isfinite(value) & torch.isfinite(away)
    advantage = torch.zeros_like(value)
    for number in range(groups):
        places = (known & (index == number)).nonzero()[:, 0]
        if len(places) < 2 or value[places].min() == value[places].max():
            continue
        chosen = torch.stack([places[value[places].argmax()], places[value[places].argmin()]])
        with torch.enable_grad():
            pair = away[chosen].requires_grad_()
            none = torch.zeros(1, dtype=pair.dtype, device=pair.device)
            loss = direct_preference_loss(pair[:1], pair[1:], none, none, row=row, beta=beta, eps=eps)
            advantage[chosen] = -len(places) * torch.autograd.grad(loss.sum(), pair)[0]
    return advantage.to(float32_dtype(reward))


def _high_half(metric: Tensor, present: Tensor, index: Tensor, groups: int) -> Tensor:
    """Bool [B]: not among the first ⌊n/2⌋ of its group by the metric; stable, missing samples last."""
    order = torch.where(present, metric.detach().double(), float("inf")).argsort(stable=True)
    order = order[index[order].argsort(stable=True)]
    size = torch.bincount(index, minlength=groups)
    place = torch.arange(len(index), device=index.device) - (size.cumsum(0) - size)[index[order]]
    rank = torch.empty_like(order).scatter_(0, order, place)
    count = torch.zeros_like(size).index_add(0, index, present.to(size.dtype))
    return rank >= count[index] // 2


def _finish(values: Tensor, present: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where missing, float32 or better."""
    return torch.where(present, values, 0.0).to(torch.promote_types(dtype, torch.float32))
