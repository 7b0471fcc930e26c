# SPDX-License-Identifier: Apache-2.0
"""RLFR: a flow over the hidden states of right completions; tokens that stray from it are paid less.

For each of some depths a small network v(x_t, t) learns to carry noise ε to the states h of right
completions, x_t = (1 − t) ε + t h. What a token strays from it (`flow_deviation`, the mean of the depths)
becomes a reward of that token (`flow_rewards`).

Deviations from arXiv 2510.10201, as far as it is known here: the flow begins untrained, learns from the run's
own right completions alone, and pays nothing during `warmup`; states are those of the reference model, whose
meaning does not move with the policy, normalised one by one. Each process learns from its own completions,
with gradients that are averaged over all: another number of processes gives other draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from visalign.core.advantages.hidden_states import flow_deviation, flow_rewards
from visalign.seeds import sample_seed
from visalign.text import TextPolicy, TextRollout
from visalign.training.policy.reference import Reference

from .settings import LatentFlowSettings
from .trajectories import states_of

KEY = "latent_flow"
"""Where a checkpoint keeps the networks."""


@dataclass
class TokenRewards:
    """Rewards of single tokens, as `StepScores`."""

    reward: Tensor
    """[B, T]."""
    valid: Tensor
    """[B] bool."""

    def tokens(self, place: Any = "last") -> Tensor:
        """[B, T]: a token is a step of its own, wherever a step's reward stands."""
        return self.reward


class LatentFlow:
    """A `ProcessJudge` that learns from the run's right completions.

    Args:
        policy: with `hidden_states`.
        reference: whose states are looked at.
        settings: of networks and rewards.
        seed: of weights and noise.
        accelerator: of the processes that learn together.

    Raises:
        UserError: a policy without hidden states.
    """

    def __init__(
        self,
        policy: TextPolicy,
        reference: Reference,
        settings: LatentFlowSettings,
        *,
        seed: int,
        accelerator: Accelerator,
    ) -> None:
        self.settings, self._reference, self._seed, self._accelerator = settings, reference, seed, accelerator
        self._hidden = states_of(policy, "latent_flow")
        size: Any = getattr(policy, "hidden_size", None)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(sample_seed(seed, KEY))
            nets = [_network(size, settings.width) for _ in settings.depths]
        self._nets = nn.ModuleList(nets).to(policy.device)
        self._optimizer = torch.optim.AdamW(self._nets.parameters(), lr=settings.lr, weight_decay=0.0)
        self._learnt, self._said = 0, dict[str, float]()

    def score_rollout(self, rollout: TextRollout) -> TokenRewards:
        """Rewards ≤ 0 of the tokens; zeros during the warm-up."""
        s, off = self.settings, torch.zeros_like(rollout.loss_mask)
        if self._learnt >= s.warmup:
            for sample, states in self._states(rollout):
                off[sample, rollout.loss_mask[sample] != 0] = self._strays(states, rollout.seed[sample])
        reward = flow_rewards(off, rollout.loss_mask, keep=s.keep, top=s.top, scale=s.scale)
        return TokenRewards(reward, torch.ones(len(rollout), dtype=torch.bool))

    def learn(self, rollout: TextRollout, right: Tensor, iteration: int) -> None:
        """Some steps of flow matching on the states of right completions; all processes call it.

        Args:
            rollout: this process's b samples.
            right: [b] bool.
            iteration: of the draws.
        """
        s, process = self.settings, self._accelerator
        found = [states for _, states in self._states(rollout.rows(right.nonzero()[:, 0]))]
        count = torch.tensor([float(sum(len(states) for states in found))], device=process.device)
        total: Any = process.reduce(count, "sum")
        if not float(total):
            return
        states = torch.cat(found) if found else None
        generator = torch.Generator().manual_seed(
            sample_seed(self._seed, KEY, iteration, process.process_index)
        )
        losses = [self._step(states, generator) for _ in range(s.steps)]
        self._learnt += 1
        self._said = {"latent_flow/loss": fmean(losses)}

    def metrics(self) -> dict[str, float]:
        """Of the last time that it learnt: the mean of (v − (h − ε))² over its steps."""
        return self._said

    def state(self) -> dict[str, Tensor]:
        """Networks and moments, for a checkpoint."""
        moments = self._optimizer.state_dict()["state"]
        return {
            "learnt": torch.tensor(self._learnt),
            **{f"net.{name}": value.detach().clone() for name, value in self._nets.state_dict().items()},
            **{f"adam.{i}.{name}": v.clone() for i, held in moments.items() for name, v in held.items()},
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self._learnt = int(state["learnt"])
        nets = {k.removeprefix("net."): v for k, v in state.items() if k.startswith("net.")}
        self._nets.load_state_dict(nets)
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in state.items():
            if key.startswith("adam."):
                _, number, name = key.split(".")
                moments.setdefault(int(number), {})[name] = value.clone()
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})

    def _states(self, rollout: TextRollout) -> Iterator[tuple[int, Tensor]]:
        """(sample, [T, L, H]), each state of mean 0 and variance 1."""
        if not len(rollout):
            return
        with self._reference.applied():
            for sample, states in self._hidden(rollout, depths=self.settings.depths):
                yield sample, layer_norm(states, states.shape[-1:])

    @torch.no_grad()
    def _strays(self, states: Tensor, seed: int) -> Tensor:
        """[T] mean deviation over the depths of states [T, L, H]."""
        generator, t = torch.Generator().manual_seed(sample_seed(seed, KEY)), self.settings.time
        noise = torch.randn(states.shape, generator=generator).to(states.device)
        found = []
        for depth, net in enumerate(self._nets):
            h, eps = states[:, depth], noise[:, depth]
            velocity = net(_at((1 - t) * eps + t * h, torch.full_like(h[:, :1], t)))
            found.append(flow_deviation(velocity, h, eps, t=t))
        return torch.stack(found).mean(0).cpu()

    def _step(self, states: Tensor | None, generator: torch.Generator) -> float:
        """One AdamW step on a draw of this process's tokens; its loss."""
        self._optimizer.zero_grad()
        process, share = self._accelerator, self.settings.batch // self._accelerator.num_processes
        losses = [torch.zeros((), device=p.device) * p.sum() for p in self._nets.parameters()]
        tokens = 0
        if states is not None:
            tokens = max(1, share)
            row = torch.randint(len(states), (tokens,), generator=generator)
            h = states[row.to(states.device)]
            eps = torch.randn(h.shape, generator=generator).to(h.device)
            t = torch.rand(tokens, 1, generator=generator).to(h.device)
            for depth, net in enumerate(self._nets):
                end, start = h[:, depth], eps[:, depth]
                velocity = net(_at((1 - t) * start + t * end, t))
                losses.append((velocity - (end - start)).square().mean(1).sum() / len(self._nets))
        total: Any = process.reduce(torch.tensor([float(tokens)], device=process.device), "sum")
        loss = torch.stack(losses).sum() / float(total)
        loss.backward()
        if process.num_processes > 1:
            for parameter in self._nets.parameters():
                summed: Any = process.reduce(parameter.grad, "sum")
                parameter.grad = summed
        self._optimizer.step()
        whole: Any = process.reduce(loss.detach(), "sum")
        return float(whole)


def _network(size: int, width: int) -> nn.Module:
    """v: a state and its time [n, H + 1] -> [n, H]."""
    layers = nn.Linear(size + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
    return nn.Sequential(*layers, nn.Linear(width, size))


def _at(x: Tensor, t: Tensor) -> Tensor:
    return torch.cat([x, t], 1)
