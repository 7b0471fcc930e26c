# SPDX-License-Identifier: Apache-2.0
"""Rewards of tools and environments: what an environment gave, and valid calls of tools."""

from __future__ import annotations

import math
from collections.abc import Sequence

from visalign.interfaces import Metadata, Prompt, RewardCapabilities, Scores, ToolCompletion
from visalign.rewards.base.contract import check_counts

from .contract import TextVerdict, read_text_request, text_scores


class EnvironmentReward:
    """Reward of the environment that a completion acted in: its `get_reward()`, else the sum of its steps' rewards."""

    name, unit = "environment", "environment's units"
    range = (-math.inf, math.inf)
    higher_is_better = True
    capabilities = RewardCapabilities(needs_prompt=False)

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Return what the environments gave; a completion without an environment's reward is invalid."""
        texts = read_text_request(self.name, completions, prompts, metadata).completions
        outcomes = [text.outcome if isinstance(text, ToolCompletion) else None for text in texts]
        reason = "no environment gave a reward: set rollout.environment.use to one with get_reward or step"
        return _read_scores(outcomes, reason, self.unit)


class ToolCalls:
    """Share of `most` tool calls that a completion made in the right form: min(calls, most)/most.

    Calls of a name or with arguments that no tool has do not count. As an auxiliary reward its weight is usually taken
    back over the run (SPEAR, arXiv 2509.22601).
    """

    unit = "1 = enough calls"
    range = (0.0, 1.0)
    higher_is_better = True
    capabilities = RewardCapabilities(needs_prompt=False)

    def __init__(self, most: int = 1, *, name: str = "tool_calls") -> None:
        check_counts(name, most=most)
        self.name, self._most = name, most

    def score(self, completions: Sequence[str], prompts: Sequence[Prompt], metadata: Metadata | None = None) -> Scores:
        """Count the calls; a completion that was generated without tools is invalid."""
        texts = read_text_request(self.name, completions, prompts, metadata).completions
        calls = [text.calls if isinstance(text, ToolCompletion) else None for text in texts]
        shares = [None if count is None else min(count, self._most) / self._most for count in calls]
        reason = "it was generated without tools: set rollout.tool or rollout.environment"
        return _read_scores(shares, reason, self.unit)


def _read_scores(values: Sequence[float | None], reason: str, unit: str) -> Scores:
    return text_scores([TextVerdict(reason=reason) if v is None else TextVerdict(value=v) for v in values], unit)
