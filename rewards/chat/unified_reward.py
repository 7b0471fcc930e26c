# SPDX-License-Identifier: Apache-2.0
"""UnifiedReward: a vision-language model rates an image, or an edit of one, in points.

Source: Wang et al., "Unified Reward Model for Multimodal Understanding and Generation", arXiv 2503.05236, its
versions 2.0 and Edit, with the questions of their training. Peers score an unreadable answer 0 or with the batch mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import check_choices, read_request
from visalign.rewards.reading.ratings import all_aspects, final_score, listed_scores
from visalign.rewards.vlm.published import published_prompt
from visalign.rewards.vlm.template import question

from .judge import ChatJudge
from .messages import Reply

Mode = Literal["aspects", "final", "edit_following", "edit_quality"]


def _read_aspects(reply: Reply) -> dict[str, float]:
    scores = all_aspects(reply.text)
    return {"value": sum(scores.values()) / len(scores), **scores}


def _read_final(reply: Reply) -> dict[str, float]:
    return {"value": final_score(reply.text)}


def _list_reader(*names: str) -> Callable[[Reply], dict[str, float]]:
    def read(reply: Reply) -> dict[str, float]:
        scores = listed_scores(reply.text, count=len(names), low=0.0, high=25.0)
        return {"value": sum(scores) / len(scores), **dict(zip(names, scores, strict=True))}

    return read


_READERS: dict[str, Callable[[Reply], dict[str, float]]] = {
    "aspects": _read_aspects,
    "final": _read_final,
    "edit_following": _list_reader("success", "restraint"),
    "edit_quality": _list_reader("naturalness", "no_artifacts"),
}


class UnifiedReward(ChatJudge):
    """Points for an image and its prompt, from 1 to 5; for edits from 0 to 25.

    "aspects": the mean of alignment, coherence and style, which are parts. "final": the number after "Final Score:".
    "edit_following": the mean of how well an edit follows the prompt, its instruction ("success"), and of how little
    else it changes ("restraint"); the source image is the record's "source". "edit_quality": the mean of "naturalness"
    and "no_artifacts" of the edit alone. `**options` are those of `ChatJudge`, as is the address.
    """

    name = "unified_reward"
    unit = "points from 1 to 5"
    range = (1.0, 5.0)

    def __init__(self, *address: str, mode: Mode = "aspects", device: Any = "cpu", **options: Any) -> None:
        check_choices(self.name, mode=(mode, _READERS))
        self.mode = mode
        if mode.startswith("edit"):
            self.unit, self.range = "points from 0 to 25", (0.0, 25.0)
        self._shows_source = mode == "edit_following"
        images = [""] * (1 + self._shows_source)
        name = f"unified_reward_{mode}"
        self.default_template = question(name, published_prompt(name), images=images)
        self.required_fields = () if mode == "edit_quality" else ("prompt",)
        super().__init__(*address, device=device, **options)
        self.identity = self.make_identity(mode=mode, **self.sampling)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images; of the metadata only an edit's "source" is read."""
        request = read_request(self.name, images, prompts, metadata)
        return self.score_answers(request, _READERS[self.mode], self.unit, source=self._shows_source)
