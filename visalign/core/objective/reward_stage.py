# SPDX-License-Identifier: Apache-2.0
"""Rewards and advantages that look at several samples, at earlier rollouts, or at the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.advantages import hidden_states
from visalign.core.advantages.group import Baseline, Scale, group_advantages
from visalign.core.advantages.risk import bundle_groups, bundle_scores, riskpo_advantages, track_quantile
from visalign.core.checks import check_axes
from visalign.core.groups.group_statistics import group_mean
from visalign.core.groups.labels import Labels, group_index
from visalign.core.rewards.entropy import difficulty_entropy_reward, difficulty_of, window_entropy
from visalign.core.rewards.likelihood import Likelihood, jepo_credit
from visalign.core.rewards.terms import preference_as_reward
from visalign.core.tokens.statistics import masked_quantile

from .data import Trajectories


def ares_reward(
    reward: Tensor,
    entropy: Tensor,
    weight: Tensor,
    present_weight: Tensor,
    present: Tensor,
    entropy_before: float | None,
    group: Labels,
    *,
    window: int = 4,
    quantile: float = 0.95,
    right_at: float = 1.0,
) -> Tensor:
    """Add `difficulty_entropy_reward` to the reward.

    Windows count above a threshold, that of the earlier rollouts (at first the rollout's own); their target is the
    mean count of the samples of the same difficulty. ARES, arXiv 2510.08457, its reward alone; the window is ours.
    """
    threshold = entropy_before
    if threshold is None:
        threshold = ares_threshold(entropy, present_weight, window=window, quantile=quantile)
    mean, exists = window_entropy(entropy, weight, window=window)
    count = (exists & (mean > threshold)).sum(1).double()
    index, groups = group_index(group, len(reward), reward.device)
    right = present & (reward >= right_at)
    difficulty = difficulty_of(group_mean(right.double(), present, index, groups)[index])
    target = group_mean(count, present, difficulty, 3)[difficulty]
    return reward + difficulty_entropy_reward(count, target, right, difficulty).to(reward.dtype)


def ares_threshold(entropy: Tensor, weight: Tensor, *, window: int = 4, quantile: float = 0.95) -> Tensor:
    """Compute the quantile of a rollout's window entropies; 0-dim float64, NaN without a window."""
    mean, exists = window_entropy(entropy, weight, window=window)
    return masked_quantile(mean, exists.double(), quantile)


def par(
    raw_reward: Tensor,
    kl_cost: Tensor | float,
    reference_reward: Tensor,
    group: Labels,
    valid: Tensor | None,
    *,
    k: float = 1.0,
    references: int = 1,
    scale: Scale = "group",
) -> Tensor:
    """Compute the group's advantage of R′_b = mean_m σ(k (R_b − R_bm)), R_bm of the start policy; arXiv 2502.18770."""
    check_axes(reference_reward=(reference_reward, f"B {references}"))
    shaped = preference_as_reward(raw_reward, reference_reward, k=k) - kl_cost
    gain = group_advantages(shaped, group, scale=scale, valid=valid)
    return torch.where(torch.isfinite(shaped), gain, torch.nan)


def likelihood(
    likelihood: Tensor,
    kl_cost: Tensor | float,
    group: Labels,
    valid: Tensor | None,
    *,
    kind: Likelihood = "log_prob",
    scale: Scale = "none",
    baseline: Baseline = "leave_one_out",
) -> Tensor:
    """Compute the group's advantage of R_i = log π(a* | prompt, z_i), a* the answer after the completion z_i.

    A trainer reads `kind`, see `likelihood_reward`. The task's reward plays no part, and the gradient of R
    itself is left out. Likelihood-based reward designs, arXiv 2602.03979.
    """
    shaped = likelihood - kl_cost
    gain = group_advantages(shaped, group, scale=scale, baseline=baseline, valid=valid)
    return torch.where(torch.isfinite(shaped), gain, torch.nan)


def jepo(likelihood: Tensor, kl_cost: Tensor | float, group: Labels, present: Tensor) -> Tensor:
    """A_i = log mean_j exp ℓ_j − log mean_{j≠i} exp ℓ_j, ℓ_i = log π(a* | prompt, z_i) as in likelihood.

    The task's reward plays no part, and the gradient of the bound itself is left out. JEPO in arXiv 2602.03979.
    """
    usable = torch.isfinite(likelihood) & present
    credit = jepo_credit(torch.where(usable, likelihood, torch.nan), group)[1]
    return torch.where(usable, credit - kl_cost, torch.nan)


def riskpo(
    reward: Tensor,
    bundle_index: Tensor,
    group: Labels,
    quantiles: tuple[float, float] | None,
    *,
    bundle: int = 5,
    rate: float = 0.1,
    level_down: float = 0.2,
    level_up: float = 0.8,
    tail_weight: float = 1.5,
    natural_baseline: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """A = (ω CVaR(S) + RVaR(S))/(ω + 1)/std(S), S the scores of bundles of samples of `bundle` prompts each.

    The std is over the bundles of the same prompts. The quantiles are those that `riskpo_quantiles` tracked over the
    earlier rollouts (`rate` is its η), at first this one's own. RiskPO, arXiv 2510.00911; see `mixed_value_at_risk`.
    """
    score, index = bundle_scores(reward, bundle_index, size=bundle)
    ends = quantiles or _score_quantiles(score, (level_down, level_up))
    options = {"tail_weight": tail_weight, "natural_baseline": natural_baseline, "eps": eps}
    same = bundle_groups(index, group)
    return riskpo_advantages(score, *ends, same, level_down=level_down, level_up=level_up, **options)[index]


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
    """Track the lower and the upper quantile of the scores of bundles, for RiskPO's next rollout.

    `t` is a whole rollout, with the quantiles of the earlier ones, `reward` its `sample_reward`; options are
    those of advantage="riskpo", `rate` the η of `track_quantile`.
    """
    assert t.bundle is not None
    score, _ = bundle_scores(reward, t.bundle, size=bundle)
    before = t.quantiles or _score_quantiles(score, (level_down, level_up))
    low = float(track_quantile(before[0], score, level=level_down, rate=rate))
    return low, max(low, float(track_quantile(before[1], score, level=level_up, rate=rate)))


def rank_bonus(
    reward: Tensor,
    rank: Tensor,
    rank_average: tuple[float, float, float] | None,
    group: Labels,
    valid: Tensor | None,
    *,
    kappa: float = 2.0,
    stride: int = 40,
    rate: float = 0.3,
    scale: Scale = "group",
) -> Tensor:
    """Add VERL's bonus (`hidden_states.rank_bonus`) to the group's advantage; arXiv 2509.23808.

    A trainer reads `rate`, that of `rank_average` over the earlier rollouts, and `stride` of `rank_dynamics`.
    """
    gain = group_advantages(reward, group, scale=scale, valid=valid)
    return hidden_states.rank_bonus(gain, rank, rank_average, kappa=kappa)


def _score_quantiles(score: Tensor, levels: tuple[float, float]) -> tuple[float, float]:
    finite = score[torch.isfinite(score)]
    low, high = (float(finite.quantile(level)) if len(finite) else 0.0 for level in levels)
    return low, high
