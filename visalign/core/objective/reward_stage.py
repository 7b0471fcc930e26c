# SPDX-License-Identifier: Apache-2.0
"""Advantages of rewards that are shaped, or scored together with those of other samples.

Each takes the trajectories, their rewards [B], and what the KL costs, [B] or 0, which is taken off what it
made of the rewards.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from visalign.core.advantages import hidden_states
from visalign.core.advantages.group import Baseline, Scale, group_advantages
from visalign.core.advantages.risk import bundle_scores, riskpo_advantages, track_quantile
from visalign.core.checks import check_choice, check_share
from visalign.core.rewards.likelihood import Likelihood, jepo_credit
from visalign.core.rewards.shaping import preference_as_reward

from .data import Trajectories


def par(
    t: Trajectories,
    reward: Tensor,
    cost: Tensor | float,
    *,
    k: float = 1.0,
    references: int = 1,
    scale: Scale = "group",
) -> Tensor:
    """The group's advantage of R′_b = mean_m σ(k (R_b − R_bm)), R_bm the rewards of `references` completions
    of the start policy.

    PAR, arXiv 2502.18770.
    """
    if references < 1:
        raise ValueError(f"references must be at least 1 completion; got {references}.")
    assert t.reference_reward is not None
    given = tuple(t.reference_reward.shape)
    if given[1] != references:
        raise ValueError(f"reference_reward must be [B, {references}]; got {given}.")
    made = preference_as_reward(reward, t.reference_reward, k=k) - cost
    gain = group_advantages(made, t.group, scale=scale, valid=t.valid)
    return torch.where(torch.isfinite(made), gain, torch.nan)


def likelihood(
    t: Trajectories,
    reward: Tensor,
    cost: Tensor | float,
    *,
    kind: Likelihood = "log_prob",
    scale: Scale = "none",
    baseline: Baseline = "leave_one_out",
) -> Tensor:
    """The group's advantage of R_i = log π(a* | prompt, z_i), of the record's answer a* after the completion
    z_i; `kind` as in `likelihood_reward`.

    Likelihood-based reward designs, arXiv 2602.03979. The judge's reward plays no part, and the gradient of
    R itself is left out.
    """
    assert t.likelihood is not None
    check_choice("kind", kind, get_args(Likelihood))
    made = t.likelihood - cost
    gain = group_advantages(made, t.group, scale=scale, baseline=baseline, valid=t.valid)
    return torch.where(torch.isfinite(made), gain, torch.nan)


def jepo(t: Trajectories, reward: Tensor, cost: Tensor | float) -> Tensor:
    """A_i = log mean_j exp ℓ_j − log mean_{j≠i} exp ℓ_j, ℓ_i = log π(a* | prompt, z_i) as in likelihood.

    JEPO in arXiv 2602.03979. The judge's reward plays no part, and the gradient of the bound itself is left
    out.
    """
    assert t.likelihood is not None
    known = torch.isfinite(t.likelihood) & t.present()
    credit = jepo_credit(torch.where(known, t.likelihood, torch.nan), t.group)[1]
    return torch.where(known, credit - cost, torch.nan)


def riskpo(
    t: Trajectories,
    reward: Tensor,
    cost: Tensor | float,
    *,
    bundle: int = 5,
    rate: float = 0.1,
    level_down: float = 0.2,
    level_up: float = 0.8,
    tail_weight: float = 1.5,
    natural_baseline: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """A = (ω CVaR(S) + RVaR(S))/(ω + 1)/std(S), S the scores of bundles of samples to `bundle` prompts each.

    RiskPO, arXiv 2510.00911; see `mixed_value_at_risk`.
    The quantiles are those that `riskpo_quantiles` tracked over the earlier rollouts (`rate` is its η), at
    first this one's own.
    """
    assert t.bundle is not None
    score, index = bundle_scores(reward - cost, t.bundle, size=bundle)
    low, high = t.quantiles or _own_quantiles(score, (level_down, level_up))
    return riskpo_advantages(
        score,
        low,
        high,
        eps=eps,
        level_down=level_down,
        level_up=level_up,
        tail_weight=tail_weight,
        natural_baseline=natural_baseline,
    )[index]


def riskpo_quantiles(
    t: Trajectories,
    reward: Tensor,
    *,
    bundle: int = 5,
    rate: float = 0.1,
    level_down: float = 0.2,
    level_up: float = 0.8,
    **_others: object,
) -> tuple[float, float]:
    """What RiskPO goes by in the next rollout, the lower and the upper quantile of the scores of bundles.

    Args:
        t: a whole rollout, with the quantiles that it went by; None at the first.
        reward: [B] of it, see `sample_reward`.
        bundle: as the others an option of advantage="riskpo".
        rate: η of `track_quantile`.
        level_down: of the lower one.
        level_up: of the upper one.
    """
    assert t.bundle is not None
    score, _ = bundle_scores(reward, t.bundle, size=bundle)
    before = t.quantiles or _own_quantiles(score, (level_down, level_up))
    low = float(track_quantile(before[0], score, level=level_down, rate=rate))
    return low, max(low, float(track_quantile(before[1], score, level=level_up, rate=rate)))


def rank_bonus(
    t: Trajectories,
    reward: Tensor,
    cost: Tensor | float,
    *,
    kappa: float = 2.0,
    stride: int = 40,
    rate: float = 0.3,
    scale: Scale = "group",
) -> Tensor:
    """The group's advantage and VERL's bonus (`hidden_states.rank_bonus`); the average is that which
    `rank_average` tracked over the earlier rollouts by `rate`, and `stride` that of `rank_dynamics`.

    VERL, arXiv 2509.23808.
    """
    assert t.rank is not None
    check_share(rate=rate)
    if stride < 1:
        raise ValueError(f"stride must be at least 1 token; got {stride}.")
    gain = group_advantages(reward - cost, t.group, scale=scale, valid=t.valid)
    return hidden_states.rank_bonus(gain, t.rank, t.rank_average, kappa=kappa)


def _own_quantiles(score: Tensor, levels: tuple[float, float]) -> tuple[float, float]:
    known = score[torch.isfinite(score)]
    low, high = (float(known.quantile(level)) if len(known) else 0.0 for level in levels)
    return low, high
