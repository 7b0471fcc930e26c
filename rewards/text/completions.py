# SPDX-License-Identifier: Apache-2.0
"""Rewards of texts in the commands of rewards: completions stand where images do."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from visalign.data.sets.image_references import CompletionText
from visalign.data.sets.text_rows import text_prompt
from visalign.interfaces import (
    Metadata,
    PairwiseReward,
    PointwiseReward,
    Preferences,
    Scores,
    TextReward,
    with_capabilities,
)
from visalign.rewards.base.contract import scatter
from visalign.rewards.catalogue import TEXT_CATALOGUE, find_target, load_judge, load_reward, load_text_reward
from visalign.rewards.chat.text_judge import TextJudge


class _Completions:
    """Text reward of which a command asks; items that are no completions fail."""

    def __init__(self, reward: Any) -> None:
        self.reward, self.name = with_capabilities(reward), reward.name
        self.capabilities, self.identity = reward.capabilities, reward.identity

    def _rows(self, *sides: Sequence[Any]) -> tuple[list[int], list[str | None]]:
        """Return the rows of completions, and the reasons of the others."""
        are_texts = [all(isinstance(item, CompletionText) for item in items) for items in zip(*sides, strict=True)]
        reason = f"it is an image, and {self.name} judges texts: give a table with prompt and completion"
        return [row for row, is_text in enumerate(are_texts) if is_text], [None if t else reason for t in are_texts]


class CompletionScores(_Completions):
    """Pointwise reward of completions, with prompts as a row holds them."""

    def __init__(self, reward: TextReward) -> None:
        super().__init__(reward)
        self.unit, self.range, self.higher_is_better = reward.unit, reward.range, reward.higher_is_better

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        """Score B completions for B prompts."""
        rows, reasons = self._rows(images)
        records = [None] * len(prompts) if metadata is None else metadata
        scores = self.reward.score(
            [str(images[row]) for row in rows], [text_prompt(prompts[row]) for row in rows], [records[r] for r in rows]
        )
        for row, reason in zip(rows, scores.reason or [None] * len(rows), strict=True):
            reasons[row] = reason
        texts = dict(zip(rows, scores.text or [], strict=False))
        valid = torch.zeros(len(prompts), dtype=torch.bool)
        valid[rows] = scores.valid.cpu()
        return Scores(
            value=scatter(scores.value, rows, len(prompts)),
            valid=valid,
            unit=scores.unit,
            std=None if scores.std is None else scatter(scores.std, rows, len(prompts)),
            parts={name: scatter(part, rows, len(prompts)) for name, part in scores.parts.items()},
            text=[texts.get(row, "") for row in range(len(prompts))],
            reason=reasons,
        )


class CompletionPairs(_Completions):
    """Pairwise judge of completions."""

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        """Compare B pairs of completions."""
        rows, reasons = self._rows(left, right)
        sides = ([str(side[row]) for row in rows] for side in (left, right))
        answer = self.reward.compare(*sides, [text_prompt(prompts[row]) for row in rows])
        for row, reason in zip(rows, answer.reason or [], strict=True):
            reasons[row] = reason
        return Preferences(
            prob=scatter(answer.prob, rows, len(prompts)),
            valid=torch.tensor([reason is None for reason in reasons], dtype=torch.bool),
            reason=reasons,
            parts={name: scatter(part, rows, len(prompts)) for name, part in answer.parts.items()},
        )


def load_any_reward(name: str, *, run_device: str | None = None, **options: Any) -> PointwiseReward:
    """Load a reward that scores images or completions by itself, by a name of either catalogue or a dotted path."""
    if judges_texts(name):
        return CompletionScores(load_text_reward(name, run_device=run_device, **options))
    return load_reward(name, run_device=run_device, **options)


def load_any_judge(name: str, *, run_device: str | None = None, **options: Any) -> PointwiseReward | PairwiseReward:
    """Load a reward or pairwise judge of images or completions; one that sees several completions compares them."""
    if not judges_texts(name):
        return load_judge(name, run_device=run_device, **options)
    reward = load_text_reward(name, run_device=run_device, **options)
    compares = isinstance(reward, TextJudge) and reward.form != "point"
    return CompletionPairs(reward) if compares else CompletionScores(reward)


def judges_texts(name: str) -> bool:
    """Tell whether a name is of a reward of texts: its first parameters are completions."""
    if ":" not in name:
        return name in TEXT_CATALOGUE
    target = find_target(name)
    score = getattr(target, "score", target)
    parameters = {} if not callable(score) else inspect.signature(score).parameters
    return not {"completion", "completions"}.isdisjoint(parameters)
