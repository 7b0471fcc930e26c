# SPDX-License-Identifier: Apache-2.0
"""Compare two images of one prompt by several judges, and rankings of images, as JSON and as a page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.errors import Naming, UserError, excerpt
from visalign.evaluation.pages.rank_page import SHOWN, rank_page
from visalign.interfaces import PairwiseReward, PointwiseReward, Preferences, Scores, score_named
from visalign.pipelines.score.image_rows import image_rows, require_still, require_text_name, shared_metadata
from visalign.pipelines.score.provenance import domain_note, provenance
from visalign.pipelines.score.report import load_shown_images
from visalign.pipelines.score.score import finite_or_none
from visalign.rewards.base.failure import failure_reasons
from visalign.rewards.base.images import load_images
from visalign.rewards.pairs.as_pairwise import TIE, PairsFromScores, logistic_odds, normal_odds
from visalign.rewards.pairs.asking import check_preferences, read_preferences
from visalign.rewards.pairs.ranking import Ranking

SIDES = ("A", "B")
SURE, EVEN = 0.75, 0.55  # A judge is sure of the image that it prefers with 75 % or more; below 55 % it sees a tie
SURE_MOVES = 3.0
"""A score without uncertainty is sure of a difference of so many times its change under invisible changes."""
RULE = (
    f"sure from {SURE:.0%}, a tie below {EVEN:.0%}; a judge that gives no probability is sure of a "
    f"difference {SURE_MOVES:g} times as large as what invisible changes (a shift by one pixel, one grey "
    "level) move its scores, and sees a tie in one that is no larger"
)


def read_two(paths: Sequence[Path]) -> list[Tensor]:
    """Read two images [3, H, W] in [0, 1], which may differ in size."""
    for path in paths:
        require_text_name(path)
        require_still(path)
    batch = load_images([str(path) for path in paths])
    for side, reason in zip(SIDES, batch.reasons, strict=True):
        if reason is not None:
            raise UserError(f"Image {side} cannot be read: {reason}.")
    return [image for image in batch.images if image is not None]


def compare_images(
    images: Sequence[Tensor], prompt: str, judges: Mapping[str, PointwiseReward | PairwiseReward]
) -> dict[str, Any]:
    """Ask judges which of two images, A and B, [3, H, W] in [0, 1], is better; the answers as JSON.

    A pointwise judge scores both; the probability that A is better follows from its standard deviations or log-odds. A
    pairwise judge is asked in both orders: (ℓ_AB − ℓ_BA)/2 is for A, (ℓ_AB + ℓ_BA)/2 is its position bias. `RULE` says
    when a judge is sure, unsure or sees a tie.
    """
    entries = []
    for label, judge in judges.items():
        with Naming(label):
            compare = _compare_scores if isinstance(judge, PointwiseReward) else _compare_orders
            entry = compare(judge, images, prompt)
        entry = {"label": label, **_NO_RESULT, **entry, "provenance": provenance(judge)}
        entry["warning"] = domain_note(judge, [prompt])
        entry["notes"] += filter(None, [entry["warning"]])
        entries.append(entry)
    votes: dict[str, list[str]] = {}
    for entry in entries:
        votes.setdefault(entry["winner"], []).append(entry["label"])
    unsure = [entry["label"] for entry in entries if entry["sure"] is False]
    result = {"format": "visalign comparison 1", "prompt": prompt, "judges": entries, "votes": votes}
    return result | {"unsure": unsure, "rule": RULE, "summary": _summary(votes, entries)}


_NO_RESULT = {"winner": "failed", "sure": None, "prob": None, "difference": None, "difference_std": None}


def _compare_scores(judge: Any, images: Sequence[Tensor], prompt: str) -> dict[str, Any]:
    scores = score_named(judge, list(images), [prompt] * 2, [None] * 2, name=judge.name)
    sides = {}
    for row, (name, reason) in enumerate(zip(SIDES, failure_reasons(scores), strict=True)):
        sides[name] = {"value": finite_or_none(scores.value[row])} | _describe(scores, row, reason)
    notes = [f"{name}: {side['reason']}" for name, side in sides.items() if side["reason"]]
    entry: dict[str, Any] = {"kind": "scores", "unit": judge.unit, "higher_is_better": judge.higher_is_better}
    entry |= {"sides": sides, "notes": notes}
    values, stds = ([side[name] for side in sides.values()] for name in ("value", "std"))
    if None in values:
        return entry
    gap = values[0] - values[1]
    spread = None if None in stds else math.hypot(*stds)
    better = gap if judge.higher_is_better else -gap
    prob = _probability(judge, better, spread or 0.0)
    entry |= {"difference": gap, "difference_std": spread, "prob": prob}
    tie = TIE * max(map(abs, values))
    if prob is None:
        moved = _invisible_change(judge, images, prompt, values)
        entry |= {"moved": moved} | _decide(better, abs(gap) <= max(moved, tie))
        entry["sure"] = entry["sure"] and abs(gap) >= SURE_MOVES * moved  # None of a tie stays
        notes.append(f"it gives no uncertainty; invisible changes move its scores by up to {moved:.3g}")
    else:
        entry |= _decide(better, abs(gap) <= tie, prob)
    if not judge.higher_is_better:
        notes.append("lower is better")
    return entry


def _decide(better: float, is_tie: bool, prob: float | None = None) -> dict[str, Any]:
    """Name the winner, and whether the judge is sure of it; None where there is none."""
    certainty = 1.0 if prob is None else max(prob, 1 - prob)
    if is_tie or certainty < EVEN:
        return {"winner": "tie", "sure": None}
    return {"winner": SIDES[better < 0], "sure": certainty >= SURE}


def _invisible_change(judge: Any, images: Sequence[Tensor], prompt: str, values: Sequence[float]) -> float:
    """Measure the largest change of a score under a shift by one pixel and by one grey level."""
    copies = [copy for image in images for copy in (image.roll(1, -1), (image + 1 / 255).clamp(0, 1))]
    scores = judge.score(copies, [prompt] * 4, [None] * 4)
    numbers = [finite_or_none(value) for value in scores.value]
    return max((abs(v - values[k // 2]) for k, v in enumerate(numbers) if v is not None), default=0.0)


def _probability(judge: PointwiseReward, better: float, spread: float) -> float | None:
    """P(A better), or None where the judge has neither log-odds nor uncertainty."""
    gap, std = (torch.tensor([value], dtype=torch.float64) for value in (better, spread))
    if PairsFromScores(judge).link == "logistic":
        return float(logistic_odds(gap, std).sigmoid())
    return None if spread == 0 else float(normal_odds(gap, std, gap.abs()).sigmoid())


def _describe(answer: Scores | Preferences, row: int, reason: str | None) -> dict[str, Any]:
    return {
        "std": None if answer.std is None else finite_or_none(answer.std[row]),
        "parts": {name: finite_or_none(part[row]) for name, part in answer.parts.items()},
        "text": answer.text[row] if answer.text else None,
        "reason": reason,
    }


def _compare_orders(judge: Any, images: Sequence[Tensor], prompt: str) -> dict[str, Any]:
    answer = judge.compare(list(images), list(images[::-1]), [prompt] * 2, [None] * 2)
    read = read_preferences(check_preferences(judge.name, answer, 2))
    log_odds = [finite_or_none(value) for value in read.log_odds]
    orders = []
    for row, side in enumerate(SIDES):
        prob = None if log_odds[row] is None else finite_or_none(answer.prob[row])
        order = {"left": side, "prob": prob, "log_odds": log_odds[row]}
        orders.append(order | _describe(answer, row, read.reasons[row]))
    notes = [f"{order['left']} on the left: {order['reason']}" for order in orders if order["reason"]]
    entry: dict[str, Any] = {"kind": "comparisons", "unit": "log-odds", "higher_is_better": True, "orders": orders}
    entry |= {"position_bias": None, "same_winner": None, "notes": notes}
    # log-odds for A: negated where B is on the left
    odds = [sign * value for sign, value in zip((1, -1), log_odds, strict=True) if value is not None]
    if not odds:
        return entry
    mean = sum(odds) / len(odds)
    prob = 1 / (1 + math.exp(-mean))
    entry |= {"difference": mean, "prob": prob} | _decide(mean, False, prob)
    if len(odds) == 1:
        notes.append("it answered in one order only, so its position bias is not known")
        return entry
    entry["position_bias"] = (odds[0] - odds[1]) / 2
    entry["same_winner"] = odds[0] * odds[1] > 0 or odds[0] == odds[1]  # two ties agree
    if not entry["same_winner"]:
        entry |= {"winner": "undecided", "sure": None}
        notes.append("its winner depends on which image is on the left")
    return entry


def _summary(votes: Mapping[str, Sequence[str]], entries: Sequence[Mapping[str, Any]]) -> str:
    count = len(entries) - len(votes.get("failed", ()))
    if not count:
        return "No judge could judge the two images."
    won = {side: len(votes.get(side, ())) for side in SIDES}
    undecided = count - sum(won.values())
    if not sum(won.values()):
        return f"No winner: {count} of {count} judges see a tie or are undecided."
    rest = f", {undecided} tied or undecided" if undecided else ""
    best, second = sorted(SIDES, key=lambda side: -won[side])
    if won[best] == won[second]:
        return f"The judges are split: {won['A']} for A, {won['B']} for B{rest}."
    unsure = sum(entry["sure"] is False for entry in entries)
    if count == 1:
        return f"{best} rather than {second}, but the judge is unsure." if unsure else f"{best} is better."
    doubt = f" ({unsure} of the judges unsure)" if unsure else ""
    return f"{best} is better for {won[best]} of {count} judges, {second} for {won[second]}{rest}{doubt}."


def samples_to_rank(items: Sequence[Path], prompt: str | None) -> tuple[list[str], str, dict[str, Any]]:
    """Read tables of images or completions of one prompt: their references, the prompt, and their common metadata."""
    rows = image_rows(items, prompt)
    prompts = list(dict.fromkeys(row.prompt for row in rows))
    if len(prompts) > 1:
        raise UserError(
            f"The tables hold {len(prompts)} prompts, {excerpt(prompts[0])} and {excerpt(prompts[1])} among them, and "
            "answers are ranked under one. Keep the rows of one prompt; visalign score ranks within each."
        )
    return list(dict.fromkeys(row.image for row in rows)), prompts[0], shared_metadata(rows)


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
