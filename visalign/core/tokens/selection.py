# SPDX-License-Identifier: Apache-2.0
"""Which decisions the policy loss uses: top entropy (80/20), Clip-Cov, KL-Cov. More in `selection_rules`.

Two phases. `*_thresholds` looks once at the whole optimizer step, all micro-batches and devices together
(concatenate or gather the tensors, the order does not matter), and returns a small frozen record of tensors.
`*_keep` or `*_select` applies it to any part of the step. With the same numbers in both phases the parts
together are exactly the whole. Deviation from the released codes, which take means, quantiles and counts per
micro-batch: there, the same tokens are treated differently when the batch is cut differently.

Nothing is drawn at random inside: where a paper draws, the caller hands in one uniform number per decision.
A decision of weight 0, or with a value that is not finite, takes no part in the statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visalign.core.checks import check_choice, check_same, check_share
from visalign.core.precision import float32
from visalign.core.surrogates.ppo import LOG_RATIO_LIMIT

from .entropy import CovarianceStatistics, covariance_statistics, token_covariance
from .statistics import (
    kth_smallest,
    masked_quantile,
    present_decisions,
    share_count,
    token_terms,
)

Unit = Literal["nats", "quantile"]
Penalty = Literal["abs", "k3"]


@dataclass(frozen=True)
class EntropyThreshold:
    """Threshold of `top_entropy_keep`."""

    entropy: Tensor
    """0-dim float64, in nats; NaN when nothing is present."""


def top_entropy_thresholds(entropy: Tensor, weight: Tensor, *, fraction: float = 0.2) -> EntropyThreshold:
    """Find the entropy that the most uncertain tokens reach: the (1 − ρ)-quantile of H over all of them.

    Args:
        entropy: [B, T] of the whole step, in nats.
        weight: the same shape; 0 for absent decisions, the others count once.
        fraction: ρ in (0, 1], the share to keep; 1 keeps all.

    Returns:
        The threshold, interpolated linearly between neighbours.

    Wang et al., Beyond the 80/20 Rule, arXiv 2506.01939.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], 1 to keep every token; got {fraction}.")
    return EntropyThreshold(masked_quantile(entropy, weight, 1 - fraction))


def top_entropy_keep(entropy: Tensor, weight: Tensor, thresholds: EntropyThreshold) -> Tensor:
    """Keep the tokens at or above the threshold: m_t = 1[H_t ≥ H_ρ].

    As `weight * keep` under the counts of `weight` it is the paper's loss, whose 1/Σ|o_i| counts every token.
    Counted as `weight * keep` too, the mean runs over the kept tokens: a step 1/ρ times as long.

    Returns:
        bool, the shape of entropy; ties at the threshold are all kept, absent decisions are not.

    Wang et al., arXiv 2506.01939.
    """
    return present_decisions(entropy, weight) & (entropy.detach().double() >= thresholds.entropy)


@dataclass(frozen=True)
class ClipCovThresholds:
    """Thresholds of `clip_cov_keep`; 0-dim float64 tensors."""

    statistics: CovarianceStatistics
    """Means of the whole step."""
    low: Tensor
    """Lower end of the covariance band."""
    high: Tensor
    """Upper end of the band."""
    noise: Tensor
    """Largest uniform number that is still drawn; +inf to draw the whole band, −inf for nothing."""


def clip_cov_thresholds(
    log_prob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    noise: Tensor,
    *,
    ratio: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    unit: Unit = "nats",
    excluded: Tensor | None = None,
) -> ClipCovThresholds:
    """Decide which tokens of high covariance are taken out of the gradient.

    I_clip = ⌊r N⌋ tokens drawn uniformly from {t : cov_t ∈ [ω_low, ω_high]}: those with the smallest `noise`.
    At least one is drawn, unless r is 0 (as released).

    Args:
        log_prob: [B, T] of the whole step, under the policy at its beginning.
        advantage: [B], or the shape of log_prob.
        weight: the shape of log_prob, 0 for absent decisions; N counts the present ones.
        noise: the shape of log_prob, uniform numbers, one per decision, drawn once per step:
            `torch.rand(shape, generator=g, dtype=torch.float64)`.
        ratio: r in [0, 1], share of the tokens to take out.
        cov_low: ω_low.
        cov_high: ω_high.
        unit: of the band: "nats" (times the advantage), or "quantile" of the step's covariances, in [0, 1].
        excluded: bool, tokens that cannot be drawn; `ppo_clipped` as released (not in the paper).

    Returns:
        Thresholds for `clip_cov_keep`.

    Cui et al., The Entropy Mechanism, arXiv 2505.22617, section 4 (Clip-Cov).
    """
    check_share(ratio=ratio)
    if unit not in ("nats", "quantile") or not cov_low <= cov_high:
        raise ValueError(
            "unit must be 'nats' or 'quantile' and cov_low ≤ cov_high; got "
            f"unit={unit!r}, cov_low={cov_low}, cov_high={cov_high}."
        )
    statistics = covariance_statistics(log_prob, advantage, weight)
    covariance = token_covariance(log_prob, advantage, weight, statistics)
    inside = token_terms(log_prob, advantage, weight)[2]
    low, high = covariance.new_tensor(cov_low), covariance.new_tensor(cov_high)
    if unit == "quantile":
        low, high = (masked_quantile(covariance, inside, q) for q in (cov_low, cov_high))
    band = inside & _free(covariance, excluded) & (covariance >= low) & (covariance <= high)
    check_same(noise=noise, log_prob=log_prob)
    last = kth_smallest(noise, band, share_count(inside, ratio))
    return ClipCovThresholds(statistics, low, high, last)


