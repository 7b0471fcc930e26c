# SPDX-License-Identifier: Apache-2.0
"""Pairwise judge from any pointwise reward: compares two images by their scores' mean and std."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from visalign.core.preference.uncertainty import log_win_probability
from visalign.interfaces import Metadata, PointwiseReward, Preferences, is_logit, score_named, with_capabilities
from visalign.rewards.base.contract import Request, check_choices, read_pairs, read_request
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.identity import Identity, with_options

from .asking import distinct_images

Link = Literal["auto", "logistic", "normal"]
TIE = 1e-6
"""Relative difference up to which scores without a standard deviation count as equal (rounding)."""


def as_pairwise(reward: PointwiseReward, *, link: Link = "auto") -> PairsFromScores:
    """Make a pairwise judge that compares the two images' scores.

    P(left better), with d = μ_left − μ_right, or its opposite where lower is better, and s² = σ_left² + σ_right²:

    - "logistic", for rewards in a Bradley-Terry unit: E[σ(d + s z)] over z ~ N(0, 1), 32-node Gauss-Hermite;
      σ(d) without a standard deviation;
    - "normal" (Thurstone), for all other units: Φ(d / s); without a standard deviation 1, 0, or 1/2 for
      scores that are equal up to rounding.

    The reward decides what σ is, the spread of one judgement or the standard error of a mean; P is of a judgement or
    of the means accordingly. Each distinct (image, prompt, record) is scored once. A pair is invalid, with the
    reason, if either image could not be scored or its standard deviation is NaN. The parts hold the two scores,
    "left" and "right", in the reward's unit.
    "auto" takes "logistic" where the unit says "Bradley-Terry", "log-odds" or "logit".
    """
    return PairsFromScores(reward, link=link)


class PairsFromScores:
    """Pairwise judge of `as_pairwise`; `floor` is added to s²."""

    def __init__(self, reward: PointwiseReward, *, link: Link = "auto", floor: float = 0.0) -> None:
        self.reward, self.name, self.floor = with_capabilities(reward), f"{reward.name}_compared", floor
        check_choices(self.name, link=(link, get_args(Link)))
        self.link = ("logistic" if is_logit(reward.unit) else "normal") if link == "auto" else link

    @property
    def identity(self) -> Identity | None:
        """Identity of the preferences; None if the reward has none."""
        return with_options(self.reward.identity, compared_by=self.link)

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        return self._compare(*read_pairs(self.name, left, right, prompts, metadata, texts=True))

    def compare_pairs(
        self, images: Any, pairs: Tensor, prompts: Sequence[str], metadata: Metadata | None = None
    ) -> Preferences:
        """Compare numbered images: n images with n prompts and records, pairs [N, 2] (left, right)."""
        return self._compare(read_request(self.name, images, prompts, metadata, texts=True), pairs)

    def _compare(self, request: Request, pairs: Tensor) -> Preferences:
        value, std, reasons = self._score(request)
        left, right = pairs.cpu().unbind(1)
        gap = (value[left] - value[right]) * (1 if self.reward.higher_is_better else -1)  # d
        spread = (std[left].square() + std[right].square() + self.floor).sqrt()  # s
        scale = torch.maximum(value[left].abs(), value[right].abs())
        log_odds = logistic_odds(gap, spread) if self.link == "logistic" else normal_odds(gap, spread, scale)
        pair_reasons: list[str | None] = []
        for i, j in pairs.tolist():
            side, reason = ("left", reasons[i]) if reasons[i] else ("right", reasons[j])
            pair_reasons.append(None if reason is None else f"{side}: {reason}")
        valid = torch.tensor([reason is None for reason in pair_reasons], dtype=torch.bool)
        log_odds = torch.where(valid, log_odds, torch.nan)
        return Preferences(
            prob=log_odds.sigmoid().float(),
            valid=valid,
            log_odds=log_odds.float(),
            parts={"left": value[left].float(), "right": value[right].float()},
            reason=pair_reasons,
        )

    def _score(self, request: Request) -> tuple[Tensor, Tensor, list[str | None]]:
        """Score each distinct readable image once: (mean [n], std [n], both float64, reasons)."""
        value = torch.full((len(request),), torch.nan, dtype=torch.float64)
        std = torch.zeros_like(value)
        reasons = list(request.images.reasons)
        rows = request.rows
        if not rows:
            return value, std, reasons
        images, prompts, records = request.select(rows, stack=False)
        first, index = distinct_images(images, list(zip(prompts, map(repr, records), strict=True)))
        scores = score_named(self.reward, *request.select([rows[i] for i in first]), name=self.reward.name)
        value[rows] = scores.value.detach().cpu().double()[index]
        if scores.std is not None:
            std[rows] = scores.std.detach().cpu().double()[index]
        score_reasons = failure_reasons(scores)
        for row, number in zip(rows, index, strict=True):
            # a missing standard deviation is no certainty
            unsure = "the reward gave a value without its standard deviation" if std[row].isnan() else None
            reasons[row] = score_reasons[number] or unsure
        return value, std.nan_to_num(0.0), reasons


def logistic_odds(gap: Tensor, spread: Tensor) -> Tensor:
    """ln(p / (1 − p)) of p = E[σ(d + s z)], z ~ N(0, 1), by 32-node Gauss-Hermite quadrature.

    `gap` is d [N] float64 and `spread` s ≥ 0 [N]; 0 gives d itself.
    """
    return log_win_probability(gap, spread) - log_win_probability(-gap, spread)


def normal_odds(gap: Tensor, spread: Tensor, scale: Tensor) -> Tensor:
    """ln(p / (1 − p)) of p = Φ(d / s); where s is 0, ±∞ by the sign of d, or 0 for a tie.

    `gap` is d [N] float64, `spread` s ≥ 0 [N]; a gap up to `TIE` times the scores' size `scale` [N] is a tie.
    """
    z = gap / spread.clamp(min=1e-300)
    graded = torch.special.log_ndtr(z) - torch.special.log_ndtr(-z)
    decided = torch.where(gap.abs() <= TIE * scale, 0.0, gap.sign() * torch.inf)
    return torch.where(spread > 0, graded, torch.where(torch.isnan(gap), gap, decided))
