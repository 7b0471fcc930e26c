# SPDX-License-Identifier: Apache-2.0
"""A judge of images as a reward model of Flow-Factory, named by its path in a `rewards` section:

    rewards:
      - {name: hps, reward_model: visalign.integrations.flow_factory.JudgeReward, judge: hps_v2}

Keys that Flow-Factory does not know are the judge's options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .hosts import host
from .judges import image_scores

rewards: Any = host("flow_factory.rewards.abc")


class JudgeReward(rewards.PointwiseRewardModel):
    """`judge` and its options come from the configuration; a failed sample ends the run with its reason."""

    required_fields = ("prompt", "image")
    use_tensor_inputs = False

    def __init__(self, config: Any, accelerator: Any) -> None:
        from visalign.rewards.catalogue import load_reward

        super().__init__(config, accelerator)
        options = dict(config.extra_kwargs)
        if "judge" not in options:
            raise ValueError("a rewards entry with JudgeReward needs judge: NAME, as `visalign rewards` lists.")
        self.judge = load_reward(options.pop("judge"), run_device=str(self.device), **options)

    @torch.no_grad()
    def __call__(self, prompt: Sequence[str], image: Any = None, **_: Any) -> Any:
        """Scores [B], larger is better."""
        if image is None:
            raise ValueError(f"{self.judge.name!r} judges images, and Flow-Factory handed none (a video?).")
        scores = torch.tensor(image_scores(self.judge, image, prompt), device=self.device)
        return rewards.RewardModelOutput(rewards=scores)
