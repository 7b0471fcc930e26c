# SPDX-License-Identifier: Apache-2.0
"""UnifiedReward: a served vision-language model gives a picture points from 1 to 5.

Source: Wang et al., "Unified Reward Model for Multimodal Understanding and Generation", arXiv 2503.05236;
checkpoints CodeGoat24/UnifiedReward-*. The questions ask for the published forms of the answer in our own
words; to ask a checkpoint in the words that it was trained with, give them as `template`. Peers score an
answer that cannot be read 0 or with the batch mean; here it is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, read_request
from visalign.rewards.base.identity import Identity
from visalign.rewards.reading.ratings import all_aspects, aspect_mean, final_score
from visalign.rewards.vlm.template import Template

from .asking import Drawing, as_template, connect, rate
from .messages import Reply, question
from .server import ChatServer

_CAPTION = "\n\nText Caption: [{prompt}]"

ASPECTS = question(
    "unified_reward_aspects",
    "This picture was generated from the text caption below. Rate it from 1 to 5 on three axes.\n"
    "- Alignment Score: how well its content agrees with the caption.\n"
    "- Coherence Score: how consistent it is in itself, without glitches and distorted objects.\n"
    "- Style Score: how attractive it looks, whatever the caption says.\n\n"
    "Answer in this form alone:\n\n"
    "Alignment Score (1-5): X\nCoherence Score (1-5): Y\nStyle Score (1-5): Z" + _CAPTION,
)
FINAL = question(
    "unified_reward_final",
    "This picture was generated from the text caption below. Judge two things: how well it agrees with the "
    "caption in its objects, their attributes and their relations; and its visual quality, such as clarity, "
    "detail, color and appeal. First list the elements of the caption, each as 'element (type): value', with "
    "value 1 if the picture shows it and 0 if not. Then give one score from 1 to 5 after 'Final Score:'."
    + _CAPTION,
)


class UnifiedReward:
    """Points from 1 to 5 for a picture and its prompt.

    "aspects": the mean of alignment, coherence and style, which are in the parts. "final": the number after
    "Final Score:". With more than one answer the score is their mean, with their standard deviation.
    """

    name = "unified_reward"
    unit = "points from 1 to 5"
    range = (1.0, 5.0)
    higher_is_better = True

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        server: ChatServer | None = None,
        mode: Literal["aspects", "final"] = "aspects",
        template: Template | str | None = None,
        answers: int = 1,
        seed: int = 0,
        temperature: float = 0.0,
        max_new_tokens: int = 1024,
        **server_options: Any,
    ) -> None:
        """Say who is asked, and what; nothing is sent yet.

        Args:
            base_url: address of an OpenAI-compatible server; VISALIGN_JUDGE_URL in the environment if None.
            model: the name under which it serves the judge; VISALIGN_JUDGE_MODEL if None.
            server: a `ChatServer` instead of the two, shared by several judges.
            mode: "aspects" or "final".
            template: instead of ours: a `Template`, or the text alone, with {prompt}.
            answers: K of each picture.
            seed: of the first answer.
            temperature: of the answers.
            max_new_tokens: of an answer.
            **server_options: of `ChatServer`.

        Raises:
            RewardError: options that cannot be used.
        """
        if mode not in ("aspects", "final"):
            raise RewardError(f"{self.name}: mode is {mode!r}; allowed are 'aspects' and 'final'.")
        self.server = connect(self.name, server, base_url, model, server_options)
        self.mode = mode
        self.template = as_template(self.name, template, ASPECTS if mode == "aspects" else FINAL)
        self.drawing = Drawing(
            answers=answers, seed=seed, temperature=temperature, max_new_tokens=max_new_tokens
        )
        fields = self.server.identity_fields(self.template, mode=mode, **self.drawing.options())
        self.identity = Identity(judge=self.name, **fields)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Points per image; metadata is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        read = _aspects if self.mode == "aspects" else _final
        return rate(self.server, self.template, request, read, unit=self.unit, drawing=self.drawing)


def _aspects(reply: Reply) -> dict[str, float]:
    scores = all_aspects(reply.text)
    return {"value": aspect_mean(scores)[0], **scores}


def _final(reply: Reply) -> dict[str, float]:
    return {"value": final_score(reply.text)}
