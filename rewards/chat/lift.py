# SPDX-License-Identifier: Apache-2.0
"""LiFT: a served critic calls an image Good, Normal or Bad in each of several respects.

Source: Wang et al., "LiFT", arXiv 2412.04814: LiFT-Critic rates videos in semantic consistency, motion
smoothness and fidelity, and its code maps Good, Normal and Bad to 0.9, 0.2 and 0.05, anything else to Good.
An image has no motion, so two questions are asked here by default, in our own words; an answer without one
clear label is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.reading.ratings import LIFT_VALUES, lift_label

from .asking import ServedJudge
from .messages import Reply, question

QUESTIONS = {
    "semantic_consistency": "Does the picture agree with its caption in subject, attributes and action?",
    "fidelity": "Is the picture clear and true to life, without distorted or missing parts?",
}
"""Ours, by respect."""

TEMPLATE = question(
    "lift",
    "This picture was generated from the caption: {prompt}\n{question} Rate it with one word, Good, "
    "Normal or Bad, and nothing else.",
)


class Lift(ServedJudge):
    """Mean over the questions of 0.9 for Good, 0.2 for Normal, 0.05 for Bad; the parts hold each question.

    An image of which one question has no readable answer has no score. `std`, with more than one answer, is
    the standard error of the mean.
    """

    name = "lift"
    unit = "Good 0.9, Normal 0.2, Bad 0.05"
    range = (LIFT_VALUES["Bad"], LIFT_VALUES["Good"])
    higher_is_better = True

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        questions: Mapping[str, str] | None = None,
        device: Any = "cpu",
        **asking: Any,
    ) -> None:
        """Say who is asked, and what.

        Args:
            base_url: see `ServedJudge`.
            model: see `ServedJudge`.
            questions: respect -> question, instead of ours.
            device: see `ServedJudge`.
            **asking: of `ServedJudge`; the template holds {prompt} and {question}, an answer 512 tokens.
        """
        self.questions = dict(QUESTIONS if questions is None else questions)
        if not self.questions:
            raise RewardError(
                f"{self.name}: there are no questions; give at least one as {{respect: question}}."
            )
        asking = {"default": TEMPLATE, "needed": ("prompt", "question"), "max_new_tokens": 512, **asking}
        super().__init__(base_url, model, device=device, **asking)
        self.identity = self.identified(questions=self.questions, **self.drawing)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Mean of the labels' values per image; metadata is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons: list[str | None] = [None] * len(request)
        text = [""] * len(request)
        parts, variances = {}, []
        for respect, asked in self.questions.items():
            found = self.rate(request, _read, self.unit, fields={"question": asked})
            parts[respect] = found.value
            variances.append(torch.zeros(()) if found.std is None else found.std.square())
            for row, reason in enumerate(failure_reasons(found)):
                own = (
                    reason
                    if request.images.reasons[row] is not None or reason is None
                    else f"{respect}: {reason}"
                )
                reasons[row] = reasons[row] or own
                text[row] += f"{respect}: {found.text[row] if found.text else ''}\n"
        count = len(self.questions)
        value = torch.stack(list(parts.values())).double().mean(0).float()
        text = [
            said.rstrip("\n") if reason is None else "" for said, reason in zip(text, reasons, strict=True)
        ]
        std = None if self.answers == 1 else torch.stack(variances).sum(0).sqrt() / count
        return make_scores(value, reasons, self.unit, std=std, parts=parts, text=text)


def _read(reply: Reply) -> dict[str, float]:
    return {"value": LIFT_VALUES[lift_label(reply.text)]}
