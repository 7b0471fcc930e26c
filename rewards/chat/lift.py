# SPDX-License-Identifier: Apache-2.0
"""LiFT: a served critic calls a picture Good, Normal or Bad in each of several respects.

Source: Wang et al., "LiFT", arXiv 2412.04814: LiFT-Critic rates videos in semantic consistency, motion
smoothness and fidelity, and its code maps Good, Normal and Bad to 0.9, 0.2 and 0.05, anything else to Good.
A picture has no motion, so two questions are asked here by default, in our own words; an answer without one
clear label is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, make_scores, read_request
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.identity import Identity
from visalign.rewards.reading.ratings import LIFT_VALUES, lift_label
from visalign.rewards.vlm.template import Template

from .asking import Drawing, as_template, connect, rate
from .messages import Reply, question
from .server import ChatServer

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


class Lift:
    """Mean over the questions of 0.9 for Good, 0.2 for Normal, 0.05 for Bad; the parts hold each question.

    A picture of which one question has no readable answer has no score. `std`, with more than one answer, is
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
        server: ChatServer | None = None,
        questions: Mapping[str, str] | None = None,
        template: Template | str | None = None,
        answers: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
        max_new_tokens: int = 512,
        **server_options: Any,
    ) -> None:
        """Say who is asked, and what; nothing is sent yet.

        Args:
            base_url: address of an OpenAI-compatible server; VISALIGN_JUDGE_URL in the environment if None.
            model: the name under which it serves the critic; VISALIGN_JUDGE_MODEL if None.
            server: a `ChatServer` instead of the two.
            questions: respect -> question, instead of ours.
            template: instead of ours: a `Template`, or the text alone, with {prompt} and {question}.
            answers: K to each question.
            seed: of the first answer.
            temperature: of the answers.
            max_new_tokens: of an answer.
            **server_options: of `ChatServer`.

        Raises:
            RewardError: options that cannot be used.
        """
        self.questions = dict(QUESTIONS if questions is None else questions)
        if not self.questions:
            raise RewardError(
                f"{self.name}: there are no questions; give at least one as {{respect: question}}."
            )
        self.server = connect(self.name, server, base_url, model, server_options)
        self.template = as_template(self.name, template, TEMPLATE, needed=("prompt", "question"))
        self.drawing = Drawing(
            answers=answers, seed=seed, temperature=temperature, max_new_tokens=max_new_tokens
        )
        options = {"questions": self.questions, **self.drawing.options()}
        self.identity = Identity(judge=self.name, **self.server.identity_fields(self.template, **options))

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Mean of the labels' values per image; metadata is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        reasons: list[str | None] = [None] * len(request)
        text = [""] * len(request)
        parts, variances = {}, []
        for respect, asked in self.questions.items():
            found = rate(
                self.server,
                self.template,
                request,
                _read,
                unit=self.unit,
                drawing=self.drawing,
                fields={"question": asked},
            )
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
        std = None if self.drawing.answers == 1 else torch.stack(variances).sum(0).sqrt() / count
        return make_scores(value, reasons, self.unit, std=std, parts=parts, text=text)


def _read(reply: Reply) -> dict[str, float]:
    return {"value": LIFT_VALUES[lift_label(reply.text)]}
