# SPDX-License-Identifier: Apache-2.0
"""Probes of a reward that scores single images: scores of changed samples against those of the unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np

from visalign.errors import UserError
from visalign.evaluation.probes import response
from visalign.evaluation.probes.catalogue import PROBES, Level, Probe, Sample
from visalign.interfaces import PointwiseReward, Scores
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import failure_reasons

from .reference import Reference
from .runner import FORMS, Answer, LevelResult, ProbeRunner


class ScoreRunner(ProbeRunner):
    """Runs the probes of a pointwise reward."""

    kind, probes = "scores", PROBES

    def __init__(self, reward: PointwiseReward, reference: Reference, batch_size: int) -> None:
        super().__init__(reward.name, reference, batch_size)
        self.reward, self.unit, self.higher_is_better = reward, reward.unit, reward.higher_is_better
        rows = list(range(len(reference.samples)))
        self.value, self.reasons = self._all_rows(self.ask(rows, self._unchanged, tolerant=False))
        if not np.isfinite(self.value).any() and any(reference.metadata):
            self.with_records = True
            self.value, self.reasons = self._all_rows(self.ask(rows, self._unchanged, tolerant=False))
        scores = self.value[np.isfinite(self.value)]
        self._require_answers(scores, self.reasons, len(rows), "reference images")
        self.spread = float(scores.std(ddof=1))
        if not self.spread > 1e-9 * max(1.0, float(np.abs(scores).max())):
            raise UserError(
                f"{reward.name} gives all {len(scores)} reference images the score {scores[0]:g}, so its "
                "responses have no unit. Give --reference images that it tells apart."
            )
        self.scored = [row for row in rows if np.isfinite(self.value[row])]

    def run_level(self, probe: Probe, level: Level, seed: int) -> LevelResult:
        """Compute the responses at one level of a probe; `seed` is that of random changes."""
        left_out = 0
        if probe.name == "neighbours":
            answers = self.ask_in_company(self.scored, self._unchanged, level)
        elif probe.name == "form":
            answers = self.ask(self.scored, self._unchanged, form=FORMS[level.label])
        else:

            def changed(row: int) -> tuple[Sample] | None:
                sample = self.reference.changed(probe, level, row, seed)
                return None if sample is None else (sample,)

            answers = self.ask(self.scored, changed)
            left_out = len(self.scored) - len(answers.rows)
        change = answers.value - self.value[answers.rows]
        return self._responses(level, answers.rows, change, answers.reasons, left_out=left_out)

    def record(self) -> dict[str, Any]:
        """Describe the reference as JSON."""
        counts = response.reference_counts(self.reasons, len(self.value))
        return counts | super().record() | {"mean": float(self.value[self.scored].mean())}

    def _unchanged(self, row: int) -> tuple[Sample]:
        return (self._sample(row),)

    def _ask(self, sides: list[Any], prompts: list[str], records: list[Any] | None) -> Answer:
        scores = self.reward.score(sides[0], prompts, records)
        if not isinstance(scores, Scores) or len(scores) != len(prompts):
            returned = f"{len(scores)} scores" if isinstance(scores, Scores) else f"a {type(scores).__name__}"
            raise RewardError(
                f"Reward {self.name!r} returned {returned} for {len(prompts)} images; needed is "
                "visalign.interfaces.Scores with an entry per image."
            )
        value = np.where(scores.valid.cpu().numpy(), scores.value.detach().cpu().double().numpy(), np.nan)
        value = np.where(np.isfinite(value), value, np.nan)
        reasons = failure_reasons(scores)
        for row in np.flatnonzero(np.isnan(value)):
            reasons[row] = reasons[row] or "the reward gave no finite number"
        return value, reasons
