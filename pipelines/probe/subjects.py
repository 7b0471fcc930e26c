# SPDX-License-Identifier: Apache-2.0
"""What is probed: a reward that scores single images, or a judge that compares two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visalign.errors import UserError
from visalign.evaluation.probes import response as answer
from visalign.evaluation.probes.catalogue import PAIR_PROBES, PROBES, Level, Probe, Sample
from visalign.interfaces import PairwiseReward, PointwiseReward, Scores, with_capabilities
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.pairs.asking import one_each, read_preferences

from .questions import FORMS, Found, Make, ProbeAnswers, Questions
from .reference import Reference

TIE = 1e-6
"""Log-odds below this are a tie."""
BIAS = "bias"
"""Parts of an answer whose names end so are what a judge that asks both orders found between them."""

Leveled = tuple[np.ndarray, dict[str, Any]]
"""[N] responses of all reference samples at one level, NaN where there is none, and the level's report."""


class Subject(ABC):
    """What both kinds share: answers about the unchanged samples, and responses in units of their spread."""

    kind: str
    unit: str
    higher_is_better: bool
    spread: float
    judged: list[int]
    """Rows that were judged unchanged."""
    questions: Questions

    def __init__(self, reference: Reference) -> None:
        self.reference = reference

    @abstractmethod
    def level(self, probe: Probe, level: Level, seed: int) -> Leveled:
        """The responses at one level of a probe."""

    def record(self) -> dict[str, Any]:
        """The reference as JSON."""
        return {
            "source": self.reference.source,
            "unreadable": self.reference.unreadable,
            "spread": self.spread,
            "with_records": self.questions.with_records,
        }

    def _sample(self, row: int) -> Sample:
        return self.reference.samples[row]

    def _nothing(self) -> np.ndarray:
        return np.full(len(self.reference.samples), np.nan)

    def _spread_out(self, found: ProbeAnswers) -> tuple[np.ndarray, list[str | None]]:
        """[N] answers and reasons of all samples."""
        full = self._nothing()
        full[found.rows] = found.value
        reasons: list[str | None] = [None] * len(self.reference.samples)
        for row, reason in zip(found.rows, found.reasons, strict=True):
            reasons[row] = reason
        return full, reasons

    def _leveled(
        self,
        level: Level,
        rows: Sequence[int],
        change: np.ndarray,
        reasons: Sequence[str | None],
        *,
        left_out: int = 0,
    ) -> Leveled:
        """r = ±change / spread."""
        response, full = change / self.spread * (1 if self.higher_is_better else -1), self._nothing()
        full[list(rows)] = response
        return full, answer.level_report(level.label, level.x, response, reasons, left_out=left_out)


