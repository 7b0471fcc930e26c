# SPDX-License-Identifier: Apache-2.0
"""LiFT: a critic model calls an image Good, Normal or Bad in each of several respects.

Source: Wang et al., "LiFT", arXiv 2412.04814, whose critic rates videos and counts anything unclear as Good. An
image has no motion, so two questions are asked here, in our words; an answer without one clear label is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import make_scores, read_request
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.reading.ratings import LIFT_VALUES, lift_label
from visalign.rewards.vlm.template import question

from .judge import ChatJudge
from .messages import Reply

QUESTIONS = {
    "semantic_consistency": "Does the picture agree with its caption in subject, attributes and action?",
    "fidelity": "Is the picture clear and true to life, without distorted or missing parts?",
}
"""Respect -> question, in our own words."""

TEMPLATE = question(
    "lift",
    "This picture was generated from the caption: {prompt}\n{question} Rate it with one word, Good, "
    "Normal or Bad, and nothing else.",
)


class Lift(ChatJudge):
    """Mean over the questions of 0.9 for Good, 0.2 for Normal, 0.05 for Bad; the parts hold each question.

    An image with an unreadable answer has no score. `std`, with more than one answer, is the standard error.
    `questions`, respect -> question, replace ours; a template has {prompt} and {question}.
    """

    name = "lift"
    unit = "Good 0.9, Normal 0.2, Bad 0.05"
    range = (LIFT_VALUES["Bad"], LIFT_VALUES["Good"])
    default_template = TEMPLATE
    required_fields = ("prompt", "question")
    default_max_new_tokens = 512

    def __init__(
        self, *address: str, questions: Mapping[str, str] | None = None, device: Any = "cpu", **options: Any
    ) -> None:
        self.questions = dict(QUESTIONS if questions is None else questions)
        super().__init__(*address, device=device, **options)
        self.identity = self.make_identity(questions=self.questions, **self.sampling)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images by the mean of the labels' values; metadata is ignored."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        texts = [""] * len(request)
        parts, variances = {}, []
        for respect, wording in self.questions.items():
            scores = self.score_answers(request, _read, self.unit, fields={"question": wording})
            parts[respect] = scores.value
            variances.append(torch.zeros(()) if scores.std is None else scores.std.square())
            for row, reason in enumerate(failure_reasons(scores)):
                reasons[row] = reasons[row] or (reason and f"{respect}: {reason}")
                texts[row] += f"{respect}: {scores.text[row] if scores.text else ''}\n"
        value = torch.stack(list(parts.values())).double().mean(0).float()
        # std of a mean of n independent means: √(Σ std²) / n
        std = None if self.answers == 1 else torch.stack(variances).sum(0).sqrt() / len(self.questions)
        text = ["" if reason else text.rstrip("\n") for text, reason in zip(texts, reasons, strict=True)]
        return make_scores(value, reasons, self.unit, std=std, parts=parts, text=text)


def _read(reply: Reply) -> dict[str, float]:
    return {"value": LIFT_VALUES[lift_label(reply.text)]}
