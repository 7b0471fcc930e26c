# SPDX-License-Identifier: Apache-2.0
"""How varied a set of samples is, how much two rewards agree, and what training did to what was solvable.

Everything is float64 and works on stacks: the last dimensions are one set, those before it are prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def starc_distance(first: Tensor, second: Tensor) -> Tensor:
    """How differently two rewards order samples: ‖c(R₁) − c(R₂)‖, c centres and divides by the L2 norm.

    0 for rewards that differ by scale and offset, 2 for opposite ones; √(2 (1 − Pearson)). This is STARC for
    one decision (a bandit), where no expected future enters the canonical form.

    Args:
        first: [..., n] rewards of the same n samples, any unit.
        second: [..., n], any other unit.

    Returns:
        [...] float64 in [0, 2]; 1 between a constant reward and another, 0 between two constant ones.

    Skalse et al., STARC, arXiv 2309.15257.
    """
    if first.shape != second.shape or not first.ndim or not first.shape[-1]:
        raise ValueError(
            f"two rewards of the same samples [..., n] are needed; got {tuple(first.shape)} and "
            f"{tuple(second.shape)}."
        )
    return torch.linalg.vector_norm(_canonical(first) - _canonical(second), dim=-1)


@dataclass(frozen=True, kw_only=True)
class SupportMetrics:
    """What training did to the set of solvable problems; NaN where nothing was there to be divided by."""

    retention: float
    """SRR = P/(P + S), share of the formerly solvable that still is."""
    discovery: float
    """NDR = E/(P + E), share of the now solvable that is new."""
    dynamics: float
    """SDS, harmonic mean of the two."""
    net_change: float
    """NSCR = (E − S)/(P + E + S)."""


def support_metrics(*, preserved: int, expanded: int, shrunk: int) -> SupportMetrics:
    """Compare what was solvable before and after, each judged with many samples per problem.

    Args:
        preserved: P, solvable before and after.
        expanded: E, solvable only after.
        shrunk: S, solvable only before.

    Returns:
        The four ratios.

    The invisible leash: why RLVR may or may not escape its origin, arXiv 2507.14843.
    """
    counts = {"preserved": preserved, "expanded": expanded, "shrunk": shrunk}
    if min(counts.values()) < 0:
        raise ValueError(f"counts must be ≥ 0; got {counts}.")
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


def _canonical(reward: Tensor) -> Tensor:
    if not torch.isfinite(reward).all():
        raise ValueError("rewards must be finite; compare only samples that both rewards could judge.")
    value = reward.detach().double()
    value = value - value[..., :1]
    value = value - value.mean(-1, keepdim=True)
    norm = torch.linalg.vector_norm(value, dim=-1, keepdim=True)
    return value / torch.where(norm > 0, norm, 1.0)
