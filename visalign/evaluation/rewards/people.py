# SPDX-License-Identifier: Apache-2.0
"""Agreement of people with one another where a set has votes: the ceiling for a reward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.evaluation.statistics.agreement import alpha_of_sums, alpha_sums, leave_one_out, majority_credit
from visalign.evaluation.statistics.intervals import (
    Interval,
    RatioTable,
    bootstrap,
    cluster_sums,
    interval,
)

from .judged_pairs import IntervalSettings, JudgedPairs

Array = NDArray[np.float64]


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
    alpha = alpha_interval(alpha_sums(votes), alpha_of_sums, judged.index, judged.clusters, settings)
    return {
        "pairs_with_votes": int((votes.sum(1) > 0).sum()),
        "single_vote": shares["single_vote"].to_dict(),
        "judge_single_vote": shares["judge_single_vote"].to_dict(),
        "alpha": alpha.to_dict(),
    }


def alpha_interval(
    sums: Array,
    statistic: Callable[[Array], Array],
    index: NDArray[np.int64],
    clusters: int,
    settings: IntervalSettings,
) -> Interval:
    """Compute α from sums [N, M] of items in clusters [N]; `statistic` maps sums of clusters [R, M] to α [R]."""
    by_prompt = cluster_sums(sums, index, clusters)
    by_prompt = by_prompt[by_prompt[:, 1:].sum(1) > 0]  # a prompt without two votes says nothing
    if not len(by_prompt):
        return Interval(estimate=math.nan, level=settings.level)
    draws = bootstrap(by_prompt, lambda s: statistic(s)[:, None], **settings.drawing())[:, 0]
    estimate = float(statistic(by_prompt.sum(0)[None])[0])
    return interval(estimate, draws, len(by_prompt), level=settings.level)
