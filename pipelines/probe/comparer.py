# SPDX-License-Identifier: Apache-2.0
"""A judge that compares under probes: changed pictures against themselves as they were and against others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from visalign.errors import UserError
from visalign.evaluation.probes import response as answer
from visalign.evaluation.probes.catalogue import Level, Probe, Sample
from visalign.evaluation.probes.pair_probes import PAIR_PROBES
from visalign.interfaces import PairwiseReward

from .forms import ALONE, FORMS, among_white
from .pairs import PairQuestions, Said
from .reference import Reference

TIE = 1e-6
"""Log-odds below this are a tie."""

Leveled = tuple[np.ndarray, dict[str, Any]]


class Comparer:
    """Compares changed samples with the unchanged, and both with other pictures of their prompt.

    Each pair is asked in both orders and the log-odds averaged; in one order only where the judge says that
    it asks both itself (its attribute `both_orders`) and its answers on real pairs bear that out.

    Args:
        judge: What is probed.
        reference: Samples with other pictures, which it tells apart.
        batch_size: Pairs asked at once.

    Raises:
        UserError: It judges fewer than two of the real pairs, or calls all of them a tie.
        RewardError: It raised on the real pairs.
    """

    kind, probes, unit, higher_is_better = "comparisons", PAIR_PROBES, "log-odds", True

    def __init__(self, judge: PairwiseReward, reference: Reference, batch_size: int) -> None:
        self.judge, self.reference = judge, reference
        self.questions = PairQuestions(judge, reference, batch_size)
        self.paired = [row for row in range(len(reference.samples)) if reference.rivals(row)]
        self.real = self._ask_real()
        if not np.isfinite(self.real.lead).any() and any(reference.metadata):
            self.questions.with_records = True
            self.real = self._ask_real()
        known = self.real.lead[np.isfinite(self.real.lead)]
        if len(known) < 2:
            reason = next((reason for reason in self.real.reasons if reason), "")
            raise UserError(
                f"{judge.name} judged {len(known)} of {len(self.paired)} pairs of reference pictures, and 2 "
                f"are needed{': ' + reason if reason else ''}. Give pictures with prompts that it judges: "
                "--reference."
            )
        self.spread = float(np.sqrt((known**2).mean() / 2))
        if self.spread <= TIE:
            raise UserError(
                f"{judge.name} calls all {len(known)} pairs of reference pictures a tie, so its responses "
                "have no unit. Give --reference pictures that it tells apart."
            )
        self.judged = [row for row in self.paired if np.isfinite(self.real.lead[row])]
        says_both = bool(getattr(judge, "both_orders", False))
        steady = np.abs(self.real.bias[self.judged]).max() <= answer.SAME * self.spread
        self.questions.one_order = says_both and bool(steady)
        alone = [row for row in range(len(reference.samples)) if not reference.rivals(row)]
        self.rows = sorted(self.judged + alone)

    def level(self, probe: Probe, level: Level, seed: int) -> Leveled:
        """[N] responses of all reference samples at one level, NaN where there is none, and its report."""
        special: dict[str, Callable[[Probe, Level], Leveled]] = {
            "identical": self._identical,
            "position": self._position,
            "swap": self._swap,
            "transitivity": self._circles,
            "neighbours": self._neighbours,
            "form": self._forms,
        }
        if probe.name in special:
            return special[probe.name](probe, level)
        if probe.name in ("spelling", "other_prompt"):
            return self._reworded(probe, level, seed)
        return self._changed(probe, level, seed)

    def record(self) -> dict[str, Any]:
        """The reference as JSON."""
        reasons = [self.real.reasons[row] for row in self.paired]
        return answer.reference_counts(reasons, len(self.paired)) | {
            "source": self.reference.source,
            "pictures": len(self.reference.samples),
            "unreadable": self.reference.unreadable,
            "strangers": self.reference.strangers,
            "mean": float(self.real.lead[self.judged].mean()),
            "spread": self.spread,
            "with_records": self.questions.with_records,
            "one_order": self.questions.one_order,
            "own_bias": self.questions.own_bias(),
        }

    def _ask_real(self) -> Said:
        """What is said of each of the N samples and its other picture, NaN where nothing is."""
        said = self.questions.both(self.paired, lambda row: (self._sample(row), self._rival(row)))
        size = len(self.reference.samples)
        first, second = np.full(size, np.nan), np.full(size, np.nan)
        first[said.rows], second[said.rows] = said.first, said.second
        reasons: list[str | None] = [None] * size
        for row, reason in zip(said.rows, said.reasons, strict=True):
            reasons[row] = reason
        return Said(list(range(size)), first, second, reasons)

    def _sample(self, row: int) -> Sample:
        return self.reference.samples[row]

    def _rival(self, row: int, place: int = 0) -> Sample:
        return self.reference.rivals(row)[place]

    def _identical(self, probe: Probe, level: Level) -> Leveled:
        said = self.questions.one(self.rows, lambda row: (self._sample(row), self._sample(row)), careful=True)
        return self._leveled(level, said.rows, said.first, said.reasons)

    def _position(self, probe: Probe, level: Level) -> Leveled:
        return self._leveled(level, self.judged, self.real.bias[self.judged], [None] * len(self.judged))

    def _swap(self, probe: Probe, level: Level) -> Leveled:
        first, second = (_signs(part[self.judged]) for part in (self.real.first, self.real.second))
        return self._nothing(), answer.share_report(
            level.label, first == -second, [None] * len(self.judged), chance=0.5
        )

    def _circles(self, probe: Probe, level: Level) -> Leveled:
        rows = [row for row in self.judged if len(self.reference.rivals(row)) > 1]
        near = self.questions.both(rows, lambda row: (self._rival(row, 0), self._rival(row, 1)), careful=True)
        far = self.questions.both(rows, lambda row: (self._rival(row, 1), self._sample(row)), careful=True)
        legs = np.stack([self.real.lead[rows], near.lead, far.lead])
        known = np.isfinite(legs).all(0)
        signs = _signs(legs[:, known])
        hits = answer.goes_in_circles(*signs)
        reasons = [a or b for a, b in zip(near.reasons, far.reasons, strict=True)]
        chance = answer.circle_chance(float((signs == 0).mean())) if known.any() else None
        left_out = len(self.judged) - len(rows)
        return self._nothing(), answer.share_report(
            level.label, hits, reasons, chance=chance, left_out=left_out
        )

    def _changed(self, probe: Probe, level: Level, seed: int) -> Leveled:
        def pair(row: int) -> tuple[Sample, Sample] | None:
            changed = self.reference.changed(probe, level, row, seed)
            return changed and (changed, self._rival(row) if probe.versus_real else self._sample(row))

        rows = self.judged if probe.versus_real else self.rows
        said = self.questions.both(rows, pair, careful=True)
        before = self.real.lead[said.rows] if probe.versus_real else np.zeros(len(said.rows))
        left_out = len(rows) - len(said.rows)
        full, report = self._leveled(level, said.rows, said.lead - before, said.reasons, left_out=left_out)
        report |= answer.probability_interval(_probability(said.lead))
        if probe.versus_real:
            report["win_before"] = answer.probability_interval(_probability(before))["win"]
        return full, report

    def _reworded(self, probe: Probe, level: Level, seed: int) -> Leveled:
        """Two real pictures under another prompt: the change of the lead, for the one that led."""

        def pair(row: int) -> tuple[Sample, Sample] | None:
            made = self.reference.changed(probe, level, row, seed)
            return made and (made, Sample(self._rival(row).image, made.prompt))

        said = self.questions.both(self.judged, pair, careful=True)
        before = self.real.lead[said.rows]
        change = (said.lead - before) * np.where(before < 0, -1, 1)
        left_out = len(self.judged) - len(said.rows)
        full, report = self._leveled(level, said.rows, change, said.reasons, left_out=left_out)
        known = np.isfinite(said.lead)
        if known.any():
            report["turned"] = float((_signs(said.lead) != _signs(before))[known].mean())
        return full, report

    def _neighbours(self, probe: Probe, level: Level) -> Leveled:
        def pair(row: int) -> tuple[Sample, Sample]:
            return self._sample(row), self._rival(row)

        if level.label == "in reverse order":
            said = self.questions.one(self.judged[::-1], pair, careful=True)
        else:
            count = self.questions.batch_size if level.label == "among white pictures" else 0
            said = self.questions.each(
                self.judged[:ALONE], pair, lambda image: among_white(image, count) if count else [image]
            )
        return self._leveled(level, said.rows, said.first - self.real.first[said.rows], said.reasons)

    def _forms(self, probe: Probe, level: Level) -> Leveled:
        said = self.questions.one(
            self.judged,
            lambda row: (self._sample(row), self._rival(row)),
            careful=True,
            form=FORMS[level.label],
        )
        return self._leveled(level, said.rows, said.first - self.real.first[said.rows], said.reasons)

    def _leveled(
        self,
        level: Level,
        rows: Sequence[int],
        log_odds: np.ndarray,
        reasons: Sequence[str | None],
        *,
        left_out: int = 0,
    ) -> Leveled:
        response, full = log_odds / self.spread, self._nothing()
        full[list(rows)] = response
        return full, answer.level_report(level.label, level.x, response, reasons, left_out=left_out)

    def _nothing(self) -> np.ndarray:
        return np.full(len(self.reference.samples), np.nan)


def _signs(log_odds: np.ndarray) -> np.ndarray:
    """−1, 0 for a tie, 1."""
    return np.where(np.abs(log_odds) <= TIE, 0.0, np.sign(log_odds))


def _probability(log_odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-log_odds))
