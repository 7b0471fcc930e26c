# SPDX-License-Identifier: Apache-2.0
"""Runner of probes: asks a reward in batches, and turns changes of its answers into responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import expit
from torch import Tensor

from visalign.data.sets.image_references import CompletionText
from visalign.errors import Naming, UserError
from visalign.evaluation.probes import response
from visalign.evaluation.probes.catalogue import Level, Probe, Sample
from visalign.interfaces import PairwiseReward, PointwiseReward, score_named, with_capabilities
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.images import as_contract, to_pil, to_uint8
from visalign.rewards.pairs.asking import check_preferences, read_preferences

from .reference import Reference

TIE = 1e-6  # Log-odds below this are a tie
COMPANY_ROWS = 16  # Images that are asked about one by one in the probe "neighbours"
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


class ProbeAnswers(NamedTuple):
    rows: list[int]
    value: np.ndarray  # [n] NaN where there is none
    reasons: list[str | None]


class ProbeRunner(ABC):
    """Asks a reward about unchanged and changed samples; responses are in units of the unchanged spread."""

    kind: str
    unit: str
    higher_is_better: bool
    spread: float
    scored: list[int]  # Rows whose unchanged samples got an answer
    with_records = False  # Whether the prompts' records are handed over, because the reward answers only with them

    def __init__(self, name: str, reference: Reference, batch_size: int) -> None:
        self.name, self.reference, self.batch_size = name, reference, batch_size

    def record(self) -> dict[str, Any]:
        return {
            "source": self.reference.source,
            "unreadable": self.reference.unreadable,
            "spread": self.spread,
            "with_records": self.with_records,
        }

    def ask_unchanged(self, ask: Callable[[], Any]) -> Any:
        """Ask about the unchanged samples, and again with the prompts' records if nothing is answered without."""
        answers = ask()
        if not np.isfinite(answers.value).any() and any(self.reference.metadata):
            self.with_records = True
            answers = ask()
        return answers

    def ask(
        self,
        rows: Sequence[int],
        make: MakeSamples,
        *,
        tolerant: bool = True,
        form: Callable[[Tensor], Any] | None = None,
    ) -> ProbeAnswers:
        """Ask about rows in batches, with images in a `form`; if `tolerant`, an error is a failure of its batch."""
        answered: list[int] = []
        answers: list[Answer] = [(np.zeros(0), [])]
        for start in range(0, len(rows), self.batch_size):
            samples = {row: sides for row in rows[start : start + self.batch_size] if (sides := make(row))}
            if samples:
                sides = [[s.image for s in side] for side in zip(*samples.values(), strict=True)]
                images = [[form(image) for image in side] if form else as_contract(side) for side in sides]
                prompts = [first.prompt for first, *_ in samples.values()]
                answers.append(self._call(images, prompts, list(samples), tolerant))
                answered += samples
        value = np.concatenate([value for value, _ in answers])
        return ProbeAnswers(answered, value, [reason for _, reasons in answers for reason in reasons])

    def ask_again(self, probe: Probe, level: Level, make: MakeSamples) -> ProbeAnswers:
        """Ask about scored rows in another form, or with other neighbours: none, in reverse order, or white images."""
        if probe.name == "form":
            return self.ask(self.scored, make, form=FORMS[level.label])
        if level.label == "in reverse order":
            return self.ask(self.scored[::-1], make)
        rows, is_alone = self.scored[:COMPANY_ROWS], level.label not in ("among white images", "among white texts")
        white = 0 if is_alone else min(max(self.batch_size, 2), 8) - 1
        values, reasons = [], []
        for row in rows:
            samples = make(row)
            assert samples, "the unchanged samples always apply"
            answers: list[Any] = [sample.image for sample in samples]
            empty: list[Any] = [
                CompletionText("") if isinstance(answer, str) else torch.ones_like(answer) for answer in answers
            ]
            images = [as_contract([answer, *[blank] * white]) for answer, blank in zip(answers, empty, strict=True)]
            value, reason = self._call(images, [samples[0].prompt] * (1 + white), [row] * (1 + white), True)
            values.append(value[0])
            reasons.append(reason[0])
        return ProbeAnswers(rows, np.array(values), reasons)

    @abstractmethod
    def _ask(self, sides: list[Any], prompts: list[str], records: list[Any] | None) -> Answer:
        """Call the reward once with the images of each side."""

    def _call(self, images: list[Any], prompts: list[str], rows: Sequence[int], tolerant: bool) -> Answer:
        records = [self.reference.metadata[row] for row in rows] if self.with_records else None
        try:
            with Naming(self.name):
                return self._ask(images, prompts, records)
        except RewardError as error:
            if not tolerant:
                raise
            return np.full(len(prompts), np.nan), [str(error)] * len(prompts)

    def _require_unit(self, has_unit: bool, size: int, reasons: Sequence[str | None], what: str) -> None:
        """Refuse a reward with fewer than two answers, or with answers that are all equal."""
        count, remedy = len(self.scored), "Give --reference samples that it"
        if count < 2:
            reason = next((f": {reason}" for reason in reasons if reason), "")
            raise UserError(f"{self.name} judged {count} of {size} {what}, and 2 are needed{reason}. {remedy} judges.")
        if not has_unit:
            fault = f"gives all {count} {what} the same answer, so its responses have no unit"
            raise UserError(f"{self.name} {fault}. {remedy} tells apart.")

    def _all_rows(self, answers: ProbeAnswers) -> Answer:
        """[N] answers and reasons of all samples, NaN and None for those not asked about."""
        values = np.full(len(self.reference.samples), np.nan)
        values[answers.rows] = answers.value
        reasons = dict(zip(answers.rows, answers.reasons, strict=True))
        return values, [reasons.get(row) for row in range(len(values))]

    def _responses(self, level: Level, answers: ProbeAnswers, before: Any, *, left_out: int = 0) -> LevelResult:
        # r = ±(value − before) / spread
        responses = (answers.value - before) / self.spread * (1 if self.higher_is_better else -1)
        full, _ = self._all_rows(answers._replace(value=responses))
        return full, response.level_report(level.label, level.x, responses, answers.reasons, left_out=left_out)

    def _share(
        self, level: Level, hits: Any, reasons: Sequence[str | None], chance: float | None, *, left_out: int = 0
    ) -> LevelResult:
        """Report a level whose answer is a share of rows; the rows have no response."""
        report = response.share_report(level.label, hits, reasons, chance=chance, left_out=left_out)
        return np.full(len(self.reference.samples), np.nan), report

    def _contrast(self, level: Level, responses: np.ndarray, reasons: Sequence[str | None]) -> LevelResult:
        """Report the share of rows whose own text or prompt is ahead by the `responses`, NaN where unknown."""
        return self._share(level, responses[np.isfinite(responses)] > 0, reasons, 0.5)


