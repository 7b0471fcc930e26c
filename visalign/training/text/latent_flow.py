# SPDX-License-Identifier: Apache-2.0
"""RLFR: a flow over the hidden states of right completions penalises tokens that deviate from it.

For each of some depths a small network v(x_t, t) learns to carry noise ε to the states h of right completions, x_t =
(1 − t) ε + t h. A token's deviation (`flow_deviation`, the mean of the depths) becomes its reward (`flow_rewards`).

Deviations from arXiv 2510.10201, as far as it is known here: the flow starts untrained, learns from the run's
own right completions alone, and penalises nothing during `warmup`; states are those of the reference model,
whose meaning does not move with the policy, normalised one by one. Each process learns from its own
completions, with gradients averaged over all: another number of processes gives other draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from visalign.core.advantages.hidden_states import flow_deviation, flow_rewards
from visalign.seeds import sample_seed
from visalign.text import TextPolicy, TextRollout
from visalign.text.steps import StepRewards
from visalign.training.policy.learning_reward import LearningReward
from visalign.training.policy.reference import Reference

from .settings import LatentFlowSettings

KEY = "latent_flow"
DEPTHS = (0.25, 0.5, 0.75)  # Shares of the layers behind which states are taken; the paper's, as the constants below
TIME = 0.8  # Time at which a state is compared with the flow
KEEP, TOP, SCALE = 0.6, 15, 0.01
"""Share of a completion's range of deviations below which a token is not penalised, most tokens of a
completion that are, and the penalty of the most deviant one in units of the advantage."""


class LatentFlow(LearningReward):
    """Flow that learns from the run's right completions, on the reference's hidden states."""

    key = KEY

    def __init__(
        self,
        policy: TextPolicy,
        reference: Reference,
        settings: LatentFlowSettings,
        *,
        seed: int,
        accelerator: Accelerator,
    ) -> None:
        self.settings, self._reference, self._seed, self._iterations = settings, reference, seed, 0
        model: Any = policy
        self._hidden = model.hidden_states
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sample_seed(seed, KEY))
            nets = [_network(model.hidden_size, settings.width) for _ in DEPTHS]
        self._nets = nn.ModuleList(nets).to(policy.device)
        super().__init__(self._nets.named_parameters(), settings.lr, accelerator)

    def score_rollout(self, rollout: TextRollout) -> StepRewards:
        """Compute rewards ≤ 0 of the tokens; zeros during the warm-up."""
        deviation = torch.zeros_like(rollout.loss_mask)
        if self._iterations >= self.settings.warmup:
            for sample, states in self._states(rollout):
                tokens = rollout.loss_mask[sample] != 0
                deviation[sample, tokens] = self._deviation(states, rollout.seed[sample])
        reward = flow_rewards(deviation, rollout.loss_mask, keep=KEEP, top=TOP, scale=SCALE)
        count, length = reward.shape
        position = torch.arange(length).expand(count, length)  # each token is a step
        valid = torch.ones(count, dtype=torch.bool)
        return StepRewards(reward=reward, step=position, valid=valid, reason=[None] * count)

    def learn(self, rollout: TextRollout, outcome: Tensor, iteration: int) -> None:
        """Take steps of flow matching on the states of completions whose `outcome` [b] is right."""
        self._metrics = {}
        accelerator, right = self._accelerator, outcome >= self.settings.right_at  # False for NaN, a failed reward
        states = [states for _, states in self._states(rollout.rows(right.nonzero()[:, 0]))]
        if not self._sum(float(sum(map(len, states))))[0]:
            return
        generator = torch.Generator().manual_seed(sample_seed(self._seed, KEY, iteration, accelerator.process_index))
        joined = torch.cat(states) if states else None
        losses = [self._step(joined, generator) for _ in range(self.settings.steps)]
        self._iterations += 1
        self._metrics = {"latent_flow/loss": fmean(losses)}  # Mean of (v − (h − ε))²

    def state(self) -> dict[str, Tensor]:
        """Return networks, AdamW's moments and the passes made, for a checkpoint."""
        return {"learnt": torch.tensor(self._iterations), **super().state()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._iterations = int(state["learnt"])
        super().load(state)

    def _states(self, rollout: TextRollout) -> Iterator[tuple[int, Tensor]]:
        """Yield (sample, states [T, L, H]), each state of mean 0 and variance 1."""
        if not len(rollout):
            return
        with self._reference.applied():
            for sample, states in self._hidden(rollout, depths=DEPTHS):
                yield sample, layer_norm(states, states.shape[-1:])

    @torch.no_grad()
    def _deviation(self, states: Tensor, seed: int) -> Tensor:
        """Compute the mean deviation [T] over the depths of states [T, L, H]."""
        generator, t = torch.Generator().manual_seed(sample_seed(seed, KEY)), TIME
        noise = torch.randn(states.shape, generator=generator).to(states.device)
        deviations = []
        for depth, net in enumerate(self._nets):
            h, eps = states[:, depth], noise[:, depth]
            x_t, time = (1 - t) * eps + t * h, torch.full_like(h[:, :1], t)
            deviations.append(flow_deviation(net(torch.cat([x_t, time], 1)), h, eps, t=t))
        return torch.stack(deviations).mean(0).cpu()

    def _step(self, states: Tensor | None, generator: torch.Generator) -> float:
        """Take one AdamW step on a draw of this process's tokens; return the loss."""
        # zeros give every parameter a gradient in a process without states
        losses = [torch.zeros((), device=p.device) * p.sum() for p in self._nets.parameters()]
        tokens = 0
        if states is not None:
            tokens = max(1, self.settings.batch // self._accelerator.num_processes)
            h = states[torch.randint(len(states), (tokens,), generator=generator).to(states.device)]
            eps = torch.randn(h.shape, generator=generator).to(h.device)
            t = torch.rand(tokens, 1, generator=generator).to(h.device)
            for depth, net in enumerate(self._nets):
                end, start = h[:, depth], eps[:, depth]
                velocity = net(torch.cat([(1 - t) * start + t * end, t], 1))
                losses.append((velocity - (end - start)).square().mean(1).sum() / len(self._nets))
        loss = torch.stack(losses).sum() / self._sum(float(tokens))[0]
        loss.backward()
        self._update()
        return self._sum(float(loss.detach()))[0]


def _network(size: int, width: int) -> nn.Module:
    """Build v: a state and its time [n, H + 1] -> [n, H]."""
    layers = nn.Linear(size + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
    return nn.Sequential(*layers, nn.Linear(width, size))
