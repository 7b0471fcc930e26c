# SPDX-License-Identifier: Apache-2.0
"""Several rewards for text as one, with every term on record: `WeightedSum` for completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from visalign.interfaces import Metadata, Prompt, Scores, TextReward
from visalign.rewards.combine.weighted_sum import Normalise, WeightedTerms

from .contract import read_text_request


class WeightedTextSum:
    """`WeightedSum` of rewards for text: the same formula, normalisations, refusals and parts.

    With normalise="batch" the z-scores are over the completions of one call.
    """

    higher_is_better = True

    def __init__(
        self,
        rewards: Mapping[str, tuple[TextReward, float]],
        *,
        normalise: Normalise = "none",
        allow_mixed_units: bool = False,
        name: str = "weighted_text_sum",
    ) -> None:
        self.name = name
        self._terms = WeightedTerms(
            name, rewards, normalise=normalise, allow_mixed_units=allow_mixed_units, noun="completion"
        )
        self.rewards, self.unit, self.range = self._terms.rewards, self._terms.unit, self._terms.range

    def score(
        self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None
    ) -> Scores:
        """Judge with every reward and add up; each reward gets lists of its own.

        Raises:
            RewardError: a reward raised, or did not return one score per completion; by its label.
        """
        request = read_text_request(self.name, completions, prompts, metadata)

        def judge(reward: TextReward) -> Scores:
            return reward.score(list(request.completions), list(request.prompts), list(request.metadata))

        return self._terms.add_up(judge, list(range(len(request))), [None] * len(request))
