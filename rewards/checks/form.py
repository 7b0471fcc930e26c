# SPDX-License-Identifier: Apache-2.0
"""What `check_reward` and `check_text_reward` ask alike: the declaration, the form of the scores."""

from __future__ import annotations

import math
from typing import Any

import torch

from visalign.interfaces import Scores


def declaration_problems(reward: Any, *, unit: str, signature: str) -> list[str]:
    """Attributes that say what the numbers mean.

    Args:
        reward: anything.
        unit: an example of a unit, for the message.
        signature: of `score`, for the message.

    Returns:
        One line per fault, with its mend; empty when all is declared.
    """
    wanted = {
        "name": "a short string",
        "unit": f'what 1 means, e.g. "{unit}"',
        "range": "(smallest, largest) possible value, infinities allowed",
        "higher_is_better": "True or False",
        "score": signature,
    }
    problems = [
        f"it has no {key}: set it on the class ({mend})"
        for key, mend in wanted.items()
        if not hasattr(reward, key)
    ]
    if problems:
        return problems
    for key in ("name", "unit"):
        if not isinstance(getattr(reward, key), str) or not getattr(reward, key):
            problems.append(f"{key} is {getattr(reward, key)!r}: make it a non-empty string")
    ends = reward.range
    if (
        not isinstance(ends, tuple)
        or len(ends) != 2
        or any(math.isnan(end) for end in ends)
        or ends[0] >= ends[1]
    ):
        problems.append(f"range is {ends!r}: make it a pair (smallest, largest) with smallest < largest")
    if not isinstance(reward.higher_is_better, bool):
        problems.append(f"higher_is_better is {reward.higher_is_better!r}: make it True or False")
    return problems


def form_problems(scores: Any, size: int, *, unit: str, noun: str) -> list[str]:
    """Types and lengths of what came back; everything after relies on them.

    Args:
        scores: what `score` returned.
        size: samples that it was given.
        unit: that the reward declares.
        noun: what a sample is, for the messages.

    Returns:
        One line per fault, with its mend.
    """
    if not isinstance(scores, Scores):
        return [f"score() returned a {type(scores).__name__}: return visalign.interfaces.Scores"]
    problems = []
    if len(scores) != size:
        problems.append(
            f"score() gave {len(scores)} values for {size} {noun}s: give one per {noun}, NaN where invalid"
        )
    for key, value, dtype in (("value", scores.value, torch.float32), ("valid", scores.valid, torch.bool)):
        if value.dtype != dtype:
            problems.append(f"{key} has dtype {value.dtype}: make it {dtype}")
    if scores.value.requires_grad:
        problems.append(
            "value carries a gradient graph, which keeps memory: detach it, or score under torch.no_grad()"
        )
    if scores.unit != unit:
        problems.append(f"Scores.unit is {scores.unit!r}, the reward declares {unit!r}: use one of them")
    for key, column in {"std": scores.std, **scores.parts}.items():
        if column is not None and tuple(column.shape) != (size,):
            problems.append(f"{key!r} has shape {tuple(column.shape)}: make it [{size}]")
    for key, texts in (("text", scores.text), ("reason", scores.reason)):
        if texts is not None and len(texts) != size:
            problems.append(f"{key} has {len(texts)} entries for {size} {noun}s: give one per {noun}")
    return problems
