# SPDX-License-Identifier: Apache-2.0
"""Judges as plain functions, the way trainers of others take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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
    """Score texts or conversations (the last message): larger is better, None where scoring failed."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return numbers(judge, judge.score(texts, prompts, metadata), on_failure)


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
            f"{judge.name!r} could not judge {len(failed)} of {len(scores)} samples; the first is sample "
            f"{failed[0]}: {reason}. A failure is no score, and this trainer has no word for one: mend the "
            'judge, or give on_failure="nan" where what follows leaves NaN out.'
        )
    sign = 1.0 if judge.higher_is_better else -1.0
    pairs = zip(scores.value.tolist(), scores.valid.tolist(), strict=True)
    return [sign * value if valid else None for value, valid in pairs]


def flow_grpo(
    name: str, *, on_failure: OnFailure = "raise", **options: Any
) -> Callable[..., tuple[list[float], dict[str, Any]]]:
    """Return a reward of images, with `options`, as flow_grpo's score function `f(images, prompts, metadata)` -> (B
    numbers, {}), as an entry of `flow_grpo.rewards.multi_score` makes it; metadata are B records, or one for all.

    `name` is as in `visalign.rewards.load_reward`; `remote` with its url is a reward of `serve-reward`.
    """
    judge = load_reward(name, **options)

    def score(images: Any, prompts: Any, metadata: Any = None) -> tuple[list[float], dict[str, Any]]:
        records = [dict(metadata) for _ in prompts] if isinstance(metadata, Mapping) else metadata
        return image_scores(judge, images, prompts, records, on_failure), {}

    return score