class Scorer(Subject):
    """A reward that scores: its scores of changed samples against those of the unchanged."""

    kind, probes = "scores", PROBES

    def __init__(self, reward: PointwiseReward, reference: Reference, batch_size: int) -> None:
        super().__init__(reference)
        self.reward, self.unit, self.higher_is_better = reward, reward.unit, reward.higher_is_better
        self.questions = Questions(reward.name, self._scores, reference, batch_size)
        rows = list(range(len(reference.samples)))

        def unchanged() -> tuple[np.ndarray, list[str | None]]:
            return self._spread_out(self.questions.batched(rows, self._one, careful=False))

        self.value, self.reasons = unchanged()
        if not np.isfinite(self.value).any() and any(reference.metadata):
            self.questions.with_records = True
            self.value, self.reasons = unchanged()
        known = self.value[np.isfinite(self.value)]
        if len(known) < 2:
            reason = next((reason for reason in self.reasons if reason), "")
            raise UserError(
                f"{reward.name} judged {len(known)} of the {len(rows)} reference images, and 2 are needed"
                f"{': ' + reason if reason else ''}. Give images with prompts that it judges: --reference."
            )
        self.spread = float(known.std(ddof=1))
        if not self.spread > 1e-9 * max(1.0, float(np.abs(known).max())):
            raise UserError(
                f"{reward.name} gives all {len(known)} reference images the score {known[0]:g}, so its "
                "responses have no unit. Give --reference images that it tells apart."
            )
        self.judged = [row for row in rows if np.isfinite(self.value[row])]

    def level(self, probe: Probe, level: Level, seed: int) -> Leveled:
        """The responses at one level of a probe; `seed` is that of changes that are random."""
        if probe.name == "neighbours":
            found = self.questions.neighbours(self.judged, self._one, level)
        elif probe.name == "form":
            found = self.questions.batched(self.judged, self._one, form=FORMS[level.label])
        else:
            found = self.questions.batched(self.judged, self._changed(probe, level, seed))
        left_out = len(self.judged) - len(found.rows) if probe.name != "neighbours" else 0
        change = found.value - self.value[found.rows]
        return self._leveled(level, found.rows, change, found.reasons, left_out=left_out)

    def record(self) -> dict[str, Any]:
        """The reference as JSON."""
        counts = answer.reference_counts(self.reasons, len(self.value))
        return counts | super().record() | {"mean": float(self.value[self.judged].mean())}

    def _one(self, row: int) -> tuple[Sample]:
        return (self._sample(row),)

    def _changed(self, probe: Probe, level: Level, seed: int) -> Make:
        def make(row: int) -> tuple[Sample] | None:
            changed = self.reference.changed(probe, level, row, seed)
            return None if changed is None else (changed,)

        return make

    def _scores(self, sides: list[Any], prompts: list[str], records: list[Any] | None) -> Found:
        scores = self.reward.score(sides[0], prompts, records)
        if not isinstance(scores, Scores):
            raise RewardError(
                f"Reward {self.reward.name!r} returned a {type(scores).__name__}; needed is "
                "visalign.interfaces.Scores with an entry per image."
            )
        if len(scores) != len(prompts):
            raise RewardError(
                f"Reward {self.reward.name!r} gave {len(scores)} scores for {len(prompts)} images."
            )
        value = np.where(scores.valid.cpu().numpy(), scores.value.detach().cpu().double().numpy(), np.nan)
        reasons = failure_reasons(scores)
        for place in np.flatnonzero(~np.isfinite(value)):
            reasons[place] = reasons[place] or "the reward gave no finite number"
        return np.where(np.isfinite(value), value, np.nan), reasons


@dataclass(frozen=True)
class Said:
    """Answers about pairs in both orders, NaN where one of them is missing."""

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


