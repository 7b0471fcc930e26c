# SPDX-License-Identifier: Apache-2.0
"""Distance between two rewards, and change of the set of solvable problems by training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def starc_distance(first: Tensor, second: Tensor) -> Tensor:
    """Compute ‖c(R₁) − c(R₂)‖, where c centres a reward and divides it by its L2 norm.

    0 for rewards that differ by scale and offset, 2 for opposite ones; √(2 (1 − Pearson)). This is STARC for one
    decision (a bandit), where no expected future enters the canonical form. The rewards [..., n] of the same n samples
    may have different units. The distance is 1 between a constant reward and another, 0 between two constant ones.

    Skalse et al., STARC, arXiv 2309.15257.
    """
    return torch.linalg.vector_norm(_canonical(first) - _canonical(second), dim=-1)


def _canonical(reward: Tensor) -> Tensor:
    value = reward.detach().double()
    value = value - value[..., :1]  # first, so that a constant reward becomes exactly zero
    value = value - value.mean(-1, keepdim=True)
    norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
    return value / torch.where(norm > 0, norm, 1.0)


@dataclass(frozen=True, kw_only=True)
class SupportMetrics:
    """Change of the set of solvable problems; NaN where a denominator is zero."""

    retention: float  # SRR = P/(P + S), share of the formerly solvable that still is
    discovery: float  # NDR = E/(P + E), share of the now solvable that is new
    dynamics: float  # SDS, harmonic mean of the two
    net_change: float  # NSCR = (E − S)/(P + E + S)


def support_metrics(*, preserved: int, expanded: int, shrunk: int) -> SupportMetrics:
    """Compare problems solvable before and after (P), only after (E) and only before (S); arXiv 2507.14843."""
    retention = _ratio(preserved, preserved + shrunk)
    discovery = _ratio(expanded, preserved + expanded)
    return SupportMetrics(
        retention=retention,
        discovery=discovery,
        dynamics=_ratio(2 * retention * discovery, retention + discovery) if retention or discovery else 0.0,
        net_change=_ratio(expanded - shrunk, preserved + expanded + shrunk),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
