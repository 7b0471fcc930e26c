# SPDX-License-Identifier: Apache-2.0
"""TEA's protected entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_same
from visalign.core.precision import float32_dtype


def tea_weights(
    covariance: Tensor, weight: Tensor | None = None, *, tau: float = 1.0, cap: float | None = None
) -> Tensor:
    """TEA's weights of the entropy bonus: w = softmax(cov/τ) over all present decisions.

    Decisions whose likelihood rises with their advantage would lose entropy fastest; they are protected most.
    Clip-Cov drops the same decisions instead.

    Args:
        covariance: [B, T] (A_t − Ā)(log π_t − mean log π), from `token_covariance`; no gradient.
        weight: [B, T], 0 for absent decisions, such as those outside the reasoning.
        tau: temperature τ > 0, in the unit of the covariance; infinity weighs all alike.
        cap: c: no weight above c/n, n present decisions; None for no cap. Capped weights sum to less than 1.

    Returns:
        [B, T], ≥ 0, float32 or better; 0 where absent. They sum to 1 without a cap.

    Light-IF, arXiv 2508.03178. Deviation: weights sum to 1, where the paper's n Σ w H grows with the number
    of decisions and swamps the policy loss. The constants of the paper are not published.
    """
    if not tau > 0 or (cap is not None and not cap > 0):
        raise ValueError(f"tau and cap must be positive; got tau={tau}, cap={cap}.")
    check_same(covariance=covariance, weight=weight)
    present = torch.isfinite(covariance) if weight is None else torch.isfinite(covariance) & (weight != 0)
    score = torch.where(present, covariance.detach().double() / tau, float("-inf"))
    score = torch.where(present.any(), score, 0.0)
    share = torch.where(present, score.flatten().softmax(0).reshape(score.shape), 0.0)
    if cap is not None:
        share = torch.minimum(share, cap / present.sum().clamp(min=1))
    return share.to(float32_dtype(covariance))


def weighted_entropy(entropy: Tensor, weights: Tensor) -> Tensor:
    """Σ w H, the bonus to be subtracted from the loss times a coefficient.

    Args:
        entropy: any shape, in nats, differentiable.
        weights: the same shape, e.g. from `tea_weights`; detached here. Where 0, exactly no gradient.

    Returns:
        0-dim, float32 or better.

    Light-IF, arXiv 2508.03178.
    """
    check_same(entropy=entropy, weights=weights)
    value = torch.where(weights != 0, entropy.to(float32_dtype(entropy)), 0.0)
    return (weights.detach() * value).sum()
