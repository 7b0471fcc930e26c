# SPDX-License-Identifier: Apache-2.0
"""Checklist judge to be trained: the weights of its answers, or with adapters also the answers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visalign.data.sets.tables import listed
from visalign.errors import UserError
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.questions.checklist import Checklist
from visalign.rewards.questions.reward_dance import YES_NO
from visalign.rewards.questions.vision_reward import CHECKLIST, VisionReward, checklist_of
from visalign.rewards.vlm.engine import Query
from visalign.rewards.vlm.requests import check_fields
from visalign.rewards.vlm.template import Template
from visalign.training.reward.batch import Outputs, RewardBatch

from .config import TrainRewardConfig
from .examples import Example, Examples, pair_batch, pair_images
from .judges import SeeingJudge, refuse, trainable
from .vlm_judges import yes_and_no


class ChecklistJudge(SeeingJudge):
    """Weights w ≥ 0 of a checklist, with signs that stay; with train=lora also what the model answers.

    A question with a negative weight speaks of a fault. After each update w ← max(w, 0): with train=head the problem
    is convex. VisionReward, arXiv 2412.21059, section 3.
    """

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.checklist: Checklist = checklist_of(self.settings.checklist, self.engine)
        self.templates: list[Template] = [self.engine.template("checklist", CHECKLIST)]
        if self.checklist.rule.has_alignment:
            self.templates.append(self.engine.template("yes_no", YES_NO))
        self._words = [yes_and_no(self.engine, template) for template in self.templates]
        self._reader = VisionReward(self.engine, checklist=self.checklist)
        texts = [template.text for template in self.templates] + list(self.checklist.questions)
        self._reads_prompt = any("{prompt}" in text for text in texts)
        self._features: dict[bytes, Tensor] = {}
        signed = torch.tensor(list(self.checklist.rule.weights), device=device)
        self.sign = torch.where(signed < 0, -1.0, 1.0)
        self.module = nn.ModuleDict({"model": self.engine.model})
        self.module.register_parameter("weights", nn.Parameter(signed.abs()))
        self.frozen = self.settings.train == "head"
        self.learns_answers = config.objective.task == "checklist_answers"
        self.module.weights.requires_grad_(not self.learns_answers)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.unfreeze()

    @property
    def weights(self) -> Any:
        """Weights w; looked up each time, since sharding puts another parameter in place."""
        return self.module.weights

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        weights = [("weights", self.weights)] if self.weights.requires_grad else []
        return [*weights, *trainable(self.engine.model)]

    def train(self, mode: bool = True) -> None:
        if self.frozen:
            self.engine.model.eval()
        else:
            super().train(mode)
        self._project()

    @torch.no_grad()
    def _project(self) -> None:
        self.weights.clamp_(min=0.0)

    def remember(self, examples: Examples) -> Examples:
        """Put answers in the images' stead where the model is frozen; each is asked at its first use."""
        if self.learns_answers:
            self._check_questions(examples)

        @cache
        def answered(number: int) -> Example:
            example = examples[number]
            return replace(example, images=(), features=self.features(example))

        return replace(examples, example=answered) if self.frozen else examples

    def _check_questions(self, examples: Examples) -> None:
        marks: Any = [image["checklist"] for image in examples.content]
        answered = list(dict.fromkeys(question for answers in marks for question in answers))
        if unknown := [question for question in answered if question not in self.checklist.questions]:
            file = json.dumps({"questions": answered, "coef": [1.0] * len(answered), "has_alignment": False})
            raise UserError(
                f"People answered {listed(unknown)}; the checklist has no such question. Give model.checklist=FILE, "
                f"with weights to begin with in coef: {file}"
            )

    @torch.no_grad()
    def features(self, example: Example) -> Tensor:
        """[images, F] factors of the rule's weights; each image is asked by itself, for equal last bits, and once."""
        rows, text = [], example.prompt if self._reads_prompt else ""
        for image in example.images:
            content = image.contiguous().numpy().tobytes() + repr((image.shape, text)).encode()
            key = hashlib.blake2b(content).digest()
            if key not in self._features:
                self._features[key] = self._ask(image, example.prompt)
            rows.append(self._features[key])
        return torch.stack(rows)

    def _ask(self, image: Tensor, prompt: str) -> Tensor:
        scores = self._reader.score([image], [prompt])
        refuse(failure_reasons(scores), [prompt])
        rule = self.checklist.rule
        answers = torch.stack([scores.parts[question] for question in self.checklist.questions], 1).double()
        aligned = scores.parts["alignment"].double() if rule.has_alignment else None
        return rule.features(rule.fill_unanswered((answers + 1) / 2), aligned)[0].float()

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        if self.learns_answers:
            questions = self.checklist.questions
            inputs = self._encode_questions(pair_images(examples), [example.prompt for example in examples])
            target = [[(e.answers or {}).get(question, math.nan) for question in questions] for e in examples]
            return RewardBatch(inputs=inputs, size=len(examples), target=torch.tensor(target))
        if self.frozen:
            features = [self.features(e) if e.features is None else e.features for e in examples]
            inputs: Any = torch.stack(features, 1).flatten(0, 1)  # [2, pairs, F]
        else:
            inputs = self._encode_questions(pair_images(examples), [example.prompt for example in examples] * 2)
        return pair_batch(inputs, examples, heldout=heldout)

    def _encode_questions(self, images: Sequence[Tensor], prompts: Sequence[str]) -> tuple[list[Any], int]:
        """Encode (rows of all questions image by image, then of the alignment; number of images)."""
        both = list(zip(images, prompts, strict=True))
        queries = [
            Query(images=[image], prompt=prompt, fields={"question": question.replace("{prompt}", prompt)})
            for image, prompt in both
            for question in self.checklist.questions
        ]
        rows, reasons = self.engine.encode(self.templates[0], queries)
        refuse(reasons, [query.prompt for query in queries])
        for template in self.templates[1:]:
            fields = check_fields(template)
            aligned = [Query(images=[image], prompt=prompt, fields=fields) for image, prompt in both]
            more, reasons = self.engine.encode(template, aligned)
            refuse(reasons, prompts)
            rows = [*rows, *more]
        return rows, len(both)

    def __call__(self, inputs: Any) -> Outputs:
        self._project()
        outputs: dict[str, Tensor] = {}
        features = inputs
        if not self.frozen:
            with self.precision():
                features, outputs["log_mass"], outputs["odds"] = self._answer(*inputs)
        value = features.to(self.weights) @ (self.sign * self.weights) + self.checklist.rule.intercept
        return {"value": value, "weights": self.weights, **outputs}

    def _answer(self, rows: list[Any], count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Compute features [count, F], mean ln P(yes or no) over the questions [count], and log-odds [count, Q]."""
        states = self.engine.states(rows)
        questions = count * len(self.checklist.questions)
        odds, log_mass = self.odds(states[:questions], *self._words[0])
        odds = odds.view(count, -1)
        masses, aligned = [log_mass.view(count, -1)], None
        if self.checklist.rule.has_alignment:
            aligned_odds, log_mass = self.odds(states[questions:], *self._words[1])
            aligned = aligned_odds.sigmoid()
            masses.append(log_mass[:, None])
        features = self.checklist.rule.features(odds.sigmoid(), aligned)
        return features, torch.cat(masses, 1).mean(1), odds

    def learnt(self) -> Checklist:
        weights = tuple((self.sign * self.weights.detach().clamp(min=0.0)).cpu().tolist())
        return replace(self.checklist, rule=replace(self.checklist.rule, weights=weights))

    def card_notes(self) -> list[str]:
        checklist = self.learnt()
        names = ["(alignment)"] if checklist.rule.has_alignment else []
        names += [q for number, q in enumerate(checklist.questions) if number not in checklist.rule.masked]
        rows = [f"| {name} | {w:.3f} |" for name, w in zip(names, checklist.rule.weights, strict=True)]
        return ["## Weights", "", "| question | weight of yes |", "|---|---|", *rows, ""]

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write what `VisionReward` reads: `judge.json` with checklist and base, and any adapters."""
        self.write(folder, self.templates, {"checklist": self.learnt().to_dict()})
