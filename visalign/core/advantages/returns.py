# SPDX-License-Identifier: Apache-2.0
"""Returns and advantages per decision: discounted sums, GAE, ReMax, REINFORCE++, optimal token baselines.

Absent decisions are skipped, not stepped over: the present ones of a row are treated as if they were
adjacent, so neither a discount nor a value leaks through a hole. Results are [B, T]. A row in which a present
reward or value is not finite is NaN, which `whiten` leaves out and turns into 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes
from visalign.core.groups.labels import Labels, group_index, group_min, group_sum
from visalign.core.groups.moments import present_entries
from visalign.core.precision import float32_dtype

from .group import group_advantages, whiten

BLOCK = 128  # Decisions per matrix product of the backward recursion


def discounted_returns(reward: Tensor, weight: Tensor | None = None, *, gamma: float = 1.0) -> Tensor:
    """Sum rewards [B, T] from each decision on: G_t = r_t + γ G_{t'} (Sutton and Barto, 2018, eq. 3.9)."""
    present = _present("reward", reward, weight)
    order, (rewards,), missing = _to_front(present, reward)
    return _back(_discounted_sum(rewards, gamma), order, present, missing, reward.dtype)


def gae(
    reward: Tensor,
    value: Tensor,
    weight: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    last_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates, and the returns that a value function is fitted to.

    δ_t = r_t + γ V_{t'} − V_t;  A_t = δ_t + γλ A_{t'};  R_t = A_t + V_t; t' is the next present decision.
    λ = 1 gives Σ γ^l r − V_t, λ = 0 gives δ_t. PPO whitens A over all present decisions.

    `value` is V of the state before each decision, `last_value` [B] that after the last present one, for rows
    that were cut off; None means 0, the end. Returns (advantages, returns). Schulman et al., GAE, arXiv
    1506.02438, eq. 16; λ = 0.95 as in PPO, arXiv 1707.06347, table 3.
    """
    present = _present("reward", reward, weight)
    check_axes(reward=(reward, "B T"), value=(value, "B T"), last_value=(last_value, "B"))
    dtype = torch.promote_types(reward.dtype, value.dtype)
    order, (rewards, values), missing = _to_front(present, reward, value)
    following = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    if last_value is not None:
        number = present.sum(1, keepdim=True)
        is_last = torch.arange(reward.shape[1], device=reward.device) == number - 1
        following = torch.where(is_last, last_value.detach().double()[:, None], following)
        missing = missing | (~torch.isfinite(last_value) & (number[:, 0] > 0))
    # A_t = Σ_l (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} − V_t
    advantages = _discounted_sum(rewards + gamma * following - values, gamma * lam)
    return (
        _back(advantages, order, present, missing, dtype),
        _back(advantages + values, order, present, missing, dtype),
    )


def remax_advantages(reward: Tensor, baseline: Tensor, weight: Tensor | None = None) -> Tensor:
    """Subtract the greedy completion's reward: A_t = Σ_{s≥t} r_s − R(greedy completion of the prompt).

    `reward` is [B, T]; `baseline` [B] is the reward of the greedy (argmax) completion. Li et al., ReMax,
    arXiv 2310.10505, algorithm 1.
    """
    check_axes(reward=(reward, "B T"), baseline=(baseline, "B"))
    present = _present("reward", reward, weight)
    returns = discounted_returns(reward.double(), present)
    greedy = torch.where(torch.isfinite(baseline), baseline.detach().double(), float("nan"))
    result = torch.where(present, returns - greedy[:, None], 0.0)
    return result.to(float32_dtype(reward))


def reinforce_pp_advantages(
    reward: Tensor, weight: Tensor | None = None, *, gamma: float = 1.0, ddof: int = 1, eps: float = 1e-8
) -> Tensor:
    """Whiten the returns over all decisions of the batch: A = (G − mean)/sqrt(var + eps).

    G as in `discounted_returns`; the reward [B, T] holds the KL penalty (`kl_in_reward`). No group is needed.
    Rewards reach the decisions before a hole (in verl 0.8 they do not). Missing rows get 0. Hu et
    al., REINFORCE++, arXiv 2501.03262.
    """
    present = _present("reward", reward, weight)
    returns = discounted_returns(reward.double(), present, gamma=gamma)
    result = whiten(returns, present, ddof=ddof, eps=eps)
    return result.to(float32_dtype(reward))


def reinforce_pp_baseline_advantages(
    reward: Tensor, group: Labels, weight: Tensor, *, ddof: int = 1, eps: float = 1e-8, valid: Tensor | None = None
) -> Tensor:
    """Centre rewards in their group, then whiten over all decisions of the batch (REINFORCE++ with baseline).

    C_i = R_i − mean_g, on every present decision of i; A = (C − mean C)/sqrt(var C + eps). The mean over
    decisions is not 0 when lengths differ, and moves a group of equal rewards off 0, as published. Hu et al.,
    REINFORCE++, arXiv 2501.03262, the baseline variant.
    """
    check_axes(reward=(reward, "B"), weight=(weight, "B T"))
    centred = group_advantages(reward.double(), group, scale="none", valid=valid)
    centred = torch.where(present_entries(reward, valid), centred, float("nan"))
    result = whiten(centred[:, None].expand(weight.shape), weight != 0, ddof=ddof, eps=eps)
    return result.to(float32_dtype(reward))


def optimal_token_baseline(
    reward: Tensor,
    weight: Tensor,
    group: Labels,
    log_prob: Tensor,
    sum_p2: Tensor,
    importance_weight: Tensor | None = None,
    *,
    multi_turn: bool = True,
    zero_tail: bool = False,
    eps: float = 1e-8,
) -> Tensor:
    """Subtract the baseline of least variance of each token of a group: A_t = G_t − B_t.

    B_t = Σ_i G_it W_it/(Σ_i W_it + eps), W_t = Σ_{s≤t} ω_s² (1 − 2 π_s + Σ_v π_sv²) the squared norms of the logits'
    gradients so far, ω the importance weight. i runs over the rows with a t-th token, counted among the present ones
    with `multi_turn`, otherwise among columns, tools' answers included. B is 0 for the only row of a group, and with
    `zero_tail` for the longest row behind the length of the second.

    Li et al., arXiv 2602.07078, the logit-gradient proxy, in the forms of verl.
    """
    present, energy = _present("reward", reward, weight), 1 - 2 * log_prob.exp() + sum_p2
    energy = energy if importance_weight is None else energy * importance_weight.square()
    columns = (torch.where(present, row, 0.0) for row in (reward, energy))
    order, (gains, energy), missing = _to_front(present | (not multi_turn), *columns)
    inside, (index, groups) = (
        (present & ~missing[:, None]).gather(1, order),
        group_index(group, len(reward), reward.device),
    )
    returns, total = gains.flip(1).cumsum(1).flip(1), torch.where(inside, energy.cumsum(1), 0.0)
    baseline = (group_sum(total * returns, index, groups) / (group_sum(total, index, groups) + eps))[index]
    length = inside.sum(1, keepdim=True)
    compared = length > 0 if multi_turn else ~missing[:, None]
    baseline = torch.where(group_sum(compared.double(), index, groups)[index] > 1, baseline, 0.0)
    if zero_tail:
        numbers = torch.arange(max(reward.shape), device=reward.device)
        key = -(len(reward) * length + numbers[: len(reward), None]).double()  # unique, so that one row is longest
        rest = torch.where(key == group_min(key, index, groups)[index], 0.0, key)
        second = -group_min(rest, index, groups)[index] // len(reward)
        baseline = torch.where((numbers[: reward.shape[1]] >= second) & (length > second), 0.0, baseline)
    return _back(returns - baseline, order, present, missing, reward.dtype)


def _to_front(present: Tensor, *rows: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return the order that puts present decisions first, the rows in it (float64), and missing rows [B]."""
    order = torch.argsort((~present).to(torch.int32), dim=1, stable=True)
    finite = torch.stack([torch.isfinite(row) for row in rows]).all(0)
    missing = (present & ~finite).any(1)
    inside = present & finite
    moved = [torch.where(inside, row.detach().double(), 0.0).gather(1, order) for row in rows]
    return order, moved, missing


def _back(result: Tensor, order: Tensor, present: Tensor, missing: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `_to_front`, with 0 at absent decisions and NaN in missing rows."""
    result = torch.zeros_like(result).scatter(1, order, result)
    result = torch.where(missing[:, None], float("nan"), result)
    return torch.where(present, result, 0.0).to(torch.promote_types(dtype, torch.float32))


def _discounted_sum(values: Tensor, discount: float) -> Tensor:
    """Solve y_t = x_t + discount·y_{t+1} from the end, block by block.

    Within a block y = x K, K_jt = discount^(j−t) for j ≥ t, plus the carry of the next block. Float64, so
    that no reduced-precision matrix product is chosen.
    """
    if values.shape[1] == 0:
        return values
    step = torch.arange(min(BLOCK, values.shape[1]), device=values.device)
    distance = step[:, None] - step
    base = values.new_tensor(discount)
    kernel = torch.where(distance >= 0, base ** distance.clamp(min=0), 0.0)
    carry = values.new_zeros(values.shape[0], 1)
    blocks = []
    for block in reversed(values.split(len(step), dim=1)):
        size = block.shape[1]
        total = block @ kernel[:size, :size] + carry * base ** (size - step[:size])
        carry = total[:, :1]
        blocks.append(total)
    return torch.cat(blocks[::-1], 1)


def _present(name: str, values: Tensor, weight: Tensor | None) -> Tensor:
    check_axes(**{name: (values, "B T")}, weight=(weight, "B T"))
    return torch.ones_like(values, dtype=torch.bool) if weight is None else weight != 0
