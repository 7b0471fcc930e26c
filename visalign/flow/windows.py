# SPDX-License-Identifier: Apache-2.0
"""Stochastic steps of an iteration: a random subset, a random window, or a moving one."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np

from visalign.core.checks import check_choice

WindowOrder = Literal["subset", "random", "progressive", "decay", "exp_decay"]


def window_steps(
    steps: int,
    size: int,
    iteration: int,
    *,
    order: WindowOrder = "subset",
    every: int = 25,
    stride: int = 1,
    least: int | None = None,
    threshold: int = 13,
    rate: float = 0.1,
    roll_back: bool = True,
    draw: np.random.Generator | None = None,
) -> list[int]:
    """Choose stochastic steps among the candidates 0 to `steps` − 1, as rising indices.

    subset: `size` indices, uniform over sets (Flow-Factory); random: `size` neighbours, uniform over starts
    (Flow-GRPO-Fast, MixGRPO random), both drawn from `draw`; progressive: neighbours that start at 0 and move
    on by `stride` after `every` iterations, shorter at the end, then start again if `roll_back` (MixGRPO);
    decay: the same, but a start p stays ⌊every (1 − p/steps) + least p/steps⌋ iterations, `least` by default a
    quarter of `every`; exp_decay: a start p above `threshold` stays ⌈every · exp(−rate (p − threshold))⌉.

    Deviation: the published MixGRPO stays one whole turn at an empty window after the last one, and for good
    without `roll_back`; ours then stays at the last window. Source: MixGRPO, arXiv 2507.21802, section 3.2;
    Flow-GRPO-Fast, arXiv 2505.05470v4.
    """
    check_choice("order", order, get_args(WindowOrder))
    if order in ("subset", "random"):
        assert draw is not None
        if order == "subset":
            return sorted(int(step) for step in draw.choice(steps, size, replace=False))
        start = int(draw.integers(0, steps - size + 1))
        return list(range(start, start + size))
    starts = range(0, steps, stride)
    until = np.cumsum([_stay(start, steps, order, every, least, threshold, rate) for start in starts])
    at = iteration % until[-1] if roll_back else min(iteration, until[-1] - 1)
    start = starts[int(np.searchsorted(until, at, side="right"))]
    return list(range(start, min(start + size, steps)))


def _stay(start: int, steps: int, order: str, every: int, least: int | None, threshold: int, rate: float) -> int:
    if order == "decay":
        least = max(1, every // 4) if least is None else least
        return max(least, int(every * (1 - start / steps) + least * (start / steps)))
    if order == "exp_decay":
        return math.ceil(every * math.exp(-rate * max(0, start - threshold)))
    return every
