# SPDX-License-Identifier: Apache-2.0
"""Adv-GRPO: an adversarial reward scores an iteration's images, then learns to tell them from its references.

Mao et al., arXiv 2511.20256. Each process learns from its own images, with gradients averaged over all.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from visalign.errors import UserError
from visalign.flow.rollout import middle_frames
from visalign.seeds import sample_seed
from visalign.training.policy.learning_reward import LearningReward
from visalign.vision.pixels import to_levels

from .rollout_settings import RolloutSettings
from .settings import COMPLETIONS, DiffusionObjectiveSettings


def check_discriminators(
    objective: DiffusionObjectiveSettings, rollout: RolloutSettings, replay: Any, reward: Any
) -> None:
    """Refuse settings under which scores before and after the reward has learnt would be compared."""
    is_par = objective.is_policy_gradient and objective.build(length=1).advantage == "par"
    reasons = {
        "rollout.staleness=1 scores images meanwhile. Set rollout.staleness=0": rollout.staleness > 0,
        f"objective.credit={objective.credit} scores more images then. Set it to image": objective.credit
        in COMPLETIONS,
        "self_imitation replays earlier scores. Set self_imitation=null": replay is not None,
        f"objective.algorithm={objective.algorithm} stores scores of the reference. Take flow_grpo": is_par,
    }
    labels = list(reward.capabilities.discriminators)
    if reason := next((reason for reason, applies in reasons.items() if labels and applies), None):
        raise UserError(f"rewards.terms.{labels[0]} learns after each iteration, and {reason}.")


def build_discriminators(
    objective: DiffusionObjectiveSettings,
    rollout: RolloutSettings,
    replay: Any,
    reward: Any,
    seed: int,
    accelerator: Accelerator,
) -> list[OnlineDiscriminator]:
    """Build the learners of a reward's adversarial terms, under settings that fit them."""
    check_discriminators(objective, rollout, replay, reward)
    terms = reward.capabilities.discriminators.items()
    return [OnlineDiscriminator(label, term, seed=seed, accelerator=accelerator) for label, term in terms]


class OnlineDiscriminator(LearningReward):
    """Head of an adversarial reward (`visalign.rewards.scorers.adversarial`), moved by a trainer of images."""

    def __init__(self, label: str, reward: Any, *, seed: int, accelerator: Accelerator) -> None:
        self.key = f"discriminator.{label}".replace("/", "_")  # names a file
        self._label, self._reward, self._seed = label, reward, seed
        reward.begin(sample_seed(seed, self.key))
        super().__init__(reward.head.named_parameters(), reward.lr, accelerator, betas=[0.5, 0.999])
        self._images: list[Tensor] = []

    def keep(self, images: Tensor) -> None:
        """Keep sampled images, or the middle frames of clips, until the iteration's scores are in."""
        self._images.append(to_levels(middle_frames(images)))

    def learn(self, iteration: int) -> None:
        """Take the reward's updates on this process's images, drawn anew for each; forget them."""
        images, self._images = torch.cat(self._images), []
        reward, process, world = self._reward, self._accelerator.process_index, self._accelerator.num_processes
        sums = torch.zeros(reward.steps, 2, dtype=torch.float64)
        for step in range(reward.steps):
            generator = torch.Generator().manual_seed(sample_seed(self._seed, self.key, iteration, step, process))
            rows = torch.randperm(len(images), generator=generator)[: reward.batch]
            loss, accuracy = reward.discriminate(images[rows], generator)
            (loss / world).backward()
            self._update()
            sums[step] = torch.tensor(self._sum(float(loss.detach()), float(accuracy)))
        loss, accuracy = float(sums[:, 0].mean()) / world, float(sums[0, 1]) / world
        self._metrics = {f"discriminator/{self._label}.{k}": v for k, v in (("loss", loss), ("accuracy", accuracy))}
