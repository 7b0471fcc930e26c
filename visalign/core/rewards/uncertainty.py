# SPDX-License-Identifier: Apache-2.0
"""Use a judge's standard deviation: penalise, bound, combine members, weigh advantages.

All take the deviation as given; whether it means anything is a question of calibration.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_choice, check_same
from visalign.core.precision import float32, float32_dtype

Aggregation = Literal["mean", "min", "lower_bound", "inverse_variance"]


def bhattacharyya(mean: Tensor, std: Tensor, other_mean: Tensor, other_std: Tensor) -> Tensor:
    """Compute the overlap of Gaussians: √(2 σ_i σ_j/(σ_i² + σ_j²)) e^(−(μ_i − μ_j)²/(4 (σ_i² + σ_j²))).

    [N, M] in (0, 1] for rewards [N] and [M]. Bhattacharyya 1943; PURM, arXiv 2503.22480.
    """
    check_axes(mean=(mean, "N"), std=(std, "N"), other_mean=(other_mean, "M"), other_std=(other_std, "M"))
    mu, s = float32(mean)[:, None], float32(std).clamp(min=1e-12)[:, None]
    nu, t = float32(other_mean), float32(other_std).clamp(min=1e-12)
    total = s.square() + t.square()
    return (2 * s * t / total).sqrt() * torch.exp(-(mu - nu).square() / (4 * total))


def bhattacharyya_overlap(mean: Tensor, std: Tensor) -> Tensor:
    """Compute PURM's uncertainty: the mean overlap with the other rewards, u_i = mean_{j ≠ i} BC_ij.

    0 for a single reward. Sun et al., PURM, arXiv 2503.22480. Deviation: PURM compares with a rolling list of
    earlier rewards, for which there is `bhattacharyya`.
    """
    overlap = bhattacharyya(mean, std, mean, std)
    size = overlap.shape[0]
    return (overlap.sum(1) - overlap.diagonal()) / max(size - 1, 1)


def penalise(mean: Tensor, uncertainty: Tensor, *, strength: float) -> Tensor:
    """Subtract uncertainty, μ − λ u, λ ≥ 0: PURM with u of `bhattacharyya_overlap`, a lower bound with u = σ."""
    check_same(mean=mean, uncertainty=uncertainty)
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
    """Combine the rewards [M, B] of an ensemble's M members to ([B] reward, [B] standard deviation between them).

    "min" is the most careful member; "lower_bound" is mean − `strength` · deviation; "inverse_variance" has weights
    1/σ², of each member's own `std` [M, B]. What is not finite, or not `valid`, is missing: NaN where no member
    answered. The deviation, with `ddof`, is epistemic; 0 where one member answered.

    Coste et al., Reward Model Ensembles, arXiv 2310.02743 (mean, worst case, lower bound).
    """
    check_axes(mean=(mean, "M B"), std=(std, "M B"), valid=(valid, "M B"))
    present = torch.isfinite(mean) if valid is None else torch.isfinite(mean) & valid
    value = torch.where(present, mean, 0.0).to(float32_dtype(mean))
    count = present.sum(0)
    average = value.sum(0) / count.clamp(min=1)
    centred = torch.where(present, value - average, 0.0)
    spread = (centred.square().sum(0) / (count - ddof).clamp(min=1)).sqrt()
    check_choice("how", how, get_args(Aggregation))
    result = average
    if how == "lower_bound":
        result = penalise(average, spread, strength=strength)
    elif how == "min":
        result = torch.where(present, value, float("inf")).amin(0)
    elif how == "inverse_variance":
        if std is None:
            raise ValueError('how="inverse_variance" needs std, the deviation of each member.')
        usable = present & torch.isfinite(std)
        weight = torch.where(usable, inverse_variance_weights(torch.where(usable, std, 1.0)), 0.0)
        total = weight.sum(0)
        result = (weight * value).sum(0) / torch.where(total > 0, total, torch.nan)
    answered = count > 0
    return torch.where(answered, result, torch.nan), torch.where(answered, spread, torch.nan)


def inverse_variance_weights(std: Tensor, *, floor: float = 1e-3) -> Tensor:
    """Compute weights 1/(σ² + floor²), not normalised; the floor keeps a claim of certainty from outweighing all."""
    s = float32(std.detach())
    return 1 / (s.square() + floor**2)


def relative_uncertainty_weight(std: Tensor, *, strength: float = 1.0) -> Tensor:
    """Weigh advantages of uncertain rewards down: e^(−λ u/u₀), u₀ the median of the deviations `std` [B] u.

    Where the median is 0, u₀ is that of the u above 0. λ = 1 leaves the median sample e^(−1) of its advantage; NaN,
    not known, stays NaN. An adaptation: Ctrl-U weighs the loss of each pixel by e^(−U), U how far two predictions are
    apart; a reward is one number with a unit, which u₀ takes out. After Ctrl-U, arXiv 2410.11236.
    """
    check_axes(std=(std, "B"))
    u = float32(std.detach())
    finite = u[torch.isfinite(u)]
    if not bool((finite > 0).any()):
        return torch.exp(-strength * u)
    scale = finite.quantile(0.5)
    scale = scale if scale > 0 else finite[finite > 0].quantile(0.5)
    return torch.exp(-strength * u / scale)
