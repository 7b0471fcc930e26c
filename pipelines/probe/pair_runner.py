# SPDX-License-Identifier: Apache-2.0
"""Probes of a pairwise judge: changed samples against the unchanged, and both against other images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from visalign.evaluation.probes import response
from visalign.evaluation.probes.catalogue import Level, Probe, Sample
from visalign.interfaces import PairwiseReward, with_capabilities
from visalign.rewards.pairs.asking import check_preferences, read_preferences

from .reference import Reference
from .runner import Answer, LevelResult, MakeSamples, ProbeAnswers, ProbeRunner

TIE = 1e-6  # Log-odds below this are a tie


class PairAnswers(NamedTuple):
    """Answers about pairs (a, b) in both orders, NaN where one of them is missing."""

    rows: list[int]
    first: np.ndarray  # [n] log-odds of a, shown on the left
    second: np.ndarray  # [n] log-odds of b, shown on the left; −`first` where one order was asked
    reasons: list[str | None]

    @property
    def lead(self) -> np.ndarray:
        """[n] log-odds of a over b without the position bias."""
        return (self.first - self.second) / 2

    @property
    def bias(self) -> np.ndarray:
        """[n] log-odds that the left position is worth."""
        return (self.first + self.second) / 2


class PairRunner(ProbeRunner):
    """Runs the probes of a pairwise judge, asked in both orders with the log-odds averaged.

    One order is asked where the judge declares that it asks both itself and its answers on real pairs confirm it.
    """

    kind, unit, higher_is_better = "comparisons", "log-odds", True

    def __init__(self, judge: PairwiseReward, reference: Reference, batch_size: int) -> None:
        super().__init__(judge.name, reference, batch_size)
        self.judge = with_capabilities(judge)
        self.one_order = False
        rows = range(len(reference.samples))
        self.paired = [row for row in rows if reference.rivals(row)]
        self.real = self._ask_real_pairs()
        if not np.isfinite(self.real.lead).any() and any(reference.metadata):
            self.with_records = True
            self.real = self._ask_real_pairs()
        self.scored = [row for row in self.paired if np.isfinite(self.real.lead[row])]
        leads = self.real.lead[self.scored]
        self.spread = float(np.sqrt((leads**2).mean() / 2)) if len(leads) else 0.0
        what = "pairs of reference images"
        self._require_unit(self.spread > TIE, len(self.paired), self.real.reasons, what)
        unbiased = np.abs(self.real.bias[self.scored]).max() <= response.LIMITS["same"] * self.spread
        self.one_order = self.judge.capabilities.both_orders and bool(unbiased)
        self.rows = [row for row in rows if row in self.scored or row not in self.paired]

    def run_level(self, probe: Probe, level: Level, seed: int) -> LevelResult:
        """Compute the responses at one level of a probe; `seed` is that of random changes."""
        nothing: list[str | None] = [None] * len(self.scored)
        match probe.name:
            case "identical":
                same = self.ask(self.rows, lambda row: (self.reference.samples[row],) * 2)
                return self._responses(level, same, 0.0)
            case "position":
                bias = ProbeAnswers(self.scored, self.real.bias[self.scored], nothing)
                return self._responses(level, bias, 0.0)
            case "swap":
                first, second = _sign(self.real.first[self.scored]), _sign(self.real.second[self.scored])
                report = response.share_report(level.label, first == -second, nothing, chance=0.5)
                return np.full(len(self.reference.samples), np.nan), report
            case "contrast_instructions":
                contrasts = self.reference.contrasts()
                rows = [row for row in self.scored if contrasts[row] is not None]

                def pair(row: int) -> tuple[Sample, Sample]:
                    return self.reference.samples[row], self.reference.samples[contrasts[row] or 0]

                contrasted = self._ask_both_orders(rows, pair)
                return self._contrast(level, contrasted.lead, contrasted.reasons)
            case "transitivity":
                return self._cycles(level)
            case "neighbours" | "form":
                answers = self.ask_again(probe, level, self._pair)
                return self._responses(level, answers, self.real.first[answers.rows])
            case _:
                return self._changed(probe, level, seed)

    def record(self) -> dict[str, Any]:
        reasons = [self.real.reasons[row] for row in self.paired]
        return {
            **response.reference_counts(reasons, len(self.paired)),
            **super().record(),
            "images": len(self.reference.samples),
            "strangers": self.reference.strangers,
            "mean": float(self.real.lead[self.scored].mean()),
            "one_order": self.one_order,
        }

    def _pair(self, row: int) -> tuple[Sample, Sample]:
        return self.reference.samples[row], self.reference.rivals(row)[0]

    def _ask(self, sides: list[Any], prompts: list[str], records: list[Any] | None) -> Answer:
        preferences = self.judge.compare(*sides, prompts, records)
        answers = read_preferences(check_preferences(self.name, preferences, len(prompts)))
        return answers.log_odds.numpy(), answers.reasons

    def _ask_real_pairs(self) -> PairAnswers:
        """Ask about each of the N samples and its rival."""
        rows, first, second, reasons = self._ask_both_orders(self.paired, self._pair, tolerant=False)
        all_first, all_reasons = self._all_rows(ProbeAnswers(rows, first, reasons))
        all_second, _ = self._all_rows(ProbeAnswers(rows, second, reasons))
        return PairAnswers(list(range(len(all_first))), all_first, all_second, all_reasons)

    def _ask_both_orders(self, rows: Sequence[int], make: MakeSamples, *, tolerant: bool = True) -> PairAnswers:
        straight = self.ask(rows, make, tolerant=tolerant)
        if self.one_order:
            return PairAnswers(straight.rows, straight.value, -straight.value, straight.reasons)

        def exchanged(row: int) -> tuple[Sample, Sample] | None:
            if (pair := make(row)) is None:
                return None
            first, second = pair
            return Sample(second.image, first.prompt), Sample(first.image, first.prompt)

        turned = self.ask(rows, exchanged, tolerant=tolerant)
        reasons = [
            reason or (other and f"in the other order: {other}")
            for reason, other in zip(straight.reasons, turned.reasons, strict=True)
        ]
        failed = np.array([reason is not None for reason in reasons], dtype=bool)
        first, second = (np.where(failed, np.nan, answers.value) for answers in (straight, turned))
        return PairAnswers(straight.rows, first, second, reasons)

    def _cycles(self, level: Level) -> LevelResult:
        """Compute the share of cycles among a sample and its two rivals."""
        rivals = self.reference.rivals
        rows = [row for row in self.scored if len(rivals(row)) > 1]
        between = self._ask_both_orders(rows, lambda row: (rivals(row)[0], rivals(row)[1]))
        back = self._ask_both_orders(rows, lambda row: (rivals(row)[1], self.reference.samples[row]))
        leads = np.stack([self.real.lead[rows], between.lead, back.lead])
        signs = _sign(leads[:, np.isfinite(leads).all(0)])
        chance = response.circle_chance(float((signs == 0).mean())) if signs.size else None
        reasons = [a or b for a, b in zip(between.reasons, back.reasons, strict=True)]
        cycles, left_out = response.is_cycle(*signs), len(self.scored) - len(rows)
        report = response.share_report(level.label, cycles, reasons, chance=chance, left_out=left_out)
        return np.full(len(self.reference.samples), np.nan), report

    def _changed(self, probe: Probe, level: Level, seed: int) -> LevelResult:
        """Compare changed samples with the unchanged, or with their rivals as the unchanged were before.

        Under another prompt the response is the change of the lead, for the image that led.
        """
        is_reworded = probe.name in ("spelling", "other_prompt")
        with_rivals = is_reworded or probe.versus_real

        def pair(row: int) -> tuple[Sample, Sample] | None:
            if (changed := self.reference.changed(probe, level, row, seed)) is None:
                return None
            other = self._pair(row)[1] if with_rivals else self.reference.samples[row]
            return changed, other

        rows = self.scored if with_rivals else self.rows
        answers = self._ask_both_orders(rows, pair)
        lead, left_out = answers.lead, len(rows) - len(answers.rows)
        before = self.real.lead[answers.rows] if with_rivals else np.zeros(len(answers.rows))
        sign = np.where(before < 0, -1, 1) if is_reworded else 1
        change = ProbeAnswers(answers.rows, (lead - before) * sign, answers.reasons)
        responses, report = self._responses(level, change, 0.0, left_out=left_out)
        if not is_reworded:
            report |= response.probability_interval(expit(lead))
        elif np.isfinite(lead).any():
            report["turned"] = float((_sign(lead) != _sign(before))[np.isfinite(lead)].mean())
        if probe.versus_real:
            report["win_before"] = response.probability_interval(expit(before))["win"]
        return responses, report


def _sign(log_odds: np.ndarray) -> np.ndarray:
    """−1, 0 for a tie, 1."""
    return np.where(np.abs(log_odds) <= TIE, 0.0, np.sign(log_odds))
