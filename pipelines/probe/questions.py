# SPDX-License-Identifier: Apache-2.0
"""Questions about the samples of a reference, alone or in pairs: in batches, in other forms and company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visalign.evaluation.probes.catalogue import Level, Sample
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import Naming
from visalign.rewards.base.images import as_contract, to_pil, to_uint8

from .reference import Reference

ALONE = 16
"""Images that are asked for one by one in the probe of the neighbours."""

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "uint8, channels first": lambda image: image.mul(255).round().to(torch.uint8),
    "uint8, channels last": lambda image: to_uint8(image),
    "PIL": to_pil,
    "float64": lambda image: image.mul(255).round().double().div(255),
    "float16": lambda image: image.half(),
}
"""Label of a level of the probe "form" -> one image [3, H, W] in that form."""

Make = Callable[[int], tuple[Sample, ...] | None]
"""Row of the reference -> what to ask about under the first one's prompt: one sample, or the left and the
right one; None where there is none."""
Found = tuple[np.ndarray, list[str | None]]
"""[n] float64 answers, NaN where there is none, and why."""
Ask = Callable[[list[Any], list[str], list[Any] | None], Found]
"""(the images of each side, prompts, records) -> one call of the judge."""


@dataclass(frozen=True)
class ProbeAnswers:
    """What was said of some rows."""

    rows: list[int]
    value: np.ndarray
    """[n] NaN where there is none."""
    reasons: list[str | None]


class Questions:
    """Asks a judge."""

    def __init__(self, name: str, ask: Ask, reference: Reference, batch_size: int) -> None:
        self.name, self.reference, self.batch_size = name, reference, batch_size
        self.with_records = False
        self._judge = ask

    def batched(
        self,
        rows: Sequence[int],
        make: Make,
        *,
        careful: bool = True,
        form: Callable[[Tensor], Any] | None = None,
    ) -> ProbeAnswers:
        """Ask about rows, those without a sample left out.

        Args:
            rows: Of the reference.
            make: What to ask about.
            careful: Whether what the judge raises is a failure of its batch instead of the end.
            form: In which the images are handed over; as the contract has them when None.
        """
        taken: list[int] = []
        parts: list[Found] = []
        for start in range(0, len(rows), self.batch_size):
            made = [(row, make(row)) for row in rows[start : start + self.batch_size]]
            kept = [(row, found) for row, found in made if found is not None]
            if kept:
                asked = [row for row, _ in kept]
                sides = [
                    [sample.image for sample in side] for side in zip(*(f for _, f in kept), strict=True)
                ]
                shown = [[form(image) for image in side] if form else as_contract(side) for side in sides]
                parts.append(self._ask(shown, [found[0].prompt for _, found in kept], asked, careful))
                taken += asked
        value = np.concatenate([found for found, _ in parts]) if parts else np.zeros(0)
        return ProbeAnswers(taken, value, [reason for _, said in parts for reason in said])

    def neighbours(self, rows: list[int], make: Make, level: Level) -> ProbeAnswers:
        """Ask about rows in other company: alone, in reverse order, or before white images."""
        if level.label == "in reverse order":
            return self.batched(rows[::-1], make)
        white = min(max(self.batch_size, 2), 8) - 1 if level.label == "among white images" else 0
        taken, found = rows[:ALONE], []
        for row in taken:
            made = make(row)
            assert made is not None
            sides = [as_contract([s.image, *[torch.ones_like(s.image)] * white]) for s in made]
            value, reasons = self._ask(sides, [made[0].prompt] * (1 + white), [row] * (1 + white), True)
            found.append((value[0], reasons[0]))
        return ProbeAnswers(taken, np.array([value for value, _ in found]), [reason for _, reason in found])

    def _ask(self, sides: list[Any], prompts: list[str], rows: Sequence[int], careful: bool) -> Found:
        records = [self.reference.metadata[row] for row in rows] if self.with_records else None
        try:
            with Naming(self.name):
                return self._judge(sides, prompts, records)
        except RewardError as error:
            if not careful:
                raise
            return np.full(len(prompts), np.nan), [str(error)] * len(prompts)
