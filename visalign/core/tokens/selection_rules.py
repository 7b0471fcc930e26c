# SPDX-License-Identifier: Apache-2.0
"""Clip_B and Clip_V: drop the tokens whose punishment would cut the entropy most.

Two phases, as in `selection`: `*_thresholds` over the whole optimizer step, then any part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.core.checks import check_same, check_share

from .statistics import (
    kth_smallest,
    present_decisions,
    token_terms,
    weighted_mean,
)


def entropy_discriminator(log_prob: Tensor, entropy: Tensor) -> Tensor:
    """Entropy discriminator of the sampled token: S = p (H + log p); no gradient.

    Pushing down a token with small S lowers the entropy, see `DiscriminatorScores`.

    Args:
        log_prob: [B, T], in nats.
        entropy: the shape of log_prob, in nats.

    Returns:
        The shape of log_prob, float64.

    On the Entropy Dynamics in Reinforcement Fine-Tuning, arXiv 2602.03392.
    """
    check_same(log_prob=log_prob, entropy=entropy)
    value = log_prob.detach().double().clamp(min=-1e3)  # p log p of p = 0 is 0
    return value.exp() * (entropy.detach().double() + value)


@dataclass(frozen=True)
class DiscriminatorScores:
    """Discriminator of every token of the vocabulary; float64, no gradient."""

    entropy: Tensor
    """H, [...] in nats."""
    score: Tensor
    """S_i = p_i (H + log p_i), [..., V]."""
    expected: Tensor
    """E_p[S] = Σ p_i S_i, [...]."""

    def entropy_change(self) -> Tensor:
        """dH/dα of the logit step δz = α (e_k − p) for every k: −(S_k − E_p[S]), [..., V]."""
        return self.expected[..., None] - self.score


def discriminator_scores(logits: Tensor) -> DiscriminatorScores:
    """Compute S over the whole vocabulary. It holds three tensors of the size of the logits.

    Args:
        logits: [..., V]; −inf for tokens that cannot be drawn.

    Returns:
        Entropy, scores and expected score.

    On the Entropy Dynamics in Reinforcement Fine-Tuning, arXiv 2602.03392.
    """
    log_p = logits.detach().double().log_softmax(-1).clamp(min=-1e3)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    score = p * (entropy[..., None] + log_p)
    return DiscriminatorScores(entropy, score, (p * score).sum(-1))


@dataclass(frozen=True)
class ClipBThresholds:
    """Thresholds of `clip_b_keep`; 0-dim float64."""

    mean: Tensor
    """Mean S of the whole step."""
    std: Tensor
    """Its standard deviation (ddof 0)."""
    low: Tensor
    """mean − μ std."""


def clip_b_thresholds(score: Tensor, weight: Tensor, *, mu: float = 2.5) -> ClipBThresholds:
    """Find how small the discriminator of a token with A < 0 may be: mean(S) − μ std(S).

    Args:
        score: S [B, T] of the whole step, from `entropy_discriminator`.
        weight: the same shape; 0 for absent decisions, the others count once.
        mu: μ ≥ 0 in standard deviations.

    Returns:
        Thresholds for `clip_b_keep`.

    On the Entropy Dynamics in Reinforcement Fine-Tuning, arXiv 2602.03392 (Clip_B).
    """
    mean, std = _moments(score, weight, mu)
    return ClipBThresholds(mean, std, mean - mu * std)


def clip_b_keep(score: Tensor, advantage: Tensor, weight: Tensor, thresholds: ClipBThresholds) -> Tensor:
    """Keep a token iff A ≥ 0 or S − mean(S) ≥ −μ std(S). Use `weight * keep`, in `count_step` too.

    Args:
        score: [B, T] of any micro-batch.
        advantage: [B], or the shape of score.
        weight: the shape of score.
        thresholds: of the whole step.

    Returns:
        bool, the shape of score; absent decisions are not kept.

    arXiv 2602.03392 (Clip_B).
    """
    value, gain, inside = token_terms(score, advantage, weight)
    return (weight != 0) & ~(inside & (gain < 0) & (value < thresholds.low))


@dataclass(frozen=True)
class ClipVThresholds:
    """Thresholds of `clip_v_keep`; 0-dim float64."""

    std: Tensor
    """Standard deviation (ddof 0) of E_p[S] − S over the whole step."""
    bound: Tensor
    """μ std; +inf when the std is below 1e-12, so that nothing is dropped."""
    limit: Tensor
    """Only what lies above is dropped, so that no more than the allowed number is."""


def clip_v_thresholds(
    score: Tensor,
    expected: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    mu: float = 8.5,
    max_fraction: float = 1e-4,
) -> ClipVThresholds:
    """Find which tokens with A < 0 would cut the entropy most: E_p[S] − S > μ std, the largest ⌊f N⌋ of them.

    Args:
        score: S [B, T] of the whole step.
        expected: E_p[S], the shape of score.
        advantage: [B], or the shape of score.
        weight: the shape of score; N counts the entries that are not 0.
        mu: μ ≥ 0 in standard deviations; the difference is not centred.
        max_fraction: f in [0, 1]; a step of fewer than 1/f tokens loses none. When ties would exceed ⌊f N⌋,
            the whole tie stays in.

    Returns:
        Thresholds for `clip_v_keep`.

    On the Entropy Dynamics in Reinforcement Fine-Tuning, arXiv 2602.03392 (Clip_V).
    """
    check_share(max_fraction=max_fraction)
    check_same(score=score, expected=expected)
    value, gain, inside = token_terms(expected.double() - score.double(), advantage, weight)
    _, std = _moments(value, inside, mu)
    bound = torch.where(std < 1e-12, float("inf"), mu * std)
    candidate = inside & (gain < 0) & (value > bound)
    count = (max_fraction * inside.sum().double()).floor().long()
    limit = -kth_smallest(-value, candidate, count + 1)
    return ClipVThresholds(std, bound, limit)


def clip_v_keep(
    score: Tensor, expected: Tensor, advantage: Tensor, weight: Tensor, thresholds: ClipVThresholds
) -> Tensor:
    """Drop the tokens with A < 0 that lie above both thresholds. Use `weight * keep`, in `count_step` too.

    Returns:
        bool, the shape of score; absent decisions are not kept.

    arXiv 2602.03392 (Clip_V).
    """
    check_same(score=score, expected=expected)
    value, gain, inside = token_terms(expected.double() - score.double(), advantage, weight)
    drop = (gain < 0) & (value > thresholds.bound) & (value > thresholds.limit)
    return (weight != 0) & ~(inside & drop)


def _moments(values: Tensor, weight: Tensor, mu: float) -> tuple[Tensor, Tensor]:
    """(mean, standard deviation with ddof 0) of the present values, each counted once."""
    if not 0 <= mu < float("inf"):
        raise ValueError(f"mu counts standard deviations and must be a finite number ≥ 0; got {mu}.")
    inside = present_decisions(values, weight)
    share, held = inside.double(), values.detach().double()
    mean = weighted_mean(held, share)
    return mean, weighted_mean((held - mean).square(), share).sqrt()
