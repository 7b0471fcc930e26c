# SPDX-License-Identifier: Apache-2.0
"""A judge as a reward backend of UniRL, named by its path in a recipe:

reward:
  _target_: unirl.reward.service.RewardService
  backend:
    _target_: visalign.integrations.unirl.JudgeBackend
    base_device: cpu
    judge: hps_v2
    options: {}
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from visalign.rewards.catalogue import load_reward, load_text_reward

from .hosts import host
from .judges import numbers

base: Any = host("unirl.reward.base")
types: Any = host("unirl.types.reward")


class JudgeBackend(base.RewardBackend):
    """A sample that could not be judged is no success, with its reason: UniRL stops the step on it.

    `judge` and its `options` are as in `visalign.rewards.load_reward`, or `load_text_reward` for texts.
    """

    def __init__(
        self,
        judge: str,
        base_device: str = "cpu",
        options: Mapping[str, Any] | None = None,
        input_kind: Literal["image", "text"] = "image",
    ) -> None:
        super().__init__(model_name=judge)
        self.input_kind = input_kind
        load = load_text_reward if input_kind == "text" else load_reward
        self.judge: Any = load(judge, run_device=base_device, **(options or {}))

    def compute_rewards(self, request: Any) -> Any:
        begun = time.perf_counter()
        samples = request.texts if self.input_kind == "text" else request.images
        scores = self.judge.score(samples, request.prompts, request.metadata)
        values = numbers(self.judge, scores)
        return types.RewardResponse(
            rewards=[float("nan") if value is None else value for value in values],
            successes=[value is not None for value in values],
            errors=list(scores.reason or [None] * len(scores)),
            compute_time=time.perf_counter() - begun,
        )

    def is_available(self) -> bool:
        """Always: the judge was loaded when this was made."""
        return True
