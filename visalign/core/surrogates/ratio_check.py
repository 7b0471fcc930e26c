# SPDX-License-Identifier: Apache-2.0
"""Check that the ratio is 1 at a run's first update."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RatioCheck:
    """Deviation from 1 of the ratio under unchanged weights: the numerical floor of a run."""

    max_abs_log_ratio: float
    """Largest |log ratio|; compare it with the clip range."""
    mean_abs_log_ratio: float
    bound: float
    """Largest allowed |log ratio|."""
    pairs: int
    """Number of (sample, step) pairs."""
    ok: bool
    """max_abs_log_ratio <= bound; False for NaN."""


class RatioError(RuntimeError):
    """Raised if the ratio is not 1 before the first update; `check` has the measurement."""

    def __init__(self, message: str, check: RatioCheck) -> None:
        super().__init__(message)
        self.check = check


def check_log_ratio(log_ratio: Tensor, *, bound: float, strict: bool = True) -> RatioCheck:
    """Check log-ratios that should be 0, as before the first update; `strict` raises `RatioError` above the bound."""
    distance = log_ratio.detach().double().abs()
    largest = float(distance.max())
    check = RatioCheck(
        max_abs_log_ratio=largest,
        mean_abs_log_ratio=float(distance.mean()),
        bound=bound,
        pairs=distance.numel(),
        ok=largest <= bound,  # NaN is not
    )
    if strict and not check.ok:
        raise RatioError(
            f"Before the first update the ratio must be 1: the largest |log ratio| of {check.pairs} pairs is "
            f"{largest:.3g}, allowed {bound:.3g}. Likely causes: dropout or train mode in one of the passes; "
            "weights changed between rollout and replay (an EMA or reference left switched on); another "
            "guidance scale, prompt order or kernel; a model in bfloat16 or float16 whose result depends on "
            "the batch (use float32, or raise objective.ratio_bound, with the clip range well above it).",
            check,
        )
    return check
