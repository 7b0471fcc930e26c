# SPDX-License-Identifier: Apache-2.0
"""A reward with its own uncertainty taken into account: weighted down (Ctrl-U) or penalised (PURM, bound)."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.core.rewards.uncertainty import bhattacharyya_overlap, penalise
from visalign.interfaces import Metadata, PointwiseReward, RewardCapabilities, Scores, with_capabilities
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import Naming
from visalign.rewards.base.identity import Identity

HOW = ("lower_bound", "weight", "bhattacharyya")


class UncertaintyUsed:
    """value with uncertainty used, of a reward that gives a standard deviation σ.

    - "lower_bound": μ − λ σ.
    - "weight": c + (μ − c) exp(−λ σ), Ctrl-U's weight exp(−U) on what the reward says beyond the reference
      value c, where it knows nothing. (Ctrl-U weights a loss, which is ≥ 0; a factor on a reward of either
      sign would turn a doubtful negative reward into a better one.)
    - "bhattacharyya": μ − λ u, u the mean Bhattacharyya coefficient with a pool of other rewards' (μ, σ),
      in [0, 1]: how little this reward can be told from the others.

    Where lower is better penalties are added. The pool is given, or grows with `remember=True`: then a score
    depends on what was scored in earlier calls (never on its own batch), as in PURM's rolling list; or it is
    the rest of the call with `over="batch"`, which needs no memory and so goes on after a resume. The parts
    hold "mean", "uncertainty" (σ or u), and for "weight" the factor, "weight".

    Ctrl-U: Zhang et al., arXiv 2410.11236. PURM: arXiv 2503.22480.
    """

    def __init__(
        self,
        reward: PointwiseReward,
        *,
        how: str = "lower_bound",
        strength: float = 1.0,
        reference: float = 0.0,
        pool: tuple[Tensor, Tensor] | None = None,
        remember: bool = False,
        pool_size: int = 100_000,
        over: Literal["pool", "batch"] = "pool",
    ) -> None:
        """Choose the rule.

        Args:
            reward: gives `Scores.std`.
            how: "lower_bound", "weight" or "bhattacharyya".
            strength: λ ≥ 0; per unit of the reward for "weight".
            reference: c of "weight", in the reward's unit.
            pool: (means [M], standard deviations [M]) to begin with, for "bhattacharyya".
            remember: add each call's valid scores to the pool, after the call.
            pool_size: the oldest are forgotten beyond.
            over: compare with a "pool", or with the others of the same call, the "batch": then a score
                depends on its neighbours.

        Raises:
            ValueError: an unknown rule, a number out of range, or "bhattacharyya" with an empty pool that
                nothing is added to, or with a pool beside "batch".
        """
        if how not in HOW:
            raise ValueError(f"how is {how!r}; allowed are {', '.join(HOW)}.")
        if not 0 <= strength < math.inf or not math.isfinite(reference):
            raise ValueError(
                f"strength is {strength}, reference {reference}; needed are finite, strength ≥ 0."
            )
        self._compares = how == "bhattacharyya" and over == "batch"
        self.reward: Any = with_capabilities(reward)
        needs = self.reward.capabilities
        self.capabilities = RewardCapabilities(
            needs_group=needs.needs_group, needs_batch=self._compares or needs.needs_batch
        )
        if how == "bhattacharyya" and (pool is not None or remember) == self._compares:
            raise ValueError(
                'bhattacharyya needs a pool: give pool=(means, stds), or remember=True, or over="batch" '
                "without either."
            )
        if pool is not None and (pool[0].ndim != 1 or pool[0].shape != pool[1].shape):
            raise ValueError(
                f"pool must be two tensors [M]; got {tuple(pool[0].shape)} and {tuple(pool[1].shape)}."
            )
        self.how, self.strength, self.reference = how, strength, reference
        self.name, self.unit = f"{reward.name}_{how}", reward.unit
        self.higher_is_better = reward.higher_is_better
        low, high = reward.range
        if how == "weight":
            self.range = (min(low, reference), max(high, reference))
        elif how == "bhattacharyya":
            self.range = (low - strength, high) if self.higher_is_better else (low, high + strength)
        else:
            self.range = (-math.inf, high) if self.higher_is_better else (low, math.inf)
        self.remember = remember
        start = [] if pool is None else torch.stack([part.double().cpu() for part in pool], 1).tolist()
        self._start = start
        self.pool: deque[tuple[float, float]] = deque((tuple(pair) for pair in start), maxlen=pool_size)

    @property
    def identity(self) -> Identity | None:
        """Identity of the reward and this use; None where other samples move the scores."""
        identity = self.reward.identity
        if not isinstance(identity, Identity) or self.remember or self.capabilities.needs_batch:
            return None
        pool = hashlib.sha256(repr(self._start).encode()).hexdigest()[:32] if self._start else ""
        used = {"how": self.how, "strength": self.strength, "reference": self.reference, "pool": pool}
        return replace(identity, options={**identity.options, "uncertainty": used})

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """The reward's scores with its uncertainty used."""
        with Naming(self.reward.name):
            scores = self.reward.score(images, prompts, metadata)
        raw, scores, std = scores.value, *with_deviation(self.reward.name, scores)
        mean, std, valid = scores.value.double(), std.double(), scores.valid
        sign = 1.0 if self.higher_is_better else -1.0
        parts = {"mean": raw}
        if self.how == "weight":
            uncertainty = std
            weight = (-self.strength * std).exp()
            value = self.reference + (mean - self.reference) * weight
            parts["weight"] = weight.float()
        else:
            uncertainty = std if self.how == "lower_bound" else self._overlap(mean, std, valid)
            value = sign * penalise(sign * mean, uncertainty, strength=self.strength)
        if self.remember:
            self.pool.extend(zip(mean[valid].tolist(), std[valid].tolist(), strict=True))
        parts["uncertainty"] = uncertainty.float()
        nan = torch.tensor(torch.nan)
        return replace(
            scores,
            value=torch.where(valid, value.float(), nan),
            parts=dict(scores.parts) | {key: torch.where(valid, part, nan) for key, part in parts.items()},
        )

    def _overlap(self, mean: Tensor, std: Tensor, valid: Tensor) -> Tensor:
        """[B] u against the rest of the batch, or the pool as it was before this call; 0 if it is empty."""
        result = torch.zeros_like(mean)
        if self._compares:
            result[valid] = bhattacharyya_overlap(mean[valid], std[valid])
        elif self.pool and bool(valid.any()):
            pool = torch.tensor(list(self.pool), dtype=torch.float64)
            overlap = bhattacharyya_overlap(
                mean[valid], std[valid], pool_mean=pool[:, 0], pool_std=pool[:, 1]
            )
            result[valid] = overlap
        return result


def with_deviation(name: str, scores: Scores) -> tuple[Scores, Tensor]:
    """(scores, [B] σ): a row whose σ is not known has no score.

    Raises:
        RewardError: there are no standard deviations.
    """
    if scores.std is None:
        raise RewardError(
            f"Reward {name!r} gives no standard deviation, so there is no uncertainty to use; wrap an "
            "ensemble, or a judge with Scores.std."
        )
    valid = scores.valid & torch.isfinite(scores.value) & torch.isfinite(scores.std)
    reasons = list(scores.reason or [None] * len(scores))
    for row in (scores.valid & ~valid).nonzero().flatten().tolist():
        reasons[row] = "the judge gave no standard deviation for it"
    value = torch.where(valid, scores.value, torch.nan)
    return replace(scores, value=value, valid=valid, reason=reasons), scores.std
