# SPDX-License-Identifier: Apache-2.0
"""Stochastic steps of an iteration: a random subset, a random window, or a moving one."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np

WindowOrder = Literal["subset", "random", "progressive", "decay", "exp_decay"]
WINDOW_ORDERS = get_args(WindowOrder)


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
    """Choose stochastic steps among the candidates, as rising indices.

    subset: `size` indices, uniform over sets (Flow-Factory); random: `size` neighbours, uniform over starts
    (Flow-GRPO-Fast, MixGRPO random); progressive: neighbours that start at 0 and move on by `stride` after
    `every` iterations, shorter at the end, then start again (MixGRPO); decay: the same, but a start p stays
    ⌊every (1 − p/steps) + least p/steps⌋ iterations; exp_decay: a start p above `threshold` stays
    ⌈every · exp(−rate (p − threshold))⌉.

    Deviation: the published MixGRPO stays one whole turn at an empty window after the last one, and for good
    without `roll_back`; ours then stays at the last window.

    Args:
        steps: number of candidates.
        size: size of the window, 1 to `steps`.
        iteration: number of finished iterations.
        order: see above.
        every: iterations that a window stays.
        stride: steps that it moves on.
        least: shortest stay of decay; None: a quarter of `every`, at least 1, as published.
        threshold: see exp_decay.
        rate: see exp_decay.
        roll_back: start a moving window again after its last position.
        draw: random generator, for subset and random.

    Raises:
        ValueError: a size, stay or stride out of range.

    Source: MixGRPO, arXiv 2507.21802, section 3.2; Flow-GRPO-Fast, arXiv 2505.05470v4.
    """
    if order not in WINDOW_ORDERS or not 1 <= size <= steps or every < 1 or stride < 1:
        raise ValueError(
            f"A window of {size} of {steps} steps, order {order!r}, every {every}, stride {stride}: order "
            f"is one of {', '.join(WINDOW_ORDERS)}, the size 1 to {steps}, every and stride at least 1."
        )
    if order in ("subset", "random"):
        if draw is None:
            raise ValueError(f"The order {order!r} draws: give a numpy Generator.")
        if order == "subset":
            return sorted(int(step) for step in draw.choice(steps, size, replace=False))
        start = int(draw.integers(0, steps - size + 1))
        return list(range(start, start + size))
    starts = range(0, steps, stride)
    until = np.cumsum([_stay(start, steps, order, every, least, threshold, rate) for start in starts])
    at = iteration % until[-1] if roll_back else min(iteration, until[-1] - 1)
    start = starts[int(np.searchsorted(until, at, side="right"))]
    return list(range(start, min(start + size, steps)))


def _stay(
    start: int, steps: int, order: str, every: int, least: int | None, threshold: int, rate: float
) -> int:
    """Number of iterations that a moving window stays at `start`."""
    if order == "decay":
        least = max(1, every // 4) if least is None else least
        done = start / steps
        return max(least, int(every * (1 - done) + least * done))
    if order == "exp_decay":
        return math.ceil(every * math.exp(-rate * max(0, start - threshold)))
    return every
