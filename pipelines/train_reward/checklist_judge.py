# SPDX-License-Identifier: Apache-2.0
"""Checklist judge to be trained: the weights of its answers, or with adapters also the answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
from .judges import SeeingJudge, moving, refuse
from .vlm_judges import yes_and_no


class ChecklistJudge(SeeingJudge):
    """Weights w ≥ 0 of a checklist, with signs that stay; with train=lora also what the model answers.

    A question whose given weight is negative speaks of a fault and keeps its sign, so that w ≥ 0 says that no question
    turns round. After each update w is projected, w ← max(w, 0): with train=head the problem is convex.

    VisionReward, arXiv 2412.21059, section 3.
    """

    def __init__(self, config: TrainRewardConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.checklist: Checklist = checklist_of(self.settings.checklist, self.engine)
        self.asked = Questions(self, self.checklist)
        signed = torch.tensor(list(self.checklist.rule.weights), device=device)
        self.sign = torch.where(signed < 0, -1.0, 1.0)
        self.module = nn.ModuleDict({"model": self.engine.model})
        self.module.register_parameter("weights", nn.Parameter(signed.abs()))
        self.frozen = self.settings.train == "head"
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.unfreeze()

    @property
    def weights(self) -> Any:
        """w."""
        return self.module.weights

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [("weights", self.weights), *moving(self.engine.model)]

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

        @cache
        def answered(number: int) -> Example:
            example = examples[number]
            return replace(example, images=(), features=self.asked.features(example))

        return replace(examples, example=answered) if self.frozen else examples

    def encode(self, examples: Sequence[Example], *, heldout: bool = False) -> RewardBatch:
        """Encode pairs: all left images, then all right ones."""
        inputs: Any
        if self.frozen:
            features = [e.features for e in examples if e.features is not None]
            if len(features) < len(examples):  # not through `remember`
                features = [self.asked.features(example) for example in examples]
            inputs = torch.cat([torch.stack([both[side] for both in features]) for side in range(2)])
        else:
            prompts = [example.prompt for example in examples]
            inputs = self.asked.rows(pair_images(examples), [*prompts, *prompts])
        return pair_batch(inputs, examples, heldout=heldout)

    def __call__(self, inputs: Any) -> Outputs:
        self._project()
        outputs: dict[str, Tensor] = {}
        if self.frozen:
            features = inputs.to(self.weights)
        else:
            with self.precision():
                values, outputs["log_mass"] = self.asked.live(*inputs)
            features = values.to(self.weights)
        value = features @ (self.sign * self.weights) + self.checklist.rule.intercept
        return {"value": value, "weights": self.weights, **outputs}

    def learnt(self) -> Checklist:
        """The checklist with the weights as they are."""
        weights = tuple((self.sign * self.weights.detach().clamp(min=0.0)).cpu().tolist())
        return replace(self.checklist, rule=replace(self.checklist.rule, weights=weights))

    def first_notes(self) -> list[str]:
        """Explain why the first iterations take longer."""
        note = "Each image is asked about once, when it is first read: the first iterations take the longest."
        return [note] if self.frozen else []

    def card_notes(self) -> list[str]:
        """List the weight of each answer for the card."""
        checklist = self.learnt()
        names = ["(alignment)"] if checklist.rule.has_alignment else []
        names += [q for number, q in enumerate(checklist.questions) if number not in checklist.rule.masked]
        rows = [f"| {name} | {w:.3f} |" for name, w in zip(names, checklist.rule.weights, strict=True)]
        return ["## Weights", "", "| question | weight of yes |", "|---|---|", *rows, ""]

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """Write what `VisionReward` reads: `judge.json` with checklist and base, and any adapters."""
        self.write(folder, self.asked.templates, {"checklist": self.learnt().to_dict()})


class Questions:
    """Questions of a checklist to a judge's model, and the features of its answers."""

    def __init__(self, judge: SeeingJudge, checklist: Checklist) -> None:
        self.judge, self.checklist, engine = judge, checklist, judge.engine
        self.templates: list[Template] = [engine.template("checklist", CHECKLIST)]
        if checklist.rule.has_alignment:
            self.templates.append(engine.template("yes_no", YES_NO))
        self._words = [yes_and_no(engine, template) for template in self.templates]
        self._scorer = VisionReward(engine, checklist=checklist)
        texts = [t.text for t in self.templates[1:]] + list(checklist.questions)
        self._of_prompt = any("{prompt}" in text for text in texts)
        self._known: dict[bytes, Tensor] = {}

    @torch.no_grad()
    def features(self, example: Example) -> Tensor:
        """[images, F] factors of the rule's weights, as `VisionReward` scores; equal images are asked once.

        Each image is asked by itself, so that its last bits do not depend on what it was asked with.
        """
        rows = []
        for image in example.images:
            text = example.prompt if self._of_prompt else ""
            key = hashlib.blake2b(image.contiguous().numpy().tobytes() + repr((image.shape, text)).encode())
            if key.digest() not in self._known:
                self._known[key.digest()] = self._ask(image, example.prompt)
            rows.append(self._known[key.digest()])
        return torch.stack(rows)

    def _ask(self, image: Tensor, prompt: str) -> Tensor:
        scores = self._scorer.score([image], [prompt])
        refuse(failure_reasons(scores), [prompt])
        parts, rule = scores.parts or {}, self.checklist.rule
        answers = torch.stack([parts[question] for question in self.checklist.questions], 1).double()
        aligned = parts["alignment"].double() if rule.has_alignment else None
        return rule.features(rule.fill_unanswered((answers + 1) / 2), aligned)[0].float()

    def rows(self, images: Sequence[Tensor], prompts: Sequence[str]) -> tuple[list[Any], int]:
        """Encode (rows of all questions image by image, then of the alignment; number of images)."""
        both = list(zip(images, prompts, strict=True))
        asks = [
            Query(images=[image], prompt=prompt, fields={"question": question.replace("{prompt}", prompt)})
            for image, prompt in both
            for question in self.checklist.questions
        ]
        rows, reasons = self.judge.engine.encode(self.templates[0], asks)
        if len(self.templates) > 1:
            fields = check_fields(self.templates[1])
            more, why = self.judge.engine.encode(
                self.templates[1],
                [Query(images=[image], prompt=prompt, fields=fields) for image, prompt in both],
            )
            rows, reasons = [*rows, *more], [*reasons, *why]
        refuse(reasons, [ask.prompt for ask in asks] + list(prompts))
        return rows, len(both)

    def live(self, rows: list[Any], count: int) -> tuple[Tensor, Tensor]:
        """Compute (features [count, F], mean ln P(yes or no) over the questions [count]), with gradient."""
        states = self.judge.engine.states(rows)
        questions = count * len(self.checklist.questions)
        odds, log_mass = self.judge.odds(states[:questions], *self._words[0])
        masses, aligned = [log_mass.view(count, -1)], None
        if self.checklist.rule.has_alignment:
            more, log_mass = self.judge.odds(states[questions:], *self._words[1])
            aligned = more.sigmoid()
            masses.append(log_mass[:, None])
        features = self.checklist.rule.features(odds.sigmoid().view(count, -1), aligned)
        return features, torch.cat(masses, 1).mean(1)
