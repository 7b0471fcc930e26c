# SPDX-License-Identifier: Apache-2.0
"""Rows that train through the reward's gradient: which steps of an image carry it, what is done to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from visalign.core.checks import check_rules
from visalign.core.objective.options import change_row, check_row


@dataclass(frozen=True, kw_only=True)
class Ascent:
    """Climb E[r(x0)] by ∂r/∂x0 · ∂x0/∂θ; sampling is along the ODE, without gradient but for its end."""

    last: int = 1
    """K, last denoising steps that carry the gradient (DRaFT-K)."""
    renoised: int = 0
    """n, times that the clean latent is noised again to the last level and predicted from there, each with a
    gradient of its own; their mean, the sample's own included, is the step (DRaFT-LV)."""
    stop_range: tuple[float, float] | None = None
    """Part of the sampler's steps in one of which, drawn for each update, sampling stops; the image is that
    step's prediction x0 = x − σ v (ReFL). None: sample to the end."""
    hinge: float | None = None
    """h: climb −max(0, h − r), so that an image whose reward is above h moves nothing (ReFL)."""
    normalise: bool = False
    """Bring each term's gradient in each image to unit norm before the terms are added by their weights, so
    that no term drowns another by its unit (R0)."""
    kl: float = 0.0
    """k of k · mean |v − v_ref|² at the steps that carry the gradient."""
    source: str = ""
    """Paper."""

    def __post_init__(self) -> None:
        if isinstance(self.stop_range, list):
            object.__setattr__(self, "stop_range", tuple(self.stop_range))
        check_row("ascent", self)
        check_rules(self, RULES)

    def stops(self, steps: int) -> range:
        """Steps after which the rest carries the gradient, one of which is drawn."""
        if self.stop_range is None:
            return range(max(0, steps - self.last), max(0, steps - self.last) + 1)
        low, high = (round(share * steps) for share in self.stop_range)
        low = min(low, steps - 1)
        return range(low, max(high, low + 1))

    def counted(self, steps: int) -> tuple[float, int]:
        """(mean steps without gradient, steps with one) of an image."""
        stops = self.stops(steps)
        carried = 1 if self.stop_range is not None else min(self.last, steps) + self.renoised
        return sum(stops) / len(stops), carried


RULES: tuple[tuple[Callable[[Ascent], bool], str], ...] = (
    (
        lambda a: a.stop_range is not None and (a.last > 1 or a.renoised > 0),
        "stop_range is {stop_range}, with last={last} and renoised={renoised}: where sampling stops early, "
        "one step predicts the image. Set stop_range=None, or last=1 and renoised=0.",
    ),
    (
        lambda a: (
            a.stop_range is not None and not (len(a.stop_range) == 2 and 0 <= a.stop_range[0] < a.stop_range[1] <= 1)
        ),
        "stop_range is {stop_range}; give two shares, 0 <= low < high <= 1.",
    ),
)
"""(condition that is refused, message)."""

ASCENTS = {
    "draft": Ascent(source="DRaFT-K, arXiv 2309.17400"),
    "draft_lv": Ascent(renoised=2, source="DRaFT-LV, arXiv 2309.17400"),
    "refl": Ascent(stop_range=(0.75, 1.0), source="ReFL, arXiv 2304.05977"),
}
"""Name -> row; `objective.changes` and `objective.changes_for.NAME` change its fields."""


def named_ascent(name: str, **changes: Any) -> Ascent:
    """Look up a row of `ASCENTS` and change its fields."""
    return change_row("algorithm", ASCENTS, name, changes)
