# SPDX-License-Identifier: Apache-2.0
"""How far people agree with one another where a set has votes: the measure of what a judge can reach."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from visalign.evaluation.statistics.agreement import (
    against_the_rest,
    alpha_of_sums,
    alpha_sums,
    leave_one_out,
)
from visalign.evaluation.statistics.intervals import Interval, RatioTable, bootstrap, cluster_sums, interval

from .judged_pairs import IntervalSettings, JudgedPairs

Array = NDArray[np.float64]

SHOWN = 24
"""Annotators that are shown; those with the most votes are."""


def people_numbers(judged: JudgedPairs, settings: IntervalSettings) -> dict[str, Any]:
    """People and the judge against people, vote by vote, on the pairs with two votes or more.

    Returns `pairs_with_votes`; `single_vote`, how often the majority of the others predicts a person's vote,
    and `judge_single_vote`, how often the judge does, on the same votes; `alpha` (Krippendorff's, of
    three classes); and `annotators`: name, `votes`, how often the `rest` and the `judge` predict theirs. Each
    has an interval; None where there are no votes.
    """
    votes = np.array([pair.votes or (0, 0, 0) for pair in judged.pairs], dtype=np.float64)
    known, many = votes.sum(1) > 0, votes.sum(1) > 1
    table = RatioTable(judged.index, judged.clusters)
    guess = np.stack([judged.margin > 0, judged.margin < 0, judged.margin == 0], axis=1).astype(float)
    table.add("single_vote", *leave_one_out(votes))
    table.add("judge_single_vote", *against_the_rest(votes * many[:, None], guess))
    annotators = _annotators(judged, votes, guess, table)
    found = table.intervals(**settings.drawing(), level=settings.level)
    sums = cluster_sums(alpha_sums(votes), judged.index, judged.clusters)
    with_votes = sums[sums[:, 1:].sum(1) > 0]
    alpha = Interval(estimate=float("nan"))
    if len(with_votes):
        draws = bootstrap(with_votes, lambda s: alpha_of_sums(s)[:, None], **settings.drawing())[:, 0]
        estimate = float(alpha_of_sums(with_votes.sum(0)[None])[0])
        alpha = interval(estimate, draws, len(with_votes), level=settings.level)
    return {
        "pairs_with_votes": int(known.sum()),
        "single_vote": found["single_vote"].to_dict(),
        "judge_single_vote": found["judge_single_vote"].to_dict(),
        "alpha": alpha.to_dict(),
        "annotators": [
            {
                "name": name,
                "votes": count,
                **{who: found[who, name].to_dict() for who in ("rest", "judge")},
            }
            for name, count in annotators
        ],
    }


def _annotators(judged: JudgedPairs, votes: Array, guess: Array, table: RatioTable) -> list[tuple[str, int]]:
    """Put each annotator's votes against the rest and the judge into the table; (name, votes) of each."""
    spoken = Counter(name for pair in judged.pairs for name, _ in pair.ballots)
    shown = spoken.most_common(SHOWN)
    own = {name: np.zeros_like(votes) for name, _ in shown}
    for row, pair in enumerate(judged.pairs):
        for name, said in pair.ballots:
            if name in own:
                own[name][row, 0 if said > 0.5 else 1 if said < 0.5 else 2] += 1
    for name, mine in own.items():
        rest = np.maximum(votes - mine, 0.0)
        table.add(("rest", name), *against_the_rest(mine, rest))
        table.add(("judge", name), *against_the_rest(mine * (rest.sum(1) > 0)[:, None], guess))
    return shown
