# SPDX-License-Identifier: Apache-2.0
"""AEM: advantages scaled by how sure the policy was of a whole response.

Denoising steps of fixed variance all have the same entropy, which makes every factor 1: give another measure
of uncertainty there, such as the disagreement of several rewards on a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_not_negative
from visalign.core.groups.group_statistics import group_extremes, group_mean
from visalign.core.groups.labels import Labels, group_index
from visalign.core.precision import float32_dtype


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
