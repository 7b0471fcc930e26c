# SPDX-License-Identifier: Apache-2.0
"""Entropy of a token policy: what moves it, what it costs, and the rules that hold it.

Measured: covariance of log-prob and advantage, the entropy change it predicts, the curve R = −a e^H + b.
Controlled: the entropy bonus and its adaptive coefficient. Entropies are in nats. Denoising steps of fixed
variance have one entropy for all, so nothing here, in `selection` or in `selection_rules` means anything on
them: an `Objective` refuses it there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.core.precision import float32

from .statistics import token_terms, weighted_mean


@dataclass(frozen=True)
class CovarianceStatistics:
    """Whole-step statistics of log-prob and advantage; 0-dim float64 tensors, NaN when nothing is present."""

    mean_log_prob: Tensor
    """Mean log π, in nats."""
    mean_advantage: Tensor
    """Mean A."""
    covariance: Tensor
    """Mean of (A − Ā)(log π − mean log π)."""


def covariance_statistics(log_prob: Tensor, advantage: Tensor, weight: Tensor) -> CovarianceStatistics:
    """Measure Cov(log π, A) = Σ w (A − Ā)(log π − mean log π) / Σ w over the whole optimizer step.

    Args:
        log_prob: [B, T] (or [N]) under the policy at the beginning of the step; all devices together.
        advantage: [B], or the shape of log_prob.
        weight: the shape of log_prob, ≥ 0. With w = π over all actions of a state the result is exact.

    Returns:
        Means and covariance, no gradient; entries of weight 0, or not finite, take no part.

    Cui et al., The Entropy Mechanism, arXiv 2505.22617, section 4 (covariance).
    """
    value, gain, inside = token_terms(log_prob, advantage, weight)
    share = torch.where(inside, weight.double(), 0.0)
    mean_log_prob, mean_advantage = weighted_mean(value, share), weighted_mean(gain, share)
    product = (gain - mean_advantage) * (value - mean_log_prob)
    return CovarianceStatistics(mean_log_prob, mean_advantage, weighted_mean(product, share))


def token_covariance(
    log_prob: Tensor, advantage: Tensor, weight: Tensor, statistics: CovarianceStatistics
) -> Tensor:
    """One decision's part in the covariance: cov_t = (A_t − Ā)(log π_t − mean log π).

    Args:
        log_prob: [B, T] of any micro-batch.
        advantage: [B], or the shape of log_prob.
        weight: the shape of log_prob; 0 for absent decisions.
        statistics: of the whole step, from `covariance_statistics`.

    Returns:
        The shape of log_prob, float64, no gradient; 0 where absent.

    Cui et al., arXiv 2505.22617, section 4. Deviation from the released code: its means are a micro-batch's.
    """
    value, gain, inside = token_terms(log_prob, advantage, weight)
    product = (gain - statistics.mean_advantage) * (value - statistics.mean_log_prob)
    return torch.where(inside, product, 0.0)


@dataclass(frozen=True)
class EntropyFit:
    """R = −a e^H + b by ordinary least squares; 0-dim float64 tensors, NaN where the data do not tell."""

    a: Tensor
    """Reward bought per unit of e^H."""
    b: Tensor
    """Offset, in the unit of the reward."""
    ceiling: Tensor
    """b − a: the reward at H = 0, when all entropy is spent."""
    a_std: Tensor
    """Standard error of a."""
    b_std: Tensor
    """Standard error of b."""
    ceiling_std: Tensor
    """Standard error of the ceiling, with the covariance of a and b; Student's t has count − 2 degrees."""
    residual_std: Tensor
    """√(Σ residual² / (count − 2))."""
    count: Tensor
    """Points used."""


def fit_entropy_curve(entropy: Tensor, reward: Tensor, valid: Tensor | None = None) -> EntropyFit:
    """Fit how reward was bought with entropy, R = −a e^H + b, and where that ends: R(H = 0) = b − a.

    Linear in e^H − 1, so that the intercept is the ceiling itself. The errors hold for independent residuals
    of one size; neighbouring points of one training curve are not independent, and the true errors larger.

    Args:
        entropy: [n], in nats, one per evaluation.
        reward: [n], any unit.
        valid: bool [n]; False, or a value that is not finite, leaves the fit.

    Returns:
        The fit; NaN values for fewer than two different entropies, NaN errors for fewer than three points.

    Cui et al., The Entropy Mechanism, arXiv 2505.22617, eq. 6.
    """
    valid = torch.ones_like(entropy, dtype=torch.bool) if valid is None else valid
    if entropy.ndim != 1 or not entropy.shape == reward.shape == valid.shape:
        raise ValueError(
            "entropy, reward and valid must have one shape [n], one entry per evaluation; got "
            f"{tuple(entropy.shape)}, {tuple(reward.shape)} and {tuple(valid.shape)}."
        )
    x, y = torch.expm1(entropy.detach().double()), reward.detach().double()
    inside = valid.bool() & torch.isfinite(x) & torch.isfinite(y)
    share = inside.double()
    count = share.sum()
    mean_x, mean_y = weighted_mean(x, share), weighted_mean(y, share)
    dx, dy = torch.where(inside, x - mean_x, 0.0), torch.where(inside, y - mean_y, 0.0)
    spread = dx.square().sum()
    spread = torch.where(spread > 0, spread, float("nan"))
    a = -(dx * dy).sum() / spread
    degrees = torch.where(count > 2, count - 2, float("nan"))
    variance = torch.where(inside, dy + a * dx, 0.0).square().sum() / degrees

    def error(distance: Tensor) -> Tensor:
        return (variance * (1 / count + distance.square() / spread)).sqrt()

    return EntropyFit(
        a=a,
        b=mean_y + a * (mean_x + 1),
        ceiling=mean_y + a * mean_x,
        a_std=(variance / spread).sqrt(),
        b_std=error(mean_x + 1),
        ceiling_std=error(mean_x),
        residual_std=variance.sqrt(),
        count=count,
    )


