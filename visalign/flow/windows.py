# SPDX-License-Identifier: Apache-2.0
"""Which steps are stochastic in an iteration: a subset, a window anywhere, or a moving one."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np

WindowOrder = Literal["subset", "random", "progressive", "decay", "exp_decay"]
WINDOW_ORDERS = get_args(WindowOrder)


def window_places(
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
    """Places among the steps that may be stochastic, rising.

    subset: `size` places, each set as likely (Flow-Factory); random: `size` neighbours, each start as
    likely (Flow-GRPO-Fast, MixGRPO random); progressive: neighbours that start at 0 and move on by `stride`
    after `every` iterations, shorter at the end, then begin anew (MixGRPO); decay: so too, but a start p
    stays ⌊every (1 − p/steps) + least p/steps⌋ iterations; exp_decay: a start p above `threshold` stays
    ⌈every · exp(−rate (p − threshold))⌉.

    Differs from the published MixGRPO, which after the last window stays one whole turn at an empty one, and
    for good where it does not begin anew; ours then stays at the last window.

    Args:
        steps: how many there are.
        size: of the window, 1 to `steps`.
        iteration: finished ones.
        order: see above.
        every: iterations a window stays.
        stride: places that it moves on.
        least: of decay; None: a quarter of `every`, at least 1, as published.
        threshold: see exp_decay.
        rate: see exp_decay.
        roll_back: whether a moving window begins anew after its last place.
        draw: for subset and random.

    Raises:
        ValueError: for an unknown order, or a size, stay or stride out of range.

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
            return sorted(int(place) for place in draw.choice(steps, size, replace=False))
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
    """Iterations that a moving window stays at `start`."""
    if order == "decay":
        least = max(1, every // 4) if least is None else least
        done = start / steps
        return max(least, int(every * (1 - done) + least * done))
    if order == "exp_decay":
        return math.ceil(every * math.exp(-rate * max(0, start - threshold)))
    return every
