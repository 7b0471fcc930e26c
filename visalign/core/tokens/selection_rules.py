# SPDX-License-Identifier: Apache-2.0
"""Clip_B and Clip_V: drop the tokens whose punishment would cut the entropy most.

On the Entropy Dynamics in Reinforcement Fine-Tuning, arXiv 2602.03392. Two phases, as in `selection`. Use
`weight * keep`, in `count_step` too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.core.checks import check_same

from .statistics import kth_smallest, present_decisions, token_terms, weighted_mean


def entropy_discriminator(log_prob: Tensor, entropy: Tensor) -> Tensor:
    """Entropy discriminator S = p (H + log p) of the sampled token: pushing down a small S lowers the entropy."""
    check_same(log_prob=log_prob, entropy=entropy)
    value = log_prob.detach().double().clamp(min=-1e3)  # p log p of p = 0 is 0
    return value.exp() * (entropy.detach().double() + value)


@dataclass(frozen=True)
class DiscriminatorScores:
    """H [...], S_i = p_i (H + log p_i) [..., V] of the whole vocabulary, and E_p[S] [...]."""

    entropy: Tensor
    score: Tensor
    expected: Tensor

    def entropy_change(self) -> Tensor:
        """Compute dH/dα of the logit step δz = α (e_k − p) for every k: −(S_k − E_p[S]), [..., V]."""
        return self.expected[..., None] - self.score


def discriminator_scores(logits: Tensor) -> DiscriminatorScores:
    """Compute S over the vocabulary of logits [..., V] (−inf excludes; three such tensors); arXiv 2602.03392."""
    log_p = logits.detach().double().log_softmax(-1).clamp(min=-1e3)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    score = p * (entropy[..., None] + log_p)
    return DiscriminatorScores(entropy, score, (p * score).sum(-1))


@dataclass(frozen=True)
class ClipBThresholds:
    """Mean S of the whole step, its standard deviation (ddof 0), and mean − μ std."""

    mean: Tensor
    std: Tensor
    low: Tensor


def clip_b_thresholds(score: Tensor, weight: Tensor, *, mu: float = 2.5) -> ClipBThresholds:
    """Find how small S of a token with A < 0 may be: mean(S) − μ std(S), over the whole step."""
    mean, std = _moments(score, weight)
    return ClipBThresholds(mean, std, mean - mu * std)


def clip_b_keep(score: Tensor, advantage: Tensor, weight: Tensor, thresholds: ClipBThresholds) -> Tensor:
    """Keep a token iff A ≥ 0 or S − mean(S) ≥ −μ std(S); arXiv 2602.03392 (Clip_B)."""
    value, gain, inside = token_terms(score, advantage, weight)
    return (weight != 0) & ~(inside & (gain < 0) & (value < thresholds.low))


def clip_v_thresholds(
    score: Tensor, expected: Tensor, advantage: Tensor, weight: Tensor, *, mu: float = 8.5, max_fraction: float = 1e-4
) -> Tensor:
    """Find the value of E_p[S] − S above which tokens with A < 0 are dropped; 0-dim.

    It is μ std(E_p[S] − S) (ddof 0, not centred; nothing is dropped for a std below 1e-12), or higher, so
    that no more than the largest ⌊f N⌋ of N present tokens go, f = `max_fraction`: a step of fewer than 1/f
    tokens loses none. When ties would exceed ⌊f N⌋, the whole tie stays in.
    """
    check_same(score=score, expected=expected)
    value, gain, inside = token_terms(expected.double() - score.double(), advantage, weight)
    _, std = _moments(value, inside)
    bound = torch.where(std < 1e-12, float("inf"), mu * std)
    candidate = inside & (gain < 0) & (value > bound)
    count = (max_fraction * inside.sum().double()).floor().long()
    return torch.maximum(bound, -kth_smallest(-value, candidate, count + 1))


def clip_v_keep(score: Tensor, expected: Tensor, advantage: Tensor, weight: Tensor, thresholds: Tensor) -> Tensor:
    """Drop the tokens with A < 0 whose E_p[S] − S is above the threshold; arXiv 2602.03392 (Clip_V)."""
    check_same(score=score, expected=expected)
    value, gain, inside = token_terms(expected.double() - score.double(), advantage, weight)
    return (weight != 0) & ~(inside & (gain < 0) & (value > thresholds))


def _moments(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    inside = present_decisions(values, weight)
    share, values = inside.double(), values.detach().double()
    mean = weighted_mean(values, share)
    return mean, weighted_mean((values - mean).square(), share).sqrt()
