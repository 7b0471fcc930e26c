# SPDX-License-Identifier: Apache-2.0
"""Several rewards for text as one, with every term on record: `WeightedSum` for completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from visalign.interfaces import Metadata, Prompt, Scores, TextReward
from visalign.rewards.combine.weighted_sum import Normalise, WeightedTerms

from .contract import read_text_request


class WeightedTextSum:
    """value = Σ_m w_m · d_m · n_m(r_m) over text rewards m; d_m is −1 where lower is better.

    n_m is the identity, (r − mean_m) / std_m with fixed numbers, or the z-score over the valid completions of
    the batch. A sample is invalid when any reward with w_m > 0 could not judge it. A weight of 0 only records
    a reward. The parts are those of `WeightedSum`: "m", "m.weighted", and "m.x" for each part x of m.
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
        """Check the terms.

        Args:
            rewards: label -> (reward, weight); weights are at least 0, one of them above.
            normalise: "none"; "batch" (z-scores over the completions of one call: then a score depends on its
                neighbours, which the contract otherwise forbids); or label -> (mean, std) for every reward
                with a weight.
            allow_mixed_units: sum raw scores of different units all the same.
            name: name of the sum.

        Raises:
            ValueError: no rewards, a bad weight, an unknown normalisation, or different units summed raw.
        """
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
