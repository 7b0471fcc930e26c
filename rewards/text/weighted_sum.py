# SPDX-License-Identifier: Apache-2.0
"""Several rewards for text as one, with every term on record: `WeightedSum` for completions."""

from __future__ import annotations

from collections.abc import Sequence

from visalign.interfaces import Metadata, Prompt, Scores, TextReward
from visalign.rewards.combine.weighted_sum import WeightedSum

from .contract import read_text_request


class WeightedTextSum(WeightedSum):
    """`WeightedSum` of rewards for text: the same formula, options, normalisations, refusals and parts.

    With normalise="batch" the z-scores are over the completions of one call.
    """

    noun = "completion"

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """Judge with every reward and add up; each reward gets lists of its own."""
        request = read_text_request(self.name, completions, prompts, metadata)

        def judge(reward: TextReward) -> Scores:
            return reward.score(list(request.completions), list(request.prompts), list(request.metadata))

        return self.add_up(judge, list(range(len(request))), [None] * len(request))
