# SPDX-License-Identifier: Apache-2.0
"""Entropy as a weight: EMPG's advantages per segment, and TEA's protected entropy.

Entropies in nats. Statistics are over all that is passed in, so pass the whole optimizer step (all devices).
Only `weighted_entropy` has a gradient.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from visalign.core.checks import check_axes, check_not_negative, check_same
from visalign.core.precision import float32_dtype
from visalign.core.rewards.steps import next_present


def empg_scale(entropy: Tensor, weight: Tensor | None = None, *, k: float = 1.0, eps: float = 1e-8) -> Tensor:
    """EMPG's confidence, g = exp(−k H̃)/mean exp(−k H̃), H̃ = (H − min)/(max − min + eps).

    Minimum, maximum and mean are over all present segments, so that g has mean 1: confident segments move the
    policy more, unsure ones less.

    Args:
        entropy: [B, S] mean entropy of each segment; what is not finite is absent.
        weight: [B, S], 0 for absent segments.
        k: steepness, ≥ 0; 0 switches it off.
        eps: against equal entropies, in nats.

    Returns:
        [B, S], float32 or better; 0 where absent, 1 where all are equal.

    EMPG, arXiv 2509.09265.
    """
    present = _present_segments(entropy, weight)
    sure = _confidence(entropy, present, k, eps)
    mean = sure.sum() / present.sum().clamp(min=1)
    return (sure / torch.where(mean == 0, 1.0, mean)).to(float32_dtype(entropy))


def empg_advantages(
    advantage: Tensor,
    entropy: Tensor,
    weight: Tensor | None = None,
    *,
    k: float = 1.0,
    k_bonus: float = 1.0,
    zeta: float = 0.1,
    centre: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """EMPG: scale each segment by its confidence and reward the clarity of the next one.

    A_s = A g_s + ζ exp(−k′ H̃_{s+1}), without the bonus on a row's last segment; then minus the mean over all
    present segments.

    Args:
        advantage: [B], from the outcome; what is not finite is missing, and its segments are absent.
        entropy: [B, S], as in `empg_scale`.
        weight: [B, S], 0 for absent segments; the next segment is the next present one.
        k: steepness of g, ≥ 0; 0 switches it off.
        k_bonus: k′ ≥ 0.
        zeta: ζ, weight of the bonus, in the unit of the advantage.
        centre: take the mean off.
        eps: against equal entropies, in nats.

    Returns:
        [B, S], float32 or better; 0 where absent.

    EMPG, arXiv 2509.09265 (k = k′ = 1, ζ = 0.1).
    """
    present = _present_segments(entropy, weight)
    check_axes(entropy=(entropy, "B S"), advantage=(advantage, "B"))
    present = present & torch.isfinite(advantage)[:, None]
    gain = torch.where(present, advantage.detach().double()[:, None], 0.0)
    clear = _confidence(entropy, present, k_bonus, eps)
    ahead = pad(clear, (0, 1)).gather(1, next_present(present))
    scale = empg_scale(entropy.double(), present, k=k, eps=eps)
    result = torch.where(present, gain * scale + zeta * ahead, 0.0)
    if centre:
        result = torch.where(present, result - result.sum() / present.sum().clamp(min=1), 0.0)
    return result.to(torch.promote_types(advantage.dtype, float32_dtype(entropy)))


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


def _confidence(entropy: Tensor, present: Tensor, k: float, eps: float) -> Tensor:
    """exp(−k H̃), [B, S] float64; 0 where absent."""
    check_not_negative(k=k, eps=eps)
    value = torch.where(present, entropy.detach().double(), math.inf)
    low, high = value.amin(), torch.where(present, value, -math.inf).amax()
    # The clamp stands for 0/0 alone: equal entropies with eps = 0.
    reach = (high - low + eps).clamp(min=torch.finfo(value.dtype).tiny)
    return torch.where(present, torch.exp(-k * (value - low) / reach), 0.0)


def _present_segments(entropy: Tensor, weight: Tensor | None) -> Tensor:
    check_axes(entropy=(entropy, "B S"), weight=(weight, "B S"))
    finite = torch.isfinite(entropy)
    return finite if weight is None else finite & (weight != 0)
