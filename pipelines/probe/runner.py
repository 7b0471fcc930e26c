# SPDX-License-Identifier: Apache-2.0
"""Runner of probes: asks a reward in batches, and turns changes of its answers into responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.evaluation.probes import response
from visalign.evaluation.probes.catalogue import Level, Probe, Sample
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import Naming
from visalign.rewards.base.images import as_contract, to_pil, to_uint8

from .reference import Reference

ALONE = 16
"""Images that are asked about one by one in the probe "neighbours"."""
FORMS: dict[str, Callable[[Tensor], Any]] = {
    "uint8, channels first": lambda image: image.mul(255).round().to(torch.uint8),
    "uint8, channels last": to_uint8,
    "PIL": to_pil,
    "float64": lambda image: image.mul(255).round().double().div(255),
    "float16": lambda image: image.half(),
}
"""Label of a level of the probe "form" -> one image [3, H, W] in that form."""

MakeSamples = Callable[[int], tuple[Sample, ...] | None]
"""Row of the reference -> one sample, or the left and the right one, under the first one's prompt; None where
a probe does not apply."""
Answer = tuple[np.ndarray, list[str | None]]
"""[n] float64 scores or log-odds, NaN where there is none, and the reasons of failures."""
LevelResult = tuple[np.ndarray, dict[str, Any]]
"""[N] responses of all reference samples at one level, NaN where there is none, and the level's report."""


@dataclass(frozen=True)
class ProbeAnswers:
    """Answers about some rows of the reference."""

    rows: list[int]
    value: np.ndarray
    """[n] NaN where there is none."""
    reasons: list[str | None]


class ProbeRunner(ABC):
    """Asks a reward about unchanged and changed samples; responses are in units of the unchanged spread."""

    kind: str
    probes: tuple[Probe, ...]
    unit: str
    higher_is_better: bool
    spread: float
    scored: list[int]
    """Rows whose unchanged samples got an answer."""

    def __init__(self, name: str, reference: Reference, batch_size: int) -> None:
        self.name, self.reference, self.batch_size = name, reference, batch_size
        self.with_records = False
        """Whether the prompts' records are handed over, because the reward answers only with them."""

    @abstractmethod
    def run_level(self, probe: Probe, level: Level, seed: int) -> LevelResult:
        """Compute the responses at one level of a probe; `seed` is that of random changes."""

    @abstractmethod
    def _ask(self, sides: list[Any], prompts: list[str], records: list[Any] | None) -> Answer:
        """Call the reward once with the images of each side."""

    def record(self) -> dict[str, Any]:
        """Describe the reference as JSON."""
        return {
            "source": self.reference.source,
            "unreadable": self.reference.unreadable,
            "spread": self.spread,
            "with_records": self.with_records,
        }

    def ask(
        self,
        rows: Sequence[int],
        make: MakeSamples,
        *,
        tolerant: bool = True,
        form: Callable[[Tensor], Any] | None = None,
    ) -> ProbeAnswers:
        """Ask about rows in batches; rows without a sample are left out.

        Args:
            rows: Rows of the reference.
            make: Samples of a row.
            tolerant: Whether an error of the reward is a failure of its batch instead of the end.
            form: Conversion of the images; None hands them over as the contract says.
        """
        answered: list[int] = []
        answers: list[Answer] = []
        for start in range(0, len(rows), self.batch_size):
            samples = {
                row: new_samples
                for row in rows[start : start + self.batch_size]
                if (new_samples := make(row))
            }
            if not samples:
                continue
            sides = [[s.image for s in side] for side in zip(*samples.values(), strict=True)]
            images = [[form(image) for image in side] if form else as_contract(side) for side in sides]
            prompts = [first.prompt for first, *_ in samples.values()]
            answers.append(self._call(images, prompts, list(samples), tolerant))
            answered += samples
        value = np.concatenate([value for value, _ in answers]) if answers else np.zeros(0)
        return ProbeAnswers(answered, value, [reason for _, reasons in answers for reason in reasons])

    def ask_in_company(self, rows: list[int], make: MakeSamples, level: Level) -> ProbeAnswers:
        """Ask about rows with other neighbours in the batch: none, in reverse order, or white images."""
        if level.label == "in reverse order":
            return self.ask(rows[::-1], make)
        white = min(max(self.batch_size, 2), 8) - 1 if level.label == "among white images" else 0
        values, reasons = [], []
        for row in rows[:ALONE]:
            samples = make(row)
            assert samples is not None
            images = [as_contract([s.image, *[torch.ones_like(s.image)] * white]) for s in samples]
            value, reason = self._call(images, [samples[0].prompt] * (1 + white), [row] * (1 + white), True)
            values.append(value[0])
            reasons.append(reason[0])
        return ProbeAnswers(rows[:ALONE], np.array(values), reasons)

    def _call(self, images: list[Any], prompts: list[str], rows: Sequence[int], tolerant: bool) -> Answer:
        records = [self.reference.metadata[row] for row in rows] if self.with_records else None
        try:
            with Naming(self.name):
                return self._ask(images, prompts, records)
        except RewardError as error:
            if not tolerant:
                raise
            return np.full(len(prompts), np.nan), [str(error)] * len(prompts)

    def _require_answers(
        self, values: np.ndarray, reasons: Sequence[str | None], size: int, what: str
    ) -> None:
        if len(values) < 2:
            reason = next((f": {reason}" for reason in reasons if reason), "")
            raise UserError(
                f"{self.name} judged {len(values)} of {size} {what}, and 2 are needed{reason}. Give images "
                "with prompts that it judges: --reference."
            )

    def _sample(self, row: int) -> Sample:
        return self.reference.samples[row]

    def _no_responses(self) -> np.ndarray:
        return np.full(len(self.reference.samples), np.nan)

    def _all_rows(self, answers: ProbeAnswers) -> Answer:
        """[N] answers and reasons of all samples, NaN and None for those not asked about."""
        values = self._no_responses()
        reasons: list[str | None] = [None] * len(self.reference.samples)
        values[answers.rows] = answers.value
        for row, reason in zip(answers.rows, answers.reasons, strict=True):
            reasons[row] = reason
        return values, reasons

    def _responses(
        self,
        level: Level,
        rows: Sequence[int],
        change: np.ndarray,
        reasons: Sequence[str | None],
        *,
        left_out: int = 0,
    ) -> LevelResult:
        # r = ±change / spread
        responses, full = change / self.spread * (1 if self.higher_is_better else -1), self._no_responses()
        full[list(rows)] = responses
        return full, response.level_report(level.label, level.x, responses, reasons, left_out=left_out)
