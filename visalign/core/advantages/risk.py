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
from visalign.core.groups.labels import group_index, group_sum
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
    """Move a running quantile towards that of the scores: q ← q + η (α − mean 1[S ≤ q]); 0-dim.

    `level` is α in (0, 1); `rate` η is in the unit of the scores. Without a finite score q stays.
    """
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


def riskpo_advantages(
    score: Tensor, q_down: Tensor | float, q_up: Tensor | float, *, eps: float = 1e-6, **options: Any
) -> Tensor:
    """Divide `mixed_value_at_risk` of bundle scores [N] by the std (n − 1) of all scores passed in, plus eps.

    NaN where missing, 0 where all scores are equal.
    """
    present = torch.isfinite(score)
    value = mixed_value_at_risk(score, q_down, q_up, **options)
    scores = score.detach().double()[present]
    if len(scores) < 2 or bool((scores == scores[0]).all()):
        return torch.where(present, torch.zeros_like(value), torch.nan)
    return torch.where(present, value / (scores.std() + eps), torch.nan)
