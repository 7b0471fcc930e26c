# SPDX-License-Identifier: Apache-2.0
"""Advantages shaped by how sure the policy was: AEM of responses, EMPG of steps, AEPO of decisions; by
perplexity, and by position.

Entropies in nats; statistics are over all that is passed in, so pass the whole optimizer step (all devices).
Denoising steps of fixed variance all have the same entropy, which makes every factor 1: give another measure
of uncertainty there, such as the disagreement of several rewards on a sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from visalign.core.checks import check_axes, check_not_negative
from visalign.core.groups.group_statistics import group_extremes, group_mean
from visalign.core.groups.labels import Labels, group_index
from visalign.core.precision import float32, float32_dtype
from visalign.core.rewards.steps import next_present

from .group import group_advantages


def aem_scale(entropy: Tensor, group: Labels, *, lam: float = 1.0, min_range: float = 0.1) -> Tensor:
    """AEM's factor per response, α = exp(−λ h̃)/mean_g exp(−λ h̃), h̃ = (H − min_g)/(max_g − min_g).

    The factors of a group have mean 1. Groups whose entropies differ by less than `min_range` get 1.

    Args:
        entropy: [B] mean entropy of each response; what is not finite is missing.
        group: [B] labels.
        lam: λ ≥ 0; 0 switches it off.
        min_range: least difference of entropies that counts, in nats, ≥ 0.

    Returns:
        [B], float32 or better; 1, which leaves the advantage alone, where the entropy is missing.

    AEM, arXiv 2605.00425 (λ = 1, range 0.1).
    """
    check_not_negative(lam=lam, min_range=min_range)
    check_axes(entropy=(entropy, "B"))
    index, groups = group_index(group, entropy.shape[0], entropy.device)
    present = torch.isfinite(entropy)
    low, high = group_extremes(entropy, present, index, groups)
    reach = (high - low)[index]
    wide = present & (reach >= min_range) & (reach > 0)
    part = (entropy.detach().double() - low[index]) / torch.where(wide, reach, 1.0)
    sure = torch.where(wide, torch.exp(-lam * torch.where(wide, part, 0.0)), 1.0)
    scale = sure / torch.where(wide, group_mean(sure, present, index, groups)[index], 1.0)
    return scale.to(float32_dtype(entropy))


def aem_advantages(
    advantage: Tensor, entropy: Tensor, group: Labels, *, lam: float = 1.0, min_range: float = 0.1
) -> Tensor:
    """AEM: A′ = α A, with α from `aem_scale`.

    Args:
        advantage: [B] or [B, T].
        entropy: [B], as in `aem_scale`.
        group: [B] labels.
        lam: λ ≥ 0; 0 switches it off.
        min_range: least difference of entropies that counts, in nats.

    Returns:
        The shape of advantage, float32 or better.

    AEM, arXiv 2605.00425.
    """
    if advantage.ndim not in (1, 2) or advantage.shape[:1] != entropy.shape:
        raise ValueError(
            f"advantage must be [B] or [B, T] with entropy [B]; got {tuple(advantage.shape)}, "
            f"{tuple(entropy.shape)}."
        )
    scale = aem_scale(entropy, group, lam=lam, min_range=min_range)
    return advantage.detach() * (scale if advantage.ndim == 1 else scale[:, None])


def entropy_aware_advantages(advantage: Tensor, entropy: Tensor, weight: Tensor, *, a: float = 0.2) -> Tensor:
    """AEPO: unsure decisions count more, A′_t = A (1 + a (H_t − mean H)/std H), over all present decisions.

    Args:
        advantage: [B].
        entropy: [B, T] of each decision as it was drawn, nats; what is not finite is missing.
        weight: [B, T], 0 for absent decisions.
        a: ≥ 0; 0 switches it off, and so does a std of 0.

    Returns:
        [B, T], float32 or better, no gradient; A where the entropy is missing, 0 where absent.

    AEPO, arXiv 2510.14545 (a = 0.2). Deviations: the released code takes the entropies anew at each update,
    and their mean and std (ddof 1) from each micro-batch. Addition: the factor stays at 0 or above.
    """
    check_not_negative(a=a)
    check_axes(advantage=(advantage, "B"), entropy=(entropy, "B T"), weight=(weight, "B T"))
    gain, inside = float32(advantage).detach()[:, None], weight != 0
    present = inside & torch.isfinite(entropy)
    known, one = (
        torch.where(present, entropy, torch.nan).flatten(),
        torch.zeros(present.numel(), dtype=torch.long),
    )
    away = group_advantages(known, one, ddof=0, eps=0.0).view_as(entropy)
    factor = torch.where(present, 1 + a * away, 1.0).clamp(min=0).to(gain.dtype)
    return torch.where(inside, gain * factor, 0.0)


def empg_scale(entropy: Tensor, weight: Tensor | None = None, *, k: float = 1.0, eps: float = 1e-8) -> Tensor:
    """EMPG's confidence, g = exp(−k H̃)/mean exp(−k H̃), H̃ = (H − min)/(max − min + eps).

    Minimum, maximum and mean are over all present segments, so that g has mean 1: confident segments move the
    policy more, unsure ones less.

    Args:
        entropy: [B, S] mean entropy of each segment; what is not finite is absent.
        weight: [B, S], 0 for absent segments.
        k: steepness, ≥ 0; 0 switches it off.
        eps: against equal entropies, in nats.

    Returns:
        [B, S], float32 or better; 0 where absent, 1 where all are equal.

    EMPG, arXiv 2509.09265.
    """
    present = _present_segments(entropy, weight)
    sure = _confidence(entropy, present, k, eps)
    mean = sure.sum() / present.sum().clamp(min=1)
    return (sure / torch.where(mean == 0, 1.0, mean)).to(float32_dtype(entropy))


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
    """EMPG: scale each segment by its confidence and reward the clarity of the next one.

    A_s = A g_s + ζ exp(−k′ H̃_{s+1}), without the bonus on a row's last segment; then minus the mean over all
    present segments.

    Args:
        advantage: [B], from the outcome; what is not finite is missing, and its segments are absent.
        entropy: [B, S], as in `empg_scale`.
        weight: [B, S], 0 for absent segments; the next segment is the next present one.
        k: steepness of g, ≥ 0; 0 switches it off.
        k_bonus: k′ ≥ 0.
        zeta: ζ, weight of the bonus, in the unit of the advantage.
        centre: take the mean off.
        eps: against equal entropies, in nats.

    Returns:
        [B, S], float32 or better; 0 where absent.

    EMPG, arXiv 2509.09265 (k = k′ = 1, ζ = 0.1).
    """
    present = _present_segments(entropy, weight)
    check_axes(entropy=(entropy, "B S"), advantage=(advantage, "B"))
    present = present & torch.isfinite(advantage)[:, None]
    gain = torch.where(present, advantage.detach().double()[:, None], 0.0)
    clear = _confidence(entropy, present, k_bonus, eps)
    ahead = pad(clear, (0, 1)).gather(1, next_present(present))
    scale = empg_scale(entropy.double(), present, k=k, eps=eps)
    result = torch.where(present, gain * scale + zeta * ahead, 0.0)
    if centre:
        result = torch.where(present, result - result.sum() / present.sum().clamp(min=1), 0.0)
    return result.to(torch.promote_types(advantage.dtype, float32_dtype(entropy)))


def step_entropy(entropy: Tensor, step: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean entropy of each step of a completion, for `empg_advantages`.

    Args:
        entropy: [B, T], in nats.
        step: [B, T] int64 in [0, T), which step a token belongs to; −1, of no step, counts as the first.
        weight: [B, T], 0 for absent tokens, the others count once.

    Returns:
        (means [B, T] float64, column s is step s; tokens of each [B, T], 0 where there is no such step).
    """
    check_axes(entropy=(entropy, "B T"), step=(step, "B T"), weight=(weight, "B T"))
    inside, place = (weight != 0).double(), step.clamp(min=0)
    held = torch.where(weight != 0, entropy.detach().double(), 0.0)
    count = torch.zeros_like(inside).scatter_add(1, place, inside)
    return torch.zeros_like(inside).scatter_add(1, place, held) / count.clamp(min=1), count


