# SPDX-License-Identifier: Apache-2.0
"""What to do with a judge's standard deviation: penalise, bound, combine members, shrink advantages.

All take the deviation as given; whether it means anything is a question of calibration, not of these rules.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_not_negative, check_positive, check_same
from visalign.core.precision import float32, float32_dtype

Aggregation = Literal["mean", "min", "lower_bound", "inverse_variance"]


def bhattacharyya(mean: Tensor, std: Tensor, other_mean: Tensor, other_std: Tensor) -> Tensor:
    """Overlap of Gaussian rewards: BC = √(2 σ_i σ_j/(σ_i² + σ_j²)) · e^(−(μ_i − μ_j)²/(4 (σ_i² + σ_j²))).

    Args:
        mean: [N] μ_i.
        std: [N] σ_i > 0.
        other_mean: [M] μ_j.
        other_std: [M] σ_j > 0.

    Returns:
        [N, M] in (0, 1], float32 or better; 1 for equal distributions.

    Bhattacharyya 1943; PURM, arXiv 2503.22480.
    """
    mu, s = _gaussians(mean, std)
    nu, t = _gaussians(other_mean, other_std)
    total = s[:, None].square() + t[None].square()
    apart = (mu[:, None] - nu[None]).square() / (4 * total)
    return (2 * s[:, None] * t[None] / total).sqrt() * torch.exp(-apart)


def bhattacharyya_overlap(
    mean: Tensor, std: Tensor, *, pool_mean: Tensor | None = None, pool_std: Tensor | None = None
) -> Tensor:
    """PURM's uncertainty of a reward: its mean overlap with the others, u_i = mean_{j ≠ i} BC_ij.

    Args:
        mean: [N].
        std: [N] > 0.
        pool_mean: [M] rewards seen before, to compare with instead of one another; PURM keeps a rolling list.
        pool_std: [M], given with pool_mean.

    Returns:
        [N] in [0, 1], float32 or better; 0 for a single reward without a pool.

    Raises:
        ValueError: shapes that differ, or one half of a pool.

    Sun et al., PURM, arXiv 2503.22480.
    """
    if (pool_mean is None) != (pool_std is None):
        raise ValueError("pool_mean and pool_std go together; one of them is missing.")
    if pool_mean is not None and pool_std is not None:
        return bhattacharyya(mean, std, pool_mean, pool_std).mean(1)
    overlap = bhattacharyya(mean, std, mean, std)
    size = overlap.shape[0]
    return (overlap.sum(1) - overlap.diagonal()) / max(size - 1, 1)


def penalise(mean: Tensor, uncertainty: Tensor, *, strength: float) -> Tensor:
    """μ − λ u, [*]: PURM's reward with u of `bhattacharyya_overlap`, the lower confidence bound with u = σ.

    Args:
        mean: [*] μ, higher is better.
        uncertainty: [*] u ≥ 0.
        strength: λ ≥ 0, in units of the reward per unit of u; how much is data-dependent.
    """
    check_same(mean=mean, uncertainty=uncertainty)
    check_not_negative(strength=strength)
    return mean - strength * uncertainty


def combine_members(
    mean: Tensor,
    *,
    std: Tensor | None = None,
    valid: Tensor | None = None,
    how: Aggregation = "mean",
    strength: float = 1.0,
    ddof: int = 1,
) -> tuple[Tensor, Tensor]:
    """One reward from several members of an ensemble, and how far apart they are.

    Args:
        mean: [M, B] rewards of M members, in one unit; what is not finite is missing.
        std: [M, B] each member's own deviation, needed for "inverse_variance".
        valid: bool [M, B].
        how: "mean"; "min", the most careful member; "lower_bound", mean − λ · deviation between members;
            "inverse_variance", weights 1/σ².
        strength: λ of the lower bound.
        ddof: of the deviation between members.

    Returns:
        ([B] reward, [B] standard deviation between the members: epistemic), float32 or better; NaN where no
        member answered, deviation 0 where one did.

    Coste et al., Reward Model Ensembles, arXiv 2310.02743 (mean, worst case, lower bound).
    """
    check_axes(mean=(mean, "M B"), std=(std, "M B"), valid=(valid, "M B"))
    present = torch.isfinite(mean) if valid is None else torch.isfinite(mean) & valid
    value = torch.where(present, mean, 0.0).to(float32_dtype(mean))
    count = present.sum(0)
    average = value.sum(0) / count.clamp(min=1)
    off = torch.where(present, value - average, 0.0)
    spread = (off.square().sum(0) / (count - ddof).clamp(min=1)).sqrt()
    if how == "mean":
        result = average
    elif how == "lower_bound":
        result = penalise(average, spread, strength=strength)
    elif how == "min":
        result = torch.where(present, value, float("inf")).amin(0)
    elif how == "inverse_variance":
        if std is None:
            raise ValueError('how="inverse_variance" needs std, the deviation of each member.')
        known = present & torch.isfinite(std)
        weight = torch.where(known, inverse_variance_weights(torch.where(known, std, 1.0)), 0.0)
        total = weight.sum(0)
        result = (weight * value).sum(0) / torch.where(total > 0, total, torch.nan)
    else:
        raise ValueError(f'how must be "mean", "min", "lower_bound" or "inverse_variance"; got {how!r}.')
    answered = count > 0
    return torch.where(answered, result, torch.nan), torch.where(answered, spread, torch.nan)


def inverse_variance_weights(std: Tensor, *, floor: float = 1e-3) -> Tensor:
    """Weights 1/(σ² + floor²), [*], without gradient and not normalised; float32 or better.

    Args:
        std: [*] σ ≥ 0.
        floor: > 0, in the unit of σ, so that one answer that claims certainty does not outweigh all others.
    """
    check_positive(floor=floor)
    s = float32(std.detach())
    return 1 / (s.square() + floor**2)


def shrink_advantages(advantage: Tensor, std: Tensor, group_std: Tensor, *, observed: bool = False) -> Tensor:
    """Take off advantages the share that noise of the judge may have: A · (1 − σ²/(σ_group² + σ²)).

    Args:
        advantage: [B].
        std: [B] σ, the judge's standard deviation for the sample, in the unit of the reward.
        group_std: [B] standard deviation of the rewards in the sample's group.
        observed: group_std is that of the rewards as judged, which holds the noise already: σ² is taken off
            σ_group² first (down to 0), so that a group in which all differences can be noise keeps nothing.

    Returns:
        [B], float32 or better, no gradient in the factor.

    The linear estimate of a signal in known noise (James and Stein 1961); its use here is our own.
    """
    check_same(advantage=advantage, std=std, group_std=group_std)
    noise = float32(std.detach()).square()
    signal = group_std.detach().to(noise).square()
    signal = (signal - noise).clamp(min=0) if observed else signal
    total = signal + noise
    return advantage * torch.where(total > 0, signal / total.clamp(min=torch.finfo(total.dtype).tiny), 1.0)


def relative_uncertainty_weight(std: Tensor, *, strength: float = 1.0) -> Tensor:
    """Weights e^(−λ u/u₀) of advantages whose rewards are u uncertain, u₀ the median of u.

    Where the median is 0 it is that of the u above 0. An adaptation: Ctrl-U weighs the loss of each pixel by
    e^(−U), U how far two predictions are apart; a reward is one number with a unit, which u₀ takes out.

    Args:
        std: [B] u ≥ 0, the rewards' standard deviations; NaN is not known.
        strength: λ ≥ 0; 1 leaves the median sample e^(−1) of its advantage.

    Returns:
        [B] in [0, 1] without gradient, float32 or better: 1 where u = 0, NaN where u is not known.

    After Ctrl-U, arXiv 2410.11236.
    """
    check_axes(std=(std, "B"))
    check_not_negative(strength=strength)
    u = float32(std.detach())
    known = u[torch.isfinite(u)]
    if not bool((known > 0).any()):
        return torch.exp(-strength * u)
    scale = known.quantile(0.5)
    scale = scale if scale > 0 else known[known > 0].quantile(0.5)
    return torch.exp(-strength * u / scale)


def _gaussians(mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    check_axes(mean=(mean, "N"), std=(std, "N"))
    dtype = float32_dtype(mean)
    return mean.to(dtype), std.to(dtype).clamp(min=1e-12)
