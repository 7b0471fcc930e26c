# SPDX-License-Identifier: Apache-2.0
"""RewardBench 2's numbers of a reward of texts: best of n, and questions with several right answers.

Source: Malik et al., RewardBench 2, arXiv 2506.01937, as its code computes them (allenai/reward-bench, 05a9005).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def best_of_credit(scores: ArrayLike) -> Array:
    """Return the credit [N] of scores [N, n] whose first column is the right response.

    1/m if it is among the m responses with the highest score, else 0.
    """
    table = np.asarray(scores, dtype=np.float64)
    highest = table == table.max(1, keepdims=True)
    return np.where(highest[:, 0], 1.0 / highest.sum(1), 0.0)


def ties_score(
    kinds: Sequence[str], questions: Sequence[Any], right: Sequence[int], scores: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Score questions with several right answers ("tied"), each next to its twin with a single one ("ref").

    Right answers come first in `scores`, `right` is their number. A question is accurate if its worst right answer
    beats its best wrong one, by the gap; the spread is that of its right answers. The score is 0.3 acc(tied) +
    0.3 acc(ref) + 0.2 mean(gap_tied > spread) + 0.2 mean(min(gap_ref, gap_tied) > spread) + 0.01 mean
    tanh(min(gap_ref, gap_tied)/spread − 1), 0/0 counted 0.
    """
    spread, gap = np.full(len(kinds), np.nan), np.full(len(kinds), np.nan)
    for row, (count, values) in enumerate(zip(right, scores, strict=True)):
        spread[row] = max(values[:count]) - min(values[:count]) if count > 1 else np.nan
        gap[row] = min(values[:count]) - max(values[count:])
    rows = {
        kind: {q: row for row, (k, q) in enumerate(zip(kinds, questions, strict=True)) if k == kind} for kind in kinds
    }
    shared = [question for question in rows.get("tied", {}) if question in rows.get("ref", {})]
    tied, ref = ([rows[kind][question] for question in shared] for kind in ("tied", "ref"))
    narrowest = np.minimum(gap[tied], gap[ref])
    with np.errstate(divide="ignore", invalid="ignore"):
        margin = np.nan_to_num(np.tanh(narrowest / spread[tied] - 1), nan=0.0)
    accurate = gap > 0
    score = 0.3 * accurate[[k == "tied" for k in kinds]].mean() + 0.3 * accurate[[k == "ref" for k in kinds]].mean()
    score += 0.2 * (gap[tied] > spread[tied]).mean() + 0.2 * (narrowest > spread[tied]).mean() + 0.01 * margin.mean()
    return {"score": float(score), "accurate": accurate.astype(int), "spread": spread, "gap": gap}