class ScoreRunner(ProbeRunner):
    """Runs the probes of a pointwise reward: scores of changed samples against those of the unchanged."""

    kind = "scores"

    def __init__(self, reward: PointwiseReward, reference: Reference, batch_size: int) -> None:
        super().__init__(reward.name, reference, batch_size)
        self.reward, self.unit, self.higher_is_better = reward, reward.unit, reward.higher_is_better
        rows = list(range(len(reference.samples)))
        _, self.value, self.reasons = self.ask_unchanged(lambda: self.ask(rows, self._unchanged, tolerant=False))
        self.scored = [row for row in rows if np.isfinite(self.value[row])]
        scores = self.value[self.scored]
        self.spread = float(scores.std(ddof=1)) if len(scores) > 1 else 0.0
        has_unit = self.spread > 1e-9 * max(1.0, float(np.abs(scores).max(initial=0.0)))
        self._require_unit(has_unit, len(rows), self.reasons, "reference samples")

    def run_level(self, probe: Probe, level: Level, seed: int) -> LevelResult:
        left_out = 0
        if probe.name == "contrast_instructions":
            samples, contrasts = self.reference.samples, self.reference.contrasts()
            rows = [row for row in self.scored if row in contrasts]
            others = [contrasts[row] for row in rows]
            text_rows, prompt_rows = (rows, others) if level.label == "own prompt first" else (others, rows)
            texts, prompts = [samples[row].image for row in text_rows], [samples[row].prompt for row in prompt_rows]
            parts = [slice(start, start + self.batch_size) for start in range(0, len(rows), self.batch_size)]
            answers = [self._call([texts[part]], prompts[part], prompt_rows[part], True) for part in parts]
            value = np.concatenate([np.zeros(0), *(value for value, _ in answers)])
            reasons = [reason for _, batch in answers for reason in batch]
            return self._contrast(level, (self.value[rows] - value) * (1 if self.higher_is_better else -1), reasons)
        if probe.name in ("neighbours", "form"):
            answers = self.ask_again(probe, level, self._unchanged)
        else:

            def changed(row: int) -> tuple[Sample] | None:
                sample = self.reference.changed(probe, level, row, seed)
                return None if sample is None else (sample,)

            answers = self.ask(self.scored, changed)
            left_out = len(self.scored) - len(answers.rows)
        return self._responses(level, answers, self.value[answers.rows], left_out=left_out)

    def record(self) -> dict[str, Any]:
        counts = response.reference_counts(self.reasons, len(self.value))
        return counts | super().record() | {"mean": float(self.value[self.scored].mean())}

    def _unchanged(self, row: int) -> tuple[Sample]:
        return (self.reference.samples[row],)

    def _ask(self, sides: list[Any], prompts: list[str], records: list[Any] | None) -> Answer:
        scores = score_named(self.reward, sides[0], prompts, records, name=self.name)
        return scores.value.detach().cpu().double().numpy(), failure_reasons(scores)


