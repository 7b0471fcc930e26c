# SPDX-License-Identifier: Apache-2.0
"""VisionReward: many yes/no questions about one image, each with a weight.

Source: Xu et al., "VisionReward", arXiv 2412.21059. Its released code generates 30 answers per image and counts all
but the exact string "yes" as no, refusals included. Here all questions of an image share its prefix, an answer is read
as log-odds, and an unanswered question is left out and named. The default checklist is for the shapes world;
`Checklist.from_visionreward` reads VisionReward's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.interfaces import Metadata, PointwiseReward, Scores, score_named, with_capabilities
from visalign.rewards.base.contract import Request, check_rules, prompt_problem, read_request, scatter_scores
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.vlm.engine import EngineJudge
from visalign.rewards.vlm.requests import requests
from visalign.rewards.vlm.template import Template, question
from visalign.rewards.vlm.yes_no import MIN_MASS, YesNoReader

from .checklist import SHAPES_CHECKLIST, Checklist, ChecklistRule
from .reward_dance import RewardDance

CHECKLIST = question("checklist", "{question} Answer yes or no.")


class VisionReward(EngineJudge):
    """Weighted sum of the answers to a checklist, in the unit of its weights (log-odds, as they are fitted).

    An answer counts x = 2p − 1 with p the probability of yes ("soft"), or ±1 ("hard", as published). A question that
    the model answers with neither yes nor no counts 0 and is named in `text`; if it masks others, they count 0 too.
    The parts hold each question's x (NaN if unanswered), "alignment" and "unanswered".

    Args:
        checklist: the questions, as object or JSON file; if None, "checklist" in the folder's judge.json, else the one
            for the shapes world.
        alignment: text-image score that is added where the rule has one; when None, the same model's P(yes) to its
            yes/no question (VQAScore's form, as published).
        template: replaces the folder's "checklist", or ours; has {question}.
        yes: spellings of yes instead of the template's, each one token of the model.
        min_mass: smallest probability of yes and no together that counts as an answer.
        max_unanswered: share of unanswered questions above which an image is not scored.
    """

    name = "vision_reward"
    unit = "checklist log-odds"
    higher_is_better = True

    def __init__(
        self,
        model: Any = "shapes-vlm",
        *,
        checklist: Checklist | Mapping[str, Any] | str | Path | None = None,
        answers: Literal["soft", "hard"] = "soft",
        alignment: PointwiseReward | None = None,
        template: Template | None = None,
        yes: Sequence[str] | None = None,
        no: Sequence[str] | None = None,
        min_mass: float = MIN_MASS,
        max_unanswered: float = 0.5,
        device: str | torch.device = "cpu",
        **loading: Any,
    ) -> None:
        shares = f"max_unanswered is {max_unanswered}; allowed are shares in [0, 1]"
        forms = f"answers is {answers!r}; allowed are soft, hard"
        check_rules(self.name, {shares: 0 <= max_unanswered <= 1, forms: answers in ("soft", "hard")})
        super().__init__(model, CHECKLIST, template, device=device, **loading)
        self.checklist = checklist_of(checklist, self.engine)
        message = f"the template {self.template.name!r} has no {{question}}; write it into its text"
        check_rules(self.name, {message: "question" in self.template.fields})
        words: dict[str, Any] = {"yes": yes, "no": no, "min_mass": min_mass}
        self._read = YesNoReader(self.engine, self.template, **words)
        self.answers, self.max_unanswered = answers, max_unanswered
        self.alignment: Any = None
        if self.checklist.rule.has_alignment:
            alignment = alignment or RewardDance(self.engine, value="prob", **words)
            self.alignment = with_capabilities(alignment)
        self.range = _range(self.checklist.rule, self.alignment)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "questions": self.checklist.questions,
            "rule": repr(self.checklist.rule),
            "answers": self.answers,
            "alignment": repr(self.alignment and (self.alignment.identity or self.alignment.name)),
            "min_mass": self._read.min_mass,
            "max_unanswered": self.max_unanswered,
            **self._read.spellings,
        }

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images for their prompts; metadata is passed on to the alignment score."""
        request = read_request(self.name, images, prompts, metadata)
        reasons, size = list(request.images.reasons), len(request)
        rows, yes, unanswered = self._ask(request, reasons)
        alignment = self._align(request, rows, reasons)
        row_alignment = None if alignment is None else alignment[rows].double()
        rule = self.checklist.rule
        columns = dict(zip(self.checklist.questions, (2 * yes - 1).unbind(1), strict=True))
        columns |= {
            "value": rule.score(rule.fill_unanswered(yes), row_alignment),
            "unanswered": yes.isnan().sum(1).float(),
        }
        if alignment is not None:
            columns["alignment"] = alignment[rows]
        text = [""] * size
        for row, missing in zip(rows, unanswered, strict=True):
            text[row] = "left out: " + "; ".join(missing) if missing else ""
        return scatter_scores(columns, rows, reasons, self.unit, text=text if any(text) else None)

    def _ask(self, request: Request, reasons: list[str | None]) -> tuple[list[int], Tensor, list[list[str]]]:
        """(rows, probability of yes [rows, N] float64, NaN where unanswered, the unanswered with reasons)."""
        questions = self.checklist.questions
        count = len(questions)
        if any("{prompt}" in wording for wording in questions):
            for row, prompt in enumerate(request.prompts):
                reasons[row] = reasons[row] or prompt_problem(prompt)
        rows, queries = requests(request, self.template, reasons)
        question_queries = [
            replace(query, fields={"question": wording.replace("{prompt}", query.prompt)})
            for query in queries
            for wording in questions
        ]
        odds = self._read(question_queries)
        yes = odds.log_odds.double().view(len(rows), count).sigmoid()
        if self.answers == "hard":
            yes = torch.where(yes.isnan(), yes, ((yes - 0.5).sign() + 1) / 2)
        unanswered: list[list[str]] = []
        for index, row in enumerate(rows):
            answer_reasons = odds.reasons[index * count : (index + 1) * count]
            missing = [f"{w!r}: {why}" for w, why in zip(questions, answer_reasons, strict=True) if why]
            unanswered.append(missing)
            if len(missing) > self.max_unanswered * count:
                reasons[row] = f"{len(missing)} of {count} questions have no answer; {missing[0]}"
        return rows, yes, unanswered

    def _align(self, request: Request, rows: list[int], reasons: list[str | None]) -> Tensor | None:
        """Return the alignment [B], NaN outside `rows`; a row that has none gets its reason."""
        if self.alignment is None:
            return None
        alignment = torch.full((len(request),), torch.nan)
        if rows:
            scores = score_named(self.alignment, *request.select(rows), name=self.alignment.name)
            alignment[rows] = scores.value
            for row, reason in zip(rows, failure_reasons(scores), strict=True):
                reasons[row] = reasons[row] or (reason and f"alignment: {reason}")
        return alignment


def checklist_of(checklist: Checklist | Mapping[str, Any] | str | Path | None, engine: Any) -> Checklist:
    """Return the given checklist (object or JSON file), else that of the model's folder or shapes world."""
    if isinstance(checklist, str | Path):
        return Checklist.read(checklist)
    settings = getattr(engine, "settings", None)
    record = settings.rest.get("checklist") if checklist is None and settings else checklist
    return Checklist.from_dict(record) if isinstance(record, Mapping) else record or SHAPES_CHECKLIST


def _range(rule: ChecklistRule, alignment: PointwiseReward | None) -> tuple[float, float]:
    weights = list(rule.weights)
    low = high = rule.intercept
    if alignment is not None:
        weight = weights.pop(0)
        ends = [weight * end for end in alignment.range] if weight else [0.0]  # 0 · ∞ is no number
        low, high = low + min(ends), high + max(ends)
    spread = sum(abs(weight) for weight in weights)
    return low - spread - 1e-5, high + spread + 1e-5
