# SPDX-License-Identifier: Apache-2.0
"""RationalRewards: a vision-language model judges an image by aspects, each with a score from 1 to 4.

Source: Wang et al., "RationalRewards", arXiv 2604.11626; checkpoints TIGER-Lab/RationalRewards-8B-T2I and
-Edit (Qwen3-VL). Upstream scores a judgement without a number 0; here its image is masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import check_choices, read_request
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import RATIONAL_ASPECTS, RATIONAL_EDIT_ASPECTS, rational_mean, rational_scores
from visalign.rewards.vlm.published import published_prompt
from visalign.rewards.vlm.template import Template

from .judge import ChatJudge
from .messages import Reply

Mode = Literal["generation", "edit"]
ASPECTS = {"generation": RATIONAL_ASPECTS, "edit": RATIONAL_EDIT_ASPECTS}

_SYSTEM = {
    "generation": "You are an expert image generation evaluator. Your task is to evaluate the quality of a "
    "generated image based on a user instruction. Afterwards, you need to suggest how to refine the original "
    "user request to produce better image generation (if any).",
    "edit": "You are an expert image editing evaluator. Your task is to evaluate the quality of an edited "
    "image based on a source image and a user instruction. Afterwards, you need to suggest how to refine the "
    "original user request to produce better image edits (if any).",
}


def _template(mode: Mode) -> Template:
    image = {"type": "image"}
    if mode == "edit":
        first = "User Instruction: {prompt}\nYou are provided with two images:\n1. Source Image "
        texts = [first, "\n2. Edited Image "]
    else:
        texts = ["User Instruction: {prompt}\nYou are provided with one image:\n1. Generated Image "]
    content = [part for text in texts for part in ({"type": "text", "text": text}, image)]
    content.append({"type": "text", "text": published_prompt(f"rational_rewards_{mode}")})
    messages = [{"role": "system", "content": _SYSTEM[mode]}, {"role": "user", "content": content}]
    return Template(name=f"rational_rewards_{mode}", messages=messages)


class RationalRewards(ChatJudge):
    """(m − 1)/3, from 0 to 1, with m the mean of the aspects' scores, each clipped to [1, 4].

    "generation": faithfulness to the text, physical and visual quality, rendering of text. "edit": also faithfulness
    to the record's "source" image. An aspect that does not apply ("N/A") is left out of the mean and NaN among the
    parts; a judgement that skips an aspect is a failure. Upstream samples at temperature 0.1.
    """

    name = "rational_rewards"
    unit = "(points from 1 to 4 − 1) / 3"
    range = (0.0, 1.0)
    default_max_new_tokens = 2048

    def __init__(self, *address: str, mode: Mode = "generation", device: Any = "cpu", **options: Any) -> None:
        check_choices(self.name, mode=(mode, ASPECTS))
        self.mode: Mode = mode
        self.default_template = _template(mode)
        super().__init__(*address, device=device, **options)
        self.identity = self.make_identity(mode=mode, **self.sampling)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images; of the metadata only an edit's "source" is read."""
        request = read_request(self.name, images, prompts, metadata)
        return self.score_answers(request, self._read, self.unit, source=self.mode == "edit")

    def _read(self, reply: Reply) -> dict[str, float]:
        aspects = ASPECTS[self.mode]
        scores = rational_scores(reply.text, aspects)
        if missing := [aspects[key] for key, score in scores.items() if score is None]:
            raise AnswerError(f"the judgement gives no score for {', '.join(missing)}")
        parts = {key: score if isinstance(score, float) else math.nan for key, score in scores.items()}
        return {"value": rational_mean(scores), **parts}
