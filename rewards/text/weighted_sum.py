# SPDX-License-Identifier: Apache-2.0
"""Weighted sum of rewards for text, with every term among the parts."""

from __future__ import annotations

from collections.abc import Sequence

from visalign.interfaces import Metadata, Prompt, Scores, TextReward
from visalign.rewards.combine.weighted_sum import WeightedSum

from .contract import read_text_request


class WeightedTextSum(WeightedSum):
    """`WeightedSum` for completions; normalise="batch" takes z-scores over the completions of a call."""

    noun = "completion"

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Score with every reward and add up; each reward gets its own copies of the lists."""
        request = read_text_request(self.name, completions, prompts, metadata)

        def judge(reward: TextReward) -> Scores:
            return reward.score(list(request.completions), list(request.prompts), list(request.metadata))

        return self.add_up(judge, list(range(len(request))), [None] * len(request))
