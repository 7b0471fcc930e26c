# SPDX-License-Identifier: Apache-2.0
"""Rewards that look at a completion's entropies: PEAR's phases, ARES's difficulty. No gradient.

A reward that is not finite is missing and stays so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_not_negative
from visalign.core.precision import float32

EASY, MEDIUM, HARD = 0, 1, 2


def phase_entropy_reward(
    reward: Tensor,
    entropy: Tensor,
    answers: Tensor,
    weight: Tensor,
    *,
    alpha: float = 1.0,
    right_at: float = 1.0,
) -> Tensor:
    """PEAR: a right completion loses the entropy of its thinking above that of its answer.

    R′ = min(1, R − P) where R ≥ right_at, else R; P = max(0, H̄_think − α H̄_answer), each the mean over its
    tokens, 0 without one.

    Args:
        reward: [B]; of a wrong completion that of its form.
        entropy: [B, T], in nats.
        answers: bool [B, T], True after the end of the thinking; where nowhere, all of it is thinking.
        weight: [B, T], 0 for absent tokens, the others count once.
        alpha: α ≥ 0.
        right_at: reward of a right completion, at least.

    Returns:
        [B], float32 or better.

    PEAR, arXiv 2510.08026 (α = 1).
    """
    check_not_negative(alpha=alpha)
    check_axes(
        reward=(reward, "B"), entropy=(entropy, "B T"), answers=(answers, "B T"), weight=(weight, "B T")
    )

    def mean(inside: Tensor) -> Tensor:
        return torch.where(inside, entropy.detach().double(), 0.0).sum(1) / inside.sum(1).clamp(min=1)

    present, value = weight != 0, float32(reward).detach()
    penalty = (mean(present & ~answers) - alpha * mean(present & answers)).clamp(min=0)
    return torch.where(value >= right_at, (value - penalty).clamp(max=1), value).to(value.dtype)


def window_entropy(entropy: Tensor, weight: Tensor, *, window: int = 4) -> tuple[Tensor, Tensor]:
    """Mean entropy of every `window` present tokens that follow each other in a row.

    Args:
        entropy: [B, T], in nats.
        weight: [B, T], 0 for absent tokens, which are passed over.
        window: tokens, ≥ 1.

    Returns:
        (means [B, T] float64, one for each beginning; bool [B, T], whether there is such a window).

    ARES, arXiv 2510.08457. Its window was not found; 4 is ours.
    """
    check_axes(entropy=(entropy, "B T"), weight=(weight, "B T"))
    if window < 1:
        raise ValueError(f"window must be at least 1 token; got {window}.")
    inside = weight != 0
    held = torch.where(inside, entropy.detach().double(), 0.0)
    packed = held.gather(1, (~inside).long().argsort(dim=1, stable=True))
    total = torch.nn.functional.pad(packed.cumsum(1), (1, window))
    length = entropy.shape[1]
    there = torch.arange(length, device=entropy.device) + window <= inside.sum(1, keepdim=True)
    return torch.where(there, (total[:, window : window + length] - total[:, :length]) / window, 0.0), there


def difficulty_entropy_reward(count: Tensor, target: Tensor, right: Tensor, difficulty: Tensor) -> Tensor:
    """ARES's reward for the number of windows of high entropy, by how hard the prompt is.

    d = count − target, m = max(1, f target), pen(x) = min(c, c h(max(0, x − m))/(m + κ)), h(y) = y²/(2κ) up
    to κ and y − κ/2 above.
    Right: −pen(d) where easy, −pen(|d|) where medium; where hard c σ((d + m)/τ) from d = −m on, below it
    −pen(|d|)/2. Wrong: c u (2σ(max(0, d − m)/τ) − 1). For easy, medium and hard f = 0.15, 0.25, 0.35;
    κ = 2, 3, 4; τ = 2, 2.5, 3; c = 0.5, 0.5, 0.6; u = 0.6, 0.8, 1.

    Args:
        count: [B] windows above the threshold.
        target: [B] what is usual at this difficulty.
        right: bool [B].
        difficulty: [B] of `difficulty_of`.

    Returns:
        [B] float64, to be added to the reward.

    ARES, arXiv 2510.08457, released code. Deviation: there c u σ(·), 0.15 to 0.3 for any wrong answer.
    """
    check_axes(count=(count, "B"), target=(target, "B"), right=(right, "B"), difficulty=(difficulty, "B"))
    numbers = [(0.15, 2, 2, 0.5, 0.6), (0.25, 3, 2.5, 0.5, 0.8), (0.35, 4, 3, 0.6, 1)]
    table = torch.tensor(numbers, dtype=torch.float64, device=count.device)
    fraction, kappa, temperature, cap, wrong = table[difficulty].unbind(1)
    away, margin = count.double() - target, (fraction * target).clamp(min=1)

    def penalty(x: Tensor) -> Tensor:
        over = (x - margin).clamp(min=0)
        huber = torch.where(over <= kappa, over.square() / (2 * kappa), over - kappa / 2)
        return (cap * huber / (margin + kappa)).minimum(cap)

    rewarded = torch.where(
        away >= -margin, cap * torch.sigmoid((away + margin) / temperature), -penalty(away.abs()) / 2
    )
    found = torch.where(difficulty == EASY, -penalty(away), -penalty(away.abs()))
    found = torch.where(difficulty == HARD, rewarded, found)
    missed = cap * wrong * (2 * torch.sigmoid((away - margin).clamp(min=0) / temperature) - 1)
    return torch.where(right, found, missed)


def difficulty_of(accuracy: Tensor) -> Tensor:
    """Easy (0) from 2/3 of right completions on, medium (1) from 1/3 on, hard (2) below; int64.

    Args:
        accuracy: share of right completions, any shape.

    ARES, arXiv 2510.08457.
    """
    return EASY + (accuracy < 2 / 3).long() + (accuracy < 1 / 3).long()
