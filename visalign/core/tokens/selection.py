# SPDX-License-Identifier: Apache-2.0
"""Selection of tokens for the policy loss: top entropy (80/20), Clip-Cov, KL-Cov.

Two phases, thresholds over the whole step and their application to any part (see `visalign.core.tokens`).
Nothing is drawn at random inside: where a paper draws, the caller passes one uniform number per decision.

Clip-Cov and KL-Cov: Cui et al., The Entropy Mechanism, arXiv 2505.22617, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.core.checks import check_same
from visalign.core.precision import float32

from .entropy import CovarianceStatistics, covariance_statistics, token_covariance
from .statistics import kth_smallest, masked_quantile, present_decisions, share_count, token_terms


def top_entropy_thresholds(entropy: Tensor, weight: Tensor, *, fraction: float = 0.2) -> Tensor:
    """Find the (1 − ρ)-quantile of H, 0-dim, of the share ρ of most uncertain tokens (arXiv 2506.01939)."""
    return masked_quantile(entropy, weight, 1 - fraction)


def top_entropy_keep(entropy: Tensor, weight: Tensor, thresholds: Tensor) -> Tensor:
    """Keep the tokens at or above the threshold: m_t = 1[H_t ≥ H_ρ]. Ties are all kept.

    As `weight * keep` under the counts of `weight` it is the paper's loss, whose 1/Σ|o_i| counts every token.
    Counted as `weight * keep` too, the mean runs over the kept tokens: a step 1/ρ times as long.
    """
    return present_decisions(entropy, weight) & (entropy.detach().double() >= thresholds)


@dataclass(frozen=True)
class ClipCovThresholds:
    """Thresholds of `clip_cov_keep`: means of the step, covariance band, largest `noise` that is drawn."""

    statistics: CovarianceStatistics
    low: float
    high: float
    noise: Tensor


def clip_cov_thresholds(
    log_prob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    noise: Tensor,
    *,
    ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    excluded: Tensor | None = None,
) -> ClipCovThresholds:
    """Decide which tokens of high covariance are taken out of the gradient.

    I_clip = ⌊r N⌋ tokens drawn uniformly from {t : cov_t ∈ [ω_low, ω_high]}: those with the smallest `noise`,
    N counting the present decisions. At least one is drawn, unless r = `ratio` is 0 (as released).

    `log_prob` is that of the whole step, under the policy at its beginning; `noise` holds uniform numbers,
    drawn once per step: `torch.rand(shape, generator=g, dtype=torch.float64)`; ω is in nats times the
    advantage. `excluded` tokens cannot be drawn: `ppo_clipped` as released (not in the paper).
    """
    check_same(noise=noise, log_prob=log_prob)
    statistics = covariance_statistics(log_prob, advantage, weight)
    covariance = token_covariance(log_prob, advantage, weight, statistics)
    inside = token_terms(log_prob, advantage, weight)[2]
    band = inside & _free(covariance, excluded) & (covariance >= cov_low) & (covariance <= cov_high)
    last = kth_smallest(noise, band, share_count(inside, ratio))
    return ClipCovThresholds(statistics, cov_low, cov_high, last)


def clip_cov_keep(
    log_prob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    noise: Tensor,
    thresholds: ClipCovThresholds,
    *,
    excluded: Tensor | None = None,
) -> Tensor:
    """Keep the tokens that Clip-Cov (`clip_cov_thresholds`) leaves: `torch.where(keep, loss, 0)`, the old counts."""
    check_same(noise=noise, log_prob=log_prob)
    covariance = token_covariance(log_prob, advantage, weight, thresholds.statistics)
    inside = token_terms(log_prob, advantage, weight)[2]
    band = (covariance >= thresholds.low) & (covariance <= thresholds.high) & _free(covariance, excluded)
    return (weight != 0) & ~(inside & band & (noise.double() <= thresholds.noise))


@dataclass(frozen=True)
class KlCovThresholds:
    """Thresholds of `kl_cov_select`: means of the step, smallest penalised covariance (+inf for none)."""

    statistics: CovarianceStatistics
    covariance: Tensor


def kl_cov_thresholds(log_prob: Tensor, advantage: Tensor, weight: Tensor, *, ratio: float = 2e-3) -> KlCovThresholds:
    """Find the covariance that the top ⌊k N⌋ tokens reach (at least one token, unless k is 0, as released).

    `log_prob` is that of the whole step, under the policy at its beginning; `ratio` is k in [0, 1], 2e-3 for
    7B models and 2e-4 for 32B in the paper.
    """
    statistics = covariance_statistics(log_prob, advantage, weight)
    covariance = token_covariance(log_prob, advantage, weight, statistics)
    inside = token_terms(log_prob, advantage, weight)[2]
    return KlCovThresholds(statistics, -kth_smallest(-covariance, inside, share_count(inside, ratio)))


def kl_cov_select(log_prob: Tensor, advantage: Tensor, weight: Tensor, thresholds: KlCovThresholds) -> Tensor:
    """Select the tokens of highest covariance, ties included, to which `kl_cov_penalty` is added."""
    covariance = token_covariance(log_prob, advantage, weight, thresholds.statistics)
    return token_terms(log_prob, advantage, weight)[2] & (covariance >= thresholds.covariance)


def kl_cov_penalty(log_ratio: Tensor, selected: Tensor, *, coefficient: float = 1.0) -> Tensor:
    """Compute β |log r| of selected tokens, to be added to their unclipped loss −r A; else 0.

    As released and in the paper's listing, for KL(π_old ‖ π). It has no gradient at r = 1, like the exact KL:
    at the first update of on-policy data KL-Cov does nothing. `selected` is bool, or the factor of each
    token; β is 1 in the paper.
    """
    check_same(selected=selected, log_ratio=log_ratio)
    return coefficient * selected * torch.where(selected != 0, float32(log_ratio), 0.0).abs()


def _free(values: Tensor, excluded: Tensor | None) -> Tensor:
    if excluded is None:
        return torch.ones_like(values, dtype=torch.bool)
    check_same(excluded=excluded, log_prob=values)
    return ~excluded.bool()
