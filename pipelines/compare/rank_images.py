# SPDX-License-Identifier: Apache-2.0
"""Rankings of images as JSON and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from visalign.errors import UserError, excerpt
from visalign.evaluation.pages.rank_page import SHOWN, rank_page
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.pipelines.score.image_rows import image_rows
from visalign.pipelines.score.provenance import domain_note, provenance
from visalign.pipelines.score.report import load_shown_images
from visalign.pipelines.score.score import finite_or_none
from visalign.rewards.pairs.ranking import Ranking


def completions_to_rank(items: Sequence[Path], prompt: str | None) -> tuple[list[str], str]:
    """Read tables of completions of one prompt: their references, and the prompt."""
    rows = image_rows(items, prompt)
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    if len(prompts) > 1:
        raise UserError(
            f"The tables hold {len(prompts)} prompts, {excerpt(prompts[0])} and {excerpt(prompts[1])} among them, and "
            "answers are ranked under one. Keep the rows of one prompt; visalign score ranks within each."
        )
    return list(dict.fromkeys(row.image for row in rows)), prompts[0]


def ranking_record(
    ranking: Ranking, names: Sequence[str], prompt: str, reward: str, judge: PointwiseReward | PairwiseReward
) -> dict[str, Any]:
    """Convert a ranking to JSON: judged images, best first, others with reasons; of a pairwise judge every call."""
    is_pairwise = ranking.pairs is not None
    calls: list[dict[str, Any]] = []
    if ranking.pairs is not None and ranking.answers is not None:
        answers = zip(ranking.pairs.tolist(), ranking.answers.prob.tolist(), ranking.answers.reasons, strict=True)
        for (left, right), prob, reason in answers:
            pair = {"left": names[left], "right": names[right]}
            calls.append(pair | {"prob": finite_or_none(prob), "reason": reason})
    counts = Counter(call[side] for call in calls for side in ("left", "right"))
    readable = len(counts.keys() | {names[row] for row in ranking.order})
    unjudged = [row for row in range(len(names)) if row not in set(ranking.order)]
    rows = []
    for position, row in enumerate([*ranking.order, *unjudged], 1):
        is_judged = position <= len(ranking.order)
        entry = {"place": position if is_judged else None, "image": names[row]}
        entry |= {name: finite_or_none(getattr(ranking, name)[row]) for name in ("score", "low", "high")}
        entry["reason"] = None if is_judged else ranking.reason[row] or "not judged"
        rows.append(entry | ({"calls": counts[names[row]]} if is_pairwise else {}))
    return {
        "format": "visalign ranking 1",
        "prompt": prompt,
        "judge": reward,
        "unit": ranking.unit,
        "provenance": provenance(judge),
        "warning": domain_note(judge, [prompt]),
        "higher_is_better": is_pairwise or not isinstance(judge, PointwiseReward) or judge.higher_is_better,
        "level": ranking.level,
        "calls": ranking.calls,
        "all_pairs": readable * (readable - 1) // 2,
        "position_bias": ranking.bias,
        "position_bias_std": ranking.bias_std,
        "asked": calls if is_pairwise else None,
        "images": rows,
    }


def ranking_page(result: Mapping[str, Any]) -> str:
    return rank_page(result, load_shown_images(row["image"] for row in result["images"][:SHOWN]))
