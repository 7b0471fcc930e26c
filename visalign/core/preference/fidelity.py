# SPDX-License-Identifier: Apache-2.0
"""Ranking by several answers per image: Thurstone's probability and the fidelity between two probabilities.

A judge that rates an image K times has a mean and a variance; two images compare by Φ of the lead over its
deviation. VisualQuality-R1 rewards each single answer by how well it orders its image among the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_choice, check_same
from visalign.core.groups.labels import Labels, group_index
from visalign.core.groups.moments import present_entries
from visalign.core.precision import float32_dtype

FidelityMode = Literal["paper", "upstream"]
FLOOR = 0.05**2  # Added to a difference's variance, in squared units of a 1 to 5 scale; the released code has 1e-6


@dataclass(frozen=True)
class AnswerStatistics:
    """Mean and variance of K answers for each of B images."""

    mean: Tensor  # [B], NaN without a valid answer
    variance: Tensor  # [B], over the valid answers; 0 for a single one, NaN without any
    count: Tensor  # [B] int64, valid answers


def answer_statistics(answers: Tensor, *, valid: Tensor | None = None, ddof: int = 1) -> AnswerStatistics:
    """Mean and variance of the valid answers [B, K] of each image, differentiable; what is not finite, or not
    `valid` (bool [B, K]), is no answer. `ddof` is 1 (unbiased, as released) or 0.
    """
    check_axes(answers=(answers, "B K"), valid=(valid, "B K"))
    present = present_entries(answers, valid)
    value = torch.where(present, answers, 0.0).to(float32_dtype(answers))
    count = present.sum(1)
    mean = value.sum(1) / count.clamp(min=1)
    centred = torch.where(present, value - mean[:, None], 0.0)
    variance = centred.square().sum(1) / (count - ddof).clamp(min=1)
    answered = count > 0
    return AnswerStatistics(torch.where(answered, mean, torch.nan), torch.where(answered, variance, torch.nan), count)


def thurstone_score(
    left: Tensor, right: Tensor, left_variance: Tensor, right_variance: Tensor, *, floor: float = FLOOR
) -> Tensor:
    """Thurstone's lead of the left image in deviations, t = (x_l − x_r)/√(v_l + v_r + γ); P(left better) = Φ(t).

    x are means or single answers, the four shapes broadcast. With γ = `floor` > 0 a pair of single or
    identical answers has a probability, too. Thurstone 1927, case V; VisualQuality-R1, arXiv 2505.14460.
    """
    dtype = float32_dtype(left)
    return (left - right).to(dtype) / (left_variance + right_variance + floor).to(dtype).sqrt()


def thurstone_probability(
    left: Tensor, right: Tensor, left_variance: Tensor, right_variance: Tensor, *, floor: float = FLOOR
) -> Tensor:
    """P(left better) = Φ((x_l − x_r)/√(v_l + v_r + γ)), [*]; arguments as `thurstone_score`."""
    return torch.special.ndtr(thurstone_score(left, right, left_variance, right_variance, floor=floor))


def fidelity(first: Tensor, second: Tensor, *, mode: FidelityMode = "paper") -> Tensor:
    """Likeness of two probabilities of the same event: √(pq) + √((1 − p)(1 − q)), in [0, 1].

    "upstream" adds 1e-6 inside each root: a perfect match is worth 1.001, a perfect miss 0.002. As a reward
    only: where p or q is 0 or 1 its slope is infinite; train on `fidelity_loss`. Tsai et al., FRank, 2007;
    VisualQuality-R1, arXiv 2505.14460; released code, `grpo_jsonl.py`.
    """
    check_choice("mode", mode, get_args(FidelityMode))
    eps = 1e-6 if mode == "upstream" else 0.0
    return (first * second + eps).sqrt() + ((1 - first) * (1 - second) + eps).sqrt()


def fidelity_loss(score: Tensor, label: Tensor) -> Tensor:
    """1 − √(p Φ(t)) − √((1 − p) Φ(−t)), t of `thurstone_score`, with a finite slope everywhere.

    The roots are taken as e^(ln Φ/2): d√Φ/dt = φ/(2√Φ) vanishes in the tail, while √ of a rounded Φ has no
    slope there or an infinite one.
    """
    check_same(score=score, label=label)
    labelled = ~torch.isnan(label)
    t = torch.where(labelled, score, 0.0).to(float32_dtype(score))
    prob = torch.where(labelled, label, 0.5).detach().to(t.dtype)
    won, lost = (torch.exp(torch.special.log_ndtr(side * t) / 2) for side in (1, -1))
    return torch.where(labelled, 1 - prob.sqrt() * won - (1 - prob).sqrt() * lost, 0.0)


def quality_preferences(quality: Tensor) -> Tensor:
    """Compare quality labels [B]: [B, B] of 1 (i higher than j), ½ and 0; NaN where one is missing."""
    difference = quality[:, None] - quality[None, :]
    won = torch.where(difference == 0, 0.5, (difference > 0).to(difference.dtype))
    return torch.where(torch.isnan(difference), torch.nan, won)


def fidelity_rewards(
    answers: Tensor,
    target: Tensor,
    *,
    valid: Tensor | None = None,
    within: Labels | None = None,
    ddof: int = 1,
    floor: float = FLOOR,
    mode: FidelityMode = "paper",
) -> Tensor:
    """Reward each answer by how well it orders its image among the others of the batch; [B, K] without gradient.

    p_k(i, j) = Φ((q_ik − mean_j)/√(v_i + v_j + γ)); r_ik = mean over j ≠ i of fidelity(p_ij, p_k(i, j)). An
    answer that could not be read takes no part in the mean and variance of its image and gets NaN, as does
    one without anything to compare with.

    `answers` are [B, K]; what is not finite, or not `valid`, is none. `target` is [B] quality labels (higher is
    better, equal is a tie), or [B, B] probabilities that i is better than j; a pair of which it is NaN is left out.
    `within` [B] labels data sets: only images of one of them are compared. `ddof` is of the variance, `floor` γ > 0 in
    squared units of the answers, `mode` that of `fidelity`.

    Wu et al., VisualQuality-R1, arXiv 2505.14460, section 3; released code, `grpo_jsonl.py`.
    """
    statistics = answer_statistics(answers.detach(), valid=valid, ddof=ddof)
    size = answers.shape[0]
    if target.shape not in ((size,), (size, size)):
        raise ValueError(f"target must be [B] or [B, B], B = {size}; got {tuple(target.shape)}.")
    truth = quality_preferences(target) if target.ndim == 1 else target
    compared = ~torch.eye(size, dtype=torch.bool, device=answers.device) & ~torch.isnan(truth)
    compared &= (statistics.count > 0)[None, :]
    if within is not None:
        index, _ = group_index(within, size, answers.device)
        compared &= index[:, None] == index[None, :]
    variance = statistics.variance.nan_to_num(0.0)
    prob = thurstone_probability(
        answers.detach()[:, :, None],
        statistics.mean.nan_to_num(0.0)[None, None, :],
        variance[:, None, None],
        variance[None, None, :],
        floor=floor,
    )
    alike = fidelity(truth.nan_to_num(0.5).to(prob)[:, None, :], prob, mode=mode)
    total = torch.where(compared[:, None, :], alike, 0.0).sum(2)
    mean = total / compared.sum(1).clamp(min=1)[:, None]
    answered = present_entries(answers, valid) & compared.any(1)[:, None]
    return torch.where(answered, mean, torch.nan)


def rating_distribution(mean: Tensor, std: Tensor, scores: Tensor) -> Tensor:
    """Probabilities [B, K] of ascending scores [K] for a rating X ~ N(mean, std²) [B], cut to the scale.

    p_k = E h_k(X) with h_k the tent that is 1 at s_k and 0 at its neighbours, so Σ p_k s_k = E X exactly; near an end
    that is not `mean`. Without spread X is shared by two neighbours. DeQA-Score (arXiv 2501.11561) takes X's mass in
    cells and then shifts the mean back; Z-Reward (arXiv 2606.09076) distils such distributions from a larger judge.
    """
    check_axes(mean=(mean, "B"), std=(std, "B"), scores=(scores, "K"))
    gap, std = mean[:, None] - scores, std[:, None].clamp(min=1e-6)
    z = gap / std
    # E (X − s)⁺ = σ φ(z) + (μ − s) Φ(z)
    above = std * (-z.square() / 2).exp() / math.sqrt(2 * math.pi) + gap * torch.special.ndtr(z)
    share = -above.diff(dim=1) / scores.diff()
    edge = torch.ones_like(share[:, :1])
    return (torch.cat([edge, share], 1) - torch.cat([share, 0 * edge], 1)).clamp(min=0)
