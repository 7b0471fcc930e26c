# SPDX-License-Identifier: Apache-2.0
"""EditScore: a vision-language model scores an edited image against its source and its instruction.

Source: Luo et al., "EditScore", arXiv 2509.23909; code github.com/VectorSpaceLab/EditScore (Apache-2.0);
checkpoints EditScore/EditScore-*, LoRAs on Qwen2.5-VL and Qwen3-VL. The rule is VIEScore's (Ku et al., arXiv
2312.14867). Upstream draws a random score where an answer cannot be read; here its image is masked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import read_request
from visalign.rewards.reading.numbers import AnswerError
from visalign.rewards.reading.ratings import listed_scores
from visalign.rewards.vlm.requests import requests
from visalign.rewards.vlm.template import Template

from .asking import ServedJudge, as_template
from .messages import Reply, question
from .published_wording import PUBLISHED

HIGH = 25.0
"""Of the published score_range."""
_FORM = '{\n\n"reasoning" : "...",\n"score" : [...],\n}'


def wording(kind: str) -> str:
    """EditScore's question, "edit_following" or "edit_quality": UnifiedReward-Edit's, whose form of the
    answer it writes otherwise.
    """
    text = PUBLISHED[kind].replace(_FORM, '{\n"reasoning" : "...",\n"score" : [...]\n}')
    return text.replace("instruction:{prompt}", "instruction: {prompt}")


class EditScore(ServedJudge):
    """√(following · quality) of an edit, from 0 to 10; the source image is the record's "source".

    Two questions are asked, each answered by two numbers from 0 to 25, which are divided by 2.5: of source
    and edit how well the instruction is followed ("prompt_following") and how little else changed
    ("consistency"); of the edit alone its naturalness and its freedom from artifacts. Following is the
    smaller of the former two, quality ("perceptual_quality") of the latter. With more than one answer the
    score is the mean of the passes, as upstream's num_pass, with its standard error; a pass of which one
    answer cannot be read is left out.
    """

    name = "edit_score"
    unit = "points from 0 to 10"
    range = (0.0, 10.0)
    higher_is_better = True

    def __init__(
        self,
        base_url: str | None = None,
        model: str | None = None,
        *,
        labelled: bool = False,
        quality_template: Template | str | None = None,
        device: Any = "cpu",
        **asking: Any,
    ) -> None:
        """Say who is asked, and what.

        Args:
            base_url: see `ServedJudge`.
            model: see `ServedJudge`; a LoRA's base, with the LoRA as `adapter`, in this process.
            labelled: write "<img1>: " before each image, as checkpoints on Qwen2.5-VL were trained.
            quality_template: instead of the second question, as `template` of the first.
            device: see `ServedJudge`.
            **asking: of `ServedJudge`; an answer has 512 tokens, and upstream draws at temperature 0.7.
        """
        labels = ["<img1>: ", "<img2>: "] if labelled else ["", ""]
        default = question("edit_score", wording("edit_following"), images=labels)
        super().__init__(
            base_url, model, **{"default": default, "max_new_tokens": 512, "device": device, **asking}
        )
        alone = question("edit_score_quality", wording("edit_quality"), images=labels[:1])
        self.quality = as_template(self.name, quality_template, alone, needed=())
        self.identity = self.identified(quality=self.quality.text, **self.drawing)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Points per edit; the prompt is its instruction, and the metadata hold its "source"."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, both = requests(request, self.template, reasons, source=True)
        edits = [replace(query, images=query.images[1:]) for query in both]
        following = self.server.ask(self.template, both, read=_read, **self.drawing)
        quality = self.server.ask(self.quality, edits, read=_read, **self.drawing)
        passes = [
            [_overall(one, other) for one, other in zip(*row, strict=True)]
            for row in zip(following, quality, strict=True)
        ]
        return self.summed(request, rows, passes, reasons, self.unit)


_Read = tuple[list[float], str]


def _read(reply: Reply) -> _Read:
    return [score * 10 / HIGH for score in listed_scores(reply.text, high=HIGH)], reply.text


def _overall(
    following: _Read | AnswerError, quality: _Read | AnswerError
) -> tuple[dict[str, float], str] | AnswerError:
    """One pass."""
    if isinstance(following, AnswerError):
        return following
    if isinstance(quality, AnswerError):
        return quality
    success, restraint = following[0]
    least = min(quality[0])
    parts = {"prompt_following": success, "consistency": restraint, "perceptual_quality": least}
    return {"value": math.sqrt(min(success, restraint) * least), **parts}, f"{following[1]}\n{quality[1]}"
