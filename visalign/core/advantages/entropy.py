# SPDX-License-Identifier: Apache-2.0
"""Advantages shaped by entropy (AEM, EMPG, AEPO), by perplexity, and by position.

Entropies are in nats. Denoising steps of fixed variance all have the same entropy, so every factor is 1: give
another measure of uncertainty there, such as the disagreement of several rewards on a sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from visalign.core.checks import check_axes
from visalign.core.groups.group_statistics import group_extremes, group_mean
from visalign.core.groups.labels import Labels, group_index
from visalign.core.precision import float32, float32_dtype
from visalign.core.rewards.steps import next_present

from .group import group_advantages, whiten


def aem_scale(entropy: Tensor, group: Labels, *, lam: float = 1.0, min_range: float = 0.1) -> Tensor:
    """Compute AEM's factor per response, α = exp(−λ h̃)/mean_g exp(−λ h̃), h̃ = (H − min_g)/(max_g − min_g).

    `entropy` [B] is the mean entropy H of each response. The factors of a group have mean 1; missing entropies and
    groups whose entropies differ by less than `min_range` nats get 1. AEM, arXiv 2605.00425 (λ = 1, range 0.1).
    """
    check_axes(entropy=(entropy, "B"))
    index, groups = group_index(group, entropy.shape[0], entropy.device)
    present = torch.isfinite(entropy)
    low, high = group_extremes(entropy, present, index, groups)
    width = (high - low)[index]
    wide = present & (width >= min_range) & (width > 0)
    part = (entropy.detach().double() - low[index]) / torch.where(wide, width, 1.0)
    confidence = torch.where(wide, torch.exp(-lam * torch.where(wide, part, 0.0)), 1.0)
    scale = confidence / torch.where(wide, group_mean(confidence, present, index, groups)[index], 1.0)
    return scale.to(float32_dtype(entropy))


def aem_advantages(
    advantage: Tensor, entropy: Tensor, group: Labels, *, lam: float = 1.0, min_range: float = 0.1
) -> Tensor:
    """Compute AEM's A′ = α A for advantages [B] or [B, T], with α from `aem_scale`; arXiv 2605.00425."""
    check_axes(advantage=(advantage, "B T" if advantage.ndim > 1 else "B"), entropy=(entropy, "B"))
    scale = aem_scale(entropy, group, lam=lam, min_range=min_range)
    return advantage.detach() * (scale if advantage.ndim == 1 else scale[:, None])


def entropy_aware_advantages(advantage: Tensor, entropy: Tensor, weight: Tensor, *, a: float = 0.2) -> Tensor:
    """Weigh uncertain decisions more (AEPO): A′_t = A (1 + a (H_t − mean H)/std H) over the batch.

    `entropy` [B, T] is that of each decision at sampling; a missing one, or a std of 0, leaves A. AEPO, arXiv
    2510.14545 (a = 0.2). Deviations: the released code recomputes the entropies at each update, and takes
    mean and std (ddof 1) from each micro-batch. Addition: the factor stays at 0 or above.
    """
    check_axes(advantage=(advantage, "B"), entropy=(entropy, "B T"), weight=(weight, "B T"))
    gain, inside = float32(advantage).detach()[:, None], weight != 0
    present = inside & torch.isfinite(entropy)
    scores = whiten(entropy, present, ddof=0, eps=0.0, eps_inside=False)
    factor = torch.where(present, 1 + a * scores, 1.0).clamp(min=0).to(gain.dtype)
    return torch.where(inside, gain * factor, 0.0)


def empg_scale(entropy: Tensor, weight: Tensor | None = None, *, k: float = 1.0, eps: float = 1e-8) -> Tensor:
    """Compute EMPG's confidence, g = exp(−k H̃)/mean exp(−k H̃), H̃ = (H − min)/(max − min + eps).

    `entropy` [B, S] is the mean entropy of each segment, absent where not finite. Minimum, maximum and mean are over
    all present segments, so that g has mean 1: confident segments move the policy more. EMPG, arXiv 2509.09265.
    """
    present = _present_segments(entropy, weight)
    confidence = _confidence(entropy, present, k, eps)
    mean = confidence.sum() / present.sum().clamp(min=1)
    return (confidence / torch.where(mean == 0, 1.0, mean)).to(float32_dtype(entropy))


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
    """Scale each segment by its confidence and reward the clarity of the next present one (EMPG).

    A_s = A g_s + ζ exp(−k′ H̃_{s+1}), without the bonus on a row's last segment; then, with `centre`, minus
    the mean over all present segments. `advantage` is [B]; `entropy` [B, S] is as in `empg_scale`. EMPG,
    arXiv 2509.09265 (k = k′ = 1, ζ = 0.1).
    """
    present = _present_segments(entropy, weight)
    check_axes(entropy=(entropy, "B S"), advantage=(advantage, "B"))
    present = present & torch.isfinite(advantage)[:, None]
    gain = torch.where(present, advantage.detach().double()[:, None], 0.0)
    clarity = _confidence(entropy, present, k_bonus, eps)
    bonus = pad(clarity, (0, 1)).gather(1, next_present(present))
    scale = empg_scale(entropy.double(), present, k=k, eps=eps)
    result = torch.where(present, gain * scale + zeta * bonus, 0.0)  # A g_s + ζ exp(−k′ H̃_{s+1})
    if centre:
        result = torch.where(present, result - result.sum() / present.sum().clamp(min=1), 0.0)
    return result.to(torch.promote_types(advantage.dtype, float32_dtype(entropy)))


