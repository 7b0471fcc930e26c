# SPDX-License-Identifier: Apache-2.0
"""Two images of one prompt before judges: which, by how much, how sure, why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visalign.core.preference.ranking import MAX_LOG_ODDS
from visalign.errors import UserError
from visalign.interfaces import PairwiseReward, PointwiseReward, Preferences, Scores
from visalign.pipelines.score.image_rows import require_still, require_text_name
from visalign.pipelines.score.provenance import domain_note, provenance
from visalign.pipelines.score.score import finite_or_none
from visalign.rewards.base.contract import RewardError
from visalign.rewards.base.failure import Naming, failure_reasons
from visalign.rewards.base.images import load_images
from visalign.rewards.pairs.as_pairwise import TIE, PairsFromScores, logistic_odds, normal_odds

SIDES = ("A", "B")
SURE, EVEN = 0.75, 0.55
"""A judge is sure of the image that it prefers with 75 % or more; below 55 % it sees a tie."""
SURE_MOVES = 3.0
"""A score without uncertainty is sure of a difference of so many times what an invisible change moves it."""
RULE = (
    f"sure from {SURE:.0%}, a tie below {EVEN:.0%}; a judge that gives no probability is sure of a "
    f"difference {SURE_MOVES:g} times as large as what invisible changes (a shift by one pixel, one grey "
    "level) move its scores, and sees a tie in one that is no larger"
)


def read_two(paths: Sequence[Path]) -> list[Tensor]:
    """The two images [3, H, W] in [0, 1]; sizes may differ."""
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
    """Ask judges about two images.

    A pointwise judge scores both, in one call; the probability that A is better follows from its standard
    deviations, or from its scores where they are log-odds, as in `visalign.rewards.as_pairwise`. A pairwise
    judge is asked in both orders, and its log-odds are averaged: (ℓ_AB − ℓ_BA)/2 is for A, (ℓ_AB + ℓ_BA)/2
    is what standing on the left is worth. Each judge is sure, unsure or sees a tie by `RULE`.

    Args:
        images: A and B, [3, H, W] in [0, 1].
        prompt: What both should show.
        judges: Label -> judge.

    Returns:
        JSON-able: `prompt`, `judges` (an entry each), `votes` (winner -> labels), `unsure` (labels), `rule`,
        `summary`.
    """
    if len(images) != 2:
        raise UserError(f"{len(images)} images were given; compare takes two. Use visalign rank for more.")
    if not judges:
        raise UserError("No judge was named. Add --reward NAME.")
    entries = []
    for label, judge in judges.items():
        with Naming(label):
            if isinstance(judge, PointwiseReward):
                entries.append(_scored(label, judge, images, prompt))
            else:
                entries.append(_compared(label, judge, images, prompt))
            entries[-1]["whose"] = provenance(judge)
            entries[-1]["notes"] += filter(None, [domain_note(judge, [prompt])])
    votes: dict[str, list[str]] = {}
    for entry in entries:
        votes.setdefault(entry["winner"], []).append(entry["label"])
    return {
        "format": "visalign comparison 1",
        "prompt": prompt,
        "judges": entries,
        "votes": votes,
        "unsure": [entry["label"] for entry in entries if entry["sure"] is False],
        "rule": RULE,
        "summary": _summary(votes, entries),
    }


def _scored(label: str, judge: PointwiseReward, images: Sequence[Tensor], prompt: str) -> dict[str, Any]:
    scores = judge.score(list(images), [prompt] * 2, [None] * 2)
    if not isinstance(scores, Scores) or len(scores) != 2:
        raise RewardError(f"Reward {label!r} did not return one score for each image.")
    reasons = failure_reasons(scores)
    sides = [_side(scores, row, reasons[row]) for row in (0, 1)]
    entry: dict[str, Any] = {
        "label": label,
        "kind": "scores",
        "unit": judge.unit,
        "higher_is_better": judge.higher_is_better,
        "sides": dict(zip(SIDES, sides, strict=True)),
        "winner": "failed",
        "sure": None,
        "prob": None,
        "difference": None,
        "difference_std": None,
        "notes": [
            f"{side}: {found['reason']}" for side, found in zip(SIDES, sides, strict=True) if found["reason"]
        ],
    }
    values = [found["value"] for found in sides]
    if None in values:
        return entry
    gap = values[0] - values[1]
    stds = [found["std"] for found in sides]
    spread = 0.0 if None in stds else math.hypot(*stds)
    entry |= {"difference": gap, "difference_std": spread if None not in stds else None}
    better = gap if judge.higher_is_better else -gap
    entry["prob"] = _probability(judge, better, spread)
    if entry["prob"] is None:
        moved = _moved(judge, images, prompt, values)
        entry |= {"moved": moved} | _decided(better, abs(gap) <= max(moved, TIE * max(map(abs, values))))
        entry["sure"] = entry["sure"] and abs(gap) >= SURE_MOVES * moved
        entry["notes"].append(
            f"it gives no uncertainty; invisible changes move its scores by up to {moved:.3g}"
        )
    else:
        entry |= _decided(better, abs(gap) <= TIE * max(map(abs, values)), entry["prob"])
    if not judge.higher_is_better:
        entry["notes"].append("lower is better")
    return entry


def _decided(better: float, is_tie: bool, prob: float | None = None) -> dict[str, Any]:
    """The winner, and whether the judge is sure of it; None where it has none."""
    likely = 1.0 if prob is None else max(prob, 1 - prob)
    if is_tie or likely < EVEN:
        return {"winner": "tie", "sure": None}
    return {"winner": SIDES[better < 0], "sure": likely >= SURE}


def _moved(judge: PointwiseReward, images: Sequence[Tensor], prompt: str, values: Sequence[float]) -> float:
    """The largest change of a score under changes that nobody sees: one pixel to the side, one grey level."""
    copies = [copy for image in images for copy in (image.roll(1, -1), (image + 1 / 255).clamp(0, 1))]
    scores = judge.score(copies, [prompt] * 4, [None] * 4)
    known = [finite_or_none(value) for value in scores.value]
    moves = [abs(v - values[k // 2]) for k, v in enumerate(known) if v is not None]
    return max(moves, default=0.0)


def _probability(judge: PointwiseReward, better: float, spread: float) -> float | None:
    """P(A better), or None where the judge gives nothing to say it by."""
    gap, std = (torch.tensor([value], dtype=torch.float64) for value in (better, spread))
    if PairsFromScores(judge).link == "logistic":
        return float(logistic_odds(gap, std).sigmoid())
    if spread == 0:
        return None
    return float(normal_odds(gap, std, gap.abs()).sigmoid())


def _side(scores: Scores, row: int, reason: str | None) -> dict[str, Any]:
    value = finite_or_none(scores.value[row]) if reason is None else None
    if reason is None and value is None:
        reason = "the reward gave no finite number"
    return {
        "value": value,
        "std": None if scores.std is None else finite_or_none(scores.std[row]),
        "parts": {name: finite_or_none(part[row]) for name, part in scores.parts.items()},
        "text": scores.text[row] if scores.text else None,
        "reason": reason,
    }


def _compared(label: str, judge: PairwiseReward, images: Sequence[Tensor], prompt: str) -> dict[str, Any]:
    said = judge.compare(list(images), list(images[::-1]), [prompt] * 2, [None] * 2)
    if not isinstance(said, Preferences) or len(said) != 2:
        raise RewardError(f"Judge {label!r} did not return one answer for each order.")
    orders = [_order(said, row) for row in (0, 1)]
    notes = [f"{order['left']} on the left: {order['reason']}" for order in orders if order["reason"]]
    entry: dict[str, Any] = {
        "label": label,
        "kind": "comparisons",
        "unit": "log-odds",
        "higher_is_better": True,
        "orders": orders,
        "winner": "failed",
        "sure": None,
        "prob": None,
        "difference": None,
        "difference_std": None,
        "position_bias": None,
        "same_winner": None,
        "notes": notes,
    }
    # From A's side: as said where A stands on the left, turned where B does.
    odds = [
        None if o["log_odds"] is None else s * o["log_odds"] for o, s in zip(orders, (1, -1), strict=True)
    ]
    known = [value for value in odds if value is not None]
    if not known:
        return entry
    mean = sum(known) / len(known)
    prob = 1 / (1 + math.exp(-mean))
    entry |= {"difference": mean, "prob": prob} | _decided(mean, False, prob)
    if len(known) == 2:
        entry["position_bias"] = (known[0] - known[1]) / 2
        entry["same_winner"] = known[0] * known[1] > 0 or known[0] == known[1]
        if not entry["same_winner"]:
            entry |= {"winner": "undecided", "sure": None}
            notes.append("its winner depends on which image stands on the left")
    else:
        notes.append("it answered in one order only, so its position bias is not known")
    return entry


def _order(said: Preferences, row: int) -> dict[str, Any]:
    valid = bool(said.valid[row])
    odds = said.prob[row].double().logit() if said.log_odds is None else said.log_odds[row].double()
    reason = (said.reason[row] if said.reason else None) or "no reason given"
    value = None if not valid or math.isnan(float(odds)) else float(odds.clamp(-MAX_LOG_ODDS, MAX_LOG_ODDS))
    if valid and value is None:
        reason = "the judge gave no finite number"
    return {
        "left": SIDES[row],
        "prob": None if value is None else finite_or_none(said.prob[row]),
        "log_odds": value,
        "std": None if said.std is None or value is None else finite_or_none(said.std[row]),
        "parts": {name: finite_or_none(part[row]) for name, part in said.parts.items()},
        "text": said.text[row] if said.text else None,
        "reason": None if value is not None else reason,
    }


def _summary(votes: Mapping[str, Sequence[str]], entries: Sequence[Mapping[str, Any]]) -> str:
    """The votes in one sentence."""
    count = len(entries)
    if len(votes.get("failed", ())) == count:
        return "No judge could judge the two images."
    won = {side: len(votes.get(side, ())) for side in SIDES}
    judged = count - len(votes.get("failed", ()))
    others = judged - sum(won.values())
    if not sum(won.values()):
        return f"No winner: {judged} of {judged} judges see a tie or are undecided."
    best, second = sorted(SIDES, key=lambda side: -won[side])
    if won[best] == won[second]:
        return f"The judges are split: {won['A']} for A, {won['B']} for B{_and(others)}."
    unsure = sum(entry["sure"] is False for entry in entries)
    if judged == 1:
        return f"{best} rather than {second}, but the judge is unsure." if unsure else f"{best} is better."
    doubt = f" ({unsure} of the judges unsure)" if unsure else ""
    better = f"{best} is better for {won[best]} of {judged} judges, {second} for {won[second]}"
    return f"{better}{_and(others)}{doubt}."


def _and(others: int) -> str:
    return f", {others} tied or undecided" if others else ""
