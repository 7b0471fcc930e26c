# SPDX-License-Identifier: Apache-2.0
"""Advantages that look at the tail: RiskPO's mixed value at risk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visalign.core.checks import check_not_negative
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
    """Weight of a score in the mean between two quantiles, its range value at risk.

    RVaR(S) = [(S − q_d)⁺ − (S − q_u)⁺ + q_d − q_u]/(α_u − α_d), the last two terms being the natural
    baseline: with it the value is ≤ 0 and 0 from q_u on, without it ≥ 0 and 0 up to q_d.

    Args:
        score: any shape, any unit; what is not finite is missing.
        q_down: the α_d quantile of the scores, same unit, a number or a tensor that broadcasts.
        q_up: the α_u quantile, ≥ q_down.
        level_down: α_d in (0, 1).
        level_up: α_u in (α_d, 1].
        natural_baseline: see above.

    Returns:
        The shape of score, float32 or better, no gradient; 0 where missing.

    RiskPO, arXiv 2510.00911. The released single-prompt estimator divides by q_u − q_d instead; this is the
    other one, of levels.
    """
    _check_levels(level_down, level_up)
    value = float32(score).detach()
    inside = (value - q_down).clamp(min=0) - (value - q_up).clamp(min=0)
    if natural_baseline:
        inside = inside + (q_down - q_up)
    return torch.where(torch.isfinite(value), inside / (level_up - level_down), 0.0)


def conditional_value_at_risk(score: Tensor, q_down: Tensor | float, *, level_down: float = 0.2) -> Tensor:
    """Weight of a score in the mean of the worst: CVaR(S) = −(q_d − S)⁺/α_d, 0 from q_d on.

    Args:
        score: any shape, any unit; what is not finite is missing.
        q_down: the α_d quantile of the scores, same unit, a number or a tensor that broadcasts.
        level_down: α_d in (0, 1).

    Returns:
        The shape of score, ≤ 0, float32 or better, no gradient; 0 where missing.

    RiskPO, arXiv 2510.00911.
    """
    _check_levels(level_down, 1.0)
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
    """RiskPO's advantage: A = (ω CVaR + RVaR)/(ω + 1); the worst samples move the policy most.

    Non-decreasing in the score and constant from q_u on. With the natural baseline all advantages are ≤ 0.
    Divide by the std of the scores afterwards if the unit is to vanish. For images: scores of one prompt
    with the quantiles of its group guard against one lucky image among bad ones.

    Args:
        score: any shape, e.g. [B] sums over bundles of prompts; what is not finite is missing.
        q_down: lower quantile of the scores, tracked over steps by `track_quantile`.
        q_up: upper quantile, alike.
        level_down: α_d.
        level_up: α_u.
        tail_weight: ω ≥ 0.
        natural_baseline: shift RVaR by q_down − q_up, so that no score has a positive one.

    Returns:
        The shape of score, float32 or better, no gradient; 0 where missing.

    RiskPO, arXiv 2510.00911 (ω = 1.5, levels 0.2 and 0.8).
    """
    check_not_negative(tail_weight=tail_weight)
    middle = range_value_at_risk(
        score, q_down, q_up, level_down=level_down, level_up=level_up, natural_baseline=natural_baseline
    )
    tail = conditional_value_at_risk(score, q_down, level_down=level_down)
    return (tail_weight * tail + middle) / (tail_weight + 1)


def track_quantile(quantile: Tensor | float, score: Tensor, *, level: float, rate: float = 0.1) -> Tensor:
    """Move a running quantile towards the scores' own: q ← q + η (α − mean 1[S ≤ q]).

    Args:
        quantile: q, a number or 0-dim tensor, in the unit of the scores.
        score: any shape; what is not finite is left out.
        level: α in (0, 1).
        rate: η > 0, in the unit of the scores.

    Returns:
        0-dim, float32 or better, no gradient; q itself where there is no score.

    RiskPO, arXiv 2510.00911 (η = 0.1).
    """
    _check_levels(level, 1.0)
    value = float32(score).detach()
    present = torch.isfinite(value)
    below = ((value <= quantile) & present).sum() / present.sum().clamp(min=1).to(value.dtype)
    now = torch.as_tensor(quantile, dtype=value.dtype, device=value.device)
    return torch.where(present.any(), now + rate * (level - below), now)


def bundle_scores(reward: Tensor, bundle: Tensor, *, size: int = 5) -> tuple[Tensor, Tensor]:
    """The scores of bundles of samples, one to each of `size` prompts: size · mean of their rewards.

    It is their sum where the bundle is whole; a bundle of another size, or with a reward that is missing,
    stays comparable.

    Args:
        reward: [B]; what is not finite is missing.
        bundle: [B] int64 labels.
        size: prompts in a bundle, ≥ 1.

    Returns:
        (scores [N] float64 of the N bundles, NaN without a reward; [B] which of them a sample is in).

    RiskPO, arXiv 2510.00911 (5 prompts).
    """
    if size < 1:
        raise ValueError(f"bundle must be at least 1 prompt; got {size}.")
    index, count = group_index(bundle, len(reward), reward.device)
    known = torch.isfinite(reward)
    there = group_sum(known.double()[:, None], index, count)[:, 0] > 0
    return torch.where(there, size * group_mean(reward, known, index, count), torch.nan), index


def riskpo_advantages(
    score: Tensor,
    q_down: Tensor | float,
    q_up: Tensor | float,
    *,
    eps: float = 1e-6,
    **options: Any,
) -> Tensor:
    """`mixed_value_at_risk` of the scores of bundles, over their std (n − 1).

    Args:
        score: [N]; what is not finite is missing.
        q_down: lower quantile of the scores.
        q_up: upper quantile.
        eps: added to the std.
        options: of `mixed_value_at_risk`.

    Returns:
        [N], float32 or better, no gradient; NaN where missing, 0 where all scores are equal.

    RiskPO, arXiv 2510.00911. The std is that of all scores that are passed in.
    """
    known = torch.isfinite(score)
    value = mixed_value_at_risk(score, q_down, q_up, **options)
    inside = score.detach().double()[known]
    if len(inside) < 2 or bool((inside == inside[0]).all()):
        return torch.where(known, torch.zeros_like(value), torch.nan)
    return torch.where(known, value / (inside.std() + eps), torch.nan)


def _check_levels(down: float, up: float) -> None:
    if not 0 < down < up <= 1:
        raise ValueError(f"quantile levels must satisfy 0 < down < up ≤ 1; got {down} and {up}.")
