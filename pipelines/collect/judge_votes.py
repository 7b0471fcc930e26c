# SPDX-License-Identifier: Apache-2.0
"""A judge votes into the same file as people, under its own name.

Source: RLAIF, Lee et al., arXiv 2309.00267: both orders of a pair are asked and averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from visalign.data.sets.image_references import resolve_image
from visalign.errors import UserError
from visalign.interfaces import PairwiseReward, PointwiseReward
from visalign.rewards.pairs.as_pairwise import as_pairwise
from visalign.rewards.pairs.asking import read_preferences

from .store import VoteStore

EVEN = 0.55
"""Below this probability of either side a judge says that it sees a tie, as in `visalign compare`."""


def judge_votes(
    store: VoteStore,
    judge: PointwiseReward | PairwiseReward,
    name: str,
    *,
    batch_size: int = 32,
    progress: Callable[[int], object] = lambda done: None,
) -> tuple[int, list[str]]:
    """Have a judge answer all pairs that it has not answered, gold ones included.

    Batches are kept one by one: what was stopped goes on where it was.

    Args:
        store: of the votes.
        judge: scores images or compares them; one that compares is asked in both orders, and its log-odds
            are averaged.
        name: of the voter.
        batch_size: pairs judged at once.
        progress: called with the number of new votes after each batch.

    Returns:
        How many votes are new, and why pairs have none.

    Raises:
        UserError: the file asks about single images.
    """
    if any(len(task.images) == 1 for task in store.tasks.values()):
        raise UserError("A judge votes on pairs, and this file asks about single images. Use visalign score.")
    there = {vote.task for vote in store.votes() if vote.annotator == name}
    new, reasons = 0, []
    left = [task for task in store.tasks if task not in there]
    for start in range(0, len(left), batch_size):
        batch = left[start : start + batch_size]
        answers: dict[int, dict[str, Any]] = {}
        for task, prob, reason in _asked(store, judge, batch):
            if reason is not None:
                reasons.append(f"{store.tasks[task].images[0]}: {reason}")
                continue
            side = "left" if prob >= EVEN else "right" if prob <= 1 - EVEN else "tie"
            answers[task] = {"choice": side, "prob": prob}
        new += store.judged(name, answers)
        progress(new)
    return new, reasons


def _asked(
    store: VoteStore, judge: PointwiseReward | PairwiseReward, batch: list[int]
) -> Iterable[tuple[int, float, str | None]]:
    """(task, P(left is better), why there is none)."""
    tasks = [store.tasks[number] for number in batch]
    left, right = ([resolve_image(task.images[side]) for task in tasks] for side in (0, 1))
    prompts, records = (
        [t.prompt for t in tasks],
        [t.more.get("metadata", t.more.get("record")) for t in tasks],
    )
    compare = (as_pairwise(judge) if isinstance(judge, PointwiseReward) else judge).compare
    said = [compare(left, right, prompts, records)]
    if not isinstance(judge, PointwiseReward):
        said.append(compare(right, left, prompts, records))
    read = [read_preferences(answer) for answer in said]  # a certain answer is bounded: 1 and 1 are a tie
    odds = [answer.log_odds for answer in read]
    prob = (odds[0] if len(odds) == 1 else (odds[0] - odds[1]) / 2).sigmoid()
    for number, task in enumerate(batch):
        reason = next((why for answer in read if (why := answer.reasons[number])), None)
        yield task, float(prob[number]), reason
