# SPDX-License-Identifier: Apache-2.0
"""PRIME: an implicit process reward goes on learning from the outcomes of the policy's own completions.

Each iteration scores its completions first, then updates the reward on them; one AdamW throughout, on float32
masters. Updates with a gradient that is not finite are skipped and counted. Each process learns from its own
completions, with gradients summed over all. Cui et al., PRIME, arXiv 2502.01456, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from visalign.seeds import sample_seed
from visalign.text import TextPolicy, TextRollout
from visalign.text.steps import StepRewards
from visalign.training.loop.processes import get_accelerator
from visalign.training.policy.learning_reward import LearningReward
from visalign.training.process.implicit import ImplicitTexts

from .settings import OnlineProcessSettings


class OnlineProcessReward(LearningReward):
    """Implicit process reward that goes on learning; `score` returns its rewards, with this β and `reference`."""

    key = "process_reward"

    def __init__(
        self,
        score: Callable[[TextRollout], StepRewards],
        model: TextPolicy,
        reference: TextPolicy | None,
        settings: OnlineProcessSettings,
        *,
        beta: float,
        seed: int,
    ) -> None:
        super().__init__(model.trainable_parameters(), settings.lr, get_accelerator(None, model))
        self.score_rollout, self.model, self.reference = score, model, reference
        self._settings, self._beta, self._seed = settings, beta, seed

    def learn(self, rollout: TextRollout, outcome: Tensor, iteration: int) -> None:
        """Take a pass over the completions by cross-entropy, right against wrong."""
        label = torch.where(outcome.isfinite(), (outcome >= self._settings.right_at).float(), torch.nan)
        texts = ImplicitTexts(self.model, rollout, label, beta=self._beta, reference=self.reference)
        seed = sample_seed(self._seed, self.key, iteration, self._accelerator.process_index)
        order = torch.randperm(len(texts.rows), generator=torch.Generator().manual_seed(seed))
        sums = torch.zeros(4)  # Σ loss, hits, labels and number of the updates taken
        updates = math.ceil(self._sum(len(order))[0] / self._settings.batch)
        for part in order.tensor_split(updates) if updates else ():
            count = self._sum(len(part))[0]
            loss = hits = 0.0
            if len(part):
                outputs = texts.outputs([texts.rows[i] for i in part.tolist()])
                (outputs.loss.sum() / count).backward()
                is_hit = (outputs.odds > 0) == (outputs.label > 0)
                loss, hits = float(outputs.loss.detach().sum()), float(is_hit.sum())
            if self._update(max_norm=1.0):
                sums += torch.tensor([*self._sum(loss, hits), count, 1])
        self._metrics = {}
        if updates:
            loss, accuracy = (sums[:2] / sums[2]).tolist()  # NaN where no update was taken
            names = {"loss": loss, "accuracy": accuracy, "skipped": updates - float(sums[3])}
            self._metrics = {f"{self.key}/{name}": value for name, value in names.items() if math.isfinite(value)}