def perplexity_advantages(
    advantage: Tensor, log_prob: Tensor, weight: Tensor, group: Labels, *, alpha: float = 0.1
) -> Tensor:
    """Responses of low perplexity count more: A′_i = A_i max(0, 1 − α w_i).

    w_i = (ln PPL_i − mean)/std (ddof 1) among the responses of a group, ln PPL_i = −mean_t log π_old.

    Args:
        advantage: [B]; what is not finite is missing and takes no part in the statistics.
        log_prob: [B, T] log π_old, in nats.
        weight: [B, T], 0 for absent tokens, the others count once.
        group: [B] labels.
        alpha: α ≥ 0; 0 switches it off.

    Returns:
        [B], float32 or better, no gradient; 0 where missing.

    Decomposing the Entropy-Performance Exchange, arXiv 2508.02260 (perplexity). Addition: the factor stays at
    0 or above, so that no sign turns. Its α, and among what it standardises, were not found; both are ours.
    """
    check_not_negative(alpha=alpha)
    check_axes(advantage=(advantage, "B"), log_prob=(log_prob, "B T"), weight=(weight, "B T"))
    inside = weight != 0
    log_ppl = -torch.where(inside, log_prob.detach().double(), 0.0).sum(1) / inside.sum(1)
    present = torch.isfinite(log_ppl) & torch.isfinite(advantage)
    away = group_advantages(torch.where(present, log_ppl, torch.nan), group, eps=0.0)
    made = torch.where(present, advantage.detach() * (1 - alpha * away).clamp(min=0), 0.0)
    return made.to(torch.promote_types(advantage.dtype, torch.float32))


