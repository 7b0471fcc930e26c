# SPDX-License-Identifier: Apache-2.0
"""A reward that scores single pictures under probes: its scores of changed samples against the unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from visalign.errors import UserError
from visalign.evaluation.probes import response as answer
from visalign.evaluation.probes.catalogue import PROBES, Level, Probe, Sample
from visalign.interfaces import PointwiseReward, Scores
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import Naming, failure_reasons
from visalign.rewards.base.images import as_contract

from .forms import ALONE, FORMS, among_white
from .reference import Reference

Found = tuple[np.ndarray, list[str | None]]
"""[N] float64 scores, NaN where there is none, and why."""


class Scorer:
    """Scores changed samples and sets them against the unchanged.

    Args:
        reward: What is probed.
        reference: Pictures that it tells apart.
        batch_size: Pictures scored at once.

    Raises:
        UserError: It judges fewer than two of the reference pictures, or all of them alike.
        RewardError: It raised on the unchanged pictures.
    """

    kind, probes = "scores", PROBES

    def __init__(self, reward: PointwiseReward, reference: Reference, batch_size: int) -> None:
        self.reward, self.reference, self.batch_size = reward, reference, batch_size
        self.unit, self.higher_is_better = reward.unit, reward.higher_is_better
        self.with_records = False
        rows = list(range(len(reference.samples)))
        self.value, self.reasons = self._score_all(rows)
        if not np.isfinite(self.value).any() and any(reference.metadata):
            self.with_records = True
            self.value, self.reasons = self._score_all(rows)
        known = self.value[np.isfinite(self.value)]
        if len(known) < 2:
            reason = next((reason for reason in self.reasons if reason), "")
            raise UserError(
                f"{reward.name} judged {len(known)} of the {len(rows)} reference pictures, and 2 are needed"
                f"{': ' + reason if reason else ''}. Give pictures with prompts that it judges: --reference."
            )
        self.spread = float(known.std(ddof=1))
        if not self.spread > 1e-9 * max(1.0, float(np.abs(known).max())):
            raise UserError(
                f"{reward.name} gives all {len(known)} reference pictures the score {known[0]:g}, so its "
                "responses have no unit. Give --reference pictures that it tells apart."
            )
        self.judged = [row for row in rows if np.isfinite(self.value[row])]

    def level(self, probe: Probe, level: Level, seed: int) -> tuple[np.ndarray, dict[str, Any]]:
        """[N] responses of all reference samples at one level, NaN where there is none, and its report."""
        if probe.name == "neighbours":
            rows, (value, reasons) = self._neighbours(level)
        elif probe.name == "form":
            rows, (value, reasons) = self.judged, self._forms(level)
        else:
            rows, (value, reasons) = self._changed(probe, level, seed)
        response = answer.responses(
            self.value[rows], value, self.spread, higher_is_better=self.higher_is_better
        )
        full = np.full(len(self.value), np.nan)
        full[rows] = response
        left_out = len(self.judged) - len(rows) if probe.name != "neighbours" else 0
        return full, answer.level_report(level.label, level.x, response, reasons, left_out=left_out)

    def record(self) -> dict[str, Any]:
        """The reference as JSON."""
        known = self.value[self.judged]
        return answer.reference_counts(self.reasons, len(self.value)) | {
            "source": self.reference.source,
            "unreadable": self.reference.unreadable,
            "mean": float(known.mean()),
            "spread": self.spread,
            "with_records": self.with_records,
        }

    def _score_all(self, rows: list[int]) -> Found:
        parts = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
        return joined([self._score(part, [self.reference.samples[row] for row in part]) for part in parts])

    def _score(self, rows: Sequence[int], samples: Sequence[Sample]) -> Found:
        return self._ask(as_contract([s.image for s in samples]), [s.prompt for s in samples], rows)

    def _ask(self, images: Tensor | list[Any], prompts: list[str], rows: Sequence[int]) -> Found:
        """One call of the reward."""
        records = [self.reference.metadata[row] for row in rows] if self.with_records else None
        with Naming(self.reward.name):
            scores = self.reward.score(images, prompts, records)
        if not isinstance(scores, Scores):
            raise RewardError(
                f"Reward {self.reward.name!r} returned a {type(scores).__name__}; needed is "
                "visalign.interfaces.Scores with an entry per picture."
            )
        if len(scores) != len(prompts):
            raise RewardError(
                f"Reward {self.reward.name!r} gave {len(scores)} scores for {len(prompts)} pictures."
            )
        value = np.where(scores.valid.cpu().numpy(), scores.value.detach().cpu().double().numpy(), np.nan)
        reasons = failure_reasons(scores)
        for place in np.flatnonzero(~np.isfinite(value)):
            reasons[place] = reasons[place] or "the reward gave no finite number"
        return np.where(np.isfinite(value), value, np.nan), reasons

    def _try(self, images: Tensor | list[Any], prompts: list[str], rows: Sequence[int]) -> Found:
        """As `_ask`; what the reward raises is a failure of these pictures and ends no other probe."""
        try:
            return self._ask(images, prompts, rows)
        except RewardError as error:
            return np.full(len(prompts), np.nan), [str(error)] * len(prompts)

    def _changed(self, probe: Probe, level: Level, seed: int) -> tuple[list[int], Found]:
        rows: list[int] = []
        found = []
        for start in range(0, len(self.judged), self.batch_size):
            part = self.judged[start : start + self.batch_size]
            made = [(row, self.reference.changed(probe, level, row, seed)) for row in part]
            kept = [(row, sample) for row, sample in made if sample is not None]
            if kept:
                taken = [row for row, _ in kept]
                images = as_contract([sample.image for _, sample in kept])
                found.append(self._try(images, [sample.prompt for _, sample in kept], taken))
                rows += taken
        return rows, joined(found)

    def _neighbours(self, level: Level) -> tuple[list[int], Found]:
        samples = self.reference.samples
        if level.label == "in reverse order":
            rows = self.judged[::-1]
            parts = [rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size)]
            return rows, joined(
                [
                    self._try(as_contract([samples[r].image for r in p]), [samples[r].prompt for r in p], p)
                    for p in parts
                ]
            )
        rows, found = self.judged[:ALONE], []
        for row in rows:
            images = [samples[row].image]
            if level.label == "among white pictures":
                images = among_white(images[0], self.batch_size)
            count = len(images)
            value, reasons = self._try(as_contract(images), [samples[row].prompt] * count, [row] * count)
            found.append((value[:1], reasons[:1]))
        return rows, joined(found)

    def _forms(self, level: Level) -> Found:
        samples, found = self.reference.samples, []
        for start in range(0, len(self.judged), self.batch_size):
            part = self.judged[start : start + self.batch_size]
            images = [FORMS[level.label](samples[row].image) for row in part]
            found.append(self._try(images, [samples[row].prompt for row in part], part))
        return joined(found)


def joined(parts: Sequence[Found]) -> Found:
    """Batches one behind the other."""
    if not parts:
        return np.zeros(0), []
    return np.concatenate([value for value, _ in parts]), [reason for _, said in parts for reason in said]
