# SPDX-License-Identifier: Apache-2.0
"""A ranking of images as plain values, and its page with the images."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from visalign.evaluation.pages.rank_page import SHOWN, rank_page
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.pipelines.score.provenance import domain_note, provenance
from visalign.pipelines.score.report import load_shown_images
from visalign.pipelines.score.score import finite_or_none
from visalign.rewards.pairs.ranking import Ranking


def ranking_record(
    found: Ranking,
    names: Sequence[str],
    prompt: str,
    reward: str,
    judge: PointwiseReward | PairwiseReward,
) -> dict[str, Any]:
    """A ranking as JSON: the judged images in order, then the others with their reasons.

    Returns:
        `images`, best first, each with `place` (None where not judged), `score`, `low`, `high`, `reason` and,
        of a judge that compares, `calls` it stood in; `calls`, `all_pairs` of the readable images,
        `position_bias` with its deviation, and `asked`: every call with its `left` and `right` image, `prob`
        that the left one is better, or the `reason` why there is no answer.
    """
    is_pairwise = found.pairs is not None
    compared = set() if found.pairs is None else set(found.pairs.flatten().tolist())
    readable = len(compared | set(found.order))
    asked = _asked(found, names)
    judged = set(found.order)
    others = [row for row in range(len(names)) if row not in judged]
    own = Counter(call[side] for call in asked for side in ("left", "right"))
    rows = []
    for place, row in enumerate([*found.order, *others], 1):
        rows.append(
            {
                "place": place if row in judged else None,
                "image": names[row],
                "score": finite_or_none(found.score[row]),
                "low": finite_or_none(found.low[row]),
                "high": finite_or_none(found.high[row]),
                "reason": None if row in judged else found.reason[row] or "not judged",
            }
            | ({"calls": own[names[row]]} if is_pairwise else {})
        )
    return {
        "format": "visalign ranking 1",
        "prompt": prompt,
        "judge": reward,
        "unit": found.unit,
        "whose": provenance(judge),
        "caution": domain_note(judge, [prompt]),
        "higher_is_better": is_pairwise or judge.higher_is_better,
        "level": found.level,
        "calls": found.calls,
        "all_pairs": readable * (readable - 1) // 2,
        "position_bias": found.bias,
        "position_bias_std": found.bias_std,
        "asked": asked if is_pairwise else None,
        "images": rows,
    }


def ranking_page(result: Mapping[str, Any]) -> str:
    """The page of a ranking, with its best images inside."""
    return rank_page(result, load_shown_images(row["image"] for row in result["images"][:SHOWN]))


def _asked(found: Ranking, names: Sequence[str]) -> list[dict[str, Any]]:
    """Every call of a judge that compares."""
    if found.pairs is None or found.answers is None:
        return []
    calls = zip(found.pairs.tolist(), found.answers.prob.tolist(), found.answers.reasons, strict=True)
    return [
        {"left": names[left], "right": names[right], "prob": finite_or_none(prob), "reason": reason}
        for (left, right), prob, reason in calls
    ]
