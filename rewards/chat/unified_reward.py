# SPDX-License-Identifier: Apache-2.0
"""UnifiedReward: a vision-language model gives an image, or an edit of one, points.

Source: Wang et al., "Unified Reward Model for Multimodal Understanding and Generation", arXiv 2503.05236, its
versions 2.0 and Edit; checkpoints CodeGoat24/UnifiedReward-*. The questions are those of their training
(`published_wording`). Peers score an answer that cannot be read 0 or with the batch mean; here it is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from visalign.interfaces import Metadata, Scores
from visalign.rewards.base.contract import RewardError, read_request
from visalign.rewards.reading.ratings import all_aspects, aspect_mean, final_score, listed_scores

from .asking import ServedJudge
from .messages import Reply, question
from .published_wording import PUBLISHED

Mode = Literal["aspects", "final", "edit_following", "edit_quality"]


def _aspects(reply: Reply) -> dict[str, float]:
    scores = all_aspects(reply.text)
    return {"value": aspect_mean(scores)[0], **scores}


def _final(reply: Reply) -> dict[str, float]:
    return {"value": final_score(reply.text)}


def _listed(*names: str) -> Callable[[Reply], dict[str, float]]:
    def read(reply: Reply) -> dict[str, float]:
        scores = listed_scores(reply.text, count=len(names), low=0.0, high=25.0)
        return {"value": sum(scores) / len(scores), **dict(zip(names, scores, strict=True))}

    return read


_READERS: dict[str, Callable[[Reply], dict[str, float]]] = {
    "aspects": _aspects,
    "final": _final,
    "edit_following": _listed("success", "restraint"),
    "edit_quality": _listed("naturalness", "no_artifacts"),
}


class UnifiedReward(ServedJudge):
    """Points for an image and its prompt, from 1 to 5; for edits from 0 to 25.

    "aspects": the mean of alignment, coherence and style, which are in the parts. "final": the number after
    "Final Score:". "edit_following": the mean of how well an edit does what the prompt, its instruction, asks
    for ("success"), and of how little else it changes ("restraint"); the source image is the record's
    "source", a file, a PIL image or an array. "edit_quality": the mean of "naturalness" and "no_artifacts" of
    the edit alone. With more than one answer the score is their mean, with their standard deviation.
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
        mode: Mode = "aspects",
        device: Any = "cpu",
        **asking: Any,
    ) -> None:
        """Say who is asked, and what.

        Args:
            base_url: see `ServedJudge`.
            model: see `ServedJudge`.
            mode: "aspects", "final", "edit_following" or "edit_quality".
            device: see `ServedJudge`.
            **asking: of `ServedJudge`; the template holds {prompt} where the published one does.
        """
        if mode not in get_args(Mode):
            raise RewardError(f"{self.name}: mode is {mode!r}; allowed are {', '.join(get_args(Mode))}.")
        self.mode = mode
        if mode.startswith("edit"):
            self.unit, self.range = "points from 0 to 25", (0.0, 25.0)
        self._source = mode == "edit_following"
        default = question(f"unified_reward_{mode}", PUBLISHED[mode], images=[""] * (1 + self._source))
        needed = () if mode == "edit_quality" else ("prompt",)
        super().__init__(
            base_url, model, **{"default": default, "needed": needed, "device": device, **asking}
        )
        self.identity = self.identified(mode=mode, **self.drawing)

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Points per image; of the metadata an edit's "source" is looked at."""
        request = read_request(self.name, images, prompts, metadata)
        return self.rate(request, _READERS[self.mode], self.unit, source=self._source)
