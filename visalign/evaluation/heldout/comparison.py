# SPDX-License-Identifier: Apache-2.0
"""Comparison of two evaluations on the same samples: every change with its interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from visalign.errors import UserError
from visalign.evaluation.statistics.intervals import Interval, paired_bootstrap

from .result import NEUTRAL, HeldoutResult


@dataclass(frozen=True, kw_only=True)
class AccuracyRow:
    name: str
    before: Interval  # Share correct with its interval
    after: Interval
    change: Interval  # after - before with its paired interval over prompts
    correct: tuple[int, int]  # Correct samples before, after
    judged: tuple[int, int]  # Samples with a verdict before, after


@dataclass(frozen=True, kw_only=True)
class RewardRow:
    name: str
    unit: str
    before: float
    after: float
    change: Interval  # after - before over the samples valid on both sides, in `unit`, paired by prompt
    invalid: tuple[int, int]  # Samples without a score before, after
    higher_is_better: bool
    repeats_accuracy: bool  # True where its scores are the verdicts themselves
    neutral: bool = False  # True where neither direction is better or worse

    @property
    def verdict(self) -> str:
        """Movement beyond the interval: "rose", "fell", "no clear change" or "not measured"."""
        if not np.isfinite([self.change.low, self.change.high]).all():
            return "not measured"
        if not self.change.excludes_zero:
            return "no clear change"
        return "rose" if self.change.estimate > 0 else "fell"

    @property
    def worse(self) -> bool:
        """True where the reward moved against its direction beyond its interval."""
        return not self.neutral and self.verdict == ("fell" if self.higher_is_better else "rose")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Changes of accuracy and rewards, and the samples that stayed right or wrong, improved or worsened."""

    overall: AccuracyRow
    categories: tuple[AccuracyRow, ...]
    rewards: tuple[RewardRow, ...]
    right: NDArray[np.int64]  # Samples correct before and after
    improved: NDArray[np.int64]  # Wrong before, correct after
    worsened: NDArray[np.int64]  # Correct before, wrong after
    wrong: NDArray[np.int64]  # Wrong before and after

    def to_dict(self) -> dict[str, Any]:
        """Return the changes with their intervals, JSON-able."""
        return {
            "accuracy": self.overall.change.to_dict(),
            "by_category": {row.name: row.change.to_dict() for row in self.categories},
            "rewards": {row.name: row.change.to_dict() | {"verdict": row.verdict} for row in self.rewards},
            "improved": len(self.improved),
            "worsened": len(self.worsened),
        }


def compare(before: HeldoutResult, after: HeldoutResult) -> Comparison:
    """Pair two evaluations of the same prompts and seeds."""
    keys = before.keys
    if keys != after.keys or before.tags != after.tags or not np.array_equal(before.seeds, after.seeds):
        raise UserError(
            "Before and after were evaluated on different prompts, categories or seeds and cannot be paired: "
            f"{len(before)} samples of {len(set(keys))} prompts before, {len(after)} of "
            f"{len(set(after.keys))} after. Evaluate both with the same records and seeds."
        )

    def change(first: NDArray, second: NDArray, rows: NDArray[np.bool_]) -> Interval:
        prompts = [keys[row] for row in np.flatnonzero(rows)]
        return paired_bootstrap(first[rows], second[rows], prompts, generator=torch.Generator().manual_seed(0))

    old, new = before.outcome(), after.outcome()
    everything = np.ones(len(before), dtype=bool)

    def accuracy(name: str, rows: NDArray[np.bool_]) -> AccuracyRow:
        tag = None if rows.all() else name
        return AccuracyRow(
            name=name,
            before=before.interval(tag),
            after=after.interval(tag),
            change=change(old, new, rows),
            correct=(int(before.correct[rows].sum()), int(after.correct[rows].sum())),
            judged=(int(before.judged[rows].sum()), int(after.judged[rows].sum())),
        )

    def reward(name: str) -> RewardRow:
        return RewardRow(
            name=name,
            unit=after.units[name],
            before=before.mean(name),
            after=after.mean(name),
            change=change(before.scores[name], after.scores[name], everything),
            invalid=(before.invalid(name), after.invalid(name)),
            higher_is_better=after.higher_is_better[name],
            neutral=bool(after.completions) and name in NEUTRAL,
            repeats_accuracy=before.is_verdict(name) and after.is_verdict(name),
        )

    return Comparison(
        overall=accuracy("all", everything),
        categories=tuple(accuracy(tag, before.rows(tag)) for tag in dict.fromkeys(before.tags)),
        rewards=tuple(reward(name) for name in before.scores if name in after.scores),
        right=np.flatnonzero((old == 1) & (new == 1)),
        improved=np.flatnonzero((old == 0) & (new == 1)),
        worsened=np.flatnonzero((old == 1) & (new == 0)),
        wrong=np.flatnonzero((old == 0) & (new == 0)),
    )
