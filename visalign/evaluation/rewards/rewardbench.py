# SPDX-License-Identifier: Apache-2.0
"""RewardBench 2 (arXiv 2506.01937): best of n answers, and questions with several right answers ("ties").

A row of the benchmark is read as the pairs of its right and wrong answers, which share `prompt_id`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from visalign.data.sets.records import PreferencePair

Array = NDArray[np.float64]


def best_of_n_credit(margin: Array) -> float:
    """Credit a right answer by its margins over the others: 1/m if it is among m with the highest score, else 0."""
    return 0.0 if (margin < 0).any() else 1 / (1 + int((margin == 0).sum()))


def ties_score(tied: Sequence[Array], single: Sequence[Array]) -> float:
    """Score questions by their margins [right, wrong], with several right answers and with one of them.

    With g = worst right − best wrong, g₁ that of the single one, s = best right − worst right: 0.3 mean[g > 0] +
    0.3 mean[g₁ > 0] + 0.2 mean[g > s] + 0.2 mean[min(g, g₁) > s] + 0.01 mean tanh(min(g, g₁)/s − 1), 0/0 as 0.
    """
    gap, single_gap = (np.array([table.min() for table in tables]) for tables in (tied, single))
    spread, lesser = np.array([np.ptp(table[:, 0]) for table in tied]), np.minimum(gap, single_gap)
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.nan_to_num(np.tanh(lesser / spread - 1))
    terms = ((0.3, gap > 0), (0.3, single_gap > 0), (0.2, gap > spread), (0.2, lesser > spread), (0.01, excess))
    return float(sum(weight * values.mean() for weight, values in terms))


def benchmark_scores(
    pairs: Sequence[PreferencePair], margin: Array
) -> tuple[dict[str, Array], tuple[float, int] | None]:
    """Return subset -> credits and counts [2, N], each question's at its first pair, and the ties' score and number.

    Questions with a missing score count nowhere. Ties are the questions `tied:N` with their `ref:N`.
    """
    questions: dict[str, dict[tuple[str, ...], int]] = {}
    for number, pair in enumerate(pairs):
        if "distinct_pairs" in pair.extra and pair.label in (0, 1):
            right_first = (pair.image_left, pair.image_right)[:: 1 if pair.label else -1]
            questions.setdefault(pair.group, {})[right_first] = number
    signed = np.where([pair.label == 1 for pair in pairs], margin, -margin)
    tables, credits = dict[str, Array](), dict[str, Array]()
    for question, numbers in questions.items():
        right, wrong = (dict.fromkeys(answers) for answers in zip(*numbers, strict=True))
        first, table = min(numbers.values()), np.array([[np.nan]])  # of a question that a limit cut
        if len(numbers) == pairs[first].extra["distinct_pairs"]:
            table = np.array([[signed[numbers[r, w]] for w in wrong] for r in right])
        is_scored, is_tie = bool(np.isfinite(table).all()), question.startswith(("tied:", "ref:"))
        if is_scored and is_tie:
            tables[question] = table
        elif not is_tie:
            column = credits.setdefault(pairs[first].category or "all", np.zeros((2, len(pairs))))
            column[:, first] = (best_of_n_credit(table), 1) if is_scored else 0
    names = [q[4:] for q in tables if q.startswith("tied") and f"ref{q[4:]}" in tables]
    tied, single = ([tables[f"{kind}{name}"] for name in names] for kind in ("tied", "ref"))
    return credits, (ties_score(tied, single), len(names)) if names else None