def entropy_bonus(entropy: Tensor, coefficient: float | Tensor) -> Tensor:
    """Loss that rewards entropy: ℓ = −c H per decision, to be aggregated like any other.

    Args:
        entropy: [B, T], in nats, differentiable.
        coefficient: c ≥ 0, a number or 0-dim tensor; detached.

    Returns:
        The shape of entropy, float32 or better.


    Mnih et al., A3C, arXiv 1602.01783, section 4; Schulman et al., PPO, arXiv 1707.06347, eq. 9.
    """
    value = float32(entropy)
    return -torch.as_tensor(coefficient, dtype=value.dtype).detach() * value


def adapt_entropy_coefficient(
    coefficient: float | Tensor,
    measured: float | Tensor,
    target: float | Tensor,
    *,
    step: float = 0.005,
    lowest: float = 0.0,
    highest: float = float("inf"),
) -> Tensor:
    """Move the coefficient of the entropy bonus towards a target: c' = clip(c + Δ sign(H* − H)).

    Args:
        coefficient: c, 0 at the start.
        measured: H, mean token entropy of the whole step, in nats.
        target: H*, in nats; 0.2 in the report.
        step: Δ > 0 per optimizer step.
        lowest: bound of c'.
        highest: bound of c'.

    Returns:
        c', 0-dim float64, no gradient; unchanged when H = H*, NaN when H is.

    He et al., Skywork-OR1, arXiv 2505.22312 (adaptive entropy control). The bounds are an addition.
    """
    if not step > 0 or not lowest <= highest:
        raise ValueError(f"step must be positive and lowest ≤ highest; got {step=}, {lowest=}, {highest=}.")
    old, error = _number(coefficient), _number(target) - _number(measured)
    return (old + step * torch.where(error.isnan(), error, error.sign())).clamp(lowest, highest)


def gated_entropy_coefficient(
    coefficient: float | Tensor, measured: float | Tensor, target: float | Tensor
) -> Tensor:
    """Coefficient in force: c where the entropy is at or below its target, c·1[H ≤ H*], else 0.

    Returns:
        0-dim float64, no gradient; NaN when H is.

    He et al., Skywork-OR1, arXiv 2505.22312 (adaptive entropy control).
    """
    error = _number(target) - _number(measured)
    gate = torch.where(error.isnan(), error, (error >= 0).double())
    return _number(coefficient) * gate


def entrocraft_direction(monitor: float | Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Which advantages may be trained on: m = 1[H > H_high] − 1[H < H_low].

    Args:
        monitor: H, one number for the whole step: mean token entropy in nats; for images a spread measured on
            samples, e.g. the standard deviation of rewards inside groups.
        low: lower edge of the band, in the unit of the monitor; the paper moves both edges down linearly.
        high: upper edge.

    Returns:
        0-dim float64 1 (too much: only A ≥ 0), −1 (too little: only A ≤ 0) or 0; NaN when the monitor is.

    Entrocraft, arXiv 2604.26326.
    """
    value = _number(monitor)
    above, below = value > _number(high), value < _number(low)
    return torch.where(value.isnan(), value, above.double() - below.double())


def entrocraft_keep(advantage: Tensor, direction: Tensor) -> Tensor:
    """Accept sample i iff m A_i ≥ 0, so that the entropy goes back into its band.

    Count the step with the accepted samples only; if none is left, skip the step. Deviation from the released
    code, which clamps raw scores instead: with rewards 0 and 1 that would leave nothing to learn from.

    Args:
        advantage: [B] or [B, T].
        direction: m, from `entrocraft_direction`.

    Returns:
        bool, the shape of advantage; a missing (NaN) advantage or monitor is never accepted.

    Entrocraft, arXiv 2604.26326.
    """
    return direction * advantage.detach().double() >= 0


def _number(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach()
