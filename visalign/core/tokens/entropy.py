# SPDX-License-Identifier: Apache-2.0
"""Entropy of a token policy: its drivers, its price in reward, and the rules that hold it.

Measures: covariance of log-prob and advantage, which predicts the entropy change; the curve R = −a e^H + b.
Controls: the entropy bonus; Entrocraft's band.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.core.checks import check_axes
from visalign.core.precision import float32

from .statistics import token_terms, weighted_mean


@dataclass(frozen=True)
class CovarianceStatistics:
    """Whole-step mean log π, mean A, and their covariance; 0-dim, NaN if nothing is present."""

    mean_log_prob: Tensor
    mean_advantage: Tensor
    covariance: Tensor


def covariance_statistics(log_prob: Tensor, advantage: Tensor, weight: Tensor) -> CovarianceStatistics:
    """Measure Cov(log π, A) = Σ w (A − Ā)(log π − mean log π) / Σ w over the whole optimizer step.

    `log_prob` is under the policy at the beginning of the step. With w = π over all actions of a state the
    result is exact. Cui et al., The Entropy Mechanism, arXiv 2505.22617, section 4 (covariance).
    """
    value, gain, inside = token_terms(log_prob, advantage, weight)
    share = torch.where(inside, weight.double(), 0.0)
    mean_log_prob, mean_advantage = weighted_mean(value, share), weighted_mean(gain, share)
    product = (gain - mean_advantage) * (value - mean_log_prob)
    return CovarianceStatistics(mean_log_prob, mean_advantage, weighted_mean(product, share))


def token_covariance(log_prob: Tensor, advantage: Tensor, weight: Tensor, statistics: CovarianceStatistics) -> Tensor:
    """Compute one decision's part in the covariance: cov_t = (A_t − Ā)(log π_t − mean log π); 0 where absent.

    Cui et al., arXiv 2505.22617, section 4. Deviation from the released code: its means are a micro-batch's.
    """
    value, gain, inside = token_terms(log_prob, advantage, weight)
    product = (gain - statistics.mean_advantage) * (value - statistics.mean_log_prob)
    return torch.where(inside, product, 0.0)


@dataclass(frozen=True)
class EntropyFit:
    """R = −a e^H + b by ordinary least squares, with standard errors; 0-dim, NaN where undetermined.

    `ceiling` b − a is the reward at H = 0, when all entropy is spent. `residual_std` is √(Σ residual² /
    (count − 2)); Student's t has count − 2 degrees.
    """

    a: Tensor
    b: Tensor
    ceiling: Tensor
    a_std: Tensor
    b_std: Tensor
    ceiling_std: Tensor
    residual_std: Tensor
    count: Tensor


def fit_entropy_curve(entropy: Tensor, reward: Tensor, valid: Tensor | None = None) -> EntropyFit:
    """Fit the reward bought with entropy, R = −a e^H + b, and its ceiling R(H = 0) = b − a.

    Linear in e^H − 1, so that the intercept is the ceiling itself. The errors hold for independent residuals of one
    size; neighbouring points of one training curve are not independent, and the true errors larger. `entropy` (nats)
    and `reward` are [n], one entry per evaluation; `valid` bool [n]. Fewer than two different entropies give NaN,
    fewer than three points NaN errors. Cui et al., The Entropy Mechanism, arXiv 2505.22617, eq. 6.
    """
    valid = torch.ones_like(entropy, dtype=torch.bool) if valid is None else valid
    check_axes(entropy=(entropy, "n"), reward=(reward, "n"), valid=(valid, "n"))
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
    """Compute the loss that rewards entropy, ℓ = −c H per decision; c ≥ 0 is detached.

    Mnih et al., A3C, arXiv 1602.01783, section 4; Schulman et al., PPO, arXiv 1707.06347, eq. 9.
    """
    value = float32(entropy)
    return -torch.as_tensor(coefficient, dtype=value.dtype).detach() * value


def entrocraft_direction(monitor: float | Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """Find which advantages may be trained on: m = 1[H > H_high] − 1[H < H_low]; NaN when the monitor is.

    1 (too much entropy) allows A ≥ 0 only, −1 (too little) A ≤ 0. `monitor` H is one number for the whole
    step: mean token entropy; for images a spread of samples, e.g. the standard deviation of rewards inside
    groups. The paper moves both edges of the band down linearly. Entrocraft, arXiv 2604.26326.
    """
    value = _number(monitor)
    above, below = value > _number(high), value < _number(low)
    return torch.where(value.isnan(), value, above.double() - below.double())


def entrocraft_keep(advantage: Tensor, direction: Tensor) -> Tensor:
    """Accept sample i iff m A_i ≥ 0, so that the entropy returns to its band; NaN is never accepted.

    Count the step with the accepted samples only; if none is left, skip the step. Deviation from the released
    code, which clamps raw scores instead: with rewards 0 and 1 that would leave nothing to learn from.
    Entrocraft, arXiv 2604.26326.
    """
    return direction * advantage.detach().double() >= 0


def _number(value: float | Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach()