class PairAnswers(NamedTuple):
    """Answers about pairs (a, b) in both orders, NaN where one of them is missing."""

    rows: list[int]
    first: np.ndarray  # [n] log-odds of a, shown on the left
    second: np.ndarray  # [n] log-odds of b, shown on the left; −`first` where one order was asked
    reasons: list[str | None]

    @property
    def value(self) -> np.ndarray:
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
        self.real: PairAnswers = self.ask_unchanged(self._ask_real_pairs)
        self.scored = [row for row in self.paired if np.isfinite(self.real.value[row])]
        leads = self.real.value[self.scored]
        self.spread = float(np.sqrt((leads**2).mean() / 2)) if len(leads) else 0.0
        self._require_unit(self.spread > TIE, len(self.paired), self.real.reasons, "pairs of reference samples")
        unbiased = np.abs(self.real.bias[self.scored]).max() <= response.LIMITS["same"] * self.spread
        self.one_order = self.judge.capabilities.both_orders and bool(unbiased)
        self.rows = [row for row in rows if row in self.scored or row not in self.paired]

    def run_level(self, probe: Probe, level: Level, seed: int) -> LevelResult:
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
                return self._share(level, first == -second, nothing, 0.5)
            case "contrast_instructions":
                contrasts, samples = self.reference.contrasts(), self.reference.samples
                rows = [row for row in self.scored if row in contrasts]
                contrasted = self._ask_both_orders(rows, lambda row: (samples[row], samples[contrasts[row]]))
                return self._contrast(level, contrasted.value, contrasted.reasons)
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
            "mean": float(self.real.value[self.scored].mean()),
            "one_order": self.one_order,
        }

    def _pair(self, row: int) -> tuple[Sample, Sample]:
        return self.reference.samples[row], self.reference.rivals(row)[0]

    def _ask(self, sides: list[Any], prompts: list[str], records: list[Any] | None) -> Answer:
        preferences = self.judge.compare(*sides, prompts, records)
        answers = read_preferences(check_preferences(self.name, preferences, len(prompts)))
        return answers.log_odds.numpy(), answers.reasons

    def _ask_real_pairs(self) -> PairAnswers:
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
        leads = np.stack([self.real.value[rows], between.value, back.value])
        signs = _sign(leads[:, np.isfinite(leads).all(0)])
        chance = response.circle_chance(float((signs == 0).mean())) if signs.size else None
        reasons = [a or b for a, b in zip(between.reasons, back.reasons, strict=True)]
        cycles, left_out = response.is_cycle(*signs), len(self.scored) - len(rows)
        return self._share(level, cycles, reasons, chance, left_out=left_out)

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
        lead, left_out = answers.value, len(rows) - len(answers.rows)
        before = self.real.value[answers.rows] if with_rivals else np.zeros(len(answers.rows))
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