def step_entropy(entropy: Tensor, step: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Average the entropies [B, T] of each step of a completion, for `empg_advantages`.

    `step` [B, T] int64 is the step in [0, T) of each token; −1, no step, counts as the first. Returns the means [B, T]
    float64, column s for step s, and the number of tokens of each step, 0 where there is no such step.
    """
    check_axes(entropy=(entropy, "B T"), step=(step, "B T"), weight=(weight, "B T"))
    inside, column = (weight != 0).double(), step.clamp(min=0)
    present = torch.where(weight != 0, entropy.detach().double(), 0.0)
    count = torch.zeros_like(inside).scatter_add(1, column, inside)
    return torch.zeros_like(inside).scatter_add(1, column, present) / count.clamp(min=1), count


def perplexity_advantages(
    advantage: Tensor, log_prob: Tensor, weight: Tensor, group: Labels, *, alpha: float = 0.1
) -> Tensor:
    """Weigh responses of low perplexity more: A′_i = A_i max(0, 1 − α w_i).

    w_i = (ln PPL_i − mean)/std (ddof 1) among the responses of a group, ln PPL_i = −mean_t log π_old. Decomposing the
    Entropy-Performance Exchange, arXiv 2508.02260 (perplexity). Addition: the factor stays at 0 or above, so that no
    sign turns. α and the scope of the statistics are ours, as we did not find the paper's.
    """
    check_axes(advantage=(advantage, "B"), log_prob=(log_prob, "B T"), weight=(weight, "B T"))
    inside = weight != 0
    log_ppl = -torch.where(inside, log_prob.detach().double(), 0.0).sum(1) / inside.sum(1)
    present = torch.isfinite(log_ppl) & torch.isfinite(advantage)
    scores = group_advantages(torch.where(present, log_ppl, torch.nan), group, eps=0.0)
    # A max(0, 1 − α w)
    result = torch.where(present, advantage.detach() * (1 - alpha * scores).clamp(min=0), 0.0)
    return result.to(torch.promote_types(advantage.dtype, torch.float32))


def position_advantages(advantage: Tensor, weight: Tensor, *, gamma: float = 0.1) -> Tensor:
    """Weigh late decisions more: A′_t = A + sign(A) γ σ(r_t), r_t = t/n the position among the row's n.

    Decomposing the Entropy-Performance Exchange, arXiv 2508.02260 (position). γ and r_t are ours, as
    we did not find the paper's.
    """
    check_axes(advantage=(advantage, "B"), weight=(weight, "B T"))
    inside, gain = weight != 0, float32(advantage).detach()[:, None]
    position = inside.cumsum(1) / inside.sum(1, keepdim=True).clamp(min=1)
    sign = torch.where(gain.abs() > 1e-5, gain.sign(), 0.0)  # at its group's mean a sample has rounding noise
    return torch.where(inside, gain + sign * gamma * torch.sigmoid(position), 0.0)


def _confidence(entropy: Tensor, present: Tensor, k: float, eps: float) -> Tensor:
    value = torch.where(present, entropy.detach().double(), math.inf)
    low, high = value.amin(), torch.where(present, value, -math.inf).amax()
    width = (high - low + eps).clamp(min=torch.finfo(value.dtype).tiny)  # 0/0: equal entropies, eps = 0
    return torch.where(present, torch.exp(-k * (value - low) / width), 0.0)  # exp(−k H̃)


def _present_segments(entropy: Tensor, weight: Tensor | None) -> Tensor:
    check_axes(entropy=(entropy, "B S"), weight=(weight, "B S"))
    finite = torch.isfinite(entropy)
    return finite if weight is None else finite & (weight != 0)
