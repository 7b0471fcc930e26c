# SPDX-License-Identifier: Apache-2.0
"""Adv-GRPO: an adversarial reward scores an iteration's images, then learns to tell them from its references.

Mao et al., arXiv 2511.20256. Each process learns from its own images, with gradients averaged over all.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from visalign.flow.rollout import middle_frames
from visalign.seeds import sample_seed
from visalign.training.policy.learning_reward import LearningReward
from visalign.vision.pixels import to_levels


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
