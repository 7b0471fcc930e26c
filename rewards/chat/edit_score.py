# SPDX-License-Identifier: Apache-2.0
"""EditScore: a vision-language model scores an edited image against its source and its instruction.

Source: Luo et al., "EditScore", arXiv 2509.23909; code github.com/VectorSpaceLab/EditScore (Apache-2.0). The rule
is VIEScore's (Ku et al., arXiv 2312.14867). Upstream draws a random score where an answer cannot be read.
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
from visalign.rewards.vlm.published import published_prompt
from visalign.rewards.vlm.requests import requests
from visalign.rewards.vlm.template import question

from .judge import Answer, ChatJudge
from .messages import Reply


class EditScore(ChatJudge):
    """√(following · quality) of an edit, from 0 to 10; the source image is the record's "source".

    Two questions get two numbers from 0 to 25 each, divided by 2.5. About source and edit: how well the instruction is
    followed ("prompt_following") and how little else changed ("consistency"). About the edit alone: its naturalness
    and its freedom from artifacts. Following is the smaller of the first two, quality ("perceptual_quality") of the
    last two. With K answers the score is the mean of K passes, upstream's num_pass; an unreadable pass is left out.

    Args:
        labelled: write "<img1>: " before each image, as checkpoints on Qwen2.5-VL were trained.
        **options: of `ChatJudge`, as is the address; upstream samples at temperature 0.7. A LoRA in this process is
            `adapter`, its base `model`.
    """

    name = "edit_score"
    unit = "points from 0 to 10"
    range = (0.0, 10.0)
    default_max_new_tokens = 512

    def __init__(self, *address: str, labelled: bool = False, device: Any = "cpu", **options: Any) -> None:
        labels = ["<img1>: ", "<img2>: "] if labelled else ["", ""]
        self.default_template = question("edit_score", published_prompt("edit_score_following"), images=labels)
        super().__init__(*address, device=device, **options)
        text = published_prompt("edit_score_quality")
        self.quality = question("edit_score_quality", text, images=labels[:1])
        self.identity = self.make_identity(quality=self.quality.text, **self.sampling)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B edits; the prompt is the instruction, and the metadata holds the "source"."""
        request = read_request(self.name, images, prompts, metadata)
        reasons = list(request.images.reasons)
        rows, queries = requests(request, self.template, reasons, source=True)
        edits_alone = [replace(query, images=query.images[1:]) for query in queries]
        following = self.server.ask(self.template, queries, read=_read, **self.sampling)
        quality = self.server.ask(self.quality, edits_alone, read=_read, **self.sampling)
        passes = [
            [_combine(*answers) for answers in zip(*row_answers, strict=True)]
            for row_answers in zip(following, quality, strict=True)
        ]
        return self.average_answers(request, rows, passes, reasons, self.unit)


_Numbers = tuple[list[float], str]


def _read(reply: Reply) -> _Numbers:
    return [score * 10 / 25 for score in listed_scores(reply.text, high=25.0)], reply.text


def _combine(following: _Numbers | AnswerError, quality: _Numbers | AnswerError) -> Answer | AnswerError:
    if isinstance(following, AnswerError):
        return following
    if isinstance(quality, AnswerError):
        return quality
    followed, consistency = following[0]
    worst = min(quality[0])
    parts = {"prompt_following": followed, "consistency": consistency, "perceptual_quality": worst}
    # √(min(followed, consistency) · min(naturalness, no artifacts))
    return {"value": math.sqrt(min(followed, consistency) * worst), **parts}, f"{following[1]}\n{quality[1]}"
