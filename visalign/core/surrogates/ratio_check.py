# SPDX-License-Identifier: Apache-2.0
"""The check that the ratio is 1 at a run's first update."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RatioCheck:
    """How far the ratio of unchanged weights is from 1: the precision floor of a run."""

    max_abs_log_ratio: float
    """Largest |log ratio|, in the kernel's event norm; compare it with the clip range."""
    mean_abs_log_ratio: float
    bound: float
    """What was allowed, in the same unit."""
    pairs: int
    """Number of (sample, step) pairs checked."""
    ok: bool
    """max_abs_log_ratio <= bound; False for NaN."""


class RatioError(RuntimeError):
    """The ratio was not 1 before the first update; `check` holds the measurement."""

    def __init__(self, message: str, check: RatioCheck) -> None:
        super().__init__(message)
        self.check = check


def check_log_ratio(log_ratio: Tensor, *, bound: float, strict: bool = True) -> RatioCheck:
    """Judge log-ratios that should be 0, e.g. those of the first micro-batch of the first update.

    Args:
        log_ratio: Any shape, not empty.
        bound: Largest |log ratio| allowed.
        strict: Raise when it is exceeded.

    Raises:
        RatioError: When it is exceeded (strict); the message names likely causes.
    """
    distance = log_ratio.detach().double().abs()
    largest = float(distance.max())
    ok = not math.isnan(largest) and largest <= bound
    check = RatioCheck(
        max_abs_log_ratio=largest,
        mean_abs_log_ratio=float(distance.mean()),
        bound=bound,
        pairs=distance.numel(),
        ok=ok,
    )
    if strict and not ok:
        raise RatioError(
            f"Before the first update the ratio must be 1: the largest |log ratio| of {check.pairs} pairs is "
            f"{largest:.3g}, allowed {bound:.3g}. Likely causes: dropout or train mode in one of the passes; "
            "weights moved between rollout and replay (an EMA or reference left switched on); another "
            "guidance scale, prompt order or kernel; a model in bfloat16 or float16 whose result depends on "
            "the batch (run it in float32, or raise the bound knowingly, objective.ratio_bound in a job, "
            "with the clip range well above it).",
            check,
        )
    return check
