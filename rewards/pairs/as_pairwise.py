# SPDX-License-Identifier: Apache-2.0
"""From scores to preferences: any pointwise reward as a judge of pairs, by mean and std."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core.preference.uncertainty import log_win_probability
from visalign.interfaces import (
    Metadata,
    PairwiseReward,
    PointwiseReward,
    Preferences,
    Scores,
    with_capabilities,
)
from visalign.rewards.base.contract import Request, RewardError, read_pairs, read_request
from visalign.rewards.base.failure import Naming, failure_reasons
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import as_contract

from .asking import distinct_images

Link = Literal["auto", "logistic", "normal"]
LINKS = ("auto", "logistic", "normal")
LOGIT_WORDS = ("bradley-terry", "log-odds", "logit")
"""A unit with one of these words is a Bradley-Terry unit: a difference of 1 is odds of e."""
TIE = 1e-6
"""Scores without a standard deviation that differ by less of their size are equal up to rounding."""


def as_pairwise(reward: PointwiseReward, *, link: Link = "auto") -> PairwiseReward:
    """A pairwise judge that compares the two images' scores.

    P(left better), with d = μ_left − μ_right, or its opposite where lower is better, and s² = σ_left² +
    σ_right²:

    - "logistic", for rewards in a Bradley-Terry unit: E[σ(d + s z)] over z ~ N(0, 1), 32-node Gauss-Hermite;
      σ(d) without a standard deviation;
    - "normal" (Thurstone), for all other units: Φ(d / s); without a standard deviation 1, 0, or 1/2 for
      scores that are equal up to rounding.

    What σ is depends on the judge: the spread of one judgement, or the standard error of a mean (see
    `units.DEVIATIONS`); P is of a judgement or of the means accordingly. Each distinct (image, prompt,
    record) is scored once. Rows where either image could not be judged, or has NaN as standard deviation, are
    invalid with its reason. The parts hold the two scores, "left" and "right", in the reward's unit.

    Args:
        reward: any pointwise reward.
        link: "auto" takes "logistic" where the unit says "Bradley-Terry", "log-odds" or "logit".

    Returns:
        An object with `compare`, and with `compare_pairs` for numbered images.

    Raises:
        ValueError: an unknown link.
    """
    return PairsFromScores(reward, link=link)


class PairsFromScores:
    """See `as_pairwise`; `floor` is added to s²."""

    def __init__(self, reward: PointwiseReward, *, link: Link = "auto", floor: float = 0.0) -> None:
        if link not in LINKS:
            raise ValueError(f"link is {link!r}; allowed are {', '.join(LINKS)}.")
        self.reward, self.floor = with_capabilities(reward), floor
        self.name = f"{reward.name}_compared"
        is_logit = any(word in reward.unit.lower() for word in LOGIT_WORDS)
        self.link = ("logistic" if is_logit else "normal") if link == "auto" else link

    @property
    def identity(self) -> Identity | None:
        """What the preferences depend on; None where the reward does not say."""
        found = self.reward.identity
        if not isinstance(found, Identity):
            return None
        return replace(found, options={**found.options, "compared_by": self.link})

    def compare(
        self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare B pairs of images, B prompts, B records."""
        return self._compare(*read_pairs(self.name, left, right, prompts, metadata))

    def compare_pairs(
        self, images: Any, pairs: Tensor, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare numbered images: n images with n prompts and records, pairs [N, 2] (left, right)."""
        return self._compare(read_request(self.name, images, prompts, metadata), pairs)

    def _compare(self, request: Request, pairs: Tensor) -> Preferences:
        value = torch.full((len(request),), torch.nan, dtype=torch.float64)
        std = torch.zeros_like(value)
        reasons = list(request.images.reasons)
        rows = [row for row, _ in request.images.readable()]
        if rows:
            scores, index = self._score(request)
            at, take = torch.tensor(rows), torch.tensor(index)
            value[at] = torch.where(scores.valid, scores.value, torch.nan).detach().cpu().double()[take]
            if scores.std is not None:
                std[at] = scores.std.detach().cpu().double()[take]
            said = failure_reasons(scores)
            for row, number in zip(rows, index, strict=True):
                unsure = "the reward gave a value without its standard deviation"  # which is no certainty
                reasons[row] = said[number] or (unsure if bool(std[row].isnan()) else None)
            std = std.nan_to_num(0.0)
        return self._preferences(value, std, reasons, pairs)

    def _score(self, request: Request) -> tuple[Scores, list[int]]:
        """Scores of the distinct readable images, and which of them each readable image is."""
        found = request.images.readable()
        labels = [(request.prompts[row], repr(request.metadata[row])) for row, _ in found]
        first, index = distinct_images([image for _, image in found], labels)
        chosen = [found[i] for i in first]
        with Naming(self.reward.name):
            scores = self.reward.score(
                as_contract([image for _, image in chosen]),
                [request.prompts[row] for row, _ in chosen],
                [request.metadata[row] for row, _ in chosen],
            )
        if not isinstance(scores, Scores) or len(scores) != len(first):
            raise RewardError(f"Reward {self.reward.name!r} did not return one score for each image.")
        return scores, index

    def _preferences(
        self, value: Tensor, std: Tensor, reasons: list[str | None], pairs: Tensor
    ) -> Preferences:
        left, right = pairs.cpu().unbind(1)
        gap = (value[left] - value[right]) * (1 if self.reward.higher_is_better else -1)
        spread = (std[left].square() + std[right].square() + self.floor).sqrt()
        scale = torch.maximum(value[left].abs(), value[right].abs())
        log_odds = logistic_odds(gap, spread) if self.link == "logistic" else normal_odds(gap, spread, scale)
        why: list[str | None] = []
        for i, j in pairs.tolist():
            side = "left" if reasons[i] else "right"
            reason = reasons[i] or reasons[j]
            why.append(None if reason is None else f"{side}: {reason}")
        valid = torch.tensor([reason is None for reason in why], dtype=torch.bool)
        nan = torch.tensor(torch.nan, dtype=torch.float64)
        log_odds = torch.where(valid, log_odds, nan)
        return Preferences(
            prob=log_odds.sigmoid().float(),
            valid=valid,
            log_odds=log_odds.float(),
            parts={"left": value[left].float(), "right": value[right].float()},
            reason=why,
        )


def logistic_odds(gap: Tensor, spread: Tensor) -> Tensor:
    """ln(p / (1 − p)) of p = E[σ(d + s z)], z ~ N(0, 1), by 32-node Gauss-Hermite quadrature: gap [N] d
    float64, spread [N] s ≥ 0, of which 0 gives d itself.
    """
    return log_win_probability(gap, spread) - log_win_probability(-gap, spread)


def normal_odds(gap: Tensor, spread: Tensor, scale: Tensor) -> Tensor:
    """ln(p / (1 − p)) of p = Φ(d / s), gap [N] d float64, spread [N] s ≥ 0; where s is 0: ±∞ by the sign of
    d, 0 for a tie, which is a gap within `TIE` of the scores' size, `scale` [N].
    """
    z = gap / spread.clamp(min=1e-300)
    graded = torch.special.log_ndtr(z) - torch.special.log_ndtr(-z)
    decided = torch.where(gap.abs() <= TIE * scale, 0.0, gap.sign() * torch.inf)
    return torch.where(spread > 0, graded, torch.where(torch.isnan(gap), gap, decided))
