# SPDX-License-Identifier: Apache-2.0
"""Judges as plain functions, the way trainers of others take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from visalign.interfaces import Metadata, PointwiseReward, Scores, TextReward
from visalign.rewards.base.contract import RewardError
from visalign.rewards.catalogue import load_reward

OnFailure = Literal["raise", "nan"]
"""What becomes of a sample that could not be judged, where a host has no word for it."""


def text_scores(
    judge: TextReward,
    completions: Sequence[Any],
    prompts: Sequence[Any],
    metadata: Metadata,
    on_failure: OnFailure = "nan",
) -> list[float | None]:
    """Score texts or conversations (the last message of the assistant): larger is better, None where scoring failed.

    A conversation without an assistant, or whose last answer is no text (null, a list of parts), has failed.
    """
    texts = [_answer_text(completion) for completion in completions]
    scores = judge.score([text or "" for text in texts], prompts, metadata)
    has_text = [text is not None for text in texts]
    if not all(has_text):
        reasons = scores.reason or [None] * len(scores)
        unread = "the conversation has no assistant message whose content is a text"
        reasons = [reason if ok else unread for reason, ok in zip(reasons, has_text, strict=True)]
        scores = replace(scores, valid=scores.valid.cpu() & torch.tensor(has_text), reason=reasons)
    return numbers(judge, scores, on_failure)


def _answer_text(completion: Any) -> str | None:
    """Return a completion, or the last assistant message of a conversation; what a tool wrote is not graded."""
    if isinstance(completion, str):
        return completion
    turns = [turn for turn in completion or () if isinstance(turn, Mapping) and turn.get("role") == "assistant"]
    content = turns[-1].get("content") if turns else None
    return content if isinstance(content, str) else None


def image_scores(
    judge: PointwiseReward,
    images: Any,
    prompts: Sequence[str],
    metadata: Metadata | None = None,
    on_failure: OnFailure = "raise",
) -> list[float]:
    """Score images in any form that a judge takes: larger is better, NaN where it failed."""
    values = numbers(judge, judge.score(images, list(prompts), metadata), on_failure)
    return [float("nan") if value is None else value for value in values]


def numbers(judge: PointwiseReward | TextReward, scores: Scores, on_failure: OnFailure = "nan") -> list[float | None]:
    """Convert scores to numbers, larger is better, None where scoring failed."""
    failed = (~scores.valid).nonzero().flatten().tolist()
    if failed and on_failure == "raise":
        reason = scores.reason[failed[0]] if scores.reason else None
        raise RewardError(
            f"{judge.name!r} could not judge {len(failed)} of {len(scores)} samples; the first is sample {failed[0]}: "
            f'{reason}. Mend the judge, or give on_failure="nan" where what follows leaves NaN out.'
        )
    sign = 1.0 if judge.higher_is_better else -1.0
    pairs = zip(scores.value.tolist(), scores.valid.tolist(), strict=True)
    return [sign * value if valid else None for value, valid in pairs]


def flow_grpo(
    name: str, *, on_failure: OnFailure = "raise", **options: Any
) -> Callable[..., tuple[list[float], dict[str, Any]]]:
    """Return a reward, with `options`, as flow_grpo's score function `f(images, prompts, metadata)` -> (B numbers,
    {}).

    metadata are B records, or one; `name` is as in `visalign.rewards.load_reward`, `remote` is a `serve-reward`.
    """
    judge = load_reward(name, **options)

    def score(images: Any, prompts: Any, metadata: Any = None) -> tuple[list[float], dict[str, Any]]:
        records = [dict(metadata) for _ in prompts] if isinstance(metadata, Mapping) else metadata
        return image_scores(judge, images, prompts, records, on_failure), {}

    return score
