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
from visalign.rewards.reading.ratings import all_aspects, aspect_mean, final_score

from .asking import ServedJudge
from .messages import Reply, question

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


class UnifiedReward(ServedJudge):
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
        mode: Literal["aspects", "final"] = "aspects",
        **asking: Any,
    ) -> None:
        """Say who is asked, and what.

        Args:
            base_url: see `ServedJudge`.
            model: see `ServedJudge`.
            mode: "aspects" or "final".
            **asking: of `ServedJudge`; the template holds {prompt}.
        """
        if mode not in ("aspects", "final"):
            raise RewardError(f"{self.name}: mode is {mode!r}; allowed are 'aspects' and 'final'.")
        self.mode = mode
        super().__init__(base_url, model, default=ASPECTS if mode == "aspects" else FINAL, **asking)
        self.identity = self.identified(mode=mode, **self.drawing)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Points per image; metadata is not looked at."""
        request = read_request(self.name, images, prompts, metadata)
        return self.rate(request, _aspects if self.mode == "aspects" else _final, self.unit)


def _aspects(reply: Reply) -> dict[str, float]:
    scores = all_aspects(reply.text)
    return {"value": aspect_mean(scores)[0], **scores}


def _final(reply: Reply) -> dict[str, float]:
    return {"value": final_score(reply.text)}