def clip_cov_keep(
    log_prob: Tensor,
    advantage: Tensor,
    weight: Tensor,
    noise: Tensor,
    thresholds: ClipCovThresholds,
    *,
    excluded: Tensor | None = None,
) -> Tensor:
    """Keep what Clip-Cov leaves in: use `torch.where(keep, loss, 0)` and the old weight and counts.

    Args:
        log_prob: [B, T] of a micro-batch, the same numbers as in `clip_cov_thresholds`; so the next three.
        advantage: [B], or the shape of log_prob.
        weight: the shape of log_prob.
        noise: the shape of log_prob.
        thresholds: of the whole step.
        excluded: bool, tokens that could not be drawn.

    Returns:
        bool, the shape of log_prob; False for drawn and for absent decisions.

    Cui et al., arXiv 2505.22617, section 4 (Clip-Cov).
    """
    covariance = token_covariance(log_prob, advantage, weight, thresholds.statistics)
    inside = token_terms(log_prob, advantage, weight)[2]
    check_same(noise=noise, log_prob=log_prob)
    band = (covariance >= thresholds.low) & (covariance <= thresholds.high) & _free(covariance, excluded)
    return (weight != 0) & ~(inside & band & (noise.double() <= thresholds.noise))


@dataclass(frozen=True)
class KlCovThresholds:
    """Thresholds of `kl_cov_select`."""

    statistics: CovarianceStatistics
    """Means of the whole step."""
    covariance: Tensor
    """0-dim float64: the smallest covariance that is penalised; +inf for none."""


def kl_cov_thresholds(
    log_prob: Tensor, advantage: Tensor, weight: Tensor, *, ratio: float = 2e-3
) -> KlCovThresholds:
    """Find the covariance that the top ⌊k N⌋ tokens reach (at least one token, unless k is 0, as released).

    Args:
        log_prob: [B, T] of the whole step, under the policy at its beginning.
        advantage: [B], or the shape of log_prob.
        weight: the shape of log_prob, 0 for absent decisions; N counts the present ones.
        ratio: k in [0, 1]; 2e-3 for 7B models and 2e-4 for 32B in the paper.

    Returns:
        Thresholds for `kl_cov_select`.

    Cui et al., The Entropy Mechanism, arXiv 2505.22617, section 4 (KL-Cov).
    """
    check_share(ratio=ratio)
    statistics = covariance_statistics(log_prob, advantage, weight)
    covariance = token_covariance(log_prob, advantage, weight, statistics)
    inside = token_terms(log_prob, advantage, weight)[2]
    return KlCovThresholds(statistics, -kth_smallest(-covariance, inside, share_count(inside, ratio)))


def kl_cov_select(log_prob: Tensor, advantage: Tensor, weight: Tensor, thresholds: KlCovThresholds) -> Tensor:
    """Select the tokens of highest covariance, to which `kl_cov_penalty` is added.

    Returns:
        bool, the shape of log_prob; ties at the threshold are all selected, absent decisions are not.

    Cui et al., arXiv 2505.22617, section 4 (KL-Cov).
    """
    covariance = token_covariance(log_prob, advantage, weight, thresholds.statistics)
    return token_terms(log_prob, advantage, weight)[2] & (covariance >= thresholds.covariance)


def kl_cov_penalty(
    log_ratio: Tensor, selected: Tensor, *, coefficient: float = 1.0, form: Penalty = "abs"
) -> Tensor:
    """Penalty on the selected tokens, to be added to their unclipped loss −r A: β D(π_old, π), else 0.

    "abs" is β |log r|, as released and in the paper's listing; "k3" is β (r − 1 − log r), whose mean over
    π_old is the KL(π_old ‖ π) of the paper's equation. Both are without gradient at r = 1: at the first
    update of on-policy data KL-Cov does nothing (so is the gradient of the exact KL).

    Args:
        log_ratio: [B, T], log π − log π_old, differentiable.
        selected: bool, the same shape, from `kl_cov_select`.
        coefficient: β ≥ 0, 1 in the paper.
        form: "abs" or "k3".

    Returns:
        The shape of log_ratio, float32 or better; 0 with zero gradient where not selected.

    Cui et al., The Entropy Mechanism, arXiv 2505.22617, section 4 (KL-Cov).
    """
    check_choice("form", form, ("abs", "k3"))
    check_same(selected=selected, log_ratio=log_ratio)
    value = float32(log_ratio)
    value = torch.where(selected, value, 0.0)
    if form == "abs":
        return coefficient * value.abs()
    excess = (value - LOG_RATIO_LIMIT).clamp(min=0).detach()
    return coefficient * (torch.expm1(value - excess) - value)


def _free(values: Tensor, excluded: Tensor | None) -> Tensor:
    if excluded is None:
        return torch.ones_like(values, dtype=torch.bool)
    check_same(excluded=excluded, log_prob=values)
    return ~excluded.bool()
