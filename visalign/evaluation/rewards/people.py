# SPDX-License-Identifier: Apache-2.0
"""Agreement of people with one another where a set has votes: the ceiling for a reward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from visalign.evaluation.statistics.agreement import Array, alpha_of_sums, alpha_sums, leave_one_out, majority_credit
from visalign.evaluation.statistics.intervals import Interval, RatioTable, bootstrap, cluster_sums, interval

from .judged_pairs import IntervalSettings, JudgedPairs


def people_numbers(judged: JudgedPairs, settings: IntervalSettings) -> dict[str, Any]:
    """Predict people's votes by other people and by the reward, on `pairs_with_votes` of two votes or more.

    `single_vote` is how often the majority of the others predicts one, `judge_single_vote` how often the reward does;
    `alpha` is Krippendorff's. Each has an interval; NaN without votes.
    """
    votes = np.array([pair.votes or (0, 0, 0) for pair in judged.pairs], dtype=np.float64)
    repeated = votes.sum(1) > 1
    choice = np.stack([judged.margin > 0, judged.margin < 0, judged.margin == 0], axis=1).astype(float)
    table = RatioTable(judged.index, judged.clusters)
    table.add("single_vote", *leave_one_out(votes))
    table.add("judge_single_vote", *majority_credit(votes * repeated[:, None], choice))
    shares = table.intervals(**settings.drawing(), level=settings.level)
    by_prompt = cluster_sums(alpha_sums(votes), judged.index, judged.clusters)
    alpha = alpha_interval(by_prompt, alpha_of_sums, settings)
    return {
        "pairs_with_votes": int((votes.sum(1) > 0).sum()),
        "single_vote": shares["single_vote"].to_dict(),
        "judge_single_vote": shares["judge_single_vote"].to_dict(),
        "alpha": alpha.to_dict(),
    }


def alpha_interval(sums: Array, statistic: Callable[[Array], Array], settings: IntervalSettings) -> Interval:
    """Compute α from the sums [C, M] of each prompt; `statistic` maps [R, M] to α [R]."""
    sums = sums[sums[:, 1:].sum(1) > 0]  # a prompt without two votes says nothing
    if not len(sums):
        return Interval(estimate=math.nan, level=settings.level)
    draws = bootstrap(sums, lambda s: statistic(s)[:, None], **settings.drawing())[:, 0]
    return interval(float(statistic(sums.sum(0)[None])[0]), draws, len(sums), level=settings.level)
