# SPDX-License-Identifier: Apache-2.0
"""Rewards of texts in the commands of rewards: completions stand where images do."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from visalign.data.sets.image_references import CompletionText
from visalign.data.sets.text_rows import text_prompt
from visalign.interfaces import Metadata, PairwiseReward, PointwiseReward, Preferences, Scores, with_capabilities
from visalign.rewards.base.contract import RewardError
from visalign.rewards.catalogue import TEXT_CATALOGUE, find_target, load_judge, load_reward, load_text_reward


class _Completions:
    def __init__(self, reward: Any) -> None:
        self.reward, self.name = with_capabilities(reward), reward.name
        self.capabilities, self.identity = reward.capabilities, reward.identity

    def _texts(self, items: Sequence[Any]) -> list[str]:
        if not all(isinstance(item, CompletionText) for item in items):
            raise RewardError(f"{self.name} judges texts, not images. Give a table with prompt and completion.")
        return [str(item) for item in items]


class CompletionScores(_Completions):
    """Pointwise reward of completions, with prompts as a row holds them."""

    def __init__(self, reward: Any) -> None:
        super().__init__(reward)
        self.unit, self.range, self.higher_is_better = reward.unit, reward.range, reward.higher_is_better

    def score(self, images: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Scores:
        return self.reward.score(self._texts(images), [*map(text_prompt, prompts)], metadata)


class CompletionPairs(_Completions):
    def __init__(self, reward: Any) -> None:
        super().__init__(reward)
        self.capabilities = replace(reward.capabilities, needs_group=False)  # a pair is all it sees

    def compare(self, left: Any, right: Any, prompts: Sequence[str], metadata: Metadata | None = None) -> Preferences:
        return self.reward.compare(self._texts(left), self._texts(right), [*map(text_prompt, prompts)], metadata)


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
    compares = isinstance(reward, PairwiseReward) and with_capabilities(reward).capabilities.needs_group
    return CompletionPairs(reward) if compares else CompletionScores(reward)


def judges_texts(name: str) -> bool:
    """Tell whether a name is of a reward of texts: its first parameters are completions."""
    if ":" not in name:
        return name in TEXT_CATALOGUE
    target = find_target(name)
    score = getattr(target, "score", target)
    parameters = {} if not callable(score) else inspect.signature(score).parameters
    return not {"completion", "completions"}.isdisjoint(parameters)
