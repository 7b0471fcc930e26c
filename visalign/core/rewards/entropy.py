# SPDX-License-Identifier: Apache-2.0
"""Rewards that depend on a completion's entropies: PEAR's phases, ARES's difficulty."""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes
from visalign.core.precision import float32

EASY, MEDIUM, HARD = 0, 1, 2


def phase_entropy_reward(
    reward: Tensor, entropy: Tensor, step: Tensor, weight: Tensor, *, alpha: float = 1.0, right_at: float = 1.0
) -> Tensor:
    """Charge a right completion for the entropy of its thinking above that of its answer (PEAR).

    R′ = min(1, R − P) where R ≥ `right_at`, else R; P = max(0, H̄_think − α H̄_answer), each the mean over its tokens
    in nats, 0 without one. The first `step` [B, T] of a completion is its thinking. PEAR, arXiv 2510.08026 (α = 1).
    """
    check_axes(reward=(reward, "B"), entropy=(entropy, "B T"), step=(step, "B T"), weight=(weight, "B T"))

    def mean(inside: Tensor) -> Tensor:
        return torch.where(inside, entropy.detach().double(), 0.0).sum(1) / inside.sum(1).clamp(min=1)

    present, answers, value = weight != 0, step > 0, float32(reward).detach()
    penalty = (mean(present & ~answers) - alpha * mean(present & answers)).clamp(min=0)
    return torch.where(value >= right_at, (value - penalty).clamp(max=1), value).to(value.dtype)


def window_entropy(entropy: Tensor, weight: Tensor, *, window: int = 4) -> tuple[Tensor, Tensor]:
    """Average the entropy [B, T] of every `window` consecutive present tokens of a row.

    Returns the means [B, T] float64 by the window's beginning, and bool [B, T], whether there is such a window.

    ARES, arXiv 2510.08457. Its window was not found; 4 is ours.
    """
    check_axes(entropy=(entropy, "B T"), weight=(weight, "B T"))
    inside = weight != 0
    present = torch.where(inside, entropy.detach().double(), 0.0)
    packed = present.gather(1, (~inside).long().argsort(dim=1, stable=True))
    total = torch.nn.functional.pad(packed.cumsum(1), (1, window))
    length = entropy.shape[1]
    exists = torch.arange(length, device=entropy.device) + window <= inside.sum(1, keepdim=True)
    return torch.where(exists, (total[:, window : window + length] - total[:, :length]) / window, 0.0), exists


def difficulty_entropy_reward(count: Tensor, target: Tensor, right: Tensor, difficulty: Tensor) -> Tensor:
    """Reward the number of windows of high entropy by the prompt's difficulty (ARES); added to the reward.

    d = count − target, m = max(1, f target), pen(x) = min(c, c h(max(0, x − m))/(m + κ)), h(y) = y²/(2κ) up
    to κ and y − κ/2 above. Right: −pen(d) where easy, −pen(|d|) where medium; where hard c σ((d + m)/τ) from
    d = −m on, below it −pen(|d|)/2. Wrong: c u (2σ(max(0, d − m)/τ) − 1). For easy, medium and hard f = 0.15,
    0.25, 0.35; κ = 2, 3, 4; τ = 2, 2.5, 3; c = 0.5, 0.5, 0.6; u = 0.6, 0.8, 1.

    `count` and `target` [B] are the windows above the threshold and their usual number; `right` is bool [B];
    `difficulty` [B] is from `difficulty_of`. Returns [B] float64. ARES, arXiv 2510.08457, released code.
    Deviation: there c u σ(·), 0.15 to 0.3 for any wrong answer.
    """
    check_axes(count=(count, "B"), target=(target, "B"), right=(right, "B"), difficulty=(difficulty, "B"))
    numbers = [(0.15, 2, 2, 0.5, 0.6), (0.25, 3, 2.5, 0.5, 0.8), (0.35, 4, 3, 0.6, 1)]
    table = torch.tensor(numbers, dtype=torch.float64, device=count.device)
    fraction, kappa, temperature, cap, wrong = table[difficulty].unbind(1)
    excess, margin = count.double() - target, (fraction * target).clamp(min=1)

    def penalty(x: Tensor) -> Tensor:
        over = (x - margin).clamp(min=0)
        huber = torch.where(over <= kappa, over.square() / (2 * kappa), over - kappa / 2)
        return (cap * huber / (margin + kappa)).minimum(cap)

    hard = cap * torch.sigmoid((excess + margin) / temperature)
    hard = torch.where(excess >= -margin, hard, -penalty(excess.abs()) / 2)
    if_right = torch.where(difficulty == EASY, -penalty(excess), -penalty(excess.abs()))
    if_right = torch.where(difficulty == HARD, hard, if_right)
    if_wrong = cap * wrong * (2 * torch.sigmoid((excess - margin).clamp(min=0) / temperature) - 1)
    return torch.where(right, if_right, if_wrong)


def difficulty_of(accuracy: Tensor) -> Tensor:
    """Grade a prompt by its share of right completions: easy from 2/3 on, medium from 1/3 on, else hard."""
    return EASY + (accuracy < 2 / 3).long() + (accuracy < 1 / 3).long()
