# SPDX-License-Identifier: Apache-2.0
"""Votes of a judge beside people's, both orders of a pair asked and averaged (RLAIF, arXiv 2309.00267)."""

from __future__ import annotations

from typing import Any

from visalign.data.sets.image_references import resolve_image
from visalign.errors import UserError
from visalign.interfaces import PairwiseReward, PointwiseReward, with_capabilities
from visalign.pipelines.score.image_rows import record_metadata
from visalign.rewards.pairs.as_pairwise import as_pairwise
from visalign.rewards.pairs.asking import read_preferences

from .store import VoteStore

EVEN = 0.55  # Below this probability of either side a judge votes for a tie, as in `visalign compare`


def judge_votes(
    store: VoteStore, judge: PointwiseReward | PairwiseReward, name: str, *, batch_size: int = 32
) -> tuple[int, list[str]]:
    """Have a judge answer all pairs that it has not answered; return the number of votes, and why others have none."""
    if not store.is_pairs:
        raise UserError("A judge votes on pairs, and this file has single images or groups. Use visalign score.")
    if with_capabilities(judge).capabilities.compares_samples:
        batch_size = 1  # a vote is on the pair alone
    compare = (as_pairwise(judge) if isinstance(judge, PointwiseReward) else judge).compare
    answered = {vote.task for vote in store.votes() if vote.annotator == name}
    remaining = [task for task in store.tasks if task not in answered]
    new, failures = 0, []
    for start in range(0, len(remaining), batch_size):
        batch = remaining[start : start + batch_size]
        tasks = [store.tasks[number] for number in batch]
        left, right = ([resolve_image(task.images[side]) for task in tasks] for side in (0, 1))
        prompts = [task.prompt for task in tasks]
        records = [record_metadata(task.images[0], task.extra) or None for task in tasks]
        # both orders in one call: a pointwise reward scores each image once
        answer = read_preferences(compare(left + right, right + left, prompts * 2, records * 2))
        forward, backward = answer.log_odds.chunk(2)
        prob = ((forward - backward) / 2).sigmoid().tolist()
        answers: dict[int, dict[str, Any]] = {}
        for row, task in enumerate(tasks):
            if reason := answer.reasons[row] or answer.reasons[row + len(batch)]:
                failures.append(f"{task.images[0]}: {reason}")
                continue
            side = "left" if prob[row] >= EVEN else "right" if prob[row] <= 1 - EVEN else "tie"
            answers[batch[row]] = {"choice": side, "prob": prob[row]}
        new += store.add_judge_votes(name, answers)
    return new, failures
