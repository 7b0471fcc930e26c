# SPDX-License-Identifier: Apache-2.0
"""Advantages shaped by a policy's hidden states: VERL's bonus for ranks that grow, RLFR's latent flow.

Hidden states are those from which a sample's tokens were predicted, float64 inside, without gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from visalign.core.checks import check_axes, check_embeddings, check_positive
from visalign.core.precision import float32


def effective_rank(embedding: Tensor) -> Tensor:
    """Number of directions in which a set varies: exp(−Σ q ln q), q the singular values over their sum.

    The set is centred first. Between 1 (all on a line) and min(n − 1, d).

    Args:
        embedding: [..., n, d], one row per sample, any unit.

    Returns:
        [...] float64; 0 for a set that does not vary at all.

    Roy and Vetterli, The effective rank, EUSIPCO 2007; used by VERL, arXiv 2509.23808.
    """
    value = check_embeddings(embedding)
    value = value - value[..., :1, :]  # equal rows become exact zeros before the mean is taken
    singular = torch.linalg.svdvals(value - value.mean(-2, keepdim=True))
    total = singular.sum(-1, keepdim=True)
    share = singular / torch.where(total > 0, total, 1.0)
    return torch.where(total[..., 0] > 0, torch.special.entr(share).sum(-1).exp(), 0.0)


def rank_dynamics(hidden: Tensor, *, stride: int = 40) -> Tensor:
    """VERL's numbers of one completion: rank, velocity and acceleration of its hidden states.

    With m_j the effective rank of the first j·stride states: rank = that of all states;
    velocity = mean_{j≥2} δ_j, δ_j = m_j − mean_{k<j} m_k; acceleration = mean_{j≥3} (δ_j − δ_{j−1}).

    Args:
        hidden: [T, D] states of a completion.
        stride: tokens between two ranks.

    Returns:
        [3] float64: rank, velocity, acceleration; what has too few strides is 0.

    VERL, arXiv 2509.23808 (stride 40).
    """
    if hidden.ndim != 2 or stride < 1:
        raise ValueError(f"hidden must be [T, D] and stride ≥ 1; got {tuple(hidden.shape)} and {stride}.")
    found = torch.zeros(3, dtype=torch.float64, device=hidden.device)
    if not len(hidden):
        return found
    found[0] = effective_rank(hidden)
    ends = range(stride, len(hidden) + 1, stride)
    rank = torch.stack([effective_rank(hidden[:end]) for end in ends]) if len(ends) > 1 else found[:0]
    if len(rank) > 1:
        before = rank.cumsum(0)[:-1] / torch.arange(1, len(rank), device=rank.device)
        gain = rank[1:] - before
        found[1] = gain.mean()
        found[2] = gain.diff().mean() if len(gain) > 1 else 0.0
    return found


def rank_bonus(
    advantage: Tensor, rank: Tensor, average: Sequence[float] | None, *, kappa: float = 2.0
) -> Tensor:
    """VERL: A′ = A + min(relu(aux), |A|/κ), aux = β tanh(x_ER) + (1 − β) tanh(x_ERV).

    x = (m − m̄)/|m̄| of rank, velocity and acceleration, m̄ the moving average of the rollouts before, and
    β = σ(2 clamp(x_ERA, ±5)): a rank that accelerates is paid for its height, else for its velocity. The
    bonus turns no advantage's sign, and is never negative, so that a group's mean is above 0.

    Args:
        advantage: [B].
        rank: [B, 3] of `rank_dynamics`; a row that is not finite has no bonus.
        average: m̄ of the three by `rank_average`; None, at the first rollout, gives no bonus.
        kappa: κ > 0.

    Returns:
        [B], float32 or better, no gradient.

    VERL, arXiv 2509.23808 (κ = 2).
    """
    check_positive(kappa=kappa)
    check_axes(advantage=(advantage, "B"))
    if rank.shape != (len(advantage), 3):
        raise ValueError(f"rank must be [{len(advantage)}, 3]; got shape {tuple(rank.shape)}.")
    gain = float32(advantage).detach()
    if average is None:
        return gain
    centre = torch.tensor(average, dtype=torch.float64, device=rank.device)
    away = (rank.detach().double() - centre) / torch.where(centre != 0, centre.abs(), torch.nan)
    share = torch.sigmoid(2 * away[:, 2].nan_to_num().clamp(-5, 5))
    aux = share * away[:, 0].tanh().nan_to_num() + (1 - share) * away[:, 1].tanh().nan_to_num()
    aux = torch.where(torch.isfinite(rank).all(1), aux, 0.0)
    return gain + torch.minimum(aux.relu().to(gain.dtype), gain.abs() / kappa)


def rank_average(
    rank: Tensor, before: Sequence[float] | None, *, rate: float = 0.3
) -> tuple[float, float, float] | None:
    """m̄ ← (1 − rate) m̄ + rate · mean_B m, at first the mean; what is not finite takes no part.

    Args:
        rank: [B, 3] of a rollout.
        before: the average so far.
        rate: of the moving average.

    Returns:
        Three numbers; `before` where no sample has any.
    """
    known = rank[torch.isfinite(rank).all(1)].double()
    if not len(known):
        return None if before is None else (before[0], before[1], before[2])
    old = known.mean(0) if before is None else torch.tensor(before, dtype=torch.float64).to(known)
    first, second, third = (old + rate * (known.mean(0) - old)).tolist()
    return first, second, third


def flow_deviation(velocity: Tensor, hidden: Tensor, noise: Tensor, *, t: float = 0.8) -> Tensor:
    """How far a state is off a learned flow: t/(1−t) · mean_D (v − (h − ε))², v at x_t = (1−t) ε + t h.

    Args:
        velocity: v [n, D] of the flow at x_t.
        hidden: h [n, D].
        noise: ε [n, D], the flow's start.
        t: time in (0, 1), 1 at the state.

    Returns:
        [n], float32 or better.

    RLFR, arXiv 2510.10201 (t = 0.8).
    """
    if not 0 < t < 1:
        raise ValueError(f"t must be in (0, 1); got {t}.")
    off = float32(velocity) - (float32(hidden) - float32(noise))
    return t / (1 - t) * off.square().mean(-1)


def flow_rewards(
    deviation: Tensor, weight: Tensor, *, keep: float = 0.6, top: int = 15, scale: float = 0.01
) -> Tensor:
    """RLFR's token rewards: −scale · s̃_t of the `top` largest s̃ > keep of a row, else 0;
    s̃ = (s − min)/(max − min) over the row's present tokens.

    Args:
        deviation: [B, T] of `flow_deviation`, averaged over layers.
        weight: [B, T], 0 for absent tokens.
        keep: share of the row's range below which a token is as expected.
        top: most tokens of a row.
        scale: reward of the farthest token, with its sign turned.

    Returns:
        [B, T] ≤ 0, float32 or better, no gradient; 0 for rows whose tokens are all alike.

    RLFR, arXiv 2510.10201. Deviation from the released code: its minimum is the second smallest value of the
    row, taken for the first after padding, and rows of equal scores are 0/0.
    """
    check_axes(deviation=(deviation, "B T"), weight=(weight, "B T"))
    if not (0 <= keep < 1 and top >= 1 and scale >= 0):
        raise ValueError(
            f"keep must be in [0, 1), top ≥ 1 and scale ≥ 0; got keep={keep}, top={top}, scale={scale}."
        )
    present, score = weight != 0, float32(deviation).detach()
    low = torch.where(present, score, torch.inf).amin(1, keepdim=True)
    high = torch.where(present, score, -torch.inf).amax(1, keepdim=True)
    wide = present & (high > low)
    part = torch.where(wide, (score - low) / torch.where(wide, high - low, 1.0), 0.0)
    rank = part.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return torch.where((part > keep) & (rank < top), -scale * part, 0.0)
