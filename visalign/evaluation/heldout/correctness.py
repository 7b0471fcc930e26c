# SPDX-License-Identifier: Apache-2.0
"""Which rewards can say correct or wrong, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from visalign.errors import UserError
from visalign.interfaces import PointwiseReward, Scores

PART = "correct"
"""The part of a reward's scores that holds its verdicts, 1 or 0."""


def verdict(name: str, reward: Any, scores: Scores) -> Tensor:
    """The verdicts of B samples: the part `correct`, else whether a value of the range (0, 1) is the best.

    Args:
        name: of the reward.
        reward: whose scores they are.
        scores: of B samples.

    Returns:
        [B] bool.

    Raises:
        UserError: the scores have no such part, and the range is another.
    """
    if PART in scores.parts:
        return scores.parts[PART].cpu() > 0.5
    if tuple(reward.range) != (0.0, 1.0):
        raise _no_judge(name, reward)
    return scores.value.cpu() >= 1 if reward.higher_is_better else scores.value.cpu() <= 0


def check_judge(name: str, reward: PointwiseReward, record: Mapping[str, Any]) -> None:
    """Refuse a reward that cannot say correct or wrong, before anything is sampled.

    A range of (0, 1) is enough; otherwise the reward is shown one grey picture and must give the part. One
    that cannot judge that picture is left to the evaluation itself.

    Args:
        name: of the reward.
        reward: the judge of correctness.
        record: a prompt record, the picture's metadata.

    Raises:
        UserError: it returned a score without the part.
    """
    if tuple(reward.range) == (0.0, 1.0):
        return
    scores = reward.score(torch.full((1, 3, 64, 64), 0.5), [str(record["prompt"])], [record])
    if PART not in scores.parts and bool(scores.valid.any()):
        raise _no_judge(name, reward)


def _no_judge(name: str, reward: Any) -> UserError:
    return UserError(
        f"Reward '{name}' cannot say correct or wrong: its range is {tuple(reward.range)} and its scores "
        f"have no part '{PART}'. Choose a reward with the range (0, 1) or with that part, or none "
        "(evaluation.correctness=null)."
    )
