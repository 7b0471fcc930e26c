# SPDX-License-Identifier: Apache-2.0
"""A reward corrected by image quality, which falls where a policy gains the reward at the cost of its images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from visalign.interfaces import Metadata, PointwiseReward, Scores, score_named, with_capabilities
from visalign.rewards.base.contract import RewardError, make_scores
from visalign.rewards.base.failure import failure_reasons


class Corrected:
    """A reward r corrected by the quality û of the image, in points from 1 to 5: r (û − 3) + 0.2.

    The parts are "reward" and "quality". An image that one of them could not score is invalid.

    Args:
        reward: the reward, in [0, 1] and higher is better, or its name for `load_reward`; `options` are its options.
        quality: the judge of quality, such as "unified_reward" or "q_align", likewise; `quality_options` are its own.

    GDRO, arXiv 2601.02036, its measure of reward hacking.
    """

    name = "corrected"
    unit = "reward times quality"
    range = (-1.8, 2.2)
    higher_is_better = True

    def __init__(
        self,
        reward: PointwiseReward | str,
        quality: PointwiseReward | str,
        *,
        options: Mapping[str, Any] | None = None,
        quality_options: Mapping[str, Any] | None = None,
        device: str | None = None,
    ) -> None:
        from visalign.rewards.catalogue import load_reward

        self.rewards: dict[str, Any] = {}
        for part, judge, chosen in (("reward", reward, options), ("quality", quality, quality_options)):
            if isinstance(judge, str):
                judge = load_reward(judge, run_device=device, **chosen or {})
            judge = self.rewards[part] = with_capabilities(judge)
            if judge.capabilities.needs_group or not judge.higher_is_better:
                reason = "lower is better" if not judge.higher_is_better else "it compares the images of a group"
                raise RewardError(f"corrected: {part} is {judge.name}, and {reason}. Give a score of single images.")

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B images against B prompts."""
        scores = [score_named(judge, images, prompts, metadata, name=part) for part, judge in self.rewards.items()]
        reasons = [first or second for first, second in zip(*map(failure_reasons, scores), strict=True)]
        reward, quality = (score.value.float().cpu() for score in scores)
        parts = {"reward": reward, "quality": quality}
        return make_scores(reward * (quality - 3) + 0.2, reasons, self.unit, parts=parts)
