# SPDX-License-Identifier: Apache-2.0
"""VisionReward: many yes/no questions about one image, each with a weight.

Source: Xu et al., "VisionReward", arXiv 2412.21059. Its released code asks with 30 generations per image
and takes everything that is not the exact string "yes" for no, refusals included. Here all questions of an
image are one batch that shares the image and the beginning of the prompt, an answer is read as log-odds,
and a question that the model does not answer is left out and named. The default checklist is one for the
shapes world; VisionReward's own is read from its two files by `Checklist.from_visionreward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from visalign.interfaces import Metadata, PointwiseReward, Scores, with_capabilities
from visalign.rewards.base.contract import Request, make_scores, prompt_problem, read_request, scatter
from visalign.rewards.base.failure import Naming, failure_reasons
from visalign.rewards.base.identity import Identity
from visalign.rewards.base.images import as_contract
from visalign.rewards.vlm.engine import engine_of
from visalign.rewards.vlm.requests import requests
from visalign.rewards.vlm.template import Template, question
from visalign.rewards.vlm.yes_no import MIN_MASS, YesNoReader

from .checklist import SHAPES_CHECKLIST, Checklist, ChecklistRule
from .reward_dance import RewardDance

CHECKLIST = question("checklist", "{question} Answer yes or no.")


class VisionReward:
    """Weighted sum of the answers to a checklist, in the unit of its weights (log-odds, as they are fitted).

    An answer counts x = 2p − 1 with p the probability of yes ("soft"), or ±1 ("hard", as published). A
    question that the model answers with neither yes nor no counts 0 and is named in `text`; where it decides
    about others they count 0 too. The parts hold each question's x (NaN where not answered), "alignment" and
    "unanswered".
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
        precision: str = "auto",
        **loading: Any,
    ) -> None:
        """Load the model and the checklist.

        Args:
            model: folder, hub id or packaged name; or a loaded `rewards.vlm.VisionLanguageEngine`.
            checklist: the questions, as object or JSON file; "checklist" in the folder's judge.json, else
                the one for the shapes world, when None.
            answers: "soft" or "hard".
            alignment: the text-image score that stands beside the answers where the rule has one; the same
                model's P(yes) to its yes/no question (VQAScore's form, as published) when None.
            template: instead of the folder's "checklist", or ours; has {question}.
            yes: spellings of yes instead of the template's, each one token of the model.
            no: spellings of no.
            min_mass: smallest probability of yes and no together that counts as an answer.
            max_unanswered: the share of unanswered questions above which an image is not scored.
            device: where the model runs.
            precision: of its weights, as in `engine_of`.
            **loading: of `engine_of`: attention, device_map, quantization, max_tokens_per_batch, ...

        Raises:
            ValueError: options that are not allowed, or a template without {question}.
            RewardError: the model or its answer tokens cannot be used.
        """
        if answers not in ("soft", "hard"):
            raise ValueError(f"{self.name}: answers is {answers!r}; allowed are 'soft' and 'hard'.")
        if not 0 <= max_unanswered <= 1:
            raise ValueError(
                f"{self.name}: max_unanswered is {max_unanswered}; allowed are shares in [0, 1]."
            )
        self.engine = engine_of(model, self.name, device=device, precision=precision, **loading)
        self.checklist = checklist_of(checklist, self.engine)
        self.template = template or self.engine.template("checklist", CHECKLIST)
        if "question" not in self.template.fields:
            raise ValueError(
                f"The template {self.template.name!r} has no {{question}}; write it into its text."
            )
        words: dict[str, Any] = {"yes": yes, "no": no, "min_mass": min_mass}
        self._read = YesNoReader(self.engine, self.template, **words)
        self.answers, self.max_unanswered = answers, max_unanswered
        rule = self.checklist.rule
        self.alignment = with_capabilities(alignment) if rule.has_alignment and alignment else None
        if rule.has_alignment and self.alignment is None:
            self.alignment = RewardDance(self.engine, value="prob", **words)
        self.range = _range(rule, self.alignment)
        self.min_mass = min_mass

    @property
    def identity(self) -> Identity:
        """What the scores depend on."""
        return Identity(judge=self.name, **self.engine.identity_fields(self.template, **self._options()))

    def _options(self) -> dict[str, Any]:
        """What moves the score beside model and template."""
        return {
            "questions": self.checklist.questions,
            "rule": repr(self.checklist.rule),
            "answers": self.answers,
            "alignment": repr(self.alignment and (self.alignment.identity or self.alignment.name)),
            "min_mass": self.min_mass,
            **self._read.spellings,
        }

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score per (image, prompt); metadata is passed on to the alignment score."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, yes, unanswered = self._ask(request, reasons)
        aligned = self._align(request, rows, reasons)
        value = torch.full((len(request),), torch.nan)
        columns = {asked: value.clone() for asked in self.checklist.questions}
        columns |= {"unanswered": value.clone()}
        text = [""] * len(request)
        if rows:
            counted = self.checklist.rule.counted(yes)
            score = self.checklist.rule.score(counted, None if aligned is None else aligned[rows].double())
            value = scatter(score.float(), rows, len(request))
            for number, asked in enumerate(self.checklist.questions):
                columns[asked] = scatter((2 * yes[:, number] - 1).float(), rows, len(request))
            columns["unanswered"] = scatter(yes.isnan().sum(1).float(), rows, len(request))
        for row, missing in zip(rows, unanswered, strict=True):
            text[row] = "left out: " + "; ".join(missing) if missing else ""
        if aligned is not None:
            columns["alignment"] = aligned
        return make_scores(value, reasons, self.unit, parts=columns, text=text if any(text) else None)

    def _ask(self, request: Request, reasons: list[str | None]) -> tuple[list[int], Tensor, list[list[str]]]:
        """(rows, probability of yes [rows, N] float64, NaN where unanswered, the unanswered with reasons)."""
        from visalign.rewards.vlm.engine import Query

        questions = self.checklist.questions
        asks_prompt = any("{prompt}" in asked for asked in questions)
        for row, prompt in enumerate(request.prompts):
            if asks_prompt:
                reasons[row] = reasons[row] or prompt_problem(prompt)
        rows, plain = requests(request, self.template, reasons)
        queries = [
            Query(
                images=query.images,
                prompt=query.prompt,
                fields={"question": asked.replace("{prompt}", query.prompt)},
            )
            for query in plain
            for asked in questions
        ]
        odds = self._read(queries)
        log_odds = odds.log_odds.double().view(len(rows), len(questions))
        yes = log_odds.sigmoid()
        if self.answers == "hard":
            yes = torch.where(yes.isnan(), yes, (log_odds.sign() + 1) / 2)
        unanswered: list[list[str]] = []
        for place, row in enumerate(rows):
            said = odds.reasons[place * len(questions) : (place + 1) * len(questions)]
            missing = [f"{q!r}: {why}" for q, why in zip(questions, said, strict=True) if why is not None]
            unanswered.append(missing)
            if len(missing) > self.max_unanswered * len(questions):
                reasons[row] = f"{len(missing)} of {len(questions)} questions have no answer; {missing[0]}"
        return rows, yes, unanswered

    def _align(self, request: Request, rows: list[int], reasons: list[str | None]) -> Tensor | None:
        """Alignment [B] of the rows, NaN elsewhere; a row that it cannot score gets its reason."""
        if self.alignment is None:
            return None
        aligned = torch.full((len(request),), torch.nan)
        found = [request.images.images[row] for row in rows]
        if rows:
            with Naming(self.alignment.name):
                scores = self.alignment.score(
                    as_contract([image for image in found if image is not None]),
                    [request.prompts[row] for row in rows],
                    [request.metadata[row] for row in rows],
                )
            aligned[rows] = scores.value
            for row, why in zip(rows, failure_reasons(scores), strict=True):
                if why is not None:
                    reasons[row] = reasons[row] or f"alignment: {why}"
        return aligned


def checklist_of(given: Any, engine: Any) -> Checklist:
    """The checklist that a judge was given (itself, its object or a JSON file), that of its model's folder,
    or the one for the shapes world.
    """
    if isinstance(given, Checklist):
        return given
    if given is None:
        settings = getattr(engine, "settings", None)
        folder = settings.rest.get("checklist") if settings is not None else None
        return SHAPES_CHECKLIST if folder is None else Checklist.from_dict(folder)
    return Checklist.from_dict(given) if isinstance(given, Mapping) else Checklist.read(given)


def _range(rule: ChecklistRule, alignment: PointwiseReward | None) -> tuple[float, float]:
    weights = list(rule.weights)
    low = high = rule.intercept
    if rule.has_alignment and alignment is not None:
        weight = weights.pop(0)
        ends = [weight * end for end in alignment.range] if weight else [0.0]  # 0 · ∞ is no number
        low, high = low + min(ends), high + max(ends)
    spread = sum(abs(weight) for weight in weights)
    return low - spread - 1e-5, high + spread + 1e-5
