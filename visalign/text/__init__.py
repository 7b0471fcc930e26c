# SPDX-License-Identifier: Apache-2.0
"""Token trajectories: sampling distribution, seeds, stopping criteria, tools, the rollout, the policy.

It needs torch; no model library and no reward.
"""

from visalign.interfaces import Message, Prompt

from .calculator import calculator
from .distribution import (
    Sampling,
    chosen_log_prob,
    draw_seeds,
    draw_tokens,
    kept_tokens,
    log_distribution,
    sample_uniforms,
)
from .policy_protocol import Distribution, TextPolicy, TokenOutput
from .rollout import TextRollout, ToolTrace, join_rollouts
from .stopping import StoppingCriteria, StopReason, StopStrings
from .token_sets import TokenSets
from .tools import ToolPolicy, ToolUse
from .turns import ChatTurns, EnvironmentUse

__all__ = [
    "ChatTurns", "Distribution", "EnvironmentUse", "Message", "Prompt", "Sampling", "StopReason", "StopStrings",
    "StoppingCriteria", "TextPolicy", "TextRollout", "TokenOutput", "TokenSets", "ToolPolicy", "ToolTrace",
    "ToolUse", "calculator", "chosen_log_prob", "draw_seeds", "draw_tokens", "join_rollouts", "kept_tokens",
    "log_distribution", "sample_uniforms",
]  # fmt: skip
