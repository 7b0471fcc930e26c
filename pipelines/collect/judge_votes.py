# SPDX-License-Identifier: Apache-2.0
"""Votes of a judge in the same file as people's, under its own name.

Source: RLAIF, Lee et al., arXiv 2309.00267: both orders of a pair are asked and averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from visalign.data.sets.image_references import resolve_image
from visalign.errors import UserError
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.rewards.pairs.as_pairwise import as_pairwise
from visalign.rewards.pairs.asking import read_preferences

from .store import VoteStore

EVEN = 0.55
"""Below this probability of either side a judge votes for a tie, as in `visalign compare`."""


def judge_votes(
    store: VoteStore,
    judge: PointwiseReward | PairwiseReward,
    name: str,
    *,
    batch_size: int = 32,
) -> tuple[int, list[str]]:
    """Have a judge answer all pairs that it has not answered, gold ones included, and store batch by batch.

    Returns:
        Number of new votes, and the reasons of pairs without one.
    """
    if not store.is_pairs:
        raise UserError("A judge votes on pairs, and this file asks about single images. Use visalign score.")
    answered = {vote.task for vote in store.votes() if vote.annotator == name}
    new, reasons = 0, []
    remaining = [task for task in store.tasks if task not in answered]
    for start in range(0, len(remaining), batch_size):
        answers: dict[int, dict[str, Any]] = {}
        for task, prob, reason in _compare(store, judge, remaining[start : start + batch_size]):
            if reason is not None:
                reasons.append(f"{store.tasks[task].images[0]}: {reason}")
                continue
            side = "left" if prob >= EVEN else "right" if prob <= 1 - EVEN else "tie"
            answers[task] = {"choice": side, "prob": prob}
        new += store.add_judge_votes(name, answers)
    return new, reasons


def _compare(
    store: VoteStore, judge: PointwiseReward | PairwiseReward, batch: list[int]
) -> Iterable[tuple[int, float, str | None]]:
    """Yield (task, P(left is better), reason of a failure)."""
    tasks = [store.tasks[number] for number in batch]
    left, right = ([resolve_image(task.images[side]) for task in tasks] for side in (0, 1))
    prompts = [task.prompt for task in tasks]
    records = [task.extra.get("metadata", task.extra.get("record")) for task in tasks]
    compare = (as_pairwise(judge) if isinstance(judge, PointwiseReward) else judge).compare
    answers = [compare(left, right, prompts, records)]
    if not isinstance(judge, PointwiseReward):
        answers.append(compare(right, left, prompts, records))
    preferences = [read_preferences(answer) for answer in answers]  # bounds certain answers: 1 and 1 tie
    odds = [preference.log_odds for preference in preferences]
    prob = (odds[0] if len(odds) == 1 else (odds[0] - odds[1]) / 2).sigmoid()
    for index, task in enumerate(batch):
        reason = next((why for preference in preferences if (why := preference.reasons[index])), None)
        yield task, float(prob[index]), reason
