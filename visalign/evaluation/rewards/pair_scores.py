# SPDX-License-Identifier: Apache-2.0
"""A reward's scores of the pairs of a set, in one form for pointwise and pairwise rewards."""

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
from visalign.interfaces import is_logit

Array = NDArray[np.float64]

Link = Literal["own", "logistic", "probit", "none"]

READINGS: dict[Link, str] = {
    "own": "The reward's own probability.",
    "logistic": "σ of the difference of two scores in log-odds, averaged over their deviations where given.",
    "probit": "Φ of the difference of two scores over its standard deviation.",
    "none": "σ of the difference of two scores. Their unit says nothing about odds: read the scaled row.",
}

LARGEST_LOGIT = 30.0
"""Log-odds of a probability of 0 or 1; the NLL of one wrong certainty is then 30 nats."""


@dataclass(frozen=True, kw_only=True)
class PairScores:
    """Scores of one reward on N pairs; a failed pair is NaN and has a reason."""

    name: str
    unit: str
    margin: Array
    """[N] positive where it prefers the left: a difference of scores (turned where lower is better) or log-odds."""
    reasons: tuple[str | None, ...]  # [N] why a pair has no score; None for the others
    std: Array | None = None  # [N] standard deviation of the margin, where the reward gives one
    link: Link = "logistic"
    """How a margin becomes a probability: "own" log-odds of the reward, "logistic" for Bradley-Terry units,
    "probit" for other units with a std, "none" where the unit says nothing about odds."""
    swapped: Array | None = None
    """[N] log-odds of a pairwise reward for the left image with exchanged sides; NaN as `margin`."""

    def __len__(self) -> int:
        return len(self.margin)

    @property
    def judged(self) -> NDArray[np.bool_]:
        """[N] True where there is a margin."""
        return np.isfinite(self.margin)

    @property
    def prob(self) -> Array:
        """[N] probability that the left image is better (`link`)."""
        prob, valid = np.full(len(self), np.nan), self.judged
        std = None if self.std is None else np.nan_to_num(self.std[valid])
        link = "probit" if self.link == "probit" else "logistic"
        prob[valid] = win_probability(self.margin[valid], std, link=link)
        return prob

    def failures(self) -> dict[str, int]:
        """Return reason -> number of pairs, most frequent first."""
        return count_reasons(self.reasons, self.judged)


def count_reasons(reasons: Sequence[str | None], judged: NDArray[np.bool_]) -> dict[str, int]:
    """Return reason -> number of rows without a score, most frequent first."""
    failed = (reason or "no reason given" for reason, ok in zip(reasons, judged, strict=True) if not ok)
    return dict(Counter(failed).most_common())


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
    """Build pair scores from a pointwise reward's scores [N] of both images, NaN where it failed for `reasons` [N].

    A margin's std is √(std_left² + std_right²); it counts only where all scored pairs have one.
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
        reasons=fill_reasons(margin, reasons),
        std=std,
        link="logistic" if is_logit(unit) else "none" if std is None else "probit",
    )


def from_probabilities(
    name: str, prob: ArrayLike, *, swapped: ArrayLike | None = None, reasons: Sequence[str | None] | None = None
) -> PairScores:
    """Build pair scores from a pairwise reward's probabilities [N] for the left, NaN where it failed for `reasons`
    [N].

    `swapped` [N] are of the other order: log-odds are averaged, and both must be there.
    """
    margin, turned = _log_odds(prob), None
    if swapped is not None:
        turned = -_log_odds(swapped)
        margin = (margin + turned) / 2
        turned = np.where(np.isfinite(margin), turned, np.nan)
    return PairScores(
        name=name, unit="log-odds", margin=margin, reasons=fill_reasons(margin, reasons), link="own", swapped=turned
    )


def swap_consistency(scores: PairScores) -> dict[str, float] | None:
    """Measure how much of a pairwise reward's answer in both orders comes from an image's side; None for other
    rewards.

    `same_winner`: share of pairs; `position_bias`: mean log-odds for the left; `left_share`: how often left wins.
    """
    if scores.swapped is None or not scores.judged.any():
        return None
    turned = scores.swapped[scores.judged]
    straight = 2 * scores.margin[scores.judged] - turned
    return {
        "same_winner": float(np.mean(np.sign(straight) == np.sign(turned))),
        "position_bias": float(np.mean(straight - turned) / 2),
        "left_share": float(np.mean(np.sign([straight, -turned]) + 1) / 2),
    }


def _log_odds(prob: ArrayLike) -> Array:
    p = np.asarray(prob, dtype=np.float64)
    if (np.isfinite(p) & ((p < 0) | (p > 1))).any():
        raise ValueError("probabilities must lie in [0, 1]; for scores give those of both images.")
    return np.clip(special.logit(np.where(np.isfinite(p), p, math.nan)), -LARGEST_LOGIT, LARGEST_LOGIT)


def fill_reasons(values: Array, reasons: Sequence[str | None] | None) -> tuple[str | None, ...]:
    """Return why each of N values is missing: None where it is not, "no score" without a stated reason."""
    stated = reasons if reasons is not None else [None] * len(values)
    return tuple(
        None if ok else (reason or "no score") for ok, reason in zip(np.isfinite(values), stated, strict=True)
    )
