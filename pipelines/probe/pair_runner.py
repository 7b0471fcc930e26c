# SPDX-License-Identifier: Apache-2.0
"""Probes of a pairwise judge: changed samples against the unchanged, and both against other images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visalign.errors import UserError
from visalign.evaluation.probes import response
from visalign.evaluation.probes.catalogue import PAIR_PROBES, Level, Probe, Sample
from visalign.interfaces import PairwiseReward, with_capabilities
from visalign.rewards.pairs.asking import check_preferences, read_preferences

from .reference import Reference
from .runner import FORMS, Answer, LevelResult, MakeSamples, ProbeAnswers, ProbeRunner

TIE = 1e-6
"""Log-odds below this are a tie."""
BIAS = "bias"
"""Ending of the names of parts with the position bias that a judge measured itself."""


@dataclass(frozen=True)
class PairAnswers:
    """Answers about pairs (a, b) in both orders, NaN where one of them is missing."""

    rows: list[int]
    first: np.ndarray
    """[n] log-odds of a, shown on the left."""
    second: np.ndarray
    """[n] log-odds of b, shown on the left; −`first` where one order was asked."""
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
    """Runs the probes of a pairwise judge.

    Each pair is asked in both orders and the log-odds averaged; in one order only where the judge declares
    that it asks both itself (`RewardCapabilities.both_orders`) and its answers on real pairs confirm it.
    """

    kind, probes, unit, higher_is_better = "comparisons", PAIR_PROBES, "log-odds", True

    def __init__(self, judge: PairwiseReward, reference: Reference, batch_size: int) -> None:
        super().__init__(judge.name, reference, batch_size)
        self.judge = with_capabilities(judge)
        self.one_order = False
        """Whether the judge itself averages both orders, so that pairs are asked once."""
        self._own_biases: dict[str, list[float]] | None = None
        """Position biases that the judge reports, while they are collected."""
        self.paired = [row for row in range(len(reference.samples)) if reference.rivals(row)]
        self.real, self.own_bias = self._ask_real_pairs()
        if not np.isfinite(self.real.lead).any() and any(reference.metadata):
            self.with_records = True
            self.real, self.own_bias = self._ask_real_pairs()
        leads = self.real.lead[np.isfinite(self.real.lead)]
        self._require_answers(leads, self.real.reasons, len(self.paired), "pairs of reference images")
        self.spread = float(np.sqrt((leads**2).mean() / 2))
        if self.spread <= TIE:
            raise UserError(
                f"{judge.name} calls all {len(leads)} pairs of reference images a tie, so its responses "
                "have no unit. Give --reference images that it tells apart."
            )
        self.scored = [row for row in self.paired if np.isfinite(self.real.lead[row])]
        unbiased = np.abs(self.real.bias[self.scored]).max() <= response.LIMITS["same"] * self.spread
        self.one_order = self.judge.capabilities.both_orders and bool(unbiased)
        unpaired = [row for row in range(len(reference.samples)) if not reference.rivals(row)]
        self.rows = sorted(self.scored + unpaired)

    def run_level(self, probe: Probe, level: Level, seed: int) -> LevelResult:
        """Compute the responses at one level of a probe; `seed` is that of random changes."""
        nothing: list[str | None] = [None] * len(self.scored)
        match probe.name:
            case "identical":
                same = self.ask(self.rows, lambda row: (self._sample(row), self._sample(row)))
                return self._responses(level, same.rows, same.value, same.reasons)
            case "position":
                return self._responses(level, self.scored, self.real.bias[self.scored], nothing)
            case "swap":
                first, second = _sign(self.real.first[self.scored]), _sign(self.real.second[self.scored])
                report = response.share_report(level.label, first == -second, nothing, chance=0.5)
                return self._no_responses(), report
            case "transitivity":
                return self._cycles(level)
            case "neighbours" | "form":
                if probe.name == "form":
                    answers = self.ask(self.scored, self._pair, form=FORMS[level.label])
                else:
                    answers = self.ask_in_company(self.scored, self._pair, level)
                change = answers.value - self.real.first[answers.rows]
                return self._responses(level, answers.rows, change, answers.reasons)
            case "spelling" | "other_prompt":
                return self._reworded(probe, level, seed)
            case _:
                return self._changed(probe, level, seed)

    def record(self) -> dict[str, Any]:
        """Describe the reference as JSON."""
        reasons = [self.real.reasons[row] for row in self.paired]
        counts = response.reference_counts(reasons, len(self.paired))
        return {
            **counts,
            **super().record(),
            "images": len(self.reference.samples),
            "strangers": self.reference.strangers,
            "mean": float(self.real.lead[self.scored].mean()),
            "one_order": self.one_order,
            "own_bias": self.own_bias,
        }

    def _pair(self, row: int) -> tuple[Sample, Sample]:
        return self._sample(row), self.reference.rivals(row)[0]

    def _ask(self, sides: list[Any], prompts: list[str], records: list[Any] | None) -> Answer:
        left, right = sides
        preferences = self.judge.compare(left, right, prompts, records)
        check_preferences(self.name, preferences, len(prompts))
        answers = read_preferences(preferences)
        if self._own_biases is not None:
            for name, part in preferences.parts.items():
                if name.endswith(BIAS):
                    biases = part.detach().cpu().double().numpy()
                    self._own_biases.setdefault(name, []).extend(biases[np.isfinite(biases)].tolist())
        return answers.log_odds.numpy(), answers.reasons

    def _ask_real_pairs(self) -> tuple[PairAnswers, dict[str, dict[str, float | None]]]:
        """Ask about each of the N samples and its rival, and collect the judge's own position biases."""
        self._own_biases = {}
        pairs = self._ask_both_orders(self.paired, self._pair, tolerant=False)
        first, reasons = self._all_rows(ProbeAnswers(pairs.rows, pairs.first, pairs.reasons))
        second, _ = self._all_rows(ProbeAnswers(pairs.rows, pairs.second, pairs.reasons))
        own_bias: dict[str, dict[str, float | None]] = {
            name: dict(zip(("mean", "low", "high"), response.mean_interval(np.array(values)), strict=True))
            for name, values in self._own_biases.items()
            if values
        }
        self._own_biases = None
        return PairAnswers(list(range(len(first))), first, second, reasons), own_bias

    def _ask_both_orders(
        self, rows: Sequence[int], make: MakeSamples, *, tolerant: bool = True
    ) -> PairAnswers:
        straight = self.ask(rows, make, tolerant=tolerant)
        if self.one_order:
            return PairAnswers(straight.rows, straight.value, -straight.value, straight.reasons)
        collected, self._own_biases = self._own_biases, None  # the biases of one order are enough

        def exchanged(row: int) -> tuple[Sample, Sample] | None:
            if (pair := make(row)) is None:
                return None
            first, second = pair
            return Sample(second.image, first.prompt), Sample(first.image, first.prompt)

        turned = self.ask(rows, exchanged, tolerant=tolerant)
        self._own_biases = collected
        reasons = [
            reason or (other and f"in the other order: {other}")
            for reason, other in zip(straight.reasons, turned.reasons, strict=True)
        ]
        failed = np.array([reason is not None for reason in reasons], dtype=bool)
        first, second = (np.where(failed, np.nan, answers.value) for answers in (straight, turned))
        return PairAnswers(straight.rows, first, second, reasons)

    def _cycles(self, level: Level) -> LevelResult:
        """Share of cycles among a sample and its two rivals."""
        rivals = self.reference.rivals
        rows = [row for row in self.scored if len(rivals(row)) > 1]
        between = self._ask_both_orders(rows, lambda row: (rivals(row)[0], rivals(row)[1]))
        back = self._ask_both_orders(rows, lambda row: (rivals(row)[1], self._sample(row)))
        leads = np.stack([self.real.lead[rows], between.lead, back.lead])
        signs = _sign(leads[:, np.isfinite(leads).all(0)])
        chance = response.circle_chance(float((signs == 0).mean())) if signs.size else None
        reasons = [a or b for a, b in zip(between.reasons, back.reasons, strict=True)]
        report = response.share_report(
            level.label,
            response.is_cycle(*signs),
            reasons,
            chance=chance,
            left_out=len(self.scored) - len(rows),
        )
        return self._no_responses(), report

    def _changed(self, probe: Probe, level: Level, seed: int) -> LevelResult:
        """Compare changed samples with the unchanged, or with their rivals as the unchanged were before."""

        def pair(row: int) -> tuple[Sample, Sample] | None:
            changed = self.reference.changed(probe, level, row, seed)
            return changed and (changed, self._pair(row)[1] if probe.versus_real else self._sample(row))

        rows = self.scored if probe.versus_real else self.rows
        answers = self._ask_both_orders(rows, pair)
        before = self.real.lead[answers.rows] if probe.versus_real else np.zeros(len(answers.rows))
        left_out = len(rows) - len(answers.rows)
        responses, report = self._responses(
            level, answers.rows, answers.lead - before, answers.reasons, left_out=left_out
        )
        report |= response.probability_interval(_sigmoid(answers.lead))
        if probe.versus_real:
            report["win_before"] = response.probability_interval(_sigmoid(before))["win"]
        return responses, report

    def _reworded(self, probe: Probe, level: Level, seed: int) -> LevelResult:
        """Compare two real images under another prompt: the change of the lead, for the image that led."""

        def pair(row: int) -> tuple[Sample, Sample] | None:
            changed = self.reference.changed(probe, level, row, seed)
            return changed and (changed, Sample(self._pair(row)[1].image, changed.prompt))

        answers = self._ask_both_orders(self.scored, pair)
        before = self.real.lead[answers.rows]
        change = (answers.lead - before) * np.where(before < 0, -1, 1)
        left_out = len(self.scored) - len(answers.rows)
        responses, report = self._responses(level, answers.rows, change, answers.reasons, left_out=left_out)
        valid = np.isfinite(answers.lead)
        if valid.any():
            report["turned"] = float((_sign(answers.lead) != _sign(before))[valid].mean())
        return responses, report


def _sign(log_odds: np.ndarray) -> np.ndarray:
    """−1, 0 for a tie, 1."""
    return np.where(np.abs(log_odds) <= TIE, 0.0, np.sign(log_odds))


def _sigmoid(log_odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-log_odds))
