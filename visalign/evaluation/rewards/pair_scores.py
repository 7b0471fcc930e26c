# SPDX-License-Identifier: Apache-2.0
"""What a judge said of the pairs of a set, in one form for pointwise and pairwise judges."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from visalign.evaluation.statistics.calibration import win_probability

Array = NDArray[np.float64]

Link = Literal["own", "logistic", "probit", "none"]

READINGS: dict[Link, str] = {
    "own": "The judge's own probability.",
    "logistic": "σ of the difference of two scores in log-odds, averaged over their deviations where given.",
    "probit": "Φ of the difference of two scores over its standard deviation.",
    "none": "σ of the difference of two scores. Their unit says nothing about odds: read the scaled row.",
}

LOGIT_WORDS = ("bradley-terry", "log-odds", "logit")
"""A unit with one of these words is a Bradley-Terry unit: a difference of 1 is odds of e."""

LARGEST_LOGIT = 30.0
"""A probability of 0 or 1 counts as these log-odds; the NLL of one wrong certainty is then 30 nats."""


@dataclass(frozen=True, kw_only=True)
class PairScores:
    """One judge on N pairs; what it could not judge is NaN and has a reason."""

    name: str
    unit: str
    margin: Array
    """[N] positive where it prefers the left image: a difference of scores (turned where lower is better) or
    log-odds."""
    reasons: tuple[str | None, ...]
    """[N] why a pair was not judged; None for the judged."""
    std: Array | None = None
    """[N] standard deviation of the margin, where the judge gives one."""
    link: Link = "logistic"
    """How a margin becomes a probability: "own" log-odds of the judge, "logistic" for Bradley-Terry units,
    "probit" for other units with a std, "none" where the unit says nothing about odds."""
    swapped: Array | None = None
    """[N] log-odds for the left image when the sides were exchanged, of a pairwise judge; NaN as `margin`."""

    def __post_init__(self) -> None:
        lengths = {
            len(part) for part in (self.margin, self.reasons, self.std, self.swapped) if part is not None
        }
        if len(lengths) != 1:
            raise ValueError(
                f"margin, reasons, std and swapped need one entry per pair; got {sorted(lengths)}."
            )

    def __len__(self) -> int:
        return len(self.margin)

    @property
    def judged(self) -> NDArray[np.bool_]:
        """[N] where there is a margin."""
        return np.isfinite(self.margin)

    @property
    def prob(self) -> Array:
        """[N] probability that the left image is better (`link`)."""
        found = np.full(len(self), np.nan)
        known = self.judged
        std = None if self.std is None else np.nan_to_num(self.std[known])
        link = "probit" if self.link == "probit" else "logistic"
        found[known] = win_probability(self.margin[known], std, link=link)
        return found

    @property
    def reading(self) -> str:
        """How the probability was read, in words."""
        return READINGS[self.link]

    def failures(self) -> dict[str, int]:
        """reason -> how many pairs, most frequent first."""
        return counted_reasons(self.reasons, self.judged)


def counted_reasons(reasons: Sequence[str | None], judged: NDArray[np.bool_]) -> dict[str, int]:
    """reason -> how many rows were not judged for it, most frequent first."""
    counted = Counter(
        reason or "no reason given" for reason, ok in zip(reasons, judged, strict=True) if not ok
    )
    return dict(counted.most_common())


def from_scores(
    name: str,
    unit: str,
    left: ArrayLike,
    right: ArrayLike,
    *,
    std_left: ArrayLike | None = None,
    std_right: ArrayLike | None = None,
    reasons: Sequence[str | None] | None = None,
    higher_is_better: bool = True,
) -> PairScores:
    """A pointwise judge's scores of both images.

    Args:
        name: Of the judge.
        unit: Of its scores.
        left: [N]; NaN where it failed.
        right: [N].
        std_left: [N] standard deviations, or None.
        std_right: [N].
        reasons: [N] why a pair was not judged.
        higher_is_better: Direction of the scores.

    Returns:
        Margins; the std of a margin is √(std_left² + std_right²), errors taken as independent. It counts only
        where all judged pairs have one: a missing deviation is not certainty.
    """
    first, second = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    margin = (first - second) * (1.0 if higher_is_better else -1.0)
    std = None
    if std_left is not None and std_right is not None:
        std = np.hypot(np.asarray(std_left, dtype=np.float64), np.asarray(std_right, dtype=np.float64))
        if not np.isfinite(std[np.isfinite(margin)]).all():
            std = None
    return PairScores(
        name=name,
        unit=unit,
        margin=np.where(np.isfinite(margin), margin, np.nan),
        reasons=filled_reasons(margin, reasons),
        std=std,
        link=_link(unit, std),
    )


def from_probabilities(
    name: str,
    prob: ArrayLike,
    *,
    swapped: ArrayLike | None = None,
    reasons: Sequence[str | None] | None = None,
) -> PairScores:
    """A pairwise judge's probabilities.

    Args:
        name: Of the judge.
        prob: [N] that the left image is better, asked in the given order; NaN where it failed.
        swapped: [N] that the (now) left image is better when the sides are exchanged; both orders are then
            averaged in log-odds, and a pair counts as judged only where both were.
        reasons: [N] why a pair was not judged.

    Returns:
        Log-odds as margins.
    """
    straight = _log_odds(prob)
    if swapped is None:
        return PairScores(
            name=name, unit="log-odds", margin=straight, reasons=filled_reasons(straight, reasons), link="own"
        )
    turned = -_log_odds(swapped)
    margin = (straight + turned) / 2
    return PairScores(
        name=name,
        unit="log-odds",
        margin=margin,
        reasons=filled_reasons(margin, reasons),
        link="own",
        swapped=np.where(np.isfinite(margin), turned, np.nan),
    )


def swap_consistency(scores: PairScores) -> dict[str, float] | None:
    """How much of a pairwise judge's answer, asked in both orders, comes from the side an image stands on.

    Returns:
        `same_winner`: share of the pairs with one winner in both orders; `position_bias`: mean log-odds that
        the side alone adds, positive for the left; `left_share`: how often the left side wins over both
        orders; `mean_gap`: mean |p − p'| of the two probabilities for one image. None for other judges.
    """
    if scores.swapped is None or not scores.judged.any():
        return None
    known = scores.judged
    turned = scores.swapped[known]
    straight = 2 * scores.margin[known] - turned
    return {
        "same_winner": float(np.mean(np.sign(straight) == np.sign(turned))),
        "position_bias": float(np.mean(straight - turned) / 2),
        "left_share": float(np.mean([np.mean(_wins(straight)), np.mean(_wins(-turned))])),
        "mean_gap": float(np.mean(np.abs(special.expit(straight) - special.expit(turned)))),
    }


def _wins(log_odds: Array) -> Array:
    return (np.sign(log_odds) + 1) / 2


def _log_odds(prob: ArrayLike) -> Array:
    p = np.asarray(prob, dtype=np.float64)
    if (np.isfinite(p) & ((p < 0) | (p > 1))).any():
        raise ValueError("probabilities must lie in [0, 1]; for scores give those of both images.")
    known = np.where(np.isfinite(p), p, math.nan)
    return np.clip(special.logit(known), -LARGEST_LOGIT, LARGEST_LOGIT)


def _link(unit: str, std: Array | None) -> Link:
    if any(word in unit.lower() for word in LOGIT_WORDS):
        return "logistic"
    return "none" if std is None else "probit"


def filled_reasons(values: Array, reasons: Sequence[str | None] | None) -> tuple[str | None, ...]:
    """[N] why there is no value: None for the judged, "no score" where nothing was said."""
    given = reasons if reasons is not None else [None] * len(values)
    return tuple(
        None if ok else (reason or "no score") for ok, reason in zip(np.isfinite(values), given, strict=True)
    )
