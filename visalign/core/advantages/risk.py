# SPDX-License-Identifier: Apache-2.0
"""RiskPO, arXiv 2510.00911: advantages that weigh the tail of the scores; defaults are the paper's.

Scores have any shape and unit; those that are not finite are missing and get 0. `q_down` and `q_up` are their
α_d and α_u quantiles (`level_down`, `level_up`), numbers or tensors that broadcast.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visalign.core.groups.group_statistics import group_mean
from visalign.core.groups.labels import Labels, group_index, group_min, group_sum
from visalign.core.groups.moments import centre, spread
from visalign.core.precision import float32


def range_value_at_risk(
    score: Tensor,
    q_down: Tensor | float,
    q_up: Tensor | float,
    *,
    level_down: float = 0.2,
    level_up: float = 0.8,
    natural_baseline: bool = True,
) -> Tensor:
    """Weigh a score in the mean between two quantiles, its range value at risk.

    RVaR(S) = [(S − q_d)⁺ − (S − q_u)⁺ + q_d − q_u]/(α_u − α_d), the last two terms being the natural
    baseline: with it the value is ≤ 0 and 0 from q_u on, without it ≥ 0 and 0 up to q_d.

    The released single-prompt estimator divides by q_u − q_d instead.
    """
    value = float32(score).detach()
    inside = (value - q_down).clamp(min=0) - (value - q_up).clamp(min=0)
    if natural_baseline:
        inside = inside + (q_down - q_up)
    return torch.where(torch.isfinite(value), inside / (level_up - level_down), 0.0)


def conditional_value_at_risk(score: Tensor, q_down: Tensor | float, *, level_down: float = 0.2) -> Tensor:
    """Weigh a score in the mean of the worst: CVaR(S) = −(q_d − S)⁺/α_d, 0 from q_d on; arXiv 2510.00911."""
    value = float32(score).detach()
    return torch.where(torch.isfinite(value), -(q_down - value).clamp(min=0) / level_down, 0.0)


def mixed_value_at_risk(
    score: Tensor,
    q_down: Tensor | float,
    q_up: Tensor | float,
    *,
    level_down: float = 0.2,
    level_up: float = 0.8,
    tail_weight: float = 1.5,
    natural_baseline: bool = True,
) -> Tensor:
    """Compute RiskPO's advantage, A = (ω CVaR + RVaR)/(ω + 1): the worst samples move the policy most.

    Non-decreasing in the score and constant from q_u on; with the natural baseline all advantages are ≤ 0.
    Scores may be [B] sums over bundles of prompts; for images, scores of one prompt with the quantiles of its
    group guard against one lucky image among bad ones. `tail_weight` is ω ≥ 0. The paper has ω = 1.5.
    """
    middle = range_value_at_risk(
        score, q_down, q_up, level_down=level_down, level_up=level_up, natural_baseline=natural_baseline
    )
    tail = conditional_value_at_risk(score, q_down, level_down=level_down)
    return (tail_weight * tail + middle) / (tail_weight + 1)


def track_quantile(quantile: Tensor | float, score: Tensor, *, level: float, rate: float = 0.1) -> Tensor:
    """Move a running quantile: q ← q + η (α − mean 1[S ≤ q]), 0-dim; `rate` η is in the unit of the scores."""
    value = float32(score).detach()
    present = torch.isfinite(value)
    below = ((value <= quantile) & present).sum() / present.sum().clamp(min=1).to(value.dtype)
    now = torch.as_tensor(quantile, dtype=value.dtype, device=value.device)
    return torch.where(present.any(), now + rate * (level - below), now)


def bundle_scores(reward: Tensor, bundle: Tensor, *, size: int = 5) -> tuple[Tensor, Tensor]:
    """Score bundles of samples of `size` prompts each: size · mean of their rewards [B].

    This is the sum of a whole bundle; bundles of another size, or with a missing reward, stay comparable.
    Returns the scores [N] float64 of the N bundles, NaN without a reward, and the bundle [B] of each sample.
    """
    index, count = group_index(bundle, len(reward), reward.device)
    present = torch.isfinite(reward)
    scored = group_sum(present.double()[:, None], index, count)[:, 0] > 0
    return torch.where(scored, size * group_mean(reward, present, index, count), torch.nan), index


def bundle_groups(bundle: Tensor, group: Labels) -> Tensor:
    """Label the N bundles that share a prompt, [N]; `bundle` [B] numbers 0 … N − 1, `group` [B] labels prompts."""
    prompt, prompts = group_index(group, len(bundle), bundle.device)
    first = group_min(prompt[:, None].double(), bundle, int(bundle.max()) + 1)
    first = group_min(group_min(first[bundle], prompt, prompts)[prompt], bundle, len(first))
    return first[:, 0].long()


def riskpo_advantages(
    score: Tensor, q_down: Tensor | float, q_up: Tensor | float, group: Labels, *, eps: float = 1e-6, **options: Any
) -> Tensor:
    """Divide `mixed_value_at_risk` of bundle scores [N] by the std (n − 1) of the bundles of the same
    prompts, plus eps.

    `group` is from `bundle_groups`; a bundle alone has the std 1. NaN where missing. Deviation: equal scores
    of a group get 0, where the released code divides by eps.
    """
    present = torch.isfinite(score)
    value = mixed_value_at_risk(score, q_down, q_up, **options)
    index, groups = group_index(group, len(score), score.device)
    count, centred = centre(torch.nan_to_num(score.detach().double())[:, None], present[:, None], index, groups)
    std = torch.where(count > 1, spread(centred, present[:, None], index, groups, ddof=1), 1.0)[:, 0]
    return torch.where(present, torch.where(std > 0, value / (std + eps), 0.0), torch.nan)
