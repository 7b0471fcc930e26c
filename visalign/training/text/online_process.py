# SPDX-License-Identifier: Apache-2.0
"""PRIME: an implicit process reward goes on learning from the outcomes of the policy's own completions.

Each iteration scores its completions first, then updates the reward on them; one AdamW throughout. Each process
learns from its own completions, with gradients summed over all. Cui et al., PRIME, arXiv 2502.01456, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from visalign.seeds import sample_seed
from visalign.text import TextPolicy, TextRollout
from visalign.text.steps import StepRewards
from visalign.training.loop.processes import get_accelerator, sum_gradients
from visalign.training.process.implicit import ImplicitTexts

from .settings import OnlineProcessSettings


class LearningReward:
    """`ProcessReward` that learns from each iteration's completions; `key` names its file in a checkpoint."""

    key: str
    learn: Callable[[TextRollout, Tensor, int], None]
    """Learn from this process's completions and rewards [b] (NaN: failed) of an iteration; all processes call it."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], lr: float, accelerator: Accelerator) -> None:
        self.named, self._accelerator, self._metrics = dict(named), accelerator, dict[str, float]()
        self._optimizer = torch.optim.AdamW(self.named.values(), lr=lr, weight_decay=0.0)

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last pass."""
        return self._metrics

    def state(self) -> dict[str, Tensor]:
        """Return weights and AdamW's moments, for a checkpoint."""
        moments = self._optimizer.state_dict()["state"]
        state = {f"net.{name}": value.detach().clone() for name, value in self.named.items()}
        return state | {f"adam.{i}.{name}": v.clone() for i, values in moments.items() for name, v in values.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a checkpoint."""
        for name, parameter in self.named.items():
            parameter.copy_(state[f"net.{name}"])
        moments: dict[int, dict[str, Tensor]] = {}
        for key in [key for key in state if key.startswith("adam.")]:
            _, number, name = key.split(".")
            moments.setdefault(int(number), {})[name] = state[key].clone()
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})

    def _sum(self, *values: float) -> list[float]:
        """Sum over the processes."""
        total: Any = self._accelerator.reduce(torch.tensor(values, device=self._accelerator.device), "sum")
        return total.tolist()


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
        sums, parameters = torch.zeros(3), [*self.named.values()]  # Σ loss, hits and labels
        updates = math.ceil(self._sum(len(order))[0] / self._settings.batch)
        for part in order.tensor_split(updates) if updates else ():
            count = self._sum(len(part))[0]
            loss = hits = 0.0
            if len(part):
                outputs = texts.outputs([texts.rows[i] for i in part.tolist()])
                (outputs.loss.sum() / count).backward()
                loss, hits = (
                    float(outputs.loss.detach().sum()),
                    float(((outputs.odds > 0) == (outputs.label > 0)).sum()),
                )
            sum_gradients(parameters, self._accelerator)
            nn.utils.clip_grad_norm_(parameters, 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            sums += torch.tensor([*self._sum(loss, hits), count])
        if updates:
            loss, accuracy, _ = (sums / sums[2]).tolist()
            self._metrics = {f"{self.key}/loss": loss, f"{self.key}/accuracy": accuracy}