class Comparer(Subject):
    """A judge that compares: changed samples against the unchanged, and both against others of their prompt.

    Each pair is asked in both orders and the log-odds averaged; in one order only where the judge says that
    it asks both itself (`RewardCapabilities.both_orders`) and its answers on real pairs bear that out.
    """

    kind, probes, unit, higher_is_better = "comparisons", PAIR_PROBES, "log-odds", True

    def __init__(self, judge: PairwiseReward, reference: Reference, batch_size: int) -> None:
        super().__init__(reference)
        self.judge = with_capabilities(judge)
        self.questions = Questions(judge.name, self._odds, reference, batch_size)
        self.one_order = False
        """Whether the judge itself averages both orders, so that pairs are asked once."""
        self._own: dict[str, list[float]] | None = None
        """What the judge found between the orders itself, while that is noted."""
        self.paired = [row for row in range(len(reference.samples)) if reference.rivals(row)]
        self.real, self.own_bias = self._ask_real()
        if not np.isfinite(self.real.lead).any() and any(reference.metadata):
            self.questions.with_records = True
            self.real, self.own_bias = self._ask_real()
        known = self.real.lead[np.isfinite(self.real.lead)]
        if len(known) < 2:
            reason = next((reason for reason in self.real.reasons if reason), "")
            raise UserError(
                f"{judge.name} judged {len(known)} of {len(self.paired)} pairs of reference images, and 2 "
                f"are needed{': ' + reason if reason else ''}. Give images with prompts that it judges: "
                "--reference."
            )
        self.spread = float(np.sqrt((known**2).mean() / 2))
        if self.spread <= TIE:
            raise UserError(
                f"{judge.name} calls all {len(known)} pairs of reference images a tie, so its responses "
                "have no unit. Give --reference images that it tells apart."
            )
        self.judged = [row for row in self.paired if np.isfinite(self.real.lead[row])]
        steady = np.abs(self.real.bias[self.judged]).max() <= answer.LIMITS["same"] * self.spread
        self.one_order = self.judge.capabilities.both_orders and bool(steady)
        alone = [row for row in range(len(reference.samples)) if not reference.rivals(row)]
        self.rows = sorted(self.judged + alone)

    def level(self, probe: Probe, level: Level, seed: int) -> Leveled:
        """The responses at one level of a probe; `seed` is that of changes that are random."""
        ask = self.questions
        match probe.name:
            case "identical":
                found = ask.batched(self.rows, lambda row: (self._sample(row), self._sample(row)))
                return self._leveled(level, found.rows, found.value, found.reasons)
            case "position":
                return self._leveled(
                    level, self.judged, self.real.bias[self.judged], [None] * len(self.judged)
                )
            case "swap":
                first, second = (_signs(part[self.judged]) for part in (self.real.first, self.real.second))
                none = [None] * len(self.judged)
                return self._nothing(), answer.share_report(level.label, first == -second, none, chance=0.5)
            case "transitivity":
                return self._circles(level)
            case "neighbours" | "form":
                if probe.name == "form":
                    found = ask.batched(self.judged, self._pair, form=FORMS[level.label])
                else:
                    found = ask.neighbours(self.judged, self._pair, level)
                change = found.value - self.real.first[found.rows]
                return self._leveled(level, found.rows, change, found.reasons)
            case "spelling" | "other_prompt":
                return self._reworded(probe, level, seed)
            case _:
                return self._changed(probe, level, seed)

    def record(self) -> dict[str, Any]:
        """The reference as JSON."""
        reasons = [self.real.reasons[row] for row in self.paired]
        return (
            answer.reference_counts(reasons, len(self.paired))
            | super().record()
            | {
                "images": len(self.reference.samples),
                "strangers": self.reference.strangers,
                "mean": float(self.real.lead[self.judged].mean()),
                "one_order": self.one_order,
                "own_bias": self.own_bias,
            }
        )

    def _pair(self, row: int) -> tuple[Sample, Sample]:
        return self._sample(row), self.reference.rivals(row)[0]

    def _odds(self, sides: list[Any], prompts: list[str], records: list[Any] | None) -> Found:
        left, right = sides
        said = self.judge.compare(left, right, prompts, records)
        answers = read_preferences(one_each(self.judge.name, said, len(prompts)))
        if self._own is not None:
            for name, part in said.parts.items():
                if name.endswith(BIAS):
                    known = part.detach().cpu().double().numpy()
                    self._own.setdefault(name, []).extend(known[np.isfinite(known)].tolist())
        return answers.log_odds.numpy(), answers.reasons

    def _ask_real(self) -> tuple[Said, dict[str, dict[str, float | None]]]:
        """What is said of each of the N samples and its other image, NaN where nothing is, and what the
        judge found between the orders itself: part of its answers -> mean with its interval."""
        self._own = {}
        said = self._both(self.paired, self._pair, careful=False)
        first, reasons = self._spread_out(ProbeAnswers(said.rows, said.first, said.reasons))
        second, _ = self._spread_out(ProbeAnswers(said.rows, said.second, said.reasons))
        own: dict[str, dict[str, float | None]] = {}
        for name, values in self._own.items():
            if values:
                ends = answer.mean_interval(np.array(values))
                own[name] = dict(zip(("mean", "low", "high"), ends, strict=True))
        self._own = None
        return Said(list(range(len(first))), first, second, reasons), own

    def _both(self, rows: Sequence[int], make: Make, *, careful: bool = True) -> Said:
        """Ask in both orders; a pair is judged where both answers are there."""
        straight = self.questions.batched(rows, make, careful=careful)
        if self.one_order:
            return Said(straight.rows, straight.value, -straight.value, straight.reasons)
        noted, self._own = self._own, None

        def turned_pair(row: int) -> tuple[Sample, Sample] | None:
            if (made := make(row)) is None:
                return None
            one, two = made
            return Sample(two.image, one.prompt), Sample(one.image, one.prompt)

        turned = self.questions.batched(rows, turned_pair, careful=careful)
        self._own = noted
        reasons = [
            a or (b and f"in the other order: {b}")
            for a, b in zip(straight.reasons, turned.reasons, strict=True)
        ]
        bad = np.array([reason is not None for reason in reasons], dtype=bool)
        first, second = (np.where(bad, np.nan, part.value) for part in (straight, turned))
        return Said(straight.rows, first, second, reasons)

    def _circles(self, level: Level) -> Leveled:
        rivals = self.reference.rivals
        rows = [row for row in self.judged if len(rivals(row)) > 1]
        near = self._both(rows, lambda row: (rivals(row)[0], rivals(row)[1]))
        far = self._both(rows, lambda row: (rivals(row)[1], self._sample(row)))
        legs = np.stack([self.real.lead[rows], near.lead, far.lead])
        known = np.isfinite(legs).all(0)
        signs = _signs(legs[:, known])
        chance = answer.circle_chance(float((signs == 0).mean())) if known.any() else None
        reasons = [a or b for a, b in zip(near.reasons, far.reasons, strict=True)]
        left_out = len(self.judged) - len(rows)
        hits = answer.is_cycle(*signs)
        return self._nothing(), answer.share_report(
            level.label, hits, reasons, chance=chance, left_out=left_out
        )

    def _changed(self, probe: Probe, level: Level, seed: int) -> Leveled:
        def pair(row: int) -> tuple[Sample, Sample] | None:
            changed = self.reference.changed(probe, level, row, seed)
            return changed and (changed, self._pair(row)[1] if probe.versus_real else self._sample(row))

        rows = self.judged if probe.versus_real else self.rows
        said = self._both(rows, pair)
        before = self.real.lead[said.rows] if probe.versus_real else np.zeros(len(said.rows))
        left_out = len(rows) - len(said.rows)
        full, report = self._leveled(level, said.rows, said.lead - before, said.reasons, left_out=left_out)
        report |= answer.probability_interval(_probability(said.lead))
        if probe.versus_real:
            report["win_before"] = answer.probability_interval(_probability(before))["win"]
        return full, report

    def _reworded(self, probe: Probe, level: Level, seed: int) -> Leveled:
        """Two real images under another prompt: the change of the lead, for the one that led."""

        def pair(row: int) -> tuple[Sample, Sample] | None:
            made = self.reference.changed(probe, level, row, seed)
            return made and (made, Sample(self._pair(row)[1].image, made.prompt))

        said = self._both(self.judged, pair)
        before = self.real.lead[said.rows]
        change = (said.lead - before) * np.where(before < 0, -1, 1)
        left_out = len(self.judged) - len(said.rows)
        full, report = self._leveled(level, said.rows, change, said.reasons, left_out=left_out)
        known = np.isfinite(said.lead)
        if known.any():
            report["turned"] = float((_signs(said.lead) != _signs(before))[known].mean())
        return full, report


def _signs(log_odds: np.ndarray) -> np.ndarray:
    """−1, 0 for a tie, 1."""
    return np.where(np.abs(log_odds) <= TIE, 0.0, np.sign(log_odds))


def _probability(log_odds: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-log_odds))
