# SPDX-License-Identifier: Apache-2.0
"""The reward that an environment gave, for training in conversations (`rollout.environment`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from visalign.interfaces import Metadata, Prompt, RewardCapabilities, Scores, ToolCompletion

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
        return text_scores(
            [TextVerdict(reason=reason) if value is None else TextVerdict(value=value) for value in outcomes],
            self.unit,
        )
