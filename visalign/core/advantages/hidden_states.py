# SPDX-License-Identifier: Apache-2.0
"""Advantages shaped by a policy's hidden states: VERL's bonus for growing ranks, RLFR's latent flow.

Hidden states are those from which a sample's tokens were predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_embeddings
from visalign.core.precision import float32


def effective_rank(embedding: Tensor) -> Tensor:
    """Count the directions in which a set varies: exp(−Σ q ln q), q the singular values over their sum.

    Sets [..., n, d] are centred first. Returns [...] between 1 (all on a line) and min(n − 1, d); 0 for a set
    that does not vary. Roy and Vetterli, The effective rank, EUSIPCO 2007; used by VERL, arXiv 2509.23808.
    """
    value = check_embeddings(embedding)
    value = value - value[..., :1, :]  # equal rows become exact zeros before the mean is taken
    singular = torch.linalg.svdvals(value - value.mean(-2, keepdim=True))
    total = singular.sum(-1, keepdim=True)
    share = singular / torch.where(total > 0, total, 1.0)
    return torch.where(total[..., 0] > 0, torch.special.entr(share).sum(-1).exp(), 0.0)


def rank_dynamics(hidden: Tensor, *, stride: int = 40) -> Tensor:
    """Measure rank, velocity and acceleration of a completion's hidden states [T, D]; [3] float64.

    With m_j the effective rank of the first j·stride states: rank = that of all states; velocity = mean_{j≥2}
    δ_j, δ_j = m_j − mean_{k<j} m_k; acceleration = mean_{j≥3} (δ_j − δ_{j−1}); 0 with too few strides. VERL,
    arXiv 2509.23808 (stride 40).
    """
    check_axes(hidden=(hidden, "T D"))
    dynamics = torch.zeros(3, dtype=torch.float64, device=hidden.device)
    if not len(hidden):
        return dynamics
    dynamics[0] = effective_rank(hidden)
    ends = range(stride, len(hidden) + 1, stride)
    rank = torch.stack([effective_rank(hidden[:end]) for end in ends]) if len(ends) > 1 else dynamics[:0]
    if len(rank) > 1:
        before = rank.cumsum(0)[:-1] / torch.arange(1, len(rank), device=rank.device)
        gain = rank[1:] - before
        dynamics[1] = gain.mean()
        dynamics[2] = gain.diff().mean() if len(gain) > 1 else 0.0
    return dynamics


def rank_bonus(advantage: Tensor, rank: Tensor, average: Sequence[float] | None, *, kappa: float = 2.0) -> Tensor:
    """Add VERL's bonus: A′ = A + min(relu(aux), |A|/κ), aux = β tanh(x_ER) + (1 − β) tanh(x_ERV).

    x = (m − m̄)/|m̄| of rank, velocity and acceleration, with the moving average m̄ of earlier rollouts
    (`average`, from `rank_average`; None gives no bonus), and β = σ(2 clamp(x_ERA, ±5)): an accelerating rank
    is paid for its height, else for its velocity. The bonus turns no advantage's sign and is never negative,
    so a group's mean is above 0. `rank` is [B, 3] of `rank_dynamics`; a row that is not finite gets no bonus.
    VERL, arXiv 2509.23808 (κ = 2).
    """
    check_axes(advantage=(advantage, "B"), rank=(rank, "B n"))
    gain = float32(advantage).detach()
    if average is None:
        return gain
    centre = torch.tensor(average, dtype=torch.float64, device=rank.device)
    relative = (rank.detach().double() - centre) / torch.where(centre != 0, centre.abs(), torch.nan)
    share = torch.sigmoid(2 * relative[:, 2].nan_to_num().clamp(-5, 5))
    aux = share * relative[:, 0].tanh().nan_to_num() + (1 - share) * relative[:, 1].tanh().nan_to_num()
    aux = torch.where(torch.isfinite(rank).all(1), aux, 0.0)
    return gain + torch.minimum(aux.relu().to(gain.dtype), gain.abs() / kappa)


def rank_average(
    rank: Tensor, before: Sequence[float] | None, *, rate: float = 0.3
) -> tuple[float, float, float] | None:
    """Update the average of ranks [B, 3]: m̄ ← (1 − rate) m̄ + rate · mean_B m over finite rows, at first the mean."""
    finite = rank[torch.isfinite(rank).all(1)].double()
    if not len(finite):
        return None if before is None else (before[0], before[1], before[2])
    old = finite.mean(0) if before is None else torch.tensor(before, dtype=torch.float64).to(finite)
    first, second, third = (old + rate * (finite.mean(0) - old)).tolist()
    return first, second, third


def flow_deviation(velocity: Tensor, hidden: Tensor, noise: Tensor, *, t: float = 0.8) -> Tensor:
    """Measure how far states are off a learned flow: t/(1−t) · mean_D (v − (h − ε))², [n].

    `velocity` v [n, D] is the flow's at x_t = (1−t) ε + t h, for states `hidden` h and start `noise` ε, both
    [n, D]; time t in (0, 1) is 1 at the state. RLFR, arXiv 2510.10201 (t = 0.8).
    """
    residual = float32(velocity) - (float32(hidden) - float32(noise))
    return t / (1 - t) * residual.square().mean(-1)


def flow_rewards(
    deviation: Tensor, weight: Tensor, *, keep: float = 0.6, top: int = 15, scale: float = 0.01
) -> Tensor:
    """Compute RLFR's token rewards: −scale · s̃_t for the `top` largest s̃ > keep of a row, else 0; [B, T].

    s̃ = (s − min)/(max − min) over the row's present tokens, s the `deviation` [B, T] of `flow_deviation` averaged
    over layers. Rows whose tokens are all alike get 0. RLFR, arXiv 2510.10201. Deviation from the released code: its
    minimum is the second smallest value of the row (the first is taken for padding), and rows of equal scores are 0/0.
    """
    check_axes(deviation=(deviation, "B T"), weight=(weight, "B T"))
    present, score = weight != 0, float32(deviation).detach()
    low = torch.where(present, score, torch.inf).amin(1, keepdim=True)
    high = torch.where(present, score, -torch.inf).amax(1, keepdim=True)
    wide = present & (high > low)
    part = torch.where(wide, (score - low) / torch.where(wide, high - low, 1.0), 0.0)
    rank = part.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return torch.where((part > keep) & (rank < top), -scale * part, 0.0)
