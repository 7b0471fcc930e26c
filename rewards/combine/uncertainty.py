# SPDX-License-Identifier: Apache-2.0
"""A reward with its own uncertainty taken into account: weighted down (Ctrl-U) or penalised (PURM, bound)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visalign.core.rewards.uncertainty import bhattacharyya_overlap, penalise
from visalign.interfaces import Metadata, PointwiseReward, RewardCapabilities, Scores, score_named, with_capabilities
from visalign.rewards.base.contract import RewardError, check_choices, check_rules
from visalign.rewards.base.identity import Identity, with_options


class UncertaintyUsed:
    """value with uncertainty used, of a reward that gives a standard deviation σ.

    - "lower_bound": μ − λ σ.
    - "weight": c + (μ − c) exp(−λ σ), Ctrl-U's weight exp(−U) on what the reward says beyond the reference
      value c, where it knows nothing. (Ctrl-U weights a loss, which is ≥ 0; a factor on a reward of either
      sign would turn a doubtful negative reward into a better one.)
    - "bhattacharyya": μ − λ u, u the mean Bhattacharyya coefficient with the (μ, σ) of the other samples of
      the call, in [0, 1]: how little this reward can be told from the others. (PURM compares with a rolling
      list of earlier rewards, which would not survive a resume.)

    Where lower is better penalties are added. The parts hold "mean", "uncertainty" (σ or u), and for "weight"
    the factor, "weight".

    Ctrl-U: Zhang et al., arXiv 2410.11236. PURM: arXiv 2503.22480.

    Args:
        reward: gives `Scores.std`.
        how: "lower_bound", "weight" or "bhattacharyya".
        strength: λ ≥ 0; per unit of the reward for "weight".
        reference: c of "weight", in the reward's unit.
    """

    def __init__(
        self, reward: PointwiseReward, *, how: str = "lower_bound", strength: float = 1.0, reference: float = 0.0
    ) -> None:
        check_choices("UncertaintyUsed", how=(how, ("lower_bound", "weight", "bhattacharyya")))
        in_range = f"strength is {strength}; allowed are finite numbers from 0"
        check_rules("UncertaintyUsed", {in_range: 0 <= strength < math.inf})
        self.reward: Any = with_capabilities(reward)
        use: Any = {"how": how, "strength": strength, "reference": reference}
        at: Any = self.reward.capabilities.at_iteration
        self.capabilities = RewardCapabilities.of(
            [self.reward],
            **{"needs_batch": True} if how == "bhattacharyya" else {},
            at_iteration=at and (lambda iteration: UncertaintyUsed(at(iteration), **use)),
        )
        self.how, self.strength, self.reference = how, strength, reference
        self.name, self.unit = f"{reward.name}_{how}", reward.unit
        self.higher_is_better = reward.higher_is_better
        low, high = reward.range
        penalty = strength if how == "bhattacharyya" else math.inf
        if how == "weight":
            self.range = (min(low, reference), max(high, reference))
        else:
            self.range = (low - penalty, high) if self.higher_is_better else (low, high + penalty)

    @property
    def identity(self) -> Identity | None:
        """Identity of the reward and this use; None where other samples move the scores."""
        used = {"how": self.how, "strength": self.strength, "reference": self.reference}
        return None if self.capabilities.needs_batch else with_options(self.reward.identity, uncertainty=used)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        scores = score_named(self.reward, images, prompts, metadata, name=self.reward.name)
        raw, scores, std = scores.value, *with_deviation(self.reward.name, scores)
        mean, std, valid = scores.value.double(), std.double(), scores.valid
        sign = 1.0 if self.higher_is_better else -1.0
        parts, uncertainty = {"mean": raw}, std
        if self.how == "weight":
            weight = (-self.strength * std).exp()
            value = self.reference + (mean - self.reference) * weight
            parts["weight"] = weight.float()
        else:
            if self.how == "bhattacharyya":
                uncertainty = torch.zeros_like(mean)
                uncertainty[valid] = bhattacharyya_overlap(mean[valid], std[valid])
            value = sign * penalise(sign * mean, uncertainty, strength=self.strength)
        parts["uncertainty"] = uncertainty.float()
        nan = torch.tensor(torch.nan)
        return replace(
            scores,
            value=torch.where(valid, value.float(), nan),
            parts=dict(scores.parts) | {key: torch.where(valid, part, nan) for key, part in parts.items()},
        )


def with_deviation(name: str, scores: Scores) -> tuple[Scores, Tensor]:
    """Return (scores, [B] σ); a row whose σ is not known has no score."""
    if scores.std is None:
        raise RewardError(
            f"Reward {name!r} gives no standard deviation. Take an ensemble, or a judge with Scores.std."
        )
    valid = scores.valid & torch.isfinite(scores.std)
    reasons = list(scores.reason or [None] * len(scores))
    for row in (scores.valid & ~valid).nonzero().flatten().tolist():
        reasons[row] = "the judge gave no standard deviation for it"
    value = torch.where(valid, scores.value, torch.nan)
    return replace(scores, value=value, valid=valid, reason=reasons), scores.std