def position_advantages(advantage: Tensor, weight: Tensor, *, gamma: float = 0.1) -> Tensor:
    """Late decisions count more: A′_t = A + sign(A) γ σ(r_t), r_t = t/n the place among the row's n.

    Args:
        advantage: [B].
        weight: [B, T], 0 for absent decisions.
        gamma: γ ≥ 0, in the unit of the advantage; 0 switches it off.

    Returns:
        [B, T], float32 or better, no gradient; 0 where absent.

    Decomposing the Entropy-Performance Exchange, arXiv 2508.02260 (position). Its γ, and how a place becomes
    r_t, were not found; both are ours.
    """
    check_not_negative(gamma=gamma)
    check_axes(advantage=(advantage, "B"), weight=(weight, "B T"))
    inside, gain = weight != 0, float32(advantage).detach()[:, None]
    place = inside.cumsum(1) / inside.sum(1, keepdim=True).clamp(min=1)
    return torch.where(inside, gain + gain.sign() * gamma * torch.sigmoid(place), 0.0)


def _confidence(entropy: Tensor, present: Tensor, k: float, eps: float) -> Tensor:
    """exp(−k H̃), [B, S] float64; 0 where absent."""
    check_not_negative(k=k, eps=eps)
    value = torch.where(present, entropy.detach().double(), math.inf)
    low, high = value.amin(), torch.where(present, value, -math.inf).amax()
    # The clamp stands for 0/0 alone: equal entropies with eps = 0.
    reach = (high - low + eps).clamp(min=torch.finfo(value.dtype).tiny)
    return torch.where(present, torch.exp(-k * (value - low) / reach), 0.0)


def _present_segments(entropy: Tensor, weight: Tensor | None) -> Tensor:
    check_axes(entropy=(entropy, "B S"), weight=(weight, "B S"))
    finite = torch.isfinite(entropy)
    return finite if weight is None else finite & (weight != 0)
