# SPDX-License-Identifier: Apache-2.0
"""A reward manager of verl that hands judges the prompt; `reward.reward_manager` names it by its module."""

from __future__ import annotations

from typing import Any

from .hosts import host

Base: Any = host("verl.experimental.reward_loop.reward_manager").NaiveRewardManager


class JudgeManager(Base):
    """verl's naive manager, whose reward function finds the prompt in `extra_info["prompt"]`, for judges of
    question and answer. The prompts must be kept raw: `data.return_raw_chat=True`, verl's default.
    """

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Score one sample."""
        columns = data.non_tensor_batch
        if "raw_prompt" not in columns:
            raise ValueError("JudgeManager needs the prompt: set data.return_raw_chat=True.")
        for info, prompt in zip(columns["extra_info"], columns["raw_prompt"], strict=True):
            info["prompt"] = list(prompt)
        return await super().run_single(data)
