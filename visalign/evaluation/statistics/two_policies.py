# SPDX-License-Identifier: Apache-2.0
"""A policy before and after training on the same problems: what k attempts solve, and where curves cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from visalign.core import pass_at_k

from .intervals import Interval, paired_bootstrap


@dataclass(frozen=True, kw_only=True)
class AttemptsPoint:
    """pass@k of both policies, with intervals over problems."""

    k: int
    base: Interval
    tuned: Interval
    change: Interval
    """Tuned less base, problem by problem."""


def doublings(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    steps = [2**i for i in range(most.bit_length())]
    return steps if steps[-1] == most else [*steps, most]


def pass_at_k_curves(base: Tensor, tuned: Tensor, *, generator: torch.Generator) -> list[AttemptsPoint]:
    """pass@k of two policies at k = 1, 2, 4, ..., n, exact over the subsets of n samples.

    Args:
        base: [P, n] 1 where a sample solves its problem, 0 where not, NaN where nobody knows.
        tuned: [P, n] of the same problems. A problem counts at the k for which both have so many known ones.
        generator: of the bootstrap over problems.

    Returns:
        A point per k for which some problem has k known samples of both.

    Yue et al., Does Reinforcement Learning Really Incentivize Reasoning Capacity, arXiv 2504.13837, figure 2.
    """
    if base.ndim != 2 or base.shape != tuned.shape or not base.numel():
        raise ValueError(
            "base and tuned must be [P, n], the samples of the same problems; got "
            f"{tuple(base.shape)} and {tuple(tuned.shape)}."
        )
    cluster, points = list(range(len(base))), []
    for k in doublings(base.shape[1]):
        first, second = (
            pass_at_k(solved.isfinite().sum(1), solved.nansum(1), k).numpy() for solved in (base, tuned)
        )
        known = torch.from_numpy(first + second).isfinite()
        if not known.any():
            break
        first[~known], second[~known] = torch.nan, torch.nan
        nothing = 0 * first
        found = [
            paired_bootstrap(before, after, cluster, generator=generator)
            for before, after in ((nothing, first), (nothing, second), (first, second))
        ]
        points.append(AttemptsPoint(k=k, base=found[0], tuned=found[1], change=found[2]))
    return points


def crossing(points: Sequence[AttemptsPoint]) -> tuple[int | None, bool]:
    """The first k at which the curve that led is behind, and whether the intervals show it.

    Returns:
        (k or None, True where one change before k and one from k on lie on opposite sides of 0 with their
        whole intervals). Curves that touch, or that meet at 1, have not crossed.
    """
    changes = [round(point.change.estimate, 12) for point in points]  # equal curves differ by rounding
    led = next((value for value in changes if value), 0.0)
    place = next((i for i, value in enumerate(changes) if value * led < 0), None)
    if place is None:
        return None, False
    before, after = (
        any(point.change.excludes_zero and point.change.estimate * sign > 0 for point in part)
        for part, sign in ((points[:place], led), (points[place:], -led))
    )
    return points[place].k, before and after
