# SPDX-License-Identifier: Apache-2.0
"""Runner of probes: asks a reward in batches, and turns changes of its answers into responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from visalign.data.sets.image_references import CompletionText
from visalign.errors import Naming, UserError
from visalign.evaluation.probes import response
from visalign.evaluation.probes.catalogue import Level, Probe, Sample
from visalign.interfaces import PointwiseReward
from visalign.rewards.base.contract import RewardError, check_answer
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.images import as_contract, to_pil, to_uint8

from .reference import Reference

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
    """Answers about some rows of the reference."""

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
        white, rows = 0, self.scored[:COMPANY_ROWS]
        if level.label in ("among white images", "among white texts"):
            white = min(max(self.batch_size, 2), 8) - 1
        values, reasons = [], []
        for row in rows:
            samples = make(row)
            assert samples, "the unchanged samples always apply"
            images = [as_contract([s.image, *[_empty(s.image)] * white]) for s in samples]
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
        if len(self.scored) < 2:
            reason = next((f": {reason}" for reason in reasons if reason), "")
            fault = f"judged {len(self.scored)} of {size} {what}, and 2 are needed{reason}. Give --reference images"
            raise UserError(f"{self.name} {fault} that it judges.")
        if not has_unit:
            fault = f"gives all {len(self.scored)} {what} the same answer, so its responses have no unit"
            raise UserError(f"{self.name} {fault}. Give --reference images that it tells apart.")

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

    def _contrast(self, level: Level, responses: np.ndarray, reasons: Sequence[str | None]) -> LevelResult:
        """Report the share of rows whose own text or prompt is ahead by the `responses`, NaN where unknown."""
        finite = responses[np.isfinite(responses)]
        report = response.share_report(level.label, finite > 0, reasons, chance=0.5)
        return np.full(len(self.reference.samples), np.nan), report


def _empty(item: Any) -> Any:
    """Return a white image of the same size, or a text without words."""
    return CompletionText("") if isinstance(item, CompletionText) else torch.ones_like(item)


class ScoreRunner(ProbeRunner):
    """Runs the probes of a pointwise reward: scores of changed samples against those of the unchanged."""

    kind = "scores"

    def __init__(self, reward: PointwiseReward, reference: Reference, batch_size: int) -> None:
        super().__init__(reward.name, reference, batch_size)
        self.reward, self.unit, self.higher_is_better = reward, reward.unit, reward.higher_is_better
        rows = list(range(len(reference.samples)))
        unchanged = self.ask(rows, self._unchanged, tolerant=False)
        if not np.isfinite(unchanged.value).any() and any(reference.metadata):
            self.with_records = True
            unchanged = self.ask(rows, self._unchanged, tolerant=False)
        self.value, self.reasons = unchanged.value, unchanged.reasons
        self.scored = [row for row in rows if np.isfinite(self.value[row])]
        scores = self.value[self.scored]
        self.spread = float(scores.std(ddof=1)) if len(scores) > 1 else 0.0
        has_unit = self.spread > 1e-9 * max(1.0, float(np.abs(scores).max(initial=0.0)))
        self._require_unit(has_unit, len(rows), self.reasons, "reference images")

    def run_level(self, probe: Probe, level: Level, seed: int) -> LevelResult:
        """Compute the responses at one level of a probe; `seed` is that of random changes."""
        left_out = 0
        if probe.name == "contrast_instructions":
            samples = self.reference.samples
            contrasts = self.reference.contrasts()
            rows = [row for row in self.scored if contrasts[row] is not None]
            swaps_prompt = level.label == "own prompt first"
            mixed = [(samples[contrasts[r] or 0], samples[r])[:: -1 if swaps_prompt else 1] for r in rows]
            texts, prompts = [text.image for text, _ in mixed], [record.prompt for _, record in mixed]
            records = [contrasts[row] or 0 for row in rows] if swaps_prompt else rows
            parts = [slice(start, start + self.batch_size) for start in range(0, len(rows), self.batch_size)]
            answers = [self._call([texts[part]], prompts[part], records[part], True) for part in parts]
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
        scores = self.reward.score(sides[0], prompts, records)
        check_answer(self.name, scores, len(prompts), "image")
        value = np.where(scores.valid.cpu().numpy(), scores.value.detach().cpu().double().numpy(), np.nan)
        value = np.where(np.isfinite(value), value, np.nan)
        default = ("the reward gave no finite number" if np.isnan(number) else None for number in value)
        return value, [reason or why for reason, why in zip(failure_reasons(scores), default, strict=True)]
