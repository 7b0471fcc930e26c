# SPDX-License-Identifier: Apache-2.0
"""Questions to a judge that compares: many pairs in batches, in one order or both, failures with reasons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from visalign.evaluation.probes.catalogue import Sample
from visalign.evaluation.probes.response import mean_interval
from visalign.interfaces import PairwiseReward, Preferences
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import Naming
from visalign.rewards.base.images import as_contract
from visalign.rewards.pairs.asking import one_each, read_preferences

from .reference import Reference

Pair = Callable[[int], tuple[Sample, Sample] | None]
"""Row of the reference -> the pair to ask about under the first one's prompt, None where there is none."""
Found = tuple[np.ndarray, list[str | None]]
BIAS = "bias"
"""Parts of an answer whose names end so are what a judge that asks both orders found between them."""


@dataclass(frozen=True)
class Said:
    """Answers about the pairs of some rows, NaN where there is none."""

    rows: list[int]
    first: np.ndarray
    """[n] log-odds of the one, standing on the left."""
    second: np.ndarray
    """[n] log-odds of the two, standing on the left; −`first` where one order was asked."""
    reasons: list[str | None]

    @property
    def lead(self) -> np.ndarray:
        """[n] log-odds of the one over the two, whatever a place is worth."""
        return (self.first - self.second) / 2

    @property
    def bias(self) -> np.ndarray:
        """[n] what standing on the left is worth."""
        return (self.first + self.second) / 2


class PairQuestions:
    """Asks a judge about pairs.

    Args:
        judge: Any pairwise judge.
        reference: Whose records go with the pairs, once `with_records` is set.
        batch_size: Pairs in one call.
    """

    def __init__(self, judge: PairwiseReward, reference: Reference, batch_size: int) -> None:
        self.judge, self.reference, self.batch_size = judge, reference, batch_size
        self.with_records = False
        self.one_order = False
        """Whether the judge itself averages both orders, so that `both` asks once."""
        self._bias: dict[str, list[float]] = {}

    def both(self, rows: Sequence[int], pair: Pair, *, careful: bool = False) -> Said:
        """Ask in both orders; a pair is judged where both answers are there.

        Args:
            rows: Of the reference.
            pair: What to ask about.
            careful: Whether what the judge raises is a failure of its batch instead of the end.
        """
        straight = self.one(rows, pair, careful=careful, note=not careful)
        if self.one_order:
            return Said(straight.rows, straight.first, -straight.first, straight.reasons)
        turned = self.one(rows, lambda row: (made := pair(row)) and _turned(*made), careful=careful)
        reasons = [
            a or (b and f"in the other order: {b}")
            for a, b in zip(straight.reasons, turned.reasons, strict=True)
        ]
        bad = np.array([reason is not None for reason in reasons], dtype=bool)
        first, second = (np.where(bad, np.nan, part) for part in (straight.first, turned.first))
        return Said(straight.rows, first, second, reasons)

    def one(
        self,
        rows: Sequence[int],
        pair: Pair,
        *,
        careful: bool = False,
        note: bool = False,
        form: Callable[[Tensor], Any] | None = None,
    ) -> Said:
        """Ask once, the one on the left.

        Args:
            rows: Of the reference.
            pair: What to ask about.
            careful: As above.
            note: Whether the answers count for `own_bias`.
            form: In which the pictures are handed over; as the contract has them when None.
        """
        taken: list[int] = []
        parts: list[Found] = []
        for start in range(0, len(rows), self.batch_size):
            made = [(row, pair(row)) for row in rows[start : start + self.batch_size]]
            kept = [(row, found) for row, found in made if found is not None]
            if not kept:
                continue
            sides = [[sample.image for sample in side] for side in zip(*(f for _, f in kept), strict=True)]
            left, right = ([form(i) for i in side] if form else as_contract(side) for side in sides)
            prompts = [one.prompt for _, (one, _) in kept]
            asked = [row for row, _ in kept]
            parts.append(self._ask(left, right, prompts, asked, careful=careful, note=note))
            taken += asked
        value = np.concatenate([found for found, _ in parts]) if parts else np.zeros(0)
        return Said(taken, value, -value, [reason for _, said in parts for reason in said])

    def each(self, rows: Sequence[int], pair: Pair, company: Callable[[Tensor], list[Tensor]]) -> Said:
        """Ask one pair at a time, in company.

        Args:
            rows: Of the reference.
            pair: What to ask about; never None.
            company: The picture -> itself and the pictures that stand behind it in the batch.
        """
        value, reasons = np.full(len(rows), np.nan), []
        for place, row in enumerate(rows):
            made = pair(row)
            assert made is not None
            left, right = (company(sample.image) for sample in made)
            count = len(left)
            found, said = self._ask(
                as_contract(left), as_contract(right), [made[0].prompt] * count, [row] * count, careful=True
            )
            value[place] = found[0]
            reasons.append(said[0])
        return Said(list(rows), value, -value, reasons)

    def own_bias(self) -> dict[str, dict[str, float | None]]:
        """Part of the answers -> mean of it so far, with its interval; what the judge found itself."""
        names = ("mean", "low", "high")
        return {
            name: dict(zip(names, mean_interval(np.array(values)), strict=True))
            for name, values in self._bias.items()
            if values
        }

    def _ask(
        self,
        left: Any,
        right: Any,
        prompts: list[str],
        rows: Sequence[int],
        *,
        careful: bool,
        note: bool = False,
    ) -> Found:
        records = [self.reference.metadata[row] for row in rows] if self.with_records else None
        try:
            with Naming(self.judge.name):
                said = self.judge.compare(left, right, prompts, records)
            answers = read_preferences(one_each(self.judge.name, said, len(prompts)))
        except RewardError as error:
            if not careful:
                raise
            return np.full(len(prompts), np.nan), [str(error)] * len(prompts)
        if note:
            self._note_bias(said)
        return answers.log_odds.numpy(), answers.reasons

    def _note_bias(self, said: Preferences) -> None:
        for name, part in said.parts.items():
            if name.endswith(BIAS):
                known = part.detach().cpu().double().numpy()
                self._bias.setdefault(name, []).extend(known[np.isfinite(known)].tolist())


def _turned(one: Sample, two: Sample) -> tuple[Sample, Sample]:
    """The other order under the same prompt."""
    return Sample(two.image, one.prompt), Sample(one.image, one.prompt)
